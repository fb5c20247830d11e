"""Repeated blocks share their variables: ops that look alike, and stand alike, are decided together.

A model of depth 64 makes one decision per *kind* of op, not sixty-four. Two ops are of one kind when their
neighbourhoods in the program agree up to a few steps: colour refinement (Weisfeiler and Leman 1968), stopped
early. An op starts with the colour of its primitive, factors, phase, trip count and name, numbers in names
left out (`layers_3` and `layers_17` look alike); each round mixes in the colours of producers and consumers,
with the positions at which they meet. Stopping early is what folds a stack: after `ROUNDS` rounds only the
layers within that distance of an irregular op (the embedding, the head) differ from the rest.

Any partition would be sound, since deciding two ops together only restricts the plan; a finer one is merely
larger. Colours are sums of 64-bit mixes (Steele, Lea and Flood 2014, SplitMix64), so the result does not
depend on any order.
"""

import re
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from search.program import Program

ROUNDS = 4
"""How far ops look around themselves: enough to see the parameter that tells a query from a key projection."""


def fold(program: Program, marks: Sequence[Any] = ()) -> tuple[tuple[int, ...], ...]:
    """The kinds of ops: a partition of op positions.

    Args:
      program: the flat program.
      marks: per argument of the step, anything hashable by `repr` that keeps it apart from others (a pin, a
        decision).

    Returns:
      For each kind, the positions of its ops, ascending; kinds ordered by their first op.
    """
    colors = _refine(_first_colors(program, marks), *_edges(program))
    groups: dict[int, list[int]] = {}
    for position, color in enumerate(colors.tolist()):
        groups.setdefault(color, []).append(position)
    return tuple(tuple(g) for g in groups.values())


def _first_colors(program: Program, marks: Sequence[Any]) -> np.ndarray:
    rules: dict[Any, int] = {}
    colors = np.empty(len(program.ops), np.uint64)
    memo: dict[Any, int] = {}
    for i, op in enumerate(program.ops):
        name = op.op.scope if op.op is not None else ""
        if op.name == "input":
            name = program.step.arguments[op.site[0]].name
            name += repr(marks[op.site[0]]) if marks else ""
        itemsizes = tuple(program.values[v].itemsize for v in (*op.operands, *op.results))
        rule = rules.setdefault(op.rule, len(rules))
        key = (op.name, rule, op.phase.value, op.count, op.operand_counts, itemsizes, name)
        if key not in memo:
            memo[key] = zlib.crc32(repr((*key[:-1], re.sub(r"\d+", "*", name))).encode())
        colors[i] = memo[key]
    return _mix(colors)


def _edges(program: Program) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Producer position, consumer position, and where they meet (result and operand index, mixed)."""
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
