"""The ops that run as one kernel, and the bytes that each kernel moves through memory.

Products, look-ups, loops and ops with a dimension that cannot be split are kernels of their own. They read their
operands and write their results, except those that look up or update a few places of a large array (gather, scatter,
slices of it): these touch the places that they pick, and update in place. Ops that only move elements are no kernels
where all their readers compute their results on the fly.

All other stored arrays (`search.problem.fusion`) are made by fused kernels. An array's op is placed as *late* as its
readers allow: an array that only the backward phase reads is computed there. Ops of one group that pass values on at
one lateness are one kernel. It reads each array from outside once, and writes the arrays that are read outside of it.
Elements that move on the fly are read from the arrays behind them: a slice's share of its operand, and no zeros of a
pad. A sum ends its kernel, because its readers depend on it; they read their other operands once more. A sum over rows
may lie inside a kernel where it only meets the array that it sums. Then a block of threads keeps its row at hand, as in
a softmax or a norm (XLA's `SoftmaxRewriterTriton`), but not where the backward phase reads the sum too, or a mean is
squared as well.

A kernel is priced by its group's strategy alone. So a value from another group counts in the spec in which this group
reads it.

Products and convolutions call libraries, which need copies of operands in another layout, and of a loop's part of a stack,
which they neither read nor write in place. A stack is filled with zeros before its loop begins.

All this happens on the flat program, op by op; kernels of the same classes are then one `FusedKernel` with a count.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType

from autoshard.search.ir.factors import Kind
from autoshard.search.problem.convolution_copies import ConvolutionCopy
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.fusion import POOLINGS, Fusion, Place, elements_read, is_part
from autoshard.search.problem.op_groups import OpGroup

MAX_ROW = 1 << 14
"""Elements of the longest row that a block of threads keeps at hand. Source: XLA on an H100; softmaxes of 16,384
numbers in float32 take as many kernels as of 1,024, those of 32,768 more."""

MAXIMA = frozenset({"reduce_max", "reduce_min"})
"""Reductions over rows that are recomputed, not kept. Source: XLA on an H100, which keeps of a softmax only the sums."""

Endpoint = tuple[int, int, bool]
"""(class, index, whether a result): an operand or a result of a class."""

_SCATTER = (((1, False), 1.0), ((2, False), 3.0))
_TOUCHED = MappingProxyType(
    {
        "gather": (((1, False), 1.0), ((0, True), 2.0)),
        "dynamic_slice": (((0, True), 2.0),),
        "dynamic_update_slice": (((1, False), 2.0),),
        "scatter": (((1, False), 1.0), ((2, False), 2.0)),
        **dict.fromkeys(
            ("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"), _SCATTER
        ),
    }
)
"""The operands or results that ops move that touch parts of an array, by index, and how often. A look-up reads and
writes the places that it picks. An update reads its new elements, and reads and writes their places, or only writes
them."""

_PARTLY_READ = MappingProxyType({**_TOUCHED, "slice": (((0, True), 2.0),)})
"""The operands and results that an op moves which reads a part of its operand, as above; a slice reads as much as it
writes."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedKernel:
    """Kernels of the same classes.

    Attributes:
      op_classes: the classes of its ops, ascending.
      moved: the values read or written, by the endpoint where each enters or leaves, and how often per run.
      count: runs in one step.
    """

    op_classes: tuple[int, ...]
    moved: tuple[tuple[Endpoint, float], ...]
    count: int


