"""The two forms of a step with attention: as it is written, and with its attention in blocks.

Blocks skip the scores that a mask hides, save the memory of all scores, and let devices split a sequence without gathering
keys and values. The form that seems faster is searched first. The other form is a candidate of the same queue
(`search.space.queue`): its turn comes if plans of the first form need more memory than there is, and rewrites that save it
seem to be slower.

The forms differ by the time of attention, which is estimated with heads and examples split over all devices. If examples do
not suffice, a sequence may have to be split. Then the estimate says nothing, and both forms are searched.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import ceil, gcd, prod
from typing import Any

from autoshard.cost_model.cluster import Cluster, Device
from autoshard.cost_model.compute import kernel_s
from autoshard.search.ir.attention.layout import QUERY
from autoshard.search.ir.attention.ring import ALONE
from autoshard.search.ir.graph import Graph, Op, Step, Value
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.problem.attention_blocks import BlockLoops
from autoshard.search.problem.rings import ATTENTIONS, block_loops

BLOCKWISE = "blockwise"
"""The word of a plan for attention in blocks."""

ERROR = 0.14
"""Largest error of the estimated difference of both forms, as a share of the seconds of attention as it is written. Source:
33 layers of drawn masks, types, lengths and groups of heads on H100s, A100s and L4s, searched in both forms; the errors lie
between -11 and +14%."""


@dataclass(frozen=True, eq=False)
class OtherForm:
    """The form of a step that is not searched first.

    Attributes:
      step: the step in this form, or the shortened step that represents it.
      marks: per argument, its pin.
      name: the form, in words.
      more_s: estimated seconds that attention takes more than in the other form, less the estimate's error; minus infinity
        if nothing is known.
    """

    step: Step
    marks: Sequence[str]
    name: str
    more_s: float


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
    def _group(self) -> int:
        """Query heads that share one of keys."""
        return prod(n for a, n in self.sizes.items() if a[0] == "g")

    @property
    def _copied_bytes(self) -> float:
        """Bytes read and written to cut operands in blocks, and to join results."""
        arrays = (*(self.graph.value(a) for a in self.op.inputs), *self.op.result_values)
        return 2.0 * sum(value.num_bytes for value in arrays)

    def _loops(self, num_parts: int) -> tuple[BlockLoops, BlockLoops]:
        """The loops of a device, if heads and examples are split in so many parts: first the heads of keys, or first the
        query heads that share one."""
        batch, group = prod(n for a, n in self.sizes.items() if a[0] == "b"), self._group
        splits = min(batch, num_parts), max(1, num_parts // group)
        by_keys, by_queries = ((ceil(batch / n), ceil(group / max(1, num_parts // n))) for n in splits)
        return self._loops_of(by_keys), self._loops_of(by_queries)

    def _loops_of(self, heads: tuple[int, int]) -> BlockLoops:
        scores = self.op.params["scores"]
        return block_loops(self.op.name, scores, self.sizes, heads, ALONE, self.query.itemsize)

    def blocks_s(self, cluster: Cluster, num_parts: int) -> float:
        """Estimated seconds in one step in blocks, with the copies of arrays from and to their blocks."""
        peak_flops_per_s = cluster.device.peak_flops_per_s(self.query.dtype)
        blocks_s = min(one.seconds(cluster, peak_flops_per_s) for one in self._loops(num_parts))
        return self.num_runs * (blocks_s + float(kernel_s(cluster.device, self._copied_bytes / num_parts)))

    def written_s(self, device: Device, num_parts: int) -> float:
        """Estimated seconds in one step as it is written."""
        softmax_itemsize = self.op.params["scores"].widest_itemsize
        peak_flops_per_s = device.peak_flops_per_s(self.query.dtype)
        loops, _ = self._loops(num_parts)
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


def blocks_add_s(in_blocks: Step, cluster: Cluster) -> float:
    """Estimated seconds that attention takes more in blocks than as written, with heads and examples split over all
    devices; negative if it takes less."""
    blocks_s = sum(one.blocks_s(cluster, cluster.num_devices) for one in _attentions(in_blocks))
    return blocks_s - _written_s(in_blocks, cluster)


def slower_adds_s(in_blocks: Step, cluster: Cluster) -> float:
    """Seconds that attention takes more in the form that seems slower, less the error of the estimate. Minus infinity if a
    sequence has to be split."""
    if not _has_examples(in_blocks, cluster.num_devices) and _has_ring(in_blocks, cluster.num_devices):
        return -math.inf
    return abs(blocks_add_s(in_blocks, cluster)) - ERROR * _written_s(in_blocks, cluster)


def _written_s(in_blocks: Step, cluster: Cluster) -> float:
    """Estimated seconds of attention as it is written."""
    return sum(one.written_s(cluster.device, cluster.num_devices) for one in _attentions(in_blocks))


def without_ring(in_blocks: Step, num_devices: int) -> str:
    """Why no attention can run in a ring, as a sentence; empty if some can, or if there are examples for all devices."""
    if _has_examples(in_blocks, num_devices) or _has_ring(in_blocks, num_devices):
        return ""
    said = " or ".join(f"{n:,}" for n in _lengths(in_blocks))
    return f"no ring: a sequence of {said} positions does not split evenly over any axis of {num_devices} devices"


def _has_examples(step: Step, num_devices: int) -> bool:
    """True if examples alone split evenly over all devices."""
    return max(batch_divisors(step), default=1) % num_devices == 0


def _has_ring(in_blocks: Step, num_devices: int) -> bool:
    """True if a mesh axis may divide some attention's sequence."""
    return any(gcd(n, num_devices) > 1 for n in _lengths(in_blocks))


def _lengths(in_blocks: Step) -> list[int]:
    """Lengths of the sequences of all attentions."""
    return sorted({one.sizes[QUERY] for one in _attentions(in_blocks)})
