"""Which ops run as one kernel, and what each kernel moves through memory.

Products, look-ups, loops and ops with a dimension that cannot be split are kernels of their own. They read their operands
and write their results, except those that look up or update a few places of a large array (gather, scatter, slices of it):
these touch what they pick, and update in place.

What else is stored (`search.problem.fusion`) is made by fused kernels. An array's op stands as *late* as its readers
allow: what only the backward phase reads is computed there. Ops of one group that pass values on at one lateness are one
kernel: it reads each array from outside once, whatever lies between, and writes those that are read outside of it. A sum
over rows may lie between, as a block of threads has a row at hand (softmax, layer norm); a sum over anything else ends its
kernel, as its readers wait for all blocks (batch norm).

A kernel is priced by its group's strategy alone. So what comes from another group counts as it is handed over.

All this happens on the flat program, op by op; kernels of the same classes are then one `FusedKernel` with a count.
"""

from dataclasses import dataclass
from types import MappingProxyType

from search.ir.factors import Kind
from search.problem.flat_program import FlatOp
from search.problem.folding import FoldedProgram
from search.problem.fusion import Fusion
from search.problem.op_groups import OpGroup

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
"""What ops move that touch parts of an array: operands or results, by index, and how often. A look-up reads and writes
what it picks; an update reads what is new, and reads and writes, or only writes, where it goes."""


@dataclass(frozen=True, slots=True, eq=False)
class FusedKernel:
    """Kernels of the same classes.

    Attributes:
      op_classes: of its ops, ascending.
      moved: the values read or written, by the endpoint where each enters or leaves, and how often per run.
      count: runs in one step.
    """

    op_classes: tuple[int, ...]
    moved: tuple[tuple[Endpoint, float], ...]
    count: int


@dataclass(frozen=True, eq=False)
class Kernels:
    """The kernels of a program.

    Attributes:
      fused: ordered by their classes; kernels that run alone go without saying.
      of_op: by position, for ops whose results a fused kernel stores: that kernel, and the op's share of a run.
    """

    fused: tuple[FusedKernel, ...]
    of_op: dict[int, tuple[FusedKernel, float]]


def runs_alone(folded: FoldedProgram, op_class: int) -> bool:
    """Whether an op is a kernel of its own."""
    op = folded.op(op_class)
    return not op.is_boundary and (op.name in _TOUCHED or not folded.is_light[op_class])


def moved_alone(folded: FoldedProgram, op_class: int) -> tuple[tuple[Endpoint, float], ...]:
    """What an op that is a kernel of its own moves."""
    op = folded.op(op_class)
    if op.name in _TOUCHED:
        number = {i: n for n, (_, _, i) in enumerate(op.operand_places)}  # literals are no operands
        touched = [
            (i if is_result else number.get(i), is_result, t) for (i, is_result), t in _TOUCHED[op.name]
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
        count = max(collector.ops[p].count for p in positions)
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
    return Kernels(tuple(fused.values()), of_op)


def _ends_kernel(op: FlatOp) -> bool:
    """Whether an op sums, or the like, over other dimensions than the last ones of several rows."""
    if not op.operands:
        return False
    reduced = {i for i, f in enumerate(op.rule.factors) if f.kind in (Kind.SUM, Kind.REDUCE) and f.size > 1}
    loops = [f for dim in op.rule.operands[0] for f in dim if op.rule.factors[f].size > 1]
    last = loops[len(loops) - len(reduced) :]
    return bool(reduced) and (set(last) != reduced or len(last) == len(loops))


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
        self.ends = [_ends_kernel(self.folded.op(k)) for k in range(len(self.folded.members))]
        self.kernel_of = self._joined(self._late())
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

    def moved(self, positions: list[int]) -> list[tuple[Endpoint, float]]:
        """What a kernel moves in one step, by endpoint."""
        count = max(self.ops[p].count for p in positions)
        reads = self.reads.get(self.kernel_of[positions[0]], {})
        written = [
            ((self.folded.class_of[p], r, True), float(self.ops[p].count))
            for p in positions
            for r, v in enumerate(self.ops[p].results)
            if v in self.read_outside
        ]
        return [*((endpoint, float(count)) for endpoint in reads.values()), *written]

    def _late(self) -> list[int]:
        """Per op: how many kernels that run alone, or end in a sum, can stand before it on one path, at most, without
        delaying any other."""
        depth = [0] * len(self.ops)
        for p, op in enumerate(self.ops):
            before = [self.maker[v][0] for v in op.operands if self.maker[v][0] < p]
            depth[p] = max((depth[q] + self._is_waited_for(q) for q in before), default=0)
        late = list(depth)
        wanted: dict[int, int] = {}
        for p in reversed(range(len(self.ops))):
            if self.is_fused[p]:
                latest = min((wanted[v] for v in self.ops[p].results if v in wanted), default=depth[p])
                late[p] = max(depth[p], latest - self._is_waited_for(p))
            for v in self.ops[p].operands:
                wanted[v] = min(wanted.get(v, late[p]), late[p])
        return late

    def _is_waited_for(self, p: int) -> bool:
        """Whether an op's readers are in later kernels than it is."""
        return not self.is_fused[p] or self.ends[self.folded.class_of[p]]

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
                if not self._is_waited_for(q) and self.groups[q] == self.groups[p] and late[q] == late[p]:
                    a, b = sorted((find(p), find(q)))
                    root[b] = a
        return [find(p) for p in range(len(self.ops))]

    def _read_all(self) -> None:
        """What each kernel reads, and which arrays are read outside of the kernel that makes them."""
        behind: dict[int, dict[int, Endpoint]] = {}
        for p, op in enumerate(self.ops):
            if not self.is_fused[p]:
                self.read_outside.update(op.operands)
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
        """The arrays from which an op's operand can be had, and where they enter its group."""
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
