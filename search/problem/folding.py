"""Repeated blocks share their variables: ops with equal looks and equal neighbourhoods are decided together.

A model of depth 64 makes one decision per *class* of op, not sixty-four. Two ops are of one class when their
neighbourhoods in the program agree up to a few steps: colour refinement (Weisfeiler and Leman 1968), stopped
early. An op starts with the colour of its primitive, factors, phase, trip count and name, numbers in names
left out (`layers_3` and `layers_17` look alike); each round mixes in the colours of producers and consumers,
with the positions at which they meet. Early stopping folds a stack: after `ROUNDS` rounds only the layers within that
distance of an irregular op (the embedding, the head) differ from the rest.

Any partition would be sound, since deciding two ops together only restricts the plan; a finer one is merely
larger. Colours are sums of 64-bit mixes (Steele, Lea and Flood 2014, SplitMix64), so the result does not
depend on any order.

The result is the folded program: *classes* of ops, each decided by one choice, and the dependencies between them. A
result of one class is an operand of another, and is read a number of times in one step.

Two arguments may look alike and yet be meant to differ. A difference that is known beforehand (a pin) is a mark: it
enters the first colour, so that the ops around a marked argument can follow it. A difference that an edited plan makes
later must not move the ops, whose decisions the plan holds: `separate` takes apart the arguments alone.
"""

import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.search.ir.factors import Kind, Rule
from autoshard.search.ir.graph import Value
from autoshard.search.problem.flat_program import FlatOp, FlatProgram
from autoshard.search.problem.numbering import Numbering

ROUNDS = 4
"""How far ops look around themselves: enough to see the parameter that tells a query from a key projection."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """Result `result` of class `producer` is operand `operand` of class `consumer`, `count` times a step."""

    producer: int
    result: int
    consumer: int
    operand: int
    count: int


@dataclass(frozen=True, eq=False)
class FoldedProgram:
    """A program and its classes.

    Attributes:
      program: the flat program.
      members: for each class, the positions of its ops.
      class_of: for each op position, its class.
      dependencies: ordered by producer, result, consumer, operand.
      dependency_of: for each op position, by operand: which of the dependencies it is.
      whole_of: for each class, a number that it shares with those that it was separated from.
    """

    program: FlatProgram
    members: tuple[tuple[int, ...], ...]
    class_of: tuple[int, ...]
    dependencies: tuple[Dependency, ...]
    dependency_of: tuple[tuple[int, ...], ...]
    whole_of: tuple[int, ...]

    def op(self, op_class: int) -> FlatOp:
        """The first op of a class, which stands for all."""
        return self.program.ops[self.members[op_class][0]]

    @cached_property
    def values_read(self) -> tuple[tuple[tuple[int, int], frozenset[int]], ...]:
        """By dependency, an op and operand that it stands for, and the values of all such operands."""
        first, values = dict[int, tuple[int, int]](), dict[int, set[int]]()
        for i, (op, alike) in enumerate(zip(self.program.ops, self.dependency_of, strict=True)):
            for operand, (v, n) in enumerate(zip(op.operands, alike, strict=True)):
                first.setdefault(n, (i, operand))
                values.setdefault(n, set()).add(v)
        return tuple((first[n], frozenset(values[n])) for n in first)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Runs of the ops of each class in one step, all together."""
        ops = self.program.ops
        return tuple(sum(ops[i].count for i in m) for m in self.members)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of ops for which each class stands."""
        ops = self.program.ops
        return tuple(sum(ops[i].repeats for i in m) for m in self.members)

    @cached_property
    def is_heavy(self) -> tuple[bool, ...]:
        """Whether a class contracts several operands (a matrix product, a convolution, a gather, a scatter), or is a
        kernel of the user's."""
        return tuple(self._heavy(self.op(k)) for k in range(len(self.members)))

    @cached_property
    def is_light(self) -> tuple[bool, ...]:
        """Whether a class computes element by element, or nearly so, and may be fused, and decided, with its
        neighbours."""
        return tuple(self._light(k) for k in range(len(self.members)))

    @cached_property
    def dependencies_into(self) -> dict[int, list[Dependency]]:
        """Dependencies by consumer."""
        into: dict[int, list[Dependency]] = {}
        for dependency in self.dependencies:
            into.setdefault(dependency.consumer, []).append(dependency)
        return into

    def _light(self, op_class: int) -> bool:
        op = self.op(op_class)
        is_stuck = any(f.kind is Kind.UNSPLITTABLE and f.size > 1 for f in op.rule.factors)
        is_light = not (is_stuck or op.rule.windows)
        is_alone = op.is_boundary or op.is_transfer or op.is_host_update
        return is_light and not (is_alone or self.is_heavy[op_class])

    @staticmethod
    def _heavy(op: FlatOp) -> bool:
        is_contraction = len(op.operands) > 1 and any(f.kind is Kind.SUM for f in op.rule.factors)
        return is_contraction or op.rule.is_kernel


