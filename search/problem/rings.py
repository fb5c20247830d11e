"""Time and messages of blockwise attention, whose sequence may be split over a ring of devices.

A device looks at its rows' scores against all keys, block by block, and computes those that the mask does not hide, as many
as the device has that has most (`search.problem.attention_blocks`).

In each of the ring's steps but the last, keys and values are sent on while the blocks of the step are computed. Gradients of
keys and values are sent on too, and once more in the end, to be at home. A message that takes longer than a step's blocks
delays the next step by the difference; the last one, and the exchange of pieces in zigzag, hide behind nothing.

    forward     (n - 1) x (keys, values)
    backward    (n - 1) x (keys, values, gradients of both in the dtype of sums)  +  1 x (gradients of both)
    zigzag      2 x half of every operand and result that has the sequence; 1 x between two devices

The compiler sees that the forward op has dealt out the queries, keys and values that the backward op reads, and that the
log-sum-exp is collected and dealt out again: the backward op sends none of the four. It converts gradients to their
operands' type before they change places.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Any

import numpy as np

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.compute import kernel_s
from autoshard.search.ir.attention.blocks import block_size
from autoshard.search.ir.attention.layout import CHANNEL, KEY, QUERY, VALUE_CHANNEL, Dims, Layout
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.attention.ring import Ring, ring_over, seen_share
from autoshard.search.ir.attention.scores import Scores
from autoshard.search.ir.graph import Value
from autoshard.search.problem.attention_blocks import BlockLoops
from autoshard.search.problem.flat_program import FlatOp

ATTENTIONS = frozenset({FORWARD, BACKWARD})

DISTRIBUTED = (0, 1, 2, 4)
"""Operands of the backward op that need no exchange. Source: XLA:GPU, programs of `tests/gpu/test_long_sequences.py`."""


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of one run of an attention.

    Attributes:
      axes: the mesh axes of the ring.
      sent: (times, bytes per device) of each.
      exposed_s: seconds of them that the device waits.
      total_s: seconds of them all.
    """

    axes: tuple[int, ...]
    sent: tuple[tuple[int, float], ...]
    exposed_s: float
    total_s: float


