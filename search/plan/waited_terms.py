"""Terms of sums that a barrier waits for.

What a loop adds up is reduced once, behind it: the compiler takes the all-reduce of what is added out of the loop, if
nothing else in the loop reads its result (XLA:GPU, measured). So it does with terms of a sum, which it reduces behind that.
What is recomputed waits, by a barrier, for weight gradients of layers behind (`search.memory.recompute`), and those are what
a loop over microbatches adds up, or what a tied embedding's gradient is the sum of: read by the barrier, they would be
reduced one by one. So the barrier waits for each device's own terms of them. Products and sums make these shard by shard
(`executors.kernels`); the barrier does not wait for terms that others make.

The compiler takes out of a barrier what nobody reads behind it, if nobody else reads it either. So their sum is made of the
terms for which the barrier waits: on a device the two are one array.
"""

from collections.abc import Mapping

from autoshard.search.ir.sharding import ReshardPath
from autoshard.search.ir.spec import PARTIAL, Spec, divides
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.reshard import REDUCTIONS
from autoshard.search.problem.reshard_paths import ReshardPaths

MAKERS = frozenset({PRODUCT, "reduce_sum"})
"""Ops that make terms on each device as they make the whole: no parameter says a size that is split."""


def waited_terms(paths: ReshardPaths) -> Mapping[int, ReshardPath | None]:
    """By value whose terms a barrier waits for, how these are scattered as they are made; None where they are not
    made shard by shard."""
    found: dict[int, ReshardPath | None] = {}
    for op in paths.program.ops:
        for v, _ in op.after:
            if v not in found and (read := paths.first_read(v)) is not None:
                way = (*paths.to_rest(v), *paths.to_reader(*read).path)
                if PARTIAL in (way[-1].after if way else paths.made(v)):
                    found[v] = way if _is_on_shards(paths, v, way) else None
    return found


def _is_on_shards(paths: ReshardPaths, v: int, way: ReshardPath) -> bool:
    """Whether a value can be made shard by shard and scattered: of operands that are no terms, and all splits evenly."""
    i, _ = paths.maker[v]
    op, values, mesh_shape = paths.program.ops[i], paths.program.values, paths.costed.resharder.mesh.shape
    ports = [paths.graph.ports[paths.folded.class_of[i], n, False] for n in range(len(op.operands))]
    read = list(zip(op.operands, map(paths.spec, ports), strict=True))
    lies: list[tuple[int, Spec]] = [*read, (v, paths.made(v)), *((v, step.after) for step in way)]
    return (
        op.name in MAKERS
        and len(paths.program.uses[v]) == 1
        and all(step.kind in REDUCTIONS for step in way)
        and all(PARTIAL not in spec for _, spec in read)
        and all(divides(spec, values[u].shape, mesh_shape) for u, spec in lies)
    )