def fold(program: FlatProgram, marks: Sequence[Any] = ()) -> FoldedProgram:
    """Folds a program: ops with equal looks and equal neighbourhoods become one class.

    Args:
      program: the flat program.
      marks: per argument of the step, a mark, compared by its `repr`. It keeps the argument, and the ops near it, apart
        from others (a pin).

    Returns:
      The folded program; its classes are ordered by their first op.
    """
    colors = _refine(_first_colors(program, marks), *_edges(program))
    groups: dict[int, list[int]] = {}
    for position, color in enumerate(colors.tolist()):
        groups.setdefault(color, []).append(position)
    return _folded(program, tuple(map(tuple, groups.values())), tuple(range(len(groups))))


def partitioned(program: FlatProgram, members: tuple[tuple[int, ...], ...]) -> FoldedProgram:
    """A program folded into given classes."""
    return _folded(program, members, tuple(range(len(members))))


def separate(folded: FoldedProgram, marks: Sequence[Any]) -> FoldedProgram:
    """Takes apart the arguments of a class that are marked differently; all other ops stay folded."""
    parts: dict[tuple[int, Any], list[int]] = {}
    for position, op in enumerate(folded.program.ops):
        mark = marks[op.number] if op.name == "input" else None
        parts.setdefault((folded.class_of[position], mark), []).append(position)
    if len(parts) == len(folded.members):
        return folded
    wholes = tuple(folded.whole_of[op_class] for op_class, _ in parts)
    return _folded(folded.program, tuple(map(tuple, parts.values())), wholes)


def _folded(
    program: FlatProgram, members: tuple[tuple[int, ...], ...], whole_of: tuple[int, ...]
) -> FoldedProgram:
    """Collects the dependencies between the classes of a partition."""
    class_of = [0] * len(program.ops)
    for op_class, positions in enumerate(members):
        for p in positions:
            class_of[p] = op_class
    maker = {v: (class_of[i], r) for i, op in enumerate(program.ops) for r, v in enumerate(op.results)}
    counts: dict[tuple[int, int, int, int], int] = {}
    keys = []
    for op_class, op in zip(class_of, program.ops, strict=True):
        own = [(*maker[v], op_class, operand) for operand, v in enumerate(op.operands)]
        for key, count in zip(own, op.operand_counts, strict=True):
            counts[key] = counts.get(key, 0) + count
        keys.append(own)
    dependencies = tuple(Dependency(*key, count) for key, count in sorted(counts.items()))
    number = {key: n for n, key in enumerate(sorted(counts))}
    dependency_of = tuple(tuple([number[key] for key in own]) for own in keys)
    return FoldedProgram(program, members, tuple(class_of), dependencies, dependency_of, whole_of)


def _first_colors(program: FlatProgram, marks: Sequence[Any]) -> np.ndarray:
    rules = Numbering[Rule]()
    colors = np.empty(len(program.ops), np.uint64)
    memo: dict[Any, int] = {}
    itemsize = [_itemsize(value) for value in program.values]
    for i, op in enumerate(program.ops):
        name = op.op.scope if op.op is not None else ""
        if op.name == "input":
            name = program.step.arguments[op.number].name
            name += repr(marks[op.number]) if marks else ""
        itemsizes = tuple([itemsize[v] for v in (*op.operands, *op.results)])
        rule = rules.of(op.rule)
        counts = op.count // op.repeats, _counts_of_one(program, op)
        key = (op.name, rule, op.phase.value, *counts, itemsizes, name)
        if key not in memo:
            memo[key] = zlib.crc32(repr((*key[:-1], re.sub(r"\d+", "*", name))).encode())
        colors[i] = memo[key]
    return _mix(colors)


def _counts_of_one(program: FlatProgram, op: FlatOp) -> tuple[int, ...]:
    """Reads of an op's operands in one step, if no op stood for several."""
    if not program.is_shortened:
        return op.operand_counts
    makers = (program.ops[program.maker[v][0]] for v in op.operands)
    return tuple(count // made.repeats for count, made in zip(op.operand_counts, makers, strict=True))


def _itemsize(value: Value) -> int:
    """Bytes of an element, negative on the host."""
    return -value.itemsize if value.is_on_host else value.itemsize


def _edges(program: FlatProgram) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Producer position, consumer position, and the place where they meet (result and operand index, mixed)."""
    maker = program.maker
    rows = [
        (maker[v][0], i, maker[v][1] * 1024 + position)
        for i, op in enumerate(program.ops)
        for position, v in enumerate(op.operands)
    ]
    table = np.array(rows, np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], _mix(table[:, 2].astype(np.uint64))


def _refine(
    colors: np.ndarray, producers: np.ndarray, consumers: np.ndarray, meets: np.ndarray
) -> np.ndarray:
    downward, upward = np.uint64(0xD1B54A32D192ED03), np.uint64(0xABC98388FB8FAC03)
    for _ in range(ROUNDS):
        sums = _mix(colors)
        np.add.at(sums, consumers, _mix(colors[producers] ^ meets ^ downward))
        np.add.at(sums, producers, _mix(colors[consumers] ^ meets ^ upward))
        colors = sums
    return colors


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser: spreads 64-bit integers."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
