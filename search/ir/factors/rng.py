"""Random numbers. A result is a function of its key and place alone, whichever device computes it.

JAX's own generators work so under `jax_threefry_partitionable`, its default. XLA's (`rng_bit_generator`, the
`rbg` keys) draw from one running state, and stay whole.
"""

from autoshard.search.ir.factors.elementwise import elementwise
from autoshard.search.ir.factors.loops import leading, opaque
from autoshard.search.ir.factors.rule import Kind, RuleFn
from autoshard.search.ir.factors.shape import created

THREEFRY = 100.0
"""Integer operations per element of Threefry-2x32: 20 rounds of add, rotate (three) and xor for two words,
plus five key injections (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011)."""

RULES: dict[str, RuleFn] = {
    **dict.fromkeys(("threefry2x32", "philox2x32", "threefry4x32", "philox4x32"), elementwise(THREEFRY)),
    **dict.fromkeys(("random_seed", "random_fold_in", "random_clone"), elementwise(THREEFRY)),
    **dict.fromkeys(
        ("random_bits", "random_split", "random_gamma"), leading(Kind.PARALLEL, flops_per_point=THREEFRY)
    ),
    **dict.fromkeys(("random_wrap", "random_unwrap", "to_edtype", "from_edtype"), leading(Kind.UNSPLITTABLE)),
    "iota_2x32_shape": created,
    **dict.fromkeys(("rng_bit_generator", "rng_uniform"), opaque),
}
