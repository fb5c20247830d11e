"""The work of a step in any number of parts, at least: known before the step is taken apart.

A pipeline runs each kernel of the step on parts of its data: on a microbatch's examples, and of these on what each device of
a replica has. The kernels of the step as one program are known once such a program was searched. This module prices them on
an n-th of their data. For n parts the devices take together

    n x (seconds of the kernel on an n-th of its data),

which never falls as n grows, because a kernel has a start, fills waves of tiles, and moves bytes at a given rate
(`cost_model.compute`). Nobody needs to know which loops are cut:

* A kernel that moves B bytes moves B/n at least.
* A product of P results, each a sum of K terms, is cut in q parts along the results and n/q along the sum. Under a tile of
  A waves for all results it takes max(1, A/q) (K q/n + DEPTH) steps at least. That is smallest for q = A, or the nearest
  to it between 1 and n.

Where the step goes through its batch in a loop, its kernels move a part's bytes. A larger part moves no less; it need not
move more, since parameters are read by each part.

Only kernels whose data hold examples run for each microbatch. All others, and those of which that is not certain, count as
one kernel: n = 1. Copies between memories, and what a plan recomputes, are no work of the step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.compute import DEPTH, SPLITS, START_S, TILES, kernel_s, pass_s_per_byte
from autoshard.search.ir.factors.contraction import RULES as PRODUCTS
from autoshard.search.ir.graph import Phase, Role
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.memory.written import SCOPE
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp, FlatProgram
from autoshard.search.problem.kernels import Endpoint, moved_alone, runs_alone

_PARTIAL_BYTES = 8.0
"""Bytes for each element and part of a split sum, as in `cost_model.compute`."""


_WAYS = np.array([(t.m * t.n, t.efficiency, split) for t in TILES for split in SPLITS], float).T

FORWARD, BACKWARD, LATER, ONCE = range(4)
"""Parts of a step: the fields of `Passes`, and what may run once."""


class Passes(NamedTuple):
    """Seconds of the devices together, or of a stage.

    Attributes:
      forward_s: of the forward pass.
      backward_s: of the backward pass, without what only weight gradients need.
      later_s: of all else that runs for each microbatch.
    """

    forward_s: float
    backward_s: float
    later_s: float

    @property
    def total_s(self) -> float:
        """All three."""
        return self.forward_s + self.backward_s + self.later_s

    def times(self, factor: float) -> "Passes":
        """Each of them so many times."""
        return Passes(*(factor * seconds for seconds in self))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of the step as one program, on one device.

    Attributes:
      runs: in a step.
      num_bytes: moved by a run.
      points: results of a product; zero for other kernels.
      depth: terms of each of these sums.
      flops_per_s: rate of the product.
      part: the part of the step to which it belongs.
      merged: numbers of its kind whose data are the whole batch's, where the step goes through its batch in a loop.
    """

    runs: float
    num_bytes: float
    points: float
    depth: float
    flops_per_s: float
    part: int
    merged: int = 1


