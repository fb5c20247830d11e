"""Blocks of a stack with equal structure, and the values that pass from one to the next.

Blocks have equal structure when their ops, in program order, look alike; read alike (which op or argument of their own,
which type from elsewhere); have equal specs in the plan; and make corresponding state. Where this separates blocks
other than the first and the last, update ops are put in an order of their own, because leaves may be updated in the
order of their names. So the n-th op of one block corresponds to the n-th op of another. A value is known by its *slot*:
the place of its op in the block, and which result it is. An argument's slot is the place of the op that reads it first,
and which operand it is there.

A value that one block makes and another reads is *passed on*: a residual stream from layer to layer, gradients the
other way, a running total in any order of the leaves. It is supported when each block reads it from a neighbour, in the
order in which they make it or read it.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Atom, Phase, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.problem.blocks import Blocks

Slot = tuple[str, int, int]
"""("result" | "operand", place of an op in its block, which)."""


class UnlikeError(Exception):
    """Blocks pass on a value in an unsupported way; the message says which."""


@dataclass(frozen=True, slots=True)
class Passed:
    """A value that blocks pass on: `maker` makes it, `reader` reads it in another block."""

    maker: Slot
    reader: Slot


class Likeness:
    """Compares the blocks of a step.

    Attributes:
      members: the ops of each block, in corresponding order.
      groups: of each stack, the largest set of blocks of one structure.
      result_block: the block of each result of the step: that of the state which it replaces, or of its maker.
    """

    def __init__(
        self, step: Step, sharding: StepSharding, blocks: Blocks, marks: Sequence[Hashable] = ()
    ) -> None:
        self.step, self.blocks, self.ops, self._marks = step, blocks, step.graph.ops, marks
        self._maker = {v: (i, r) for i, op in enumerate(self.ops) for r, v in enumerate(op.outputs)}
        self._argument = {v: a for a, v in enumerate(step.graph.inputs)}
        self._replaced = frozenset(step.replaces)
        self._ranks: dict[Any, int] = {}
        self._sharding = _by_op(sharding)
        self.result_block = tuple(
            self.block_of(out) if a is None else blocks.of_argument[a]
            for out, a in zip(step.graph.outputs, step.replaces, strict=True)
        )
        members: dict[int, list[int]] = {b: [] for stack in blocks.stacks for b in stack}
        for i, b in enumerate(blocks.of_op):
            if b is not None:
                members[b].append(i)
        self._compare(members)
        if any(
            len(inner) > len(group) for (_, *inner, _), group in zip(blocks.stacks, self.groups, strict=True)
        ):
            self._compare({b: self._in_order(ops) for b, ops in members.items()})

    def _compare(self, members: Mapping[int, Sequence[int]]) -> None:
        """Compares the blocks with their ops in an order that is equal in corresponding blocks."""
        self.members = members
        self._place = {i: place for ops in members.values() for place, i in enumerate(ops)}
        self._first_read = self._first_reads()
        results: dict[int, list[int]] = {}
        for o, b in enumerate(self.result_block):
            if b is not None:
                results.setdefault(b, []).append(o)
        self.groups = tuple(self._largest_alike(stack, results) for stack in self.blocks.stacks)

    def _in_order(self, ops: Sequence[int]) -> list[int]:
        """A block's ops, each update op ordered by its dataflow.

        Its rank is made of the ranks of its operands in the block, then of its readers there.
        """
        updates = [i for i in ops if self.ops[i].phase is Phase.UPDATE]
        others = [i for i in ops if self.ops[i].phase is not Phase.UPDATE]
        rank: dict[int, int] = {}
        for place, i in enumerate(others):
            for n, v in enumerate(self.ops[i].inputs):
                if isinstance(v, int) and v in self._argument:
                    rank.setdefault(v, self._rank("operand", place, n))
            rank.update((v, self._rank("result", place, r)) for r, v in enumerate(self.ops[i].outputs))
        for i in updates:
            read = (rank.get(a) if isinstance(a, int) else None for a in self.ops[i].inputs)
            made = self._rank("op", self.blocks.looks[i], *read)
            rank.update((v, self._rank("made", made, r)) for r, v in enumerate(self.ops[i].outputs))
        readers: dict[int, list[int]] = {}
        last: dict[int, int] = {}
        for i in reversed(updates):
            op = self.ops[i]
            last[i] = self._rank("last", *((rank[v], *sorted(readers.get(v, ()))) for v in op.outputs))
            for n, v in enumerate(op.inputs):
                if isinstance(v, int):
                    readers.setdefault(v, []).append(self._rank("reader", last[i], n))
        return others + sorted(updates, key=lambda i: (last[i], i))

    def _rank(self, *what: Any) -> int:
        """The number of a description of an op or a value: equal in all blocks, and different for other descriptions."""
        return self._ranks.setdefault(what, len(self._ranks))

    def _first_reads(self) -> dict[int, Slot]:
        """Where each argument is read first in its block."""
        found: dict[int, Slot] = {}
        for b, ops in self.members.items():
            for i in ops:
                for n, v in enumerate(self.ops[i].inputs):
                    a = self._argument.get(v) if isinstance(v, int) else None
                    if a is not None and self.blocks.of_argument[a] == b:
                        found.setdefault(a, self.operand_slot(i, n))
        return found

    def block_of(self, atom: Atom) -> int | None:
        """The block that a value belongs to."""
        if not isinstance(atom, int):
            return None
        if atom in self._maker:
            return self.blocks.of_op[self._maker[atom][0]]
        return self.blocks.of_argument[self._argument[atom]] if atom in self._argument else None

    def slot_of(self, value: int) -> Slot:
        """The slot of a value of a block."""
        if value in self._argument:
            return self._first_read[self._argument[value]]
        i, r = self._maker[value]
        return "result", self._place[i], r

    def operand_slot(self, op: int, operand: int) -> Slot:
        """The slot of an op's operand."""
        return "operand", self._place[op], operand

    def at(self, block: int, slot: Slot) -> Atom:
        """The value at a slot of a block."""
        what, place, n = slot
        op = self.ops[self.members[block][place]]
        return op.outputs[n] if what == "result" else op.inputs[n]

    def arguments_of(self, block: int) -> dict[Slot, int]:
        """A block's arguments by slot; an argument that it only writes has the slot of its new value."""
        return self._arguments[block]

    @cached_property
    def _arguments(self) -> dict[int, dict[Slot, int]]:
        found: dict[int, dict[Slot, int]] = {b: {} for b in self.members}
        new = {a: v for v, a in zip(self.step.graph.outputs, self.step.replaces, strict=True)}
        for a, b in enumerate(self.blocks.of_argument):
            if b is not None:
                slot = self._first_read[a] if a in self._first_read else self.slot_of(new[a])
                found[b][slot] = a
        return found

    def made_at(self, value: int) -> int:
        """The op that makes a value; -1 for arguments and constants."""
        return self._maker[value][0] if value in self._maker else -1

    # --- blocks of one structure

    def _largest_alike(self, stack: range, results: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
        found: dict[Any, list[int]] = {}
        for b in stack:
            found.setdefault(self._structure(b, results.get(b, ())), []).append(b)
        return tuple(max(found.values(), key=len))

    def _structure(self, block: int, results: Sequence[int]) -> Any:
        ops = tuple(
            (
                self.blocks.looks[i],
                tuple(self._origin(block, a) for a in self.ops[i].inputs),
                self._sharding.get(i),
            )
            for i in self.members[block]
        )
        return ops, tuple(sorted((self._result_structure(block, o) for o in results), key=repr))

    def _result_structure(self, block: int, o: int) -> Any:
        replaced = self.step.replaces[o]
        slot = self._first_read.get(replaced) if replaced is not None else None
        return self._origin(block, self.step.graph.outputs[o]), slot, self._sharding.get(("output", o))

    def _origin(self, block: int, atom: Atom) -> Any:
        """The slot of a value that a block reads; for values from elsewhere, their type and spec."""
        if not isinstance(atom, int):
            return None
        own, rest = self.block_of(atom), self._rest(atom)
        if own == block:
            return self.slot_of(atom), rest
        return "outside" if own is None else "passed", self.step.graph.values[atom], rest

    @memo
    def _rest(self, value: int) -> Any:
        """A value's spec; for an argument, also its role, whether it is replaced, and its mark."""
        if value not in self._argument:
            return self._sharding.get(("result", self._maker.get(value)))
        a = self._argument[value]
        mark = self._marks[a] if self._marks else None
        return self._sharding.get(("input", a)), self.step.arguments[a].role, a in self._replaced, mark

    # --- values that pass from one to the next

    def passed(self, group: Sequence[int]) -> tuple[Passed, ...]:
        """The values that blocks of one structure pass on to one another.

        Raises:
          UnlikeError: a block reads a value that a block other than its neighbours made.
        """
        found: dict[Passed, list[tuple[int, int]]] = {}
        for b in group:
            for i in self.members[b]:
                for n, v in enumerate(self.ops[i].inputs):
                    maker = self.block_of(v)
                    if maker is not None and maker != b and maker in group:
                        passed = Passed(self.slot_of(v), self.operand_slot(i, n))
                        found.setdefault(passed, []).append((maker, b))
        for passed, pairs in found.items():
            neighbours = self._neighbours(group, passed.maker) | self._neighbours(group, passed.reader)
            if not neighbours.issuperset(pairs):
                op = self.ops[self.members[pairs[0][1]][passed.reader[1]]]
                raise UnlikeError(f"{op.name} at {op.source} reads past the layers next to its own")
        return tuple(found)

    def _neighbours(self, group: Sequence[int], slot: Slot) -> set[tuple[int, int]]:
        """Pairs of blocks that follow one another, in the order in which they come to a slot."""
        order = sorted(group, key=lambda b: self.members[b][slot[1]])
        return {pair for a, b in pairwise(order) for pair in ((a, b), (b, a))}


def _by_op(sharding: StepSharding) -> dict[Any, Any]:
    """The entries of a sharding: by op, those of its operands, results and bodies; those of each result, argument and
    output also alone."""
    found: dict[Any, list[Any]] = {}
    for says in (sharding.specs, sharding.reshards):
        for (what, path, n), value in says.items():
            if path:
                found.setdefault(path[0], []).append((what, path[1:], n, value))
            if len(path) < 2:
                alone = (what, n) if not path else (what, (path[0], n))
                found.setdefault(alone, []).append(value)
    return {key: tuple(sorted(value, key=repr)) for key, value in found.items()}
