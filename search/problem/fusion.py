"""Which ops run as one kernel, and what each kernel moves through memory.

The compiler fuses light ops: a chain of them reads its inputs once and writes its outputs once, whatever lies between.
What is fused with what follows from where things stand between the heavy ops, which are kernels of their own:

  * an op stands as *late* as its readers allow: what only the backward phase reads is computed there;
  * light ops of one group that pass values on at one lateness are one kernel;
  * an op with one large operand is *cheap*: in another kernel it is computed again from that operand, which is in memory
    anyway, and never stored. A cast, a mask, a normalised activation cost their readers what it is made of;
  * reductions and ops of several large operands are stored when another kernel wants them;
  * what a heavy op or another group reads is stored as it is.

Heavy ops read all their operands and write their results, except those that look up or update a few places of a
large array (gather, scatter, slices of it): these touch what they pick, and update in place.

All this happens on the flat program, op by op; kernels of the same classes are then one `FusedKernel` with a count.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from search.problem.flat_program import FlatOp
from search.problem.folding import FoldedProgram

Endpoint = tuple[int, int, bool]
"""(class, index, whether a result): an operand or a result of a class."""

SMALL_SHARE = 1 / 8
"""Operands smaller than this share of an op's result are not what makes it expensive. Source: a choice of ours."""

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


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """Kernels of the same classes.

    Attributes:
      op_classes: of its ops, ascending.
      moved: the values read or written, by the place where each enters or leaves, and how often per run.
      count: runs in one step.
    """

    op_classes: tuple[int, ...]
    moved: tuple[tuple[Endpoint, float], ...]
    count: int


def is_light(folded: FoldedProgram, op_class: int) -> bool:
    """Whether an op is fused with others."""
    op = folded.op(op_class)
    return not (op.is_boundary or folded.is_heavy[op_class] or op.name in _TOUCHED)


def moved_alone(folded: FoldedProgram, op_class: int) -> tuple[tuple[Endpoint, float], ...]:
    """What an op that is a kernel of its own moves."""
    op = folded.op(op_class)
    if op.name in _TOUCHED:
        return tuple(((op_class, i, is_result), times) for (i, is_result), times in _TOUCHED[op.name])
    read = {v: (op_class, i, False) for i, v in reversed(list(enumerate(op.operands)))}
    return tuple(
        (endpoint, 1.0)
        for endpoint in (*read.values(), *((op_class, r, True) for r in range(len(op.results))))
    )


def kernels(folded: FoldedProgram, node_of: Sequence[int]) -> tuple[FusedKernel, ...]:
    """The kernels of light ops, ordered by first class; those of heavy ops go without saying."""
    fusion = _Fusion(folded, node_of)
    members: dict[int, list[int]] = {}
    for position in fusion.light:
        members.setdefault(fusion.kernel_of[position], []).append(position)
    runs: dict[tuple[int, ...], int] = {}
    moved: dict[tuple[int, ...], dict[Endpoint, float]] = {}
    for positions in members.values():
        op_classes = tuple(sorted({folded.class_of[p] for p in positions}))
        count = max(fusion.ops[p].count for p in positions)
        runs[op_classes] = runs.get(op_classes, 0) + count
        total = moved.setdefault(op_classes, {})
        for endpoint, times in fusion.moved(positions):
            total[endpoint] = total.get(endpoint, 0.0) + times
    return tuple(
        FusedKernel(
            op_classes,
            tuple(
                (endpoint, times / runs[op_classes]) for endpoint, times in sorted(moved[op_classes].items())
            ),
            runs[op_classes],
        )
        for op_classes in sorted(runs)
    )


