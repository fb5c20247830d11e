"""Makes the profile of a full assignment from the schedule of a device's kernels."""

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from autoshard.search.device.lowering import TRANSFERS
from autoshard.search.device.prediction import Moment, Prediction
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.memory.copies import is_recomputed
from autoshard.search.plan.decisions import node_names
from autoshard.search.plan.kernel_class import KernelClass, class_of_op
from autoshard.search.plan.profile import ClassTime, OpTime, Profile
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.live_ranges import Resident

NUM_SLICES = 120
"""Slices of a profile: a slice is some pixels wide in a chart, and a profile is a few kilobytes."""

NUM_OPS = 16
"""Ops in a profile: a Transformer's layer has six products in each of its two phases, and there is the head."""

DIGITS = 3
"""Digits of a share of a slice."""

UNIT_BYTES = 2**20
"""Bytes are rounded to this unit, which no chart shows."""

RECOMPUTATION = "recomputation"


def measured_profile(costed: CostedGraph, chosen: Sequence[int], device: Prediction) -> Profile:
    """The profile of a full assignment of strategies."""
    moments, course = device.course()
    seconds = max((moment.end_s for moment in moments), default=0.0)
    return Profile(
        seconds,
        _busy(costed, moments, seconds),
        _held(moments, course, seconds),
        _ops(costed, chosen),
        _kernels(costed, moments),
    )


# --- streams


def _busy(costed: CostedGraph, moments: Iterable[Moment], seconds: float) -> dict[str, tuple[float, ...]]:
    """By stream, the share of each slice in which it runs."""
    spans: dict[str, list[tuple[float, float]]] = {}
    for moment in moments:
        if not moment.is_wait and moment.end_s > moment.start_s:
            spans.setdefault(_stream(costed, moment), []).append((moment.start_s, moment.end_s))
    return {name: _shares(np.array(spans[name]), seconds) for name in sorted(spans)}


def _stream(costed: CostedGraph, moment: Moment) -> str:
    """The name of the stream on which a kernel runs; of computation, its phase."""
    if (collective := moment.kernel.collective) is not None:
        names = AXIS_NAMES[costed.resharder.num_axes]
        over = ", ".join(names[axis] for axis in sorted(collective.axes))
        return collective.kind if collective.kind in TRANSFERS else f"collectives over {over}"
    op = costed.graph.folded.program.ops[moment.kernel.position]
    return RECOMPUTATION if is_recomputed(op.op) else str(op.phase)


def _shares(spans: np.ndarray, seconds: float) -> tuple[float, ...]:
    """The share of each slice that disjoint spans cover: differences of the time that they cover until a slice's end."""
    start, end = spans[np.argsort(spans[:, 0])].T
    before = np.concatenate([[0.0], np.cumsum(end - start)])
    edges = np.linspace(0.0, seconds, NUM_SLICES + 1)
    last = np.searchsorted(start, edges, side="right") - 1
    covered = before[last + 1] - np.where(last >= 0, np.maximum(end[last] - edges, 0.0), 0.0)
    shares = np.clip(np.diff(covered) * NUM_SLICES / seconds, 0.0, 1.0)
    return tuple(round(share, DIGITS) for share in shares.tolist())


def _kernels(costed: CostedGraph, moments: Iterable[Moment]) -> dict[str, ClassTime]:
    """The kernels that compute, by class, in the order of the classes."""
    found = dict.fromkeys(KernelClass, ClassTime(0.0, 0))
    for moment in moments:
        if moment.kernel.collective is None and not moment.is_wait and moment.kernel.time.seconds:
            op = costed.graph.folded.program.ops[moment.kernel.position]
            so_far = found[kind := class_of_op(op.name)]
            found[kind] = ClassTime(so_far.seconds + moment.kernel.time.seconds, so_far.runs + op.count)
    return {str(kind): taken for kind, taken in found.items() if taken.runs}


# --- memory


def _held(
    moments: Sequence[Moment], course: Mapping[Resident, np.ndarray], seconds: float
) -> dict[str, tuple[int, ...]]:
    """By kind, bytes at the fullest place of each slice: of those that begin in it, and the one that goes on into it."""
    if not moments or not seconds:
        return {}
    start = np.array([moment.start_s if not moment.is_wait else moment.end_s for moment in moments])
    at = np.minimum(np.maximum.accumulate(start) * NUM_SLICES / seconds, NUM_SLICES - 1).astype(int)
    first = np.searchsorted(at, np.arange(NUM_SLICES + 1))
    total = sum(course.values(), np.zeros(len(moments)))
    fullest = [
        int(begin + np.argmax(total[begin : max(end, begin + 1)]))
        for begin, end in zip(np.maximum(first[:-1] - 1, 0), first[1:], strict=True)
    ]
    return {str(kind): _rounded(held[fullest]) for kind, held in course.items()}


def _rounded(held: np.ndarray) -> tuple[int, ...]:
    return tuple(UNIT_BYTES * round(num_bytes / UNIT_BYTES) for num_bytes in held.tolist())


# --- ops


def _ops(costed: CostedGraph, chosen: Sequence[int]) -> tuple[OpTime, ...]:
    """The products, convolutions and lookups that take longest."""
    graph = costed.graph
    pairs = zip(node_names(graph), graph.groups, strict=False)
    found = [
        _op(costed, chosen, names[0], heavy)
        for names, group in pairs
        if (heavy := [k for k in group.op_classes if graph.folded.is_heavy[k]])
    ]
    return tuple(sorted(found, key=lambda op: (-op.seconds, op.name))[:NUM_OPS])


def _op(costed: CostedGraph, chosen: Sequence[int], name: str, op_classes: Sequence[int]) -> OpTime:
    """The ops of one node."""
    folded, node = costed.graph.folded, costed.graph.node_of[op_classes[0]]
    strategy = chosen[node]
    largest = max(op_classes, key=lambda k: folded.counts[k] * _flops(folded.op(k)))
    dtype = folded.program.values[folded.op(largest).operands[0]].dtype
    return OpTime(
        name,
        max(folded.counts[k] for k in op_classes),
        sum(folded.counts[k] * float(costed.op_seconds(k)[strategy]) for k in op_classes),
        sum(folded.counts[k] * _flops(folded.op(k)) / _parts(costed, k, strategy) for k in op_classes),
        sum(folded.counts[k] * float(costed.moved_bytes(k)[strategy]) for k in op_classes),
        costed.device.peak_flops_per_s(str(dtype)),
    )


def _flops(op: FlatOp) -> float:
    return op.rule.flops_per_point * op.rule.num_points


def _parts(costed: CostedGraph, op_class: int, strategy: int) -> int:
    """Number of parts into which a strategy divides an op."""
    graph = costed.graph
    node = graph.node_of[op_class]
    taken, factor_of = costed.strategies[node].assignment[strategy], graph.groups[node].factor_of
    own = {factor_of.get((op_class, f)) for f in range(len(graph.folded.op(op_class).rule.factors))} - {None}
    return math.prod(
        size for size, factor in zip(costed.resharder.mesh.shape, taken, strict=True) if factor in own
    )
