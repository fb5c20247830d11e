"""Whether a step is searched as it is written, with its attention in blocks, or in both forms.

Blocks skip the scores that a mask hides, save the memory of all scores, and let devices split a sequence without gathering
keys and values. The form that seems faster is searched first. The other form is a candidate of the same queue
(`search.space.queue`): its turn comes if plans of the first form need more memory than there is, and rewrites that save it
seem to be slower. If there is a plan, the other form is searched only on the meshes whose lower bound is below that plan.

The bound on plans in one form comes from the other form. Take any plan. A plan in the other form splits every
attention alike and decides all else alike, so that both differ by the time of attention alone:

    plan in blocks  >=  bound on plans as written  -  max over p of (scores / p - blocks split in p)
    plan as written >=  bound on plans in blocks   -  max over p of (blocks split in p - scores / p)

`scores` is the time of all kernels that touch scores, on one device. Numbers of parts are left out with which attention
and all other computation take longer than the best plan. A ring splits a sequence. To split examples over the same axes
costs the same outside of attention and sends nothing inside, so that a plan with a ring has such a counterpart, too, if
there are examples for all devices; blocks of a ring may be faster, and count among those of p parts. If there are not, there
is no bound.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil, gcd, prod
from typing import Any

import numpy as np

from autoshard.cost_model.cluster import Cluster, Device
from autoshard.cost_model.compute import kernel_s
from autoshard.cost_model.meshes import divisors
from autoshard.search.ir.attention.layout import KEY, QUERY
from autoshard.search.ir.attention.ring import ALONE, Ring, ring_over
from autoshard.search.ir.graph import Graph, Op, Step, Value
from autoshard.search.memory.attention.cudnn import FUSED
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.mesh_problem import RELATIVE_GAP
from autoshard.search.problem.attention_blocks import BlockLoops
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.kernels import Endpoint, runs_alone
from autoshard.search.problem.rings import ATTENTIONS, block_loops
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.found import Bounds, Found

BLOCKWISE = "blockwise"
"""The word of a plan for attention in blocks."""


@dataclass(frozen=True, eq=False)
class OtherForm:
    """The form of a step that is not searched first.

    Attributes:
      step: the step in this form, or the shortened step that represents it.
      marks: per argument, its pin.
      in_blocks: the whole step with its attention in blocks.
      is_in_blocks: whether that is this form.
      more_s: estimated seconds that attention takes more than in the other form.
    """

    step: Step
    marks: Sequence[str]
    in_blocks: Step
    is_in_blocks: bool
    more_s: float

    def may_be_faster(
        self, best: Found, bounds_s: Bounds, is_pinned: bool, written: Callable[[], CostedGraph]
    ) -> tuple[tuple[int, ...], ...]:
        """The meshes where a plan in this form may be faster than the best plan in the other form.

        Args:
          best: that plan.
          bounds_s: by mesh, a lower bound on plans in the other form, without a cap.
          is_pinned: whether pins may keep a plan from splitting examples instead of a sequence.
          written: makes the costs of the step as it is written, on that plan's mesh. It is called if that is this form.
        """
        if self.is_in_blocks:
            least_s = least_in_blocks_s(best, bounds_s, self.in_blocks, is_pinned)
        else:
            least_s = least_as_written_s(best, bounds_s, self.in_blocks, written(), is_pinned)
        enough_s = (1 - RELATIVE_GAP) * best.cost_s
        return tuple(shape for shape, bound_s in least_s.items() if bound_s < enough_s)


@dataclass(frozen=True)
class _Attention:
    """An attention op and its runs in one step."""

    graph: Graph
    op: Op
    num_runs: int

    @cached_property
    def sizes(self) -> dict[str, int]:
        """By label, the whole extents."""
        return self.op.params["layout"].sizes(*(self.graph.value(a).shape for a in self.op.inputs[:3]))

    @property
    def query(self) -> Value:
        return self.graph.value(self.op.inputs[0])

    @property
    def num_scores(self) -> int:
        """Elements of the scores."""
        return prod(n for a, n in self.sizes.items() if a[0] in "bg") * self.sizes[QUERY] * self.sizes[KEY]

    @property
    def _group(self) -> int:
        """Query heads that share one of keys."""
        return prod(n for a, n in self.sizes.items() if a[0] == "g")

    @property
    def _copied_bytes(self) -> float:
        """Bytes read and written to cut operands in blocks, and to join results."""
        arrays = (*(self.graph.value(a) for a in self.op.inputs), *self.op.result_values)
        return 2.0 * sum(value.num_bytes for value in arrays)

    def loops(self, num_parts: int, ring: Ring = ALONE) -> tuple[BlockLoops, BlockLoops]:
        """The loops of a device, if heads and examples are split in so many parts besides the ring: first the heads of keys,
        or first the query heads that share one."""
        batch, group = prod(n for a, n in self.sizes.items() if a[0] == "b"), self._group
        splits = min(batch, num_parts), max(1, num_parts // group)
        by_keys, by_queries = ((ceil(batch / n), ceil(group / max(1, num_parts // n))) for n in splits)
        return self._loops(by_keys, ring), self._loops(by_queries, ring)

    def _loops(self, heads: tuple[int, int], ring: Ring) -> BlockLoops:
        scores = self.op.params["scores"]
        return block_loops(self.op.name, scores, self.sizes, heads, ring, self.query.itemsize)

    def _rings(self, num_parts: int) -> Iterator[Ring]:
        """The rings of so many devices or fewer."""
        length, scores = self.sizes[QUERY], self.op.params["scores"]
        yield from (ring_over(scores, (), n, length) for n in divisors(num_parts) if length % n == 0)

    def blocks_s(self, cluster: Cluster, num_parts: int) -> tuple[float, float]:
        """Seconds in one step of a device's attention in so many parts: at least, for its blocks alone, and at most without
        a ring, with the copies of arrays from and to their blocks."""
        peak_flops_per_s = cluster.device.peak_flops_per_s(self.query.dtype)
        found = [
            [one.seconds(cluster, peak_flops_per_s) for one in self.loops(num_parts // ring.size, ring)]
            for ring in self._rings(num_parts)
        ]
        copied_s = float(kernel_s(cluster.device, self._copied_bytes / max(1, num_parts // self._group)))
        return self.num_runs * min(map(min, found)), self.num_runs * (max(found[0]) + copied_s)

    def written_s(self, device: Device, num_parts: int) -> float:
        """Estimated seconds in one step as it is written."""
        softmax_itemsize = self.op.params["scores"].widest_itemsize
        peak_flops_per_s = device.peak_flops_per_s(self.query.dtype)
        loops, _ = self.loops(num_parts)
        return self.num_runs * loops.written_s(device, peak_flops_per_s, softmax_itemsize)


def _attentions(in_blocks: Step) -> list[_Attention]:
    """The attention ops of a step; those that are alike are one, with the runs of all."""
    found: dict[tuple[Any, ...], _Attention] = {}
    for one in _each(in_blocks.graph, 1):
        key = one.op.name, one.op.params["scores"], tuple(sorted(one.sizes.items())), one.query.dtype
        found[key] = replace(one, num_runs=one.num_runs + (found[key].num_runs if key in found else 0))
    return list(found.values())


def _each(graph: Graph, num_runs: int) -> Iterator[_Attention]:
    for op in graph.ops:
        if op.name in ATTENTIONS:
            yield _Attention(graph, op, num_runs)
        length = int(op.params["length"]) if op.name == "scan" else 1
        for body in chain.from_iterable(op.bodies.values()):
            yield from _each(body, num_runs * length)


def holds_too_much(step: Step, in_blocks: Step, num_devices: int, limit_bytes: int) -> bool:
    """True if no plan of the step as it is fits: one example's scores, split over all devices, are more than the cap."""
    examples = max(batch_divisors(step), default=1)
    most = max(one.num_scores * one.query.itemsize for one in _attentions(in_blocks))
    return most / examples / num_devices > limit_bytes


