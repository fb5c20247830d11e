"""Updates that change nothing: an array plus zeros is that array.

`optax.set_to_zero` freezes parameters by an update of zeros, and `optax.apply_updates` adds it. The step then returns a sum
for each frozen weight, and computes its gradient for nothing. Such sums are replaced by the array itself, so that the step
hands the weight back as it came. XLA does that, too, and like XLA's rule this one makes no difference between 0.0 and -0.0.
"""

from collections.abc import Container
from dataclasses import replace

import numpy as np

from autoshard.search.ir.graph import Atom, Graph, Op, Phase, without_dead_ops

STAY_ZERO = frozenset(
    {"broadcast_in_dim", "convert_element_type", "copy", "neg", "reshape", "squeeze", "transpose"}
)
"""Primitives whose result is zero if their operand is."""


def without_zero_updates(graph: Graph) -> Graph:
    """The graph without additions and subtractions of zeros in its update phase, and without all that only these read."""
    zeros, same, kept = set[int](), dict[int, Atom](), list[Op]()
    for op in graph.ops:
        read = tuple(same.get(a, a) if isinstance(a, int) else a for a in op.inputs)
        op = op if read == op.inputs else replace(op, inputs=read)
        if _is_zero_result(op, zeros):
            zeros.update(op.outputs)
        if op.phase is Phase.UPDATE and (unchanged := _unchanged(graph, op, zeros)) is not None:
            same[op.outputs[0]] = unchanged
        else:
            kept.append(op)
    if not same:
        return graph
    outputs = tuple(same.get(a, a) if isinstance(a, int) else a for a in graph.outputs)
    return without_dead_ops(replace(graph, ops=tuple(kept), outputs=outputs))


def _unchanged(graph: Graph, op: Op, zeros: Container[int]) -> int | None:
    """The operand that an op hands on as it is, because the op only adds or subtracts zeros."""
    if op.name not in ("add", "add_any", "sub"):
        return None
    first, second = op.inputs
    if _is_zero(second, zeros):
        kept = first
    elif op.name != "sub" and _is_zero(first, zeros):
        kept = second
    else:
        return None
    return kept if isinstance(kept, int) and graph.values[kept] == op.result_values[0] else None


def _is_zero_result(op: Op, zeros: Container[int]) -> bool:
    """True if an op's result is zero: its operand is, or one of two factors is while the other is a finite literal."""
    if op.name in STAY_ZERO:
        return len(op.inputs) == 1 and _is_zero(op.inputs[0], zeros)
    if op.name != "mul":
        return False
    first, second = op.inputs
    return any(_is_zero(a, zeros) and _is_finite(b, zeros) for a, b in ((first, second), (second, first)))


def _is_zero(atom: Atom, zeros: Container[int]) -> bool:
    return atom in zeros if isinstance(atom, int) else not np.any(atom.val)


def _is_finite(atom: Atom, zeros: Container[int]) -> bool:
    return atom in zeros if isinstance(atom, int) else bool(np.all(np.isfinite(atom.val)))
