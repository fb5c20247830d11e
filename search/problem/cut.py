"""A step without some of its repeated blocks.

To leave a block out is to drop its ops, arguments and results, and to rewire the values that pass through it: another
block that read a value from it now reads the value that this block read in its place. An op outside of all blocks may
read a value of a block left out (all layers' losses, stacked). It then reads that value of a block that is kept, so the
op stays as large as it is.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any

import jax

from autoshard.search.ir.graph import Atom, Graph, Op, Step, verify
from autoshard.search.ir.sharding import Place, StepSharding
from autoshard.search.problem.likeness import Likeness, Passed, UnlikeError


class BlockCut:
    """Leaves blocks out of a step and its sharding."""

    def __init__(self, step: Step, sharding: StepSharding, likeness: Likeness) -> None:
        self.step, self.graph, self.sharding, self.likeness = step, step.graph, sharding, likeness
        self.group = {b: group for group in likeness.groups for b in group}
        self.passed: dict[int, tuple[Passed, ...]] = {}
        for group in likeness.groups:
            self.passed.update(dict.fromkeys(group, likeness.passed(group)))

    def without(self, gone: AbstractSet[int]) -> tuple[Step, StepSharding]:
        """The step and its sharding without some blocks.

        Raises:
          UnlikeError: the value that an op should read instead is ambiguous, or has another type.
        """
        blocks = self.likeness.blocks
        ops = [i for i, b in enumerate(blocks.of_op) if b not in gone]
        arguments = [a for a, b in enumerate(blocks.of_argument) if b not in gone]
        results = [o for o, b in enumerate(self.likeness.result_block) if b not in gone]
        graph = replace(
            self.graph,
            inputs=tuple(self.graph.inputs[a] for a in arguments),
            ops=tuple(self._rewired(i, gone) for i in ops),
            outputs=tuple(self._instead(self.graph.outputs[o], None, 0, gone) for o in results),
        )
        _check_order(graph)
        verify(graph)
        number = {a: n for n, a in enumerate(arguments)}
        step = replace(
            self.step,
            graph=graph,
            arguments=tuple(self.step.arguments[a] for a in arguments),
            results=tuple(self.step.results[o] for o in results),
            replaces=tuple(None if (a := self.step.replaces[o]) is None else number[a] for o in results),
            retyped=tuple(
                (results.index(o), number[a]) for o, a in self.step.retyped if o in results and a in number
            ),
            in_tree=_by_position(self.step.in_tree, arguments),
            out_tree=jax.tree_util.tree_structure((0,) * len(results)),
        )
        return step, _renumbered(self.sharding, ops, arguments, results)

    def _rewired(self, i: int, gone: AbstractSet[int]) -> Op:
        op = self.graph.ops[i]
        inputs = tuple(self._instead(a, i, n, gone) for n, a in enumerate(op.inputs))
        return op if inputs == op.inputs else replace(op, inputs=inputs)

    def _instead(self, atom: Atom, reader: int | None, operand: int, gone: AbstractSet[int]) -> Atom:
        """The value that is read in place of a value: itself, or its substitute where its block is left out."""
        found = atom
        for _ in range(len(gone)):
            block = self.likeness.block_of(found)
            if block is None or block not in gone:
                break
            found = self._handed_on(found, block, reader, operand, gone)
        if self.likeness.block_of(found) in gone or self._type(found) != self._type(atom):
            raise UnlikeError(f"what {self._name(reader)} reads of one has no like in another")
        return found

    def _handed_on(
        self, value: int, block: int, reader: int | None, operand: int, gone: AbstractSet[int]
    ) -> Atom:
        group, likeness = self.group[block], self.likeness
        own = likeness.blocks.of_op[reader] if reader is not None else None
        if reader is not None and own in group:
            return likeness.at(block, likeness.operand_slot(reader, operand))
        slot = likeness.slot_of(value)
        entering = {likeness.at(block, p.reader) for p in self.passed[block] if p.maker == slot}
        if len(entering) > 1:
            raise UnlikeError(f"{self._name(reader)} reads what passes through them both ways")
        kept = (likeness.at(b, slot) for b in group if b not in gone)
        return entering.pop() if entering else min(kept, key=likeness.made_at)

    def _type(self, atom: Atom) -> Any:
        value = self.graph.values[atom] if isinstance(atom, int) else atom.aval
        return value.shape, value.dtype

    def _name(self, op: int | None) -> str:
        return "the result" if op is None else f"{self.graph.ops[op].name} at {self.graph.ops[op].source}"


def _check_order(graph: Graph) -> None:
    """Raises UnlikeError where an op reads a value that is now made after it."""
    made = {*graph.inputs, *(v for v, _ in graph.constants)}
    for op in graph.ops:
        if not made.issuperset(op.operands):
            raise UnlikeError(f"{op.name} at {op.source} comes before what it would read")
        made.update(op.outputs)


def _by_position(in_tree: Any, arguments: Sequence[int]) -> Any:
    """The pytree of `(args, {})` with a flat tuple for each of the user's arguments, so that donation stays the same."""
    args, kwargs = in_tree.children()
    counts, start = [], 0
    for tree in (*args.children(), *kwargs.children()):
        counts.append(sum(start <= a < start + tree.num_leaves for a in arguments))
        start += tree.num_leaves
    return jax.tree_util.tree_structure((tuple((0,) * n for n in counts), {}))


def _renumbered(
    sharding: StepSharding, ops: Sequence[int], arguments: Sequence[int], results: Sequence[int]
) -> StepSharding:
    """The sharding of the ops, arguments and results that are kept, under their new numbers."""
    op_at = {i: n for n, i in enumerate(ops)}
    outside = {
        "input": {a: n for n, a in enumerate(arguments)},
        "output": {o: n for n, o in enumerate(results)},
    }

    def place(old: Place) -> Place | None:
        what, path, n = old
        if path:
            return (what, (op_at[path[0]], *path[1:]), n) if path[0] in op_at else None
        return (what, path, outside[what][n]) if n in outside[what] else None

    def kept(says: Mapping[Place, Any]) -> dict[Place, Any]:
        return {new: value for old, value in says.items() if (new := place(old)) is not None}

    return replace(sharding, specs=kept(sharding.specs), reshards=kept(sharding.reshards))