def blocks_add_s(in_blocks: Step, cluster: Cluster) -> float:
    """Estimated seconds that attention takes more in blocks than as written, with heads and examples split over all
    devices; negative if it takes less."""
    found, num_parts = _attentions(in_blocks), cluster.num_devices
    blocks_s = sum(one.blocks_s(cluster, num_parts)[1] for one in found)
    return blocks_s - sum(one.written_s(cluster.device, num_parts) for one in found)


def least_in_blocks_s(found: Found, uncapped_bounds_s: Bounds, in_blocks: Step, is_pinned: bool) -> Bounds:
    """By mesh, a lower bound on the time of plans in blocks that are faster than a plan as written; minus infinity where
    nothing is proven.

    Args:
      found: the best plan of the step as it is written.
      uncapped_bounds_s: by mesh, a lower bound on plans of the step as it is written, without a cap.
      in_blocks: the step with its attention in blocks.
      is_pinned: whether pins may keep a plan from splitting examples instead of a sequence.
    """
    scores = _Scores(found.on_mesh.memory.costed, found.step_problem.traced, in_blocks, found.labels)
    pairs = [(scores.alone_s / n, least_s) for n, (least_s, _) in scores.blocks_s.items()]
    return _bounds(scores, pairs, found.cost_s, uncapped_bounds_s, is_pinned)


