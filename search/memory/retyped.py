"""Arrays that are converted again in each phase that reads them.

A weight in bfloat16 that multiplies activations in float32 is converted before. One converted array serves the forward phase
and the backward phase. While it waits for the backward phase, it takes as much memory as the weight or more, so a weight in
the host's memory would leave the device no room. Therefore each phase converts the weight that it fetches itself.

Arrays that are converted to a narrower type stay: they take less memory than the fetch moves.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

from autoshard.search.ir.graph import Atom, Graph, Op, Phase
from autoshard.search.memory.written import Written

RETYPES = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "expand_dims"})
"""Ops that convert an array to another type or shape."""


def is_retyped(op: Op, v: int) -> bool:
    """True if an op makes nothing but another form of a value."""
    return op.name in RETYPES and op.operands == (v,)


@dataclass(frozen=True, slots=True)
class Retyped:
    """A graph in which each phase converts some arrays for itself.

    Attributes:
      graph: with the same inputs and outputs.
      origin: by op, its index before the rewrite; -1 for new ones.
      made_again: converted arrays of which later phases make their own.
    """

    graph: Graph
    origin: tuple[int, ...]
    made_again: frozenset[int]


def retyped_by_phase(graph: Graph, arrays: Collection[int]) -> Retyped:
    """The graph with ops that convert these arrays in each phase that reads them converted."""
    rewriting = _Rewriting(graph, arrays)
    rewriting.run()
    written = rewriting.written
    by_phase = replace(graph, values=tuple(written.values), ops=tuple(written.ops))
    return Retyped(by_phase, tuple(rewriting.origin), frozenset(v for v, _ in rewriting.again))


class _Rewriting:
    """One walk over a graph. `maker` has the op of each form of an array that takes no less memory than the array."""

    def __init__(self, graph: Graph, arrays: Collection[int]) -> None:
        self.graph, self.written = graph, Written(graph.values)
        self.origin: list[int] = []
        self.num_bytes = {v: graph.values[v].num_bytes for v in arrays}
        self.maker: dict[int, Op] = {}
        self.again: dict[tuple[int, Phase], int] = {}

    def run(self) -> None:
        for n, op in enumerate(self.graph.ops):
            inputs = tuple(self._read(a, op.phase) for a in op.inputs)
            self._append(op if inputs == op.inputs else replace(op, inputs=inputs), n)
            for v in (v for v in op.operands if v in self.num_bytes and is_retyped(op, v)):
                (form,) = op.outputs
                if self.graph.values[form].num_bytes >= self.num_bytes[v]:
                    self.maker[form], self.num_bytes[form] = op, self.num_bytes[v]

    def _read(self, atom: Atom, phase: Phase) -> Atom:
        """An operand in the form that its phase has made."""
        if not isinstance(atom, int) or (op := self.maker.get(atom)) is None or op.phase is phase:
            return atom
        if (atom, phase) not in self.again:
            inputs = tuple(self._read(a, phase) for a in op.inputs)
            self.again[atom, phase] = made = self.written.new(self.graph.values[atom])
            self._append(replace(op, phase=phase, inputs=inputs, outputs=(made,)), -1)
        return self.again[atom, phase]

    def _append(self, op: Op, origin: int) -> None:
        self.written.ops.append(op)
        self.origin.append(origin)