@dataclass(frozen=True, slots=True)
class CopyKernel:
    """Kernels that only move an array.

    Attributes:
      endpoint: the operand or result that is moved.
      times: how often it is read or written per run.
      count: runs in one step.
    """

    endpoint: Endpoint
    times: float
    count: float


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a program.

    Attributes:
      fused: ordered by their classes; kernels that run alone are not listed.
      of_op: by position, for ops whose results a fused kernel stores: that kernel, and the op's share of a run.
      first: by position, for the ops in `of_op`: the first of them in the same run of the kernel.
      alone: the positions of the ops that are kernels of their own.
      copied: by class, the copies beside the reads and writes of its kernel.
    """

    fused: tuple[FusedKernel, ...]
    of_op: dict[int, tuple[FusedKernel, float]]
    first: dict[int, int]
    alone: frozenset[int]
    copied: Mapping[int, tuple[CopyKernel, ...]]


def runs_alone(folded: FoldedProgram, op_class: int) -> bool:
    """Whether an op is a kernel of its own, if its results are arrays."""
    op = folded.op(op_class)
    is_fused = folded.is_light[op_class] or op.name in POOLINGS
    return not op.is_boundary and (op.name in _TOUCHED or not is_fused)


def moved_alone(folded: FoldedProgram, op_class: int) -> tuple[tuple[Endpoint, float], ...]:
    """The operands and results that an op moves that is a kernel of its own."""
    op = folded.op(op_class)
    if op.name in _PARTLY_READ:
        number = {i: n for n, (_, _, i) in enumerate(op.operand_places)}  # literals are no operands
        touched = [
            (i if is_result else number.get(i), is_result, t) for (i, is_result), t in _PARTLY_READ[op.name]
        ]
        return tuple(((op_class, n, is_result), t) for n, is_result, t in touched if n is not None)
    read = {v: (op_class, i, False) for i, v in reversed(list(enumerate(op.operands)))}
    return tuple(
        (endpoint, 1.0)
        for endpoint in (*read.values(), *((op_class, r, True) for r in range(len(op.results))))
    )


def kernels(fusion: Fusion, groups: tuple[OpGroup, ...]) -> Kernels:
    """The kernels of a program whose op classes are decided in these groups."""
    collector = _Collector(fusion, groups)
    runs: dict[tuple[int, ...], int] = {}
    moved: dict[tuple[int, ...], dict[Endpoint, float]] = {}
    for key, positions in collector.instances():
        count = collector.runs(positions)
        runs[key] = runs.get(key, 0) + count
        total = moved.setdefault(key, {})
        for endpoint, times in collector.moved(positions):
            total[endpoint] = total.get(endpoint, 0.0) + times
    fused = {
        key: FusedKernel(
            key, tuple((e, times / runs[key]) for e, times in sorted(moved[key].items())), runs[key]
        )
        for key in sorted(runs)
    }
    of_op = {
        p: (fused[key], 1 / len(positions)) for key, positions in collector.instances() for p in positions
    }
    first = {p: positions[0] for _, positions in collector.instances() for p in positions}
    return Kernels(tuple(fused.values()), of_op, first, _alone(fusion), _copied(fusion))


def _alone(fusion: Fusion) -> frozenset[int]:
    """The positions of the ops that are kernels of their own."""
    return frozenset(
        i
        for i, op in enumerate(fusion.program.ops)
        if runs_alone(fusion.folded, fusion.folded.class_of[i])
        and (not op.results or any(map(fusion.is_stored, op.results)))
    )


def _copied(fusion: Fusion) -> dict[int, tuple[CopyKernel, ...]]:
    """By class: the operands written out for libraries, and the additional traffic of stacks."""
    runs: dict[tuple[Endpoint, float], float] = {}
    for endpoint, times, count in (*_written_out(fusion), *_stacked(fusion)):
        runs[endpoint, times] = runs.get((endpoint, times), 0.0) + count
    found: dict[int, tuple[CopyKernel, ...]] = {}
    for (endpoint, times), count in sorted(runs.items()):
        found[endpoint[0]] = (*found.get(endpoint[0], ()), CopyKernel(endpoint, times, count))
    return found


def _written_out(fusion: Fusion) -> Iterator[tuple[Endpoint, float, float]]:
    """The operands that products and convolutions need in another order or with zeros around them. Each array counts
    once, for the first of its readers, as read and written."""
    seen: set[tuple] = set()
    for p, op in enumerate(fusion.program.ops):
        for i, v in enumerate(op.operands):
            copy = fusion.copied_as(p, i)
            if copy is None or (what := (fusion.seen_through(v), copy)) in seen:
                continue
            seen.add(what)
            growth = copy.growth if isinstance(copy, ConvolutionCopy) else 1.0
            yield (fusion.folded.class_of[p], i, False), 2 * growth, op.count


def _stacked(fusion: Fusion) -> Iterator[tuple[Endpoint, float, float]]:
    """The additional traffic of loops' stacks. Zeros are written first. A part of a stack that a product reads is read
    and written for it; so is a part that a product makes or reads before it is stacked. Source: a GPT of 1.3B in
    bfloat16 on an H100, JAX 0.11.2; without Triton's products XLA reads most parts of stacks in place."""
    for p, op in enumerate(fusion.program.ops):
        op_class = fusion.folded.class_of[p]
        if is_part(op) and fusion.is_read_by_library(op.results[0]):
            yield (op_class, 0, True), 2.0, op.count
        if op.name == "stack" and op.is_boundary and op.operands:
            length = fusion.program.values[op.results[0]].shape[0]
            yield (op_class, 0, True), 1.0, op.count / length
            if fusion.is_at_library(op.operands[0]):
                yield (op_class, 0, False), 2.0, op.count


def _summed_over(op: FlatOp) -> frozenset[int]:
    """The factors over which an op takes a sum or another reduction."""
    factors = enumerate(op.rule.factors) if op.operands else ()
    return frozenset(i for i, f in factors if f.kind in (Kind.SUM, Kind.REDUCE) and f.size > 1)


