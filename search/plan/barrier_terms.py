"""Terms of sums that a barrier waits for.

A sum over a loop's iterations is reduced once, behind the loop: the compiler moves the all-reduce of each term out of
the loop, if nothing else in the loop reads its result (XLA:GPU, measured). It also moves the all-reduces of a sum's
terms behind the sum.

Recomputed ops wait, by a barrier, for weight gradients of later layers (`search.memory.recompute`). These gradients are
often such terms: of a loop over microbatches, or of a tied embedding's gradient. If the barrier read them, they would
be reduced one by one. So the barrier waits for each device's own terms. Products and sums make terms shard by shard
(`executors.kernels`); the barrier does not wait for terms of other ops.

The compiler removes an operand from a barrier if nothing else reads it, before or behind the barrier. So the sum is
made of the terms for which the barrier waits: on a device the two are one array.
"""

from collections.abc import Mapping

from autoshard.search.ir.sharding import ReshardPath
from autoshard.search.ir.spec import PARTIAL, Spec, divides
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.reshard import REDUCTIONS
from autoshard.search.problem.reshard_paths import ReshardPaths

MAKERS = frozenset({PRODUCT, "reduce_sum"})
"""Ops that make terms on each device as they make the whole: none of their parameters holds a size that is split."""


def barrier_terms(paths: ReshardPaths) -> Mapping[int, ReshardPath | None]:
    """By value whose terms a barrier waits for, the path that scatters them as they are made; None if they are not made
    shard by shard."""
    found: dict[int, ReshardPath | None] = {}
    for op in paths.program.ops:
        for v, _ in op.after:
            if v not in found and (read := paths.first_read(v)) is not None:
                path = (*paths.to_rest(v), *paths.to_reader(*read).path)
                if PARTIAL in (path[-1].after if path else paths.made(v)):
                    found[v] = path if _is_on_shards(paths, v, path) else None
    return found


def _is_on_shards(paths: ReshardPaths, v: int, path: ReshardPath) -> bool:
    """True if a value can be made shard by shard and scattered: no operand is partial, and all shapes split evenly."""
    i, _ = paths.maker[v]
    op, values, mesh_shape = paths.program.ops[i], paths.program.values, paths.costed.resharder.mesh.shape
    ports = [paths.graph.ports[paths.folded.class_of[i], n, False] for n in range(len(op.operands))]
    read = list(zip(op.operands, map(paths.spec, ports), strict=True))
    specs: list[tuple[int, Spec]] = [*read, (v, paths.made(v)), *((v, step.after) for step in path)]
    return (
        op.name in MAKERS
        and len(paths.program.uses[v]) == 1
        and all(step.kind in REDUCTIONS for step in path)
        and all(PARTIAL not in spec for _, spec in read)
        and all(divides(spec, values[u].shape, mesh_shape) for u, spec in specs)
    )