@dataclass(frozen=True, eq=False)
class StepWork:
    """The work of the devices in a step.

    Attributes:
      device: the device.
      kernels: the kernels of the step as one program.
      again_s: seconds of the devices together that the kernels recompute.
    """

    device: Device
    kernels: tuple[Kernel, ...]
    again_s: float = 0.0
    _seconds: dict[int, np.ndarray] = field(default_factory=dict[int, np.ndarray], init=False, repr=False)

    @classmethod
    def of(cls, costed: CostedGraph, again_s: float = 0.0) -> "StepWork":
        """The work of a step that was searched as one program.

        Args:
          costed: the step's problem on any mesh.
          again_s: seconds of the devices together that its plan recomputes.
        """
        return cls(costed.device, tuple(_kernels(costed)), again_s)

    def passes(self, parts: int) -> Passes:
        """Seconds of the devices together, at least, for the passes of a step whose data lie in so many parts: those of
        microbatches, and of the devices that share each of them."""
        seconds = parts * self._runs * self.seconds(parts)
        found = Passes(*(float(seconds[self._part == part].sum()) for part in (FORWARD, BACKWARD, LATER)))
        return found.times(max(1 - self.again_s / found.total_s, 0.0) if found.total_s else 1.0)

    @cached_property
    def once_s(self) -> float:
        """Seconds of the devices together for all that may run once."""
        return float((self._runs * self.seconds(1))[self._part == ONCE].sum())

    @cached_property
    def num_forward_kernels(self) -> int:
        """Kernels of the forward pass: each stage has one."""
        return round(sum(kernel.runs for kernel in self.kernels if kernel.part == FORWARD))

    def longest_s(self, parts: int) -> float:
        """Seconds of the longest kernel of the forward pass on a part of the data, at least: a stage has all of it."""
        return float(self.seconds(parts)[self._part == FORWARD].max(initial=0.0))

    def seconds(self, parts: int) -> np.ndarray:
        """By kernel, one run on one of so many parts of the data, at least."""
        if parts not in self._seconds:
            num_bytes = np.array([kernel.num_bytes * min(kernel.merged, parts) for kernel in self.kernels])
            found = np.asarray(kernel_s(self.device, num_bytes / parts), float)
            for i, kernel in enumerate(self.kernels):
                if kernel.points:
                    found[i] = _product_s(self.device, kernel, parts)
            self._seconds[parts] = found
        return self._seconds[parts]

    @cached_property
    def _runs(self) -> np.ndarray:
        return np.array([kernel.runs for kernel in self.kernels], float)

    @cached_property
    def _part(self) -> np.ndarray:
        return np.array([kernel.part for kernel in self.kernels], int)


def _product_s(device: Device, kernel: Kernel, n: int) -> float:
    """Seconds of a product on one of so many parts of the data."""
    num_bytes, merged = kernel.num_bytes * min(kernel.merged, n), kernel.merged
    sizes = {(kernel.points * merged, kernel.depth), (kernel.points, kernel.depth * merged)}
    return min(product_part_s(device, *size, kernel.flops_per_s, num_bytes, n) for size in sizes)


def product_part_s(
    device: Device, points: float, depth: float, peak_flops_per_s: float, num_bytes: float, n: int
) -> float:
    """Seconds of one of n equal parts of a product, at least, however it is cut.

    Args:
      device: the device that runs it.
      points: results of the product.
      depth: terms of each.
      peak_flops_per_s: peak of the device for the operands' dtype.
      num_bytes: bytes read and written for the product.
      n: number of parts.
    """
    flops_per_s = peak_flops_per_s * device.matmul_efficiency
    per_byte_s = pass_s_per_byte(device)
    memory_s = num_bytes / n * per_byte_s
    if device.num_cores == 1:
        return max(2 * points * depth / n / flops_per_s, memory_s, device.launch_s)
    area, efficiency, split = _WAYS
    waves = points / area * split / device.num_cores
    along = np.clip(waves, 1.0, n)
    steps = np.maximum(1.0, waves / along) * (depth / split * along / n + DEPTH)
    arithmetic_s = steps * 2 * area * device.num_cores / (flops_per_s * efficiency)
    joining_s = split * _PARTIAL_BYTES * points / n * per_byte_s + device.launch_s
    found_s = np.maximum(arithmetic_s, memory_s) + np.where(split > 1, joining_s, 0.0)
    return max(START_S + float(found_s.min()), device.launch_s)


