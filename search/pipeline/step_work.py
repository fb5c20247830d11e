"""The work of a step in any number of parts, at least: known before the step is taken apart.

A pipeline runs each kernel of the step on parts of its data: on a microbatch's examples, and of these on what each device of
a replica has. The kernels of the step as one program are known once such a program was searched. This module prices them on
a part of their data: a c-th of the examples, of which z devices share the work. The devices take together

    n x (seconds of the kernel on an n-th of its data),  n = c z,

which never falls as parts are cut again, because a kernel has a start, fills waves of tiles, and moves bytes at a given rate
(`cost_model.compute`).

* A kernel that moves B bytes moves B/n at least.
* A product whose loop over examples is known (batches, rows, columns, or the sum) is one of that loop cut in c: its shape is
  known. How z devices share it is not, so that it takes the least of all ways to cut its four loops in z or fewer parts.
* Of any other product nobody knows which loops are cut. One of P results, each a sum of K terms, is cut in q parts along the
  results and n/q along the sum. Under a tile of A waves for all results it takes max(1, A/q) (K q/n + DEPTH) steps at least.
  That is smallest for q = A, or the nearest to it between 1 and n.

The loop over examples is followed from the batch on, dim by dim, as long as each op says which of its loops runs over them.
Where the step goes through its batch in a loop, it is not followed, and kernels move a part's bytes. A larger part moves no
less; it need not move more, since parameters are read by each part.

Only kernels whose data hold examples run for each microbatch. All others, and those of which that is not certain, count as
one kernel: n = 1. Copies between memories, and what a plan recomputes, are no work of the step. Fused kernels may be merged
with later ones of the same graph, so that outside of loops it is not certain that one ends before the weight gradients.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.compute import (
    DEPTH,
    SPLITS,
    START_S,
    TILES,
    Product,
    kernel_s,
    pass_s_per_byte,
    product_s,
)
from autoshard.cost_model.memo import memo
from autoshard.search.ir.factors.contraction import RULES as PRODUCTS
from autoshard.search.ir.graph import Phase, Role
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.memory.written import SCOPE
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.costs import CostedGraph, product_loops
from autoshard.search.problem.flat_program import FlatOp, FlatProgram
from autoshard.search.problem.kernels import Endpoint, moved_alone

_PARTIAL_BYTES = 8.0
"""Bytes for each element and part of a split sum, as in `cost_model.compute`."""


_WAYS = np.array([(t.m * t.n, t.efficiency, split) for t in TILES for split in SPLITS], float).T

FORWARD, BACKWARD, LATER, ONCE = range(4)
"""Parts of a step: the fields of `PassTimes`, and the ops that may run once."""


class PassTimes(NamedTuple):
    """Seconds of the devices together, or of a stage.

    Attributes:
      forward_s: seconds of the forward pass.
      backward_s: seconds of the backward pass, without the work that only weight gradients need.
      later_s: seconds of all other work for each microbatch.
    """

    forward_s: float
    backward_s: float
    later_s: float

    @property
    def total_s(self) -> float:
        """The sum of the three."""
        return self.forward_s + self.backward_s + self.later_s

    def times(self, factor: float) -> "PassTimes":
        """The times, multiplied by a factor."""
        return PassTimes(*(factor * seconds for seconds in self))


class Sizes(NamedTuple):
    """The shape of a matrix product, and the rate at which it is computed.

    Attributes:
      loops: batches, rows, columns, and terms of each sum.
      flops_per_s: peak of the device for the operands' dtype.
      over_examples: which of the loops runs over the examples; None if that is not known.
    """

    loops: tuple[float, float, float, float]
    flops_per_s: float
    over_examples: int | None = None


@dataclass(frozen=True, slots=True)
class StepKernel:
    """A kernel of the step as one program, on one device.

    Attributes:
      num_bytes: moved by a run.
      part: the part of the step to which it belongs.
      ends_in: the last part of the step in which its time may count, as the compiler may merge it with a later one.
      product: the matrix product that it computes, if it is one.
      merged: numbers of its kind whose data are the whole batch's, where the step goes through its batch in a loop.
    """

    num_bytes: float
    part: int
    ends_in: int
    product: Sizes | None = None
    merged: int = 1


@dataclass(frozen=True, eq=False)
class StepWork:
    """The work of the devices in a step.

    Attributes:
      device: the device.
      runs: the kernels of the step as one program, with their runs in it.
      recompute_s: seconds of the devices together that the kernels recompute.
    """

    device: Device
    runs: Mapping[StepKernel, float]
    recompute_s: float = 0.0

    @classmethod
    def of(cls, on_mesh: MeshProblem, recompute_s: float = 0.0) -> "StepWork":
        """The work of a step that was searched as one program.

        Args:
          on_mesh: the step's problem on any mesh.
          recompute_s: seconds of the devices together that its plan recomputes.
        """
        runs = defaultdict[StepKernel, float](float)
        costed = on_mesh.memory.costed
        for kernel, times in _kernels(costed):
            runs[kernel] += times
        return cls(costed.device, dict(runs), recompute_s)

    def passes(self, count: int, size: int = 1) -> PassTimes:
        """Seconds of the devices together, at least, for the passes of a step.

        Args:
          count: number of parts in which the step goes through its examples.
          size: the devices that share the work on each part.
        """
        return self._bounds_of(count, size)[0]

    @cached_property
    def once_s(self) -> float:
        """Seconds of the devices together for all that may run once."""
        return float((self._times * self.seconds(1))[self._part == ONCE].sum())

    @cached_property
    def num_forward_kernels(self) -> int:
        """Kernels of the forward pass: each stage has one."""
        return round(sum(times for kernel, times in self.runs.items() if kernel.part == FORWARD))

    def longest_s(self, count: int, size: int = 1) -> float:
        """Seconds of the longest kernel of the forward pass on a part of the data, at least: a stage has all of it."""
        return self._bounds_of(count, size)[1]

    @memo
    def _bounds_of(self, count: int, size: int) -> tuple[PassTimes, float]:
        """`passes` and `longest_s`, which are asked for each schedule."""
        each_s = self.seconds(count, size)
        seconds = count * size * self._times * each_s
        found = PassTimes(
            *(float(seconds[self._ends_in == part].sum()) for part in (FORWARD, BACKWARD, LATER))
        )
        share = max(1 - self.recompute_s / found.total_s, 0.0) if found.total_s else 1.0
        return found.times(share), float(each_s[self._part == FORWARD].max(initial=0.0))

    def seconds(self, count: int, size: int = 1) -> np.ndarray:
        """By kernel, seconds of one run on one of so many parts of the examples, on one of the devices that share it, at
        least."""
        moved_bytes = [_moved_bytes(kernel, count, size) for kernel in self.runs]
        found = np.asarray(kernel_s(self.device, moved_bytes), float)
        for i, kernel in enumerate(self.runs):
            if kernel.product:
                found[i] = _product_s(self.device, kernel, kernel.product, count, size)
        return found

    @cached_property
    def _times(self) -> np.ndarray:
        return np.array([*self.runs.values()], float)

    @cached_property
    def _part(self) -> np.ndarray:
        return np.array([kernel.part for kernel in self.runs], int)

    @cached_property
    def _ends_in(self) -> np.ndarray:
        return np.array([kernel.ends_in for kernel in self.runs], int)


def _moved_bytes(kernel: StepKernel, count: int, size: int) -> float:
    """Bytes that one device moves, at least."""
    parts = count * size
    return kernel.num_bytes * min(kernel.merged, parts) / parts


def _product_s(device: Device, kernel: StepKernel, sizes: Sizes, count: int, size: int) -> float:
    """Seconds of a product on one of so many parts of the examples, on one of the devices that share it."""
    num_bytes, merged = _moved_bytes(kernel, count, size), kernel.merged
    if sizes.over_examples is not None:
        local = np.array(sizes.loops)
        local[sizes.over_examples] /= count
        cut = Product(*np.ceil(local / _cuts(size)).T)
        return float(np.min(product_s(device, cut, num_bytes, sizes.flops_per_s)))
    parts, (*made, depth) = count * size, sizes.loops
    points = prod(max(1.0, each) for each in made)
    whole = {(points * merged, depth), (points, depth * merged)}
    return min(product_part_s(device, *one, sizes.flops_per_s, parts * num_bytes, parts) for one in whole)


@lru_cache
def _cuts(size: int) -> np.ndarray:
    """[ways, 4]: numbers of parts into which the loops of a product may be cut for so many devices."""
    by = [n for n in range(1, size + 1) if size % n == 0]
    return np.array([cut for cut in product(by, repeat=4) if size % prod(cut) == 0], float)


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


def _kernels(costed: CostedGraph) -> Iterator[tuple[StepKernel, float]]:
    """The kernels of a step and their runs, transfers left out."""
    folded, parts = costed.graph.folded, _Parts(costed.graph.folded.program)
    for op_class, members in enumerate(folded.members):
        op = folded.op(op_class)
        kind = parts.of(folded.program.ops[members[0]])
        for copy in costed.kernels.copied.get(op_class, ()):
            yield _kernel(copy.count, _bytes(costed, ((copy.endpoint, copy.times),)), kind)
        runs = costed.runs_alone(op_class)
        if op.is_transfer or not runs:
            continue
        moved_bytes = _bytes(costed, moved_alone(folded, op_class))
        sizes = _sizes(costed, parts, op_class) if _is_product(costed, op_class) else None
        yield _kernel(runs, moved_bytes, kind, sizes)
    for kernel in costed.kernels.fused:
        first = folded.program.ops[folded.members[kernel.op_classes[0]][0]]
        part, merged = parts.of(first)
        ends_in = LATER if part != ONCE and len(first.site) == 1 else part
        found = StepKernel(_bytes(costed, kernel.moved), part, ends_in, merged=merged)
        yield found, kernel.count / merged


def _kernel(
    runs: float, num_bytes: float, kind: tuple[int, int], product: Sizes | None = None
) -> tuple[StepKernel, float]:
    """A kernel that nothing is merged with, of which so many runs go through the batch together."""
    part, merged = kind
    return StepKernel(num_bytes, part, part, product, merged), runs / merged


def _is_product(costed: CostedGraph, op_class: int) -> bool:
    op = costed.graph.folded.op(op_class)
    is_heavy = costed.graph.folded.is_heavy[op_class] and op.rule.flops_per_point > 0
    return is_heavy and op.name in PRODUCTS and len(op.operands) > 1


def _sizes(costed: CostedGraph, parts: "_Parts", op_class: int) -> Sizes:
    op = costed.graph.folded.op(op_class)
    loop, loops = parts.over_examples.get(op), product_loops(op.rule)
    over = next((n for n, among in enumerate(loops) if loop in among), None)
    return Sizes(costed.product_sizes(op_class), costed.product_flops_per_s(op), over)


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
        self.examples, self.over_examples = frozenset[int](), dict[FlatOp, int]()
        if self.loop is None:
            self.examples, self.over_examples = _examples(program)

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


class _Held(NamedTuple):
    """The examples of a value.

    Attributes:
      dim: the dimension along which they lie.
      are_major: whether it is certain that this dimension is made of the examples, then of other dimensions.
    """

    dim: int
    are_major: bool


def _examples(program: FlatProgram) -> tuple[frozenset[int], dict[FlatOp, int]]:
    """The values that hold examples, and by op the factor that runs over all of them, where that is certain."""
    size, loops = max(batch_divisors(program.step), default=0), dict[FlatOp, int]()
    arguments = zip(program.inputs, program.step.arguments, strict=True)
    batch = (v for v, a in arguments if a.role is Role.BATCH and program.values[v].shape[:1] == (size,))
    found = {v: _Held(0, are_major=True) for v in batch}
    for op in program.ops:
        over = _factors_over_examples(op, found, size)
        if len(over) == 1 and all(over.values()):
            loops[op] = next(iter(over))
        for v, dims in zip(op.results, op.rule.results, strict=True):
            for i, factors in enumerate(dims):
                if common := [f for f in factors if f in over]:
                    found.setdefault(v, _Held(i, over[common[0]] and factors[0] == common[0]))
    return frozenset(found), loops


def _factors_over_examples(op: FlatOp, found: Mapping[int, _Held], size: int) -> dict[int, bool]:
    """The factors of an op that run over examples, and whether it is certain that they run over all of them."""
    over = dict[int, bool]()
    for v, dims in zip(op.operands, op.rule.operands, strict=True):
        if v in found and (factors := dims[found[v].dim]):
            first = factors[0]
            is_whole = len(factors) == 1 or op.rule.factors[first].size % size == 0
            over[first] = over.get(first, True) and found[v].are_major and is_whole
    return over