def is_by_rows(op: FlatOp) -> bool:
    """Whether an op reduces over the last dimensions of several rows, none of them too long."""
    if not (summed := _summed_over(op)):
        return False
    loops = [f for dim in op.rule.operands[0] for f in dim if op.rule.factors[f].size > 1]
    last = loops[len(loops) - len(summed) :]
    is_short = prod(op.rule.factors[f].size for f in summed) <= MAX_ROW
    return set(last) == summed and len(last) < len(loops) and is_short


def _is_of_block(op: FlatOp) -> bool:
    return op.op is not None and op.op.equivalence is not None and op.op.equivalence.block >= 0


class _Collector:
    """One pass over the program each way."""

    def __init__(self, fusion: Fusion, groups: tuple[OpGroup, ...]) -> None:
        self.fusion, self.folded = fusion, fusion.folded
        self.ops, self.maker = fusion.program.ops, fusion.maker
        group_of = {k: n for n, group in enumerate(groups) for k in group.op_classes}
        self.groups = [group_of[k] for k in self.folded.class_of]
        is_fused = [
            not (self.folded.op(k).is_boundary or runs_alone(self.folded, k))
            for k in range(len(self.folded.members))
        ]
        self.is_fused = [is_fused[k] for k in self.folded.class_of]
        self.is_sum = self._sums()
        self.kernel_of = self._joined(self._late())
        self.elements = elements_read(fusion)
        self.reads: dict[int, dict[int, Endpoint]] = {}
        self.read_outside: set[int] = set()
        self._read_all()

    def instances(self) -> list[tuple[tuple[int, ...], list[int]]]:
        """Per kernel: the classes and the positions of the ops whose results it stores."""
        members: dict[int, list[int]] = {}
        for p, op in enumerate(self.ops):
            if self.is_fused[p] and any(map(self.fusion.is_stored, op.results)):
                members.setdefault(self.kernel_of[p], []).append(p)
        return [(tuple(sorted({self.folded.class_of[p] for p in ps})), ps) for ps in members.values()]

    def runs(self, positions: Sequence[int]) -> int:
        """Runs of a kernel in one step. A kernel with ops of two blocks runs once for each block that begins it."""
        of_blocks = [p for p in positions if self.fusion.program.is_shortened and _is_of_block(self.ops[p])]
        return self.ops[min(of_blocks)].count if of_blocks else max(self.ops[p].count for p in positions)

    def moved(self, positions: list[int]) -> list[tuple[Endpoint, float]]:
        """The values that a kernel moves in one step, by endpoint."""
        count = self.runs(positions)
        reads = self.reads.get(self.kernel_of[positions[0]], {})
        written = [
            ((self.folded.class_of[p], r, True), float(min(self.ops[p].count, count)))
            for p in positions
            for r, v in enumerate(self.ops[p].results)
            if v in self.read_outside
        ]
        return [*((endpoint, count * times) for endpoint, times in self._from_outside(reads)), *written]

    def _from_outside(self, reads: Mapping[int, Endpoint]) -> Iterator[tuple[Endpoint, float]]:
        """The values that a kernel reads from outside, each with the bytes that it reads as a multiple of the value's.
        Elements that move on the fly are read where they come from, none twice."""
        values, moved = self.fusion.program.values, [v for v in reads if self._moves_on_the_fly(v)]
        read = {v: float(prod(values[v].shape)) for v in reads if v not in moved}
        yield from ((reads[v], 1.0) for v in read)
        seen = set[Place]()
        for v in moved:
            num_bytes = 0.0
            for (array, path), num_elements in self.elements[v].items():
                if (array, path) not in seen:
                    before = read.get(array, 0.0)
                    read[array] = min(before + num_elements, prod(values[array].shape))
                    num_bytes += (read[array] - before) * values[array].itemsize
                    seen.add((array, path))
            if num_bytes:
                yield reads[v], num_bytes / values[v].num_bytes

    def _moves_on_the_fly(self, v: int) -> bool:
        """Whether no kernel makes a value: its readers move its elements."""
        made_at = self.maker[v][0]
        is_moved = not (self.is_fused[made_at] or self.ops[made_at].is_boundary)
        return is_moved and not self.fusion.is_stored(v)

    def _sums(self) -> list[bool]:
        """Per op: whether it makes sums that are read in later kernels, or computes on with nothing but such sums."""
        ends = [self._ends_kernel(members[0]) for members in self.folded.members]
        found = [ends[k] for k in self.folded.class_of]
        for p, op in enumerate(self.ops):
            if self.is_fused[p] and not found[p] and not _summed_over(op):
                found[p] = self._goes_on(p, found)
        return found

    def _goes_on(self, p: int, is_sum: Sequence[bool]) -> bool:
        """Whether an op reads a sum, and neither makes nor reads anything larger."""
        op, values = self.ops[p], self.fusion.program.values
        most = max((prod(values[v].shape) for v in op.operands if is_sum[self.maker[v][0]]), default=0)
        return all(prod(values[v].shape) <= most for v in (*op.operands, *op.results))

    def _ends_kernel(self, p: int) -> bool:
        """Whether an op makes a reduction that is read only in other kernels."""
        is_sum = self.is_fused[p] and bool(_summed_over(self.ops[p]))
        return is_sum and not (is_by_rows(self.ops[p]) and self._meets_again(p))

    def _meets_again(self, p: int) -> bool:
        """Whether a row's sum is read only where it meets the array that it sums, in one phase. Maxima are computed
        anew in each phase. In another order of memory, rows are not at hand."""
        summed, (v, *others) = self.ops[p].operands[0], self.ops[p].results
        is_kept = self.ops[p].name not in MAXIMA and len(self.fusion.computed_in[v]) > 1
        if others or is_kept or summed in self.fusion.layouts.across:
            return False
        while len(readers := self.fusion.uses.get(v, ())) == 1 and self.is_fused[readers[0]]:
            op = self.ops[readers[0]]
            if _summed_over(op) or len(op.results) != 1:
                return False
            if any(o != v and self._sources(o) == self._sources(summed) for o in op.operands):
                return True
            (v,) = op.results
        return False

    def _sources(self, v: int) -> frozenset[int]:
        """The arrays that a value is computed from."""
        return self.fusion.sources.get(v, frozenset((v,)))

    def _late(self) -> list[int]:
        """Per op: the largest number of kernels that run alone, or end in a sum, that can stand before it on one path
        without delaying any other."""
        depth = [0] * len(self.ops)
        for p, op in enumerate(self.ops):
            before = [self.maker[v][0] for v in op.operands if self.maker[v][0] < p]
            depth[p] = max((depth[q] + self._waits(p, q) for q in before), default=0)
        late = list(depth)
        wanted: dict[int, int] = {}
        for p in reversed(range(len(self.ops))):
            if self.is_fused[p]:
                late[p] = max(
                    depth[p], min((wanted[v] for v in self.ops[p].results if v in wanted), default=0)
                )
            for v in self.ops[p].operands:
                latest = late[p] - self._waits(p, self.maker[v][0])
                wanted[v] = min(wanted.get(v, latest), latest)
        return late

    def _waits(self, p: int, q: int) -> bool:
        """Whether an op is in a later kernel than one whose result it reads."""
        return not self.is_fused[q] or (self.is_sum[q] and not self.is_sum[p])

    def _joined(self, late: list[int]) -> list[int]:
        """Per op: the first op of its kernel."""
        root = list(range(len(self.ops)))

        def find(p: int) -> int:
            while root[p] != p:
                root[p] = root[root[p]]
                p = root[p]
            return p

        for p, op in enumerate(self.ops):
            for v in op.operands if self.is_fused[p] else ():
                q = self.maker[v][0]
                if not self._waits(p, q) and self.groups[q] == self.groups[p] and late[q] == late[p]:
                    a, b = sorted((find(p), find(q)))
                    root[b] = a
        return [find(p) for p in range(len(self.ops))]

    def _read_all(self) -> None:
        """Finds the arrays that each kernel reads, and the arrays that are read outside of the kernel that makes them."""
        behind: dict[int, dict[int, Endpoint]] = {}
        for p, op in enumerate(self.ops):
            if not self.is_fused[p]:
                self.read_outside.update(*map(self._sources, op.operands))
                continue
            seen: dict[int, Endpoint] = {}
            for i, v in enumerate(op.operands):
                seen |= {s: e for s, e in self._seen(p, i, v, behind).items() if s not in seen}
            for r, v in enumerate(op.results):
                is_stored = self.fusion.is_stored(v)
                behind[v] = {v: (self.folded.class_of[p], r, True)} if is_stored else seen
            if any(map(self.fusion.is_stored, op.results)):
                self._read(self.kernel_of[p], seen)

    def _seen(self, p: int, i: int, v: int, behind: dict[int, dict[int, Endpoint]]) -> dict[int, Endpoint]:
        """The arrays from which an op's operand can be computed, and where they enter its group."""
        q = self.maker[v][0]
        if self.is_fused[q] and self.groups[q] == self.groups[p] and q < p:
            return behind[v]
        return {v: (self.folded.class_of[p], i, False)}

    def _read(self, kernel: int, seen: dict[int, Endpoint]) -> None:
        for v, endpoint in seen.items():
            maker = self.maker[v][0]
            if not self.is_fused[maker] or self.kernel_of[maker] != kernel:
                self.read_outside.add(v)
                self.reads.setdefault(kernel, {}).setdefault(v, endpoint)
