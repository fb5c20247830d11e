"""Factor rules of hand-written kernels, whose semantics and sharding the compiler does not know.

A function wrapped in `jax.experimental.custom_partitioning` may carry a `sharding_rule`: a factor rule in Shardy's sense,
like the rules here. The wrapped function reduces the rule's *reduction* factors itself, so they are `REDUCE`, unless a
result has them. Factors that need replication or permutation cannot be split. Nor can other factors of operands only or of
results only: the rule does not define such a split.

A Pallas kernel carries no rule, but under `vmap` it runs once for each batch, independent of the others: batches are
parallel.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.search.ir import _jax_kernels
from autoshard.search.ir._jax_kernels import ShardingRule
from autoshard.search.ir.factors.loops import Loops, opaque
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn


def custom_partitioning(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """The kernel's sharding rule. If a dimension is a single factor of another size, no dimension with that factor can be
    split."""
    said = _jax_kernels.sharding_rule(params, ins, outs)
    if said is None:
        return replace(opaque(ins, outs, params), is_kernel=True, is_unknown=True)
    resized = {
        f
        for aval, dims in zip((*ins, *outs), (*said.operands, *said.results), strict=True)
        for n, (f, *minor) in zip(aval.shape, dims, strict=True)
        if not minor and n != said.sizes[f]
    }
    loops = Loops()
    shared = [loops.dim(n, _kind(said, f)) for f, n in enumerate(said.sizes)]

    def dims(aval: Any, factors: Dims) -> Dims:
        return tuple(
            [
                loops.dim(n, Kind.UNSPLITTABLE) if resized & {*fs} else sum((shared[f] for f in fs), ())
                for n, fs in zip(aval.shape, factors, strict=True)
            ]
        )

    operands, results = list(map(dims, ins, said.operands)), list(map(dims, outs, said.results))
    return loops.rule(operands, results, is_kernel=True)


def _kind(said: ShardingRule, factor: int) -> Kind:
    is_read, is_made = (
        any(factor in dim for dims in arrays for dim in dims) for arrays in (said.operands, said.results)
    )
    if factor in said.reduced and not is_made:
        return Kind.REDUCE
    is_parallel = is_read and is_made and factor not in said.whole | said.reduced
    return Kind.PARALLEL if is_parallel else Kind.UNSPLITTABLE


def pallas_call(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Dimensions that `vmap` added are parallel; others cannot be split. Leading operands without blocks are sizes of the
    grid and scalars for the index maps."""
    stepped = _jax_kernels.batch_dims(params)
    batches = sorted({step for steps in stepped for step in steps if step is not None})
    if not batches:
        return replace(opaque(ins, outs, params), is_unknown=True)
    loops = Loops()
    grid = _jax_kernels.grid(params)
    batch_of = {d: loops.dim(grid[d]) for d in batches}

    def dims(aval: Any, steps: Sequence[int | None]) -> Dims:
        return tuple(
            [
                loops.dim(n, Kind.UNSPLITTABLE) if step is None else batch_of[step]
                for n, step in zip(aval.shape, steps, strict=True)
            ]
        )

    num_scalars = len(ins) + len(outs) - len(stepped)
    scalars = [dims(aval, [None] * len(aval.shape)) for aval in ins[:num_scalars]]
    blocked = [dims(aval, steps) for aval, steps in zip((*ins[num_scalars:], *outs), stepped, strict=True)]
    num_inputs = len(ins) - num_scalars
    return loops.rule((*scalars, *blocked[:num_inputs]), blocked[num_inputs:], is_kernel=True)


RULES: dict[str, RuleFn] = {"custom_partitioning": custom_partitioning, "pallas_call": pallas_call}
