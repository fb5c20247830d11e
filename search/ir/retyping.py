"""State that is returned in another type: the leaf, its old and new types, and the line of the user's code that changes it.

The line is found backwards from the new leaf. At each op, the walk follows the operand that continues the old leaf, or at
least depends on it. It ends at the first operand of the old type.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from autoshard.search.ir.graph import Atom, Graph, Op, Step, Value
from autoshard.search.ir.lineage import NONE, lineages, sources


@dataclass(frozen=True, slots=True)
class Retyping:
    """An argument, by its path, that is returned in another type: the old and new values, and the op that changes the type;
    None if the new value is an argument, a constant or a literal."""

    argument: str
    old: Value
    new: Value
    op: Op | None

    def __str__(self) -> str:
        """The text for a message: `params['w'] (bfloat16, then float32 at train.py:12)`."""
        where = f" {self.op.where}" if self.op else ""
        old, new = _text(self.old, self.new), _text(self.new, self.old)
        return f"{self.argument} ({old}, then {new}{where})"


def retypings(step: Step) -> Iterator[Retyping]:
    """All arguments of a step that are returned in another type."""
    if not step.retyped:
        return
    graph = step.graph
    restored = _Restored(graph)
    for o, i in step.retyped:
        old, new = graph.inputs[i], graph.outputs[o]
        yield Retyping(step.arguments[i].name, graph.value(old), graph.value(new), restored.op(i, new))


class _Restored:
    """The way back from new state to old."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.maker = graph.maker
        self.lineages, self.sources = lineages(graph), sources(graph)

    def op(self, argument: int, new: Atom) -> Op | None:
        """The last op between an argument and a value that reads an operand of the argument's type."""
        wanted = _type(self.graph.value(self.graph.inputs[argument]))
        op = self.maker.get(new) if isinstance(new, int) else None
        while op:
            before = self._operand(op, argument)
            if before not in self.maker or _type(self.graph.values[before]) == wanted:
                return op
            op = self.maker[before]
        return None

    def _operand(self, op: Op, argument: int) -> int | None:
        """The operand that continues an argument; else one that depends on it; else None."""
        continuing = (v for v in op.operands if self.lineages.get(v, NONE).continued >> argument & 1)
        depending = (v for v in op.operands if self.sources.get(v, 0) >> argument & 1)
        return next(continuing, next(depending, None))


def _type(value: Value) -> tuple[object, ...]:
    return value.shape, value.dtype


def _text(value: Value, other: Value) -> str:
    """A value's dtype, and its shape if it differs from another value's."""
    shape = f"[{','.join(map(str, value.shape))}]" if value.shape != other.shape else ""
    return f"{value.dtype}{shape}"
