"""The estimates of a plan: time, memory and collectives of a full assignment.

Computation, communication and hidden time are the numbers that the solver minimised. The memory comes from the schedule
of one device's kernels.
"""

from collections.abc import Iterator, Sequence
from math import ceil

from autoshard.search.device.prediction import Prediction
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.memory.copies import is_recomputed
from autoshard.search.plan.collective_totals import EqualCollectives, added_up
from autoshard.search.plan.measured_profile import measured_profile
from autoshard.search.plan.measured_shares import measured_shares
from autoshard.search.plan.values import Collective, Estimates
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.halos import HALO
from autoshard.search.problem.reshard import SLICE
from autoshard.search.problem.reshard_paths import ReshardPaths


def estimate(
    costed: CostedGraph,
    chosen: Sequence[int],
    device: Prediction,
    hidden_s: float = 0.0,
    host_bytes: float = 0.0,
) -> Estimates:
    """Time, memory and collectives under a full assignment of strategies.

    Args:
      hidden_s: seconds of communication that computation hides, those of rings left out.
    """
    compute_s = costed.compute_s(chosen)
    collectives = _collectives(costed, chosen)
    communication_s = sum((c.seconds for c in collectives), 0.0)
    transfer_s = device.transfer_s
    hidden_s += costed.hidden_in_rings_s(chosen) if device.overlap else 0.0
    hidden_s = min(max(hidden_s, 0.0), communication_s + transfer_s)
    return Estimates(
        step_s=compute_s + communication_s - hidden_s,
        compute_s=compute_s - transfer_s,
        recompute_s=_recompute_s(costed, device),
        transfer_s=transfer_s,
        hidden_s=hidden_s,
        peak_bytes=ceil(device.peak.num_bytes),
        host_bytes=round(host_bytes),
        residents={r.value: round(b) for r, b in device.peak.residents},
        peak_at=where(costed, device.peak.position),
        collectives=collectives,
        shares=(measured_shares(costed, chosen, collectives),),
        profile=measured_profile(costed, chosen, device),
    )


def _recompute_s(costed: CostedGraph, device: Prediction) -> float:
    """Seconds of the kernels and collectives that the plan recomputes."""
    ops = costed.graph.folded.program.ops
    kernels = [(ops[k.position].op, k.time.seconds) for k in device.apart.kernels]
    return sum((seconds for op, seconds in kernels if is_recomputed(op)), 0.0)


def where(costed: CostedGraph, position: int) -> str:
    """The text of an op: phase, scope and primitive, source line."""
    op = costed.graph.folded.program.ops[position]
    if op.op is None:
        return f"{op.phase} {op.name}"
    scope = f"{op.op.scope}/" if op.op.scope else ""
    source = f" ({op.op.short_source})" if op.op.short_source else ""
    return f"{op.phase} {scope}{op.name}{source}"


def _collectives(costed: CostedGraph, chosen: Sequence[int]) -> tuple[Collective, ...]:
    """All collectives of a step, added up by kind and axes; of a kind, the outer axes first."""
    names = AXIS_NAMES[costed.resharder.num_axes]
    found = added_up(_equal(costed, chosen, names))
    return tuple(sorted(found, key=lambda one: (one.kind, [*map(names.index, one.axes)])))


def _equal(costed: CostedGraph, chosen: Sequence[int], names: Sequence[str]) -> Iterator[EqualCollectives]:
    inside = (*_inside_nodes(costed, chosen), *_in_rings(costed, chosen), *_of_halos(costed, chosen))
    runs = (*_between_nodes(costed, chosen), *inside)
    for kind, axes, count, num_bytes, combined_bytes in runs:
        seconds = float(costed.resharder.mesh.time_s(kind, axes, num_bytes, combined_bytes))
        yield EqualCollectives(kind, tuple(names[a] for a in axes), count, count * num_bytes, count * seconds)


_Run = tuple[str, tuple[int, ...], int, float, float]
"""Kind, mesh axes, number in a step, bytes per device of each, and of the combined collective that it is part of."""


def _between_nodes(costed: CostedGraph, chosen: Sequence[int]) -> Iterator[_Run]:
    """The collectives of reshards."""
    paths, graph = ReshardPaths(costed, chosen), costed.graph
    for v, step, count in paths.steps():
        if step.kind != SLICE:
            i, r = paths.maker[v]
            maker = graph.folded.class_of[i], r
            yield step.kind, step.axes, count, step.num_bytes, costed.joined_bytes(maker)


def _inside_nodes(costed: CostedGraph, chosen: Sequence[int]) -> Iterator[_Run]:
    """The all-reduces of partial results that their own group reads."""
    for node, group in enumerate(costed.graph.groups):
        for op_class in group.op_classes:
            count = costed.graph.num_reductions[op_class]
            for axes, at, local_bytes, combined_bytes in costed.reductions(op_class):
                for strategy, num_bytes in zip(at.tolist(), local_bytes.tolist(), strict=True):
                    if strategy == chosen[node]:
                        yield "all-reduce", axes, count, num_bytes, combined_bytes


def _in_rings(costed: CostedGraph, chosen: Sequence[int]) -> Iterator[_Run]:
    """The messages of attentions whose sequence is split."""
    for count, messages in costed.rings(chosen):
        for times, num_bytes in messages.sent:
            yield "collective-permute", messages.axes, count * times, num_bytes, 0.0


def _of_halos(costed: CostedGraph, chosen: Sequence[int]) -> Iterator[_Run]:
    """The rows that parts of windowed dimensions get from the parts beside them."""
    for count, exchange in costed.halos(chosen):
        for num_bytes in exchange.sent:
            yield HALO, exchange.axes, count, num_bytes, 0.0