def _kernels(costed: CostedGraph) -> Iterator[Kernel]:
    """All kernels but transfers."""
    folded, parts = costed.graph.folded, _Parts(costed.graph.folded.program)
    for op_class, members in enumerate(folded.members):
        op = folded.op(op_class)
        kind = parts.of(folded.program.ops[members[0]])
        for copy in costed.kernels.copied.get(op_class, ()):
            yield _kernel(copy.count, _bytes(costed, ((copy.endpoint, copy.times),)), kind)
        if op.is_boundary or op.is_transfer or not runs_alone(folded, op_class):
            continue
        moved_bytes = _bytes(costed, moved_alone(folded, op_class))
        product = costed.whole_product(op_class) if _is_product(costed, op_class) else (0.0, 0.0, 0.0)
        yield _kernel(folded.counts[op_class], moved_bytes, kind, product)
    for kernel in costed.kernels.fused:
        kind = parts.of(folded.program.ops[folded.members[kernel.op_classes[0]][0]])
        yield _kernel(kernel.count, _bytes(costed, kernel.moved), kind)


def _kernel(
    runs: float,
    num_bytes: float,
    kind: tuple[int, int],
    product: tuple[float, float, float] = (0.0, 0.0, 0.0),
) -> Kernel:
    """A kernel of which so many runs go through the batch together."""
    part, merged = kind
    return Kernel(runs / merged, num_bytes, *product, part, merged)


def _is_product(costed: CostedGraph, op_class: int) -> bool:
    op = costed.graph.folded.op(op_class)
    is_heavy = costed.graph.folded.is_heavy[op_class] and op.rule.flops_per_point > 0
    return is_heavy and op.name in PRODUCTS and len(op.operands) > 1


def _bytes(costed: CostedGraph, moved: Iterable[tuple[Endpoint, float]]) -> float:
    """Bytes moved through the memory of a device that has all values whole."""
    folded, total = costed.graph.folded, 0.0
    for (op_class, index, is_result), times in moved:
        op = folded.op(op_class)
        total += times * folded.program.values[(op.results if is_result else op.operands)[index]].num_bytes
    return total


class _Parts:
    """Which ops of a program run for each microbatch, and in which pass.

    In a program with a loop over microbatches these are the ops inside of it. In any other program, those are certain that
    read or make values which hold examples: the examples are followed from the batch on, dim by dim. The backward pass of a
    microbatch is waited for by other stages as far as it makes such values again, and wherever it is a loop over layers,
    which no stage splits.
    """

    def __init__(self, program: FlatProgram) -> None:
        graph = program.step.graph
        self.loop = next(
            (i for i, op in enumerate(graph.ops) if op.name == "scan" and op.scope == SCOPE), None
        )
        self.count = program.step.num_microbatches
        self.examples = _examples(program) if self.loop is None else frozenset[int]()

    def of(self, op: FlatOp) -> tuple[int, int]:
        """The part of the step that an op belongs to, and by how many runs it goes through the batch."""
        if self.loop is not None:
            is_in_loop = op.site[:1] == (self.loop,)
            return (FORWARD if op.phase is Phase.FORWARD else LATER, self.count) if is_in_loop else (ONCE, 1)
        if self.examples.isdisjoint((*op.operands, *op.results)):
            return ONCE, 1
        if op.phase is Phase.FORWARD:
            return FORWARD, 1
        is_awaited = len(op.site) > 1 or not self.examples.isdisjoint(op.results)
        return BACKWARD if is_awaited else LATER, 1


def _examples(program: FlatProgram) -> frozenset[int]:
    """The values that hold examples."""
    size = max(batch_divisors(program.step), default=0)
    arguments = zip(program.inputs, program.step.arguments, strict=True)
    found = {v: 0 for v, a in arguments if a.role is Role.BATCH and program.values[v].shape[:1] == (size,)}
    for op in program.ops:
        held = {
            dims[found[v]][0]
            for v, dims in zip(op.operands, op.rule.operands, strict=True)
            if v in found and dims[found[v]]
        }
        for v, dims in zip(op.results, op.rule.results, strict=True):
            for i, factors in enumerate(dims):
                if not held.isdisjoint(factors):
                    found.setdefault(v, i)
    return frozenset(found)