def least_as_written_s(
    found: Found, uncapped_bounds_s: Bounds, in_blocks: Step, written: CostedGraph, is_pinned: bool
) -> Bounds:
    """By mesh, a lower bound on the time of plans as written that are faster than a plan in blocks; minus infinity where
    nothing is proven.

    Args:
      found: the best plan of the step in blocks.
      uncapped_bounds_s: by mesh, a lower bound on plans of the step in blocks, without a cap.
      in_blocks: the step with its attention in blocks.
      written: the step as it is written, on that plan's mesh.
      is_pinned: whether pins may keep a plan from splitting examples instead of a sequence.
    """
    scores = _Scores(written, written.graph.folded.program.step, in_blocks)
    pairs = [(most_s, scores.alone_s / n) for n, (_, most_s) in scores.blocks_s.items()]
    return _bounds(scores, pairs, found.cost_s, uncapped_bounds_s, is_pinned)


def _bounds(
    scores: "_Scores",
    pairs: Sequence[tuple[float, float]],
    cutoff_s: float,
    uncapped_bounds_s: Bounds,
    is_pinned: bool,
) -> Bounds:
    """Bounds on plans of one form that are faster than a cutoff, from bounds on plans of the other.

    Args:
      scores: the kernels of both forms.
      pairs: by number of parts, the most seconds of attention in the other form, and the least in the bounded one.
      cutoff_s: of the plans that matter.
      uncapped_bounds_s: by mesh, bounds on the other form.
      is_pinned: whether pins may keep a plan from splitting examples instead of a sequence.
    """
    if is_pinned or not scores.are_comparable:
        return dict.fromkeys(uncapped_bounds_s, -math.inf)
    saved_s = [before_s - after_s for before_s, after_s in pairs if scores.others_s + after_s < cutoff_s]
    if not saved_s:
        return dict.fromkeys(uncapped_bounds_s, math.inf)
    return {shape: bound_s - max(0.0, *saved_s) for shape, bound_s in uncapped_bounds_s.items()}


