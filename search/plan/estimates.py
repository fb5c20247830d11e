"""What a full assignment is predicted to cost: the plan's estimates.

Computation and communication are the numbers that the solver minimised; what of the communication is hidden, and the
memory, come from the schedule of one device's kernels.
"""

from collections.abc import Iterator, Sequence

from search.device.prediction import Simulated
from search.ir.spec import AXIS_NAMES, Spec
from search.plan.plan import Collective, Estimates
from search.problem.costs import Priced
from search.problem.reshard import SLICE
from search.problem.strategies import Way, port_specs


def estimate(priced: Priced, labels: Sequence[int], device: Simulated) -> Estimates:
    """Time, memory and collectives under a full assignment of labels."""
    compute_s = sum(
        float(compute[label]) for (compute, _), label in zip(priced.node_seconds, labels, strict=True)
    )
    collectives = _collectives(priced, labels)
    communication_s = sum(c.seconds for c in collectives)
    hidden_s = min(max(device.hidden_s, 0.0), communication_s)
    return Estimates(
        step_s=compute_s + communication_s - hidden_s,
        compute_s=compute_s,
        hidden_s=hidden_s,
        peak_bytes=round(device.peak.num_bytes),
        host_bytes=0,
        residents={r.value: round(b) for r, b in device.peak.residents},
        peak_at=where(priced, device.peak.position),
        collectives=collectives,
    )


def where(priced: Priced, position: int) -> str:
    """An op in words: phase, scope and primitive, source line."""
    op = priced.sketch.folded.program.ops[position]
    if op.op is None:
        return f"{op.phase} {op.name}"
    scope = f"{op.op.scope}/" if op.op.scope else ""
    source = f" ({op.op.source})" if op.op.source else ""
    return f"{op.phase} {scope}{op.name}{source}"


def _collectives(priced: Priced, labels: Sequence[int]) -> tuple[Collective, ...]:
    """All collectives of a step, added up by kind and axes."""
    names = AXIS_NAMES[priced.resharder.num_axes]
    total: dict[tuple[str, tuple[int, ...]], tuple[int, float, float]] = {}
    runs = (*_between_nodes(priced, labels), *_inside_nodes(priced, labels))
    for kind, axes, count, num_bytes, combined_bytes in runs:
        seconds = float(priced.resharder.mesh.time_s(kind, axes, num_bytes, combined_bytes))
        so_far = total.get((kind, axes), (0, 0.0, 0.0))
        total[kind, axes] = (so_far[0] + count, so_far[1] + count * num_bytes, so_far[2] + count * seconds)
    return tuple(
        Collective(kind, tuple(names[a] for a in axes), count, round(num_bytes), seconds)
        for (kind, axes), (count, num_bytes, seconds) in sorted(total.items())
    )


_Run = tuple[str, tuple[int, ...], int, float, float]
"""Kind, mesh axes, how often in a step, bytes per device of each and of the collectives it is joined into."""


def _between_nodes(priced: Priced, labels: Sequence[int]) -> Iterator[_Run]:
    """The collectives of reshards; readers of one copy share what they have in common of their ways, so that there are
    no more of them than copies."""
    shared: dict[tuple[int, tuple[Spec, ...]], int] = {}
    for wire in priced.sketch.wires:
        source, target = wire.source.node, wire.target.node
        ways = priced.choices[target].ways
        if ways and ways[labels[target]] is not Way.FRESH:
            continue
        here, there = (
            tuple(port_specs(p, priced.choices[p.node])[labels[p.node]].tolist())
            for p in (wire.source, wire.target)
        )
        how = priced.handling(source, wire.maker)
        chain = priced.resharder.chain(wire.value, here, there, how)
        for n, step in enumerate(chain):
            count = wire.count
            if priced.choices[source].ways:
                so_far = (source, tuple(s.after for s in chain[: n + 1]))
                done = shared.get(so_far, 0)
                count = min(
                    wire.count, priced.sketch.copies[source - len(priced.sketch.clusters)].count - done
                )
                shared[so_far] = done + count
            if step.kind != SLICE and count:
                yield step.kind, step.axes, count, step.num_bytes, how.combined_bytes


def _inside_nodes(priced: Priced, labels: Sequence[int]) -> Iterator[_Run]:
    """The all-reduces of partial results that their own cluster reads."""
    for node, cluster in enumerate(priced.sketch.clusters):
        for kind in cluster.kinds:
            count = priced.sketch.folded.counts[kind]
            for axes, at, local_bytes, combined_bytes in priced.reductions(kind):
                for label, num_bytes in zip(at.tolist(), local_bytes.tolist(), strict=True):
                    if label == labels[node]:
                        yield "all-reduce", axes, count, num_bytes, combined_bytes