class _Fusion:
    """One pass over the program each way."""

    def __init__(self, folded: FoldedProgram, node_of: Sequence[int]) -> None:
        self.folded = folded
        self.ops, self.values = folded.program.ops, folded.program.values
        self.nodes = [node_of[k] for k in folded.class_of]
        light = [is_light(folded, k) for k in range(len(folded.members))]
        self.is_light = [light[k] for k in folded.class_of]
        self.light = [p for p, light in enumerate(self.is_light) if light]
        self.maker = {v: p for p, op in enumerate(self.ops) for v in op.results}
        self.kernel_of = self._joined(self._late())
        self.stored: set[int] = set()
        self.reads: dict[int, dict[int, Endpoint]] = {}
        self._pass_through()

    def _late(self) -> list[int]:
        """Per op: how many heavy ops can stand before it on one path, at most, without delaying any other."""
        depth = [0] * len(self.ops)
        for p, op in enumerate(self.ops):
            before = [self.maker[v] for v in op.operands if self.maker[v] < p]
            depth[p] = max((depth[q] + (not self.is_light[q]) for q in before), default=0)
        late = list(depth)
        wanted: dict[int, int] = {}
        for p in reversed(range(len(self.ops))):
            if self.is_light[p]:
                late[p] = max(
                    depth[p], min((wanted[v] for v in self.ops[p].results if v in wanted), default=depth[p])
                )
            for v in self.ops[p].operands:
                wanted[v] = min(wanted.get(v, late[p]), late[p])
        return late

    def _joined(self, late: list[int]) -> list[int]:
        """Per op: the first op of its kernel."""
        root = list(range(len(self.ops)))

        def find(p: int) -> int:
            while root[p] != p:
                root[p] = root[root[p]]
                p = root[p]
            return p

        for p in self.light:
            for v in self.ops[p].operands:
                q = self.maker[v]
                if self.is_light[q] and self.nodes[q] == self.nodes[p] and late[q] == late[p]:
                    a, b = sorted((find(p), find(q)))
                    root[b] = a
        return [find(p) for p in range(len(self.ops))]

    def _pass_through(self) -> None:
        """What each kernel reads, and which values are stored for it."""
        behind: dict[int, dict[int, Endpoint]] = {}
        for p, op in enumerate(self.ops):
            if not self.is_light[p]:
                self.stored.update(op.operands)
                continue
            sources: dict[int, Endpoint] = {}
            for i, v in enumerate(op.operands):
                seen = self._seen(p, i, v, behind)
                self._read(p, seen)
                if self.values[v].num_bytes >= SMALL_SHARE * self._made_bytes(op):
                    sources |= seen
            for r, v in enumerate(op.results):
                is_cheap = len(sources) <= 1 and all(
                    self.values[s].num_bytes <= self.values[v].num_bytes / SMALL_SHARE for s in sources
                )
                behind[v] = sources if is_cheap else {v: (self.folded.class_of[p], r, True)}

    def _seen(self, p: int, i: int, v: int, behind: dict[int, dict[int, Endpoint]]) -> dict[int, Endpoint]:
        """The stored values from which an op's operand can be had, and where they enter its group."""
        q = self.maker[v]
        if self.is_light[q] and self.nodes[q] == self.nodes[p]:
            return behind.get(v, {v: (self.folded.class_of[q], self.ops[q].results.index(v), True)})
        return {v: (self.folded.class_of[p], i, False)}

    def _read(self, p: int, seen: dict[int, Endpoint]) -> None:
        kernel = self.kernel_of[p]
        for v, endpoint in seen.items():
            if self.kernel_of[self.maker[v]] != kernel or not self.is_light[self.maker[v]]:
                self.stored.add(v)
                self.reads.setdefault(kernel, {}).setdefault(v, endpoint)

    def _made_bytes(self, op: FlatOp) -> int:
        return max((self.values[v].num_bytes for v in op.results), default=0)

    def moved(self, positions: list[int]) -> list[tuple[Endpoint, float]]:
        """What a kernel moves in one step, by place."""
        kernel = self.kernel_of[positions[0]]
        count = max(self.ops[p].count for p in positions)
        found = [(endpoint, float(count)) for endpoint in self.reads.get(kernel, {}).values()]
        for p in positions:
            for r, v in enumerate(self.ops[p].results):
                if v in self.stored:
                    found.append(((self.folded.class_of[p], r, True), float(self.ops[p].count)))
        return found
