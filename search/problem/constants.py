"""Arrays of one number, which XLA computes on the fly unless a scatter writes over one of them.

XLA merges equal constants into one value. If one of its readers cannot compute the value on the fly, XLA stores it for
all. A scatter cannot: it writes over the zeros that it begins with. So equal zeros in an update, where they avoid a
division by zero, are an array too. The array is made anew right before each kernel that reads it
(`HloRematerialization`).
"""

from collections.abc import Hashable

import numpy as np

from autoshard.search.problem.flat_program import FlatOp, FlatProgram


def shared_constants(program: FlatProgram) -> frozenset[int]:
    """Constants that other ops read and that equal one that a scatter of the same loop writes over."""
    number_of = _numbers(program)
    over = {op.operands[0] for op in program.ops if op.name.startswith("scatter") and op.operands}
    kind_of = {v: _kind(program, v, number) for v, number in number_of.items()}
    scattered = {kind_of[v] for v in over if v in kind_of}
    return frozenset(v for v, kind in kind_of.items() if kind in scattered and v not in over)


def _kind(program: FlatProgram, v: int, number: Hashable) -> Hashable:
    """A key that equal constants share: XLA compares them within one loop's body."""
    value, (i, _) = program.values[v], program.maker[v]
    around = tuple(loop for loop in program.loops if loop[0] <= i < loop[1])
    return number, value.shape, str(value.dtype), around


def _numbers(program: FlatProgram) -> dict[int, Hashable]:
    """By value: the number that all its elements are; values without dimensions are left out."""
    found: dict[int, Hashable] = {}
    for op in program.ops:
        if op.name in ("broadcast_in_dim", "convert_element_type"):
            number = found.get(op.operands[0]) if op.operands else _literal(op)
            if number is not None:
                found[op.results[0]] = number
    return {v: number for v, number in found.items() if program.values[v].shape}


def _literal(op: FlatOp) -> Hashable:
    assert op.op is not None
    number = getattr(op.op.inputs[0], "val", None)
    return np.asarray(number).item() if number is not None and np.ndim(number) == 0 else None