@dataclass(frozen=True)
class Attention:
    """One attention op on a mesh, under one strategy.

    Attributes:
      op: the op.
      values: the program's values.
      parts: by label, the number of devices that split it.
      axes: the mesh axes that split the sequence.
      mesh: the mesh's model of collectives.
    """

    op: FlatOp
    values: tuple[Value, ...]
    parts: dict[str, int]
    axes: tuple[int, ...]
    mesh: MeshModel

    @property
    def _params(self) -> dict[str, Any]:
        assert self.op.op is not None, "an op of the graph"
        return self.op.op.params

    @property
    def layout(self) -> Layout:
        return self._params["layout"]

    @property
    def scores(self) -> Scores:
        return self._params["scores"]

    @property
    def sizes(self) -> dict[str, int]:
        """By label, the whole extents."""
        return self.layout.sizes(*(self.values[v].shape for v in self.op.operands[:3]))

    @property
    def local(self) -> dict[str, float]:
        """By label, the extents on one device."""
        return {a: n / self.parts.get(a, 1) for a, n in self.sizes.items()}

    @property
    def num_devices(self) -> int:
        """Devices in the ring."""
        return self.parts.get(QUERY, 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the queries."""
        return self.values[self.op.operands[0]].itemsize

    @property
    def sum_itemsize(self) -> int:
        """Bytes of an element of a sum."""
        return sum_itemsize(self.itemsize)

    @property
    def ring(self) -> Ring:
        """The devices that split the sequence."""
        return ring_over(self.scores, (), self.num_devices, self.sizes[QUERY])

    @property
    def is_zigzag(self) -> bool:
        return self.ring.is_zigzag

    @property
    def _heads(self) -> tuple[int, int]:
        """On one device, the heads of keys of all examples, and the query heads that share one of them."""
        local = self.local
        batch, group = (prod(ceil(n) for a, n in local.items() if a[0] == kind) for kind in "bg")
        return batch, group

    @property
    def loops(self) -> BlockLoops:
        """The loops over a device's blocks."""
        return block_loops(self.op.name, self.scores, self.sizes, self._heads, self.ring, self.itemsize)

    def compute_s(self, peak_flops_per_s: float) -> float:
        """Seconds of a device's blocks, and of the copies of operands and results from and to their blocks."""
        cluster = self.mesh.cluster
        copied = sum(2 * self._local_bytes(v, dims) for v, dims in self._arrays())
        return self.loops.seconds(cluster, peak_flops_per_s) + float(kernel_s(cluster.device, copied))

    def _arrays(self) -> Iterator[tuple[int, Dims]]:
        """The operands and results that have the sequence, with their dimensions."""
        layout = self.layout
        read: list[Dims] = [layout.query, layout.key, layout.value]
        made: list[Dims] = [layout.output, layout.statistics]
        if self.op.name == BACKWARD:
            read, made = [*read, *made, layout.output_gradient], [*layout.gradients]
        yield from zip(self.op.operands, [*read, *layout.operands], strict=True)
        yield from zip(self.op.results, made, strict=True)

    def _local_bytes(self, v: int, dims: Dims) -> float:
        return self.values[v].num_bytes / prod(self.parts.get(a, 1) for dim in dims for a in dim)

    def messages(self, compute_s: float) -> Messages:
        """The messages of a ring's devices."""
        n = self.num_devices
        if n == 1:
            return Messages((), (), 0.0, 0.0)
        arrays = list(self._arrays())
        moving = [self._local_bytes(v, dims) for v, dims in arrays[1:3]]
        moving += [self._local_bytes(v, d) for v, d in arrays[len(self._read()) :] if self._is_column(v, d)]
        sent = [(n - 1, num_bytes) for num_bytes in moving]
        step_s = sum(self._send_s(num_bytes) for num_bytes in moving)
        last_s = 0.0
        if self.op.name == BACKWARD:
            sums = [b * self.sum_itemsize / self.itemsize for b in moving[:2]]
            home = [self._local_bytes(v, dims) for v, dims in arrays[-2:]]
            sent += [*((n - 1, num_bytes) for num_bytes in sums), *((1, num_bytes) for num_bytes in home)]
            last_s = sum(map(self._send_s, home))
            step_s += sum(map(self._send_s, sums))
        exposed_s = (n - 1) * max(0.0, step_s - compute_s / n) + last_s
        if self.is_zigzag:
            distributed = () if self.op.name == FORWARD else DISTRIBUTED
            exchanged = [
                one for n, one in enumerate(arrays) if n not in distributed and self._has_sequence(one[1])
            ]
            halves = [self._local_bytes(v, d) / 2 for v, d in exchanged]
            if self.op.name == BACKWARD:
                halves[-3:] = [
                    min(*pair) for pair in zip(halves[-3:], self._operand_halves(arrays), strict=True)
                ]
            num = self.ring.num_exchanges
            sent += [(num, num_bytes) for num_bytes in halves]
            exposed_s += num * sum(map(self._send_s, halves))
        total_s = sum(times * self._send_s(num_bytes) for times, num_bytes in sent)
        return Messages(self.axes, tuple(sent), exposed_s, total_s)

    def _operand_halves(self, arrays: Sequence[tuple[int, Dims]]) -> list[float]:
        """Half of the bytes of queries, keys and values."""
        return [self._local_bytes(v, dims) / 2 for v, dims in arrays[:3]]

    def _read(self) -> tuple[int, ...]:
        return self.op.operands[: len(self.op.operands) - len(self.layout.operands)]

    def _is_column(self, v: int, dims: Dims) -> bool:
        return v in self.op.operands and any(KEY in dim for dim in dims)

    def _has_sequence(self, dims: Dims) -> bool:
        return any(QUERY in dim or KEY in dim for dim in dims)

    def _send_s(self, num_bytes: float) -> float:
        return float(self.mesh.time_s("collective-permute", self.axes, num_bytes))

    @property
    def workspace_bytes(self) -> float:
        """Bytes that a device holds besides operands and results: one block of scores, sums, and what travels."""
        query, key, value = (self._local_bytes(v, dims) for v, dims in [*self._arrays()][:3])
        grown = self.sum_itemsize / self.itemsize
        added = query * grown if self.op.name == FORWARD else (query + 2 * (key + value)) * grown
        moving = (2 if self.num_devices > 1 else 1) * (key + value)
        return self.loops.held_bytes + added + moving


def sum_itemsize(itemsize: int) -> int:
    """Bytes of an element of a sum of such elements."""
    return max(4, itemsize)


def block_loops(
    name: str, scores: Scores, sizes: Mapping[str, int], heads: tuple[int, int], ring: Ring, itemsize: int
) -> BlockLoops:
    """The loops over blocks on one device.

    Args:
      name: `FORWARD` or `BACKWARD`.
      scores: the softmax's argument.
      sizes: by label, the whole extents.
      heads: on one device, the heads of keys of all examples, and the query heads that share one of them.
      ring: the devices that split the sequence.
      itemsize: bytes of an element of queries.
    """
    length = sizes[QUERY]
    block = block_size(prod(heads), length // ring.size // (2 if ring.is_zigzag else 1))
    num_rows, num_columns = length // ring.size // block, length // block
    return BlockLoops(
        name=name,
        batch=heads[0],
        group=heads[1],
        rows=block,
        columns=block,
        channels=sizes[CHANNEL],
        value_channels=sizes[VALUE_CHANNEL],
        itemsize=itemsize,
        sum_itemsize=sum_itemsize(itemsize),
        num_rows=num_rows * ring.size,
        num_pairs=num_rows * num_columns,
        num_seen=seen_share(scores, ring, length, block) * num_columns**2,
        is_masked=scores.mask is not None,
    )


def attention(
    op: FlatOp, values: tuple[Value, ...], factors: dict[int, int], assignment: np.ndarray, mesh: MeshModel
) -> Attention:
    """An attention under a strategy.

    Args:
      op: the op.
      values: the program's values.
      factors: by factor of its rule, the group's factor that it is.
      assignment: by mesh axis, the group's factor that it splits.
      mesh: the mesh.
    """
    assert op.op is not None, "an op of the graph"
    layout: Layout = op.op.params["layout"]
    sizes = layout.sizes(*(values[v].shape for v in op.operands[:3]))
    parts, axes = dict[str, int](), tuple[int, ...]()
    for dim, labels in zip(op.rule.operands[0], layout.query, strict=True):
        for f, label in zip(dim, (a for a in labels if sizes[a] > 1), strict=True):
            split = tuple(a for a, own in enumerate(assignment) if own == factors.get(f, STUCK))
            parts[label] = prod(mesh.shape[a] for a in split)
            axes = split if label == QUERY else axes
    parts[KEY] = parts.get(QUERY, 1)
    return Attention(op, values, parts, axes, mesh)


STUCK = -9
"""The group's factor that a factor is which cannot be split: no strategy has it."""