class _Scores:
    """The kernels that touch scores in a step as it is written, beside the blocks in their place.

    Other arrays may be as large as scores (a hidden layer, scores of an attention that is not recognised). The ops that
    blocks replace tell them apart. A rewrite of the step, which recomputes for example, may make ops anew; these may touch
    scores, too.

    Attributes:
      alone_s: seconds that these kernels take on one device without any split: at most, if a plan is given, else at least.
      others_s: seconds of computation that all else takes, at least.
      blocks_s: by number of parts, the least and the most seconds of a device's blocks.
      are_comparable: whether plans of both forms correspond. No sequence has to be split, because there are examples for all
        devices, or cannot be.
    """

    def __init__(
        self, costed: CostedGraph, step: Step, in_blocks: Step, chosen: Labels | None = None
    ) -> None:
        """Args:
        costed: the step as it is written, with its recomputation, on a mesh.
        step: the step as it is written, whole or shortened.
        in_blocks: the whole step with its attention in blocks.
        chosen: the strategies of a plan.
        """
        attentions, cluster = _attentions(in_blocks), costed.resharder.mesh.cluster
        own_blocks = in_blocks if in_blocks.spelled_out is step else blockwise(step)
        self.kept = frozenset(_common(step.graph, own_blocks.graph)) if own_blocks else frozenset[Op]()
        self.costed, self.folded = costed, costed.graph.folded
        self.sizes = {(one.num_scores, one.sizes[QUERY]) for one in attentions}
        self.alone_s, nodes = 0.0, set[int]()
        for endpoint, seconds in self._kernels():
            node, whole_s = (
                costed.graph.node_of[endpoint[0]],
                seconds / costed.shares(costed.graph.ports[endpoint]),
            )
            self.alone_s += float(whole_s[chosen[node]] if chosen else whole_s.min())
            nodes.add(node)
        times = enumerate(compute for compute, _ in costed.node_seconds)
        self.others_s = sum(float(compute.min()) for node, compute in times if node not in nodes)
        self.blocks_s = {
            num_parts: _sums([one.blocks_s(cluster, num_parts) for one in attentions])
            for num_parts in divisors(cluster.num_devices)
        }
        num_devices = cluster.num_devices
        needs_no_ring = _has_examples(in_blocks, num_devices) or not has_ring(in_blocks, num_devices)
        self.are_comparable = self.alone_s > 0.0 and needs_no_ring

    def _kernels(self) -> Iterator[tuple[Endpoint, np.ndarray]]:
        """The kernels, each by a place where scores enter or leave it, with its seconds by strategy of its group."""
        costed, folded = self.costed, self.folded
        for op_class in range(len(folded.members)):
            op = folded.op(op_class)
            if not op.is_boundary and runs_alone(folded, op_class) and not self._stays(op_class):
                places = [(op_class, i, False) for i in range(len(op.operands))]
                places += [(op_class, r, True) for r in range(len(op.results))]
                if touched := places[-1:] if op.name in FUSED else [*filter(self._is_scores, places)]:
                    yield touched[0], folded.counts[op_class] * costed.op_seconds(op_class)
        for kernel in costed.kernels.fused:
            if touched := [place for place, _ in kernel.moved if self._is_scores(place)]:
                yield (
                    touched[0],
                    kernel.count * np.asarray(kernel_s(costed.device, costed.kernel_bytes(kernel))),
                )
        for copies in costed.kernels.copied.values():
            for copy in (one for one in copies if self._is_scores(one.endpoint)):
                yield copy.endpoint, copy.count * np.asarray(costed.copy_seconds(copy))

    def _is_scores(self, endpoint: Endpoint) -> bool:
        """Whether a place of an op that blocks replace holds scores: of their number or a multiple, with two dimensions of
        the sequence."""
        op_class, i, is_result = endpoint
        op = self.folded.op(op_class)
        shape = self.folded.program.values[(op.results if is_result else op.operands)[i]].shape
        seems_so = any(
            prod(shape) % number == 0 and prod(shape) > 0 and (shape.count(n) > 1 or n * n in shape)
            for number, n in self.sizes
        )
        return seems_so and not self._stays(op_class)

    def _stays(self, op_class: int) -> bool:
        """Whether the step in blocks has all ops of a class, too."""
        program, members = self.folded.program, self.folded.members[op_class]
        return all(program.ops[member].op in self.kept for member in members)


def _common(graph: Graph, rewritten: Graph) -> Iterator[Op]:
    """The ops of a graph that a rewrite of it has, too: both make the same values."""
    makers = {v: op for op in rewritten.ops for v in op.outputs}
    for op in graph.ops:
        like = next((makers[v] for v in op.outputs if v in makers), None)
        if like and like.primitive is op.primitive:
            yield op
            for key, bodies in op.bodies.items():
                yield from chain.from_iterable(map(_common, bodies, like.bodies[key]))


def _sums(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    left, right = zip(*pairs, strict=True)
    return sum(left), sum(right)


def has_ring(in_blocks: Step, num_devices: int) -> bool:
    """True if a mesh axis may divide some attention's sequence."""
    return any(gcd(n, num_devices) > 1 for n in _lengths(in_blocks))


def without_ring(in_blocks: Step, num_devices: int) -> str:
    """Why no attention can run in a ring, as a sentence; empty if some can, or if there are examples for all devices."""
    if _has_examples(in_blocks, num_devices) or has_ring(in_blocks, num_devices):
        return ""
    said = " or ".join(f"{n:,}" for n in _lengths(in_blocks))
    return f"no ring: a sequence of {said} positions does not split evenly over any axis of {num_devices} devices"


def _has_examples(step: Step, num_devices: int) -> bool:
    """True if examples alone split evenly over all devices."""
    return max(batch_divisors(step), default=1) % num_devices == 0


def _lengths(in_blocks: Step) -> list[int]:
    """Lengths of the sequences of all attentions."""
    return sorted({one.sizes[QUERY] for one in _attentions(in_blocks)})
