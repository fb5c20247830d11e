"""The folded program: kinds of ops, and the links between them.

A *kind* is a set of ops decided together (see `folding`); a *link* says that a result of one kind is an
operand of another, and how often it is handed over in one step.
"""

from dataclasses import dataclass
from functools import cached_property

from autoshard.factors import Kind
from search.program import FlatOp, Program


@dataclass(frozen=True, slots=True)
class Link:
    """Result `result` of kind `producer` is operand `operand` of kind `consumer`, `count` times a step."""

    producer: int
    result: int
    consumer: int
    operand: int
    count: int


@dataclass(frozen=True, eq=False)
class Folded:
    """A program and its kinds.

    Attributes:
      program: the flat program.
      members: for each kind, the positions of its ops.
      kind_of: for each op position, its kind.
      links: ordered by producer, result, consumer, operand.
    """

    program: Program
    members: tuple[tuple[int, ...], ...]
    kind_of: tuple[int, ...]
    links: tuple[Link, ...]

    def op(self, kind: int) -> FlatOp:
        """The first op of a kind, which stands for all."""
        return self.program.ops[self.members[kind][0]]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How often the ops of each kind run in one step, all together."""
        ops = self.program.ops
        return tuple(sum(ops[i].count for i in m) for m in self.members)

    @cached_property
    def is_heavy(self) -> tuple[bool, ...]:
        """Whether a kind contracts several operands: a matrix product, a convolution, a gather, a scatter."""
        return tuple(self._heavy(self.op(k)) for k in range(len(self.members)))

    @cached_property
    def links_into(self) -> dict[int, list[Link]]:
        """Links by consumer."""
        into: dict[int, list[Link]] = {}
        for link in self.links:
            into.setdefault(link.consumer, []).append(link)
        return into

    @staticmethod
    def _heavy(op: FlatOp) -> bool:
        return len(op.operands) > 1 and any(f.kind is Kind.SUM for f in op.rule.factors)


def folded(program: Program, members: tuple[tuple[int, ...], ...]) -> Folded:
    """Collects the links between the kinds of a partition."""
    kind_of = [0] * len(program.ops)
    for kind, positions in enumerate(members):
        for p in positions:
            kind_of[p] = kind
    maker = {v: (kind_of[i], r) for i, op in enumerate(program.ops) for r, v in enumerate(op.results)}
    counts: dict[tuple[int, int, int, int], int] = {}
    for i, op in enumerate(program.ops):
        for position, (v, count) in enumerate(zip(op.operands, op.operand_counts, strict=True)):
            key = (*maker[v], kind_of[i], position)
            counts[key] = counts.get(key, 0) + count
    links = tuple(Link(*key, count) for key, count in sorted(counts.items()))
    return Folded(program, members, tuple(kind_of), links)
