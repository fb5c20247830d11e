"""Ops that treat each row of a table alone, and their results in rows where the gradient is zero.

A table's gradient is zero in all rows that no look-up reads. An op is *row-local* if a row of its result depends on the same
row of its operands alone, and on operands without rows. Then the op may run on the touched rows only. In the other rows, its
result follows from a *fact* about each operand there:

* `Constant`: every element equals one number, as in the gradient itself (zero), or in a literal.
* `Unchanged`: the elements equal those of a value that does not depend on the gradient, such as the table.
* None: nothing is known.

Facts are derived op by op, with the laws of real numbers: `0 * x` is 0, and `x + 0` is `x`. So they hold for finite numbers.
IEEE's rules differ in two cases. `0 * inf` is no number, and `-0.0 + 0.0` is `0.0`. XLA's own simplifier replaces `x + 0` by
`x`, too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from autoshard.search.ir.factors import elementwise
from autoshard.search.ir.graph import Op, Value

ELEMENTWISE = frozenset(elementwise.RULES) - {
    *("optimization_barrier", "device_put", "sharding_constraint", "layout_constraint", "reshard", "stage"),
}
"""Ops on each element alone."""

REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})

FOLLOWED = ELEMENTWISE | REDUCTIONS | {"broadcast_in_dim", "reshape", "squeeze", "expand_dims"}
"""Ops about whose results facts are derived."""

_SIZES = MappingProxyType({"broadcast_in_dim": "shape", "reshape": "new_sizes"})
"""Ops whose parameters hold the shape of the result, and the parameter's name."""

_NEUTRAL: Mapping[str, Any] = MappingProxyType({"reduce_sum": 0, "reduce_or": False, "reduce_and": True})
"""Reductions to which equal elements add nothing, and these elements."""


@dataclass(frozen=True, slots=True)
class Constant:
    """All elements equal this number."""

    number: Any


@dataclass(frozen=True, slots=True)
class Unchanged:
    """The elements equal those of the value with this number, in its dtype."""

    value: int


Fact = Constant | Unchanged | None


def has_rows(value: Value, num_rows: int) -> bool:
    """True if an array's first dimension may be the table's rows."""
    return bool(value.shape) and value.shape[0] == num_rows


def is_row_local(op: Op, operands: Sequence[Value], by_rows: Sequence[bool]) -> bool:
    """True if each row of an op's result depends on the same row of its operands alone.

    Args:
      op: an op with at least one operand that has rows.
      operands: its operands.
      by_rows: per operand, whether its first dimension is the table's rows.
    """
    if len(op.outputs) != 1:
        return False
    num_rows = next(value.shape[0] for value, has in zip(operands, by_rows, strict=True) if has)
    if op.name in ELEMENTWISE:
        rank = len(op.result_values[0].shape)
        return all(has or _lacks_rows(v, rank) for v, has in zip(operands, by_rows, strict=True))
    if op.name in REDUCTIONS:
        return 0 not in op.params["axes"]
    if op.name == "broadcast_in_dim":
        return op.params["broadcast_dimensions"][0] == 0
    if op.name in ("squeeze", "expand_dims"):
        return 0 not in op.params["dimensions"]
    return (
        op.name == "reshape"
        and op.params.get("dimensions") is None
        and has_rows(op.result_values[0], num_rows)
    )


def is_alike_in_all_rows(op: Op) -> bool:
    """True if an op makes an array whose rows are equal, from an operand without rows."""
    return op.name == "broadcast_in_dim" and len(op.inputs) == 1 and 0 not in _spread(op)


def _spread(op: Op) -> tuple[int, ...]:
    return tuple(op.params["broadcast_dimensions"])


def _lacks_rows(value: Value, rank: int) -> bool:
    return not value.shape or (len(value.shape) == rank and value.shape[0] == 1)


def sums_up_rows(op: Op, fact: Fact) -> bool:
    """True if an op reduces over rows, and rows with this fact add nothing to its result."""
    return (
        op.name in _NEUTRAL
        and 0 in op.params["axes"]
        and isinstance(fact, Constant)
        and fact == Constant(_NEUTRAL[op.name])
    )


def of_rows(value: Value, num_rows: int) -> Value:
    """An array with another number of rows."""
    return Value((num_rows, *value.shape[1:]), value.dtype)


def params_of_rows(op: Op, num_rows: int) -> dict[str, Any]:
    """A row-local op's parameters for another number of rows."""
    key = _SIZES.get(op.name)
    return op.params if key is None else {**op.params, key: (num_rows, *op.params[key][1:])}


# --- facts


def fact(op: Op, facts: Sequence[Fact], source: Callable[[int, Any], int | None]) -> Fact:
    """The fact about a row-local op's result.

    Args:
      op: the op.
      facts: the facts about its operands.
      source: maps a value and a dtype to the value of this dtype that it is, widened; None if there is none.
    """
    numbers = [f.number for f in facts if isinstance(f, Constant)]
    if op.name in _SHAPED:
        return facts[0] if isinstance(facts[0], Constant) else None
    if op.name in REDUCTIONS:
        return _reduced(op, facts[0])
    if op.name == "select_n":
        return _selected(facts)
    if op.name == "convert_element_type":
        return _converted(op, facts[0], source)
    if op.name in ("copy", "name", "stop_gradient"):
        return facts[0]
    if len(numbers) == len(facts):
        return _computed(op, numbers)
    law = _LAWS.get(op.name)
    return law(op, *facts) if law is not None else None


_SHAPED = ("broadcast_in_dim", "reshape", "squeeze", "expand_dims")


def _is(known: Fact, number: float) -> bool:
    return isinstance(known, Constant) and bool(known.number == number)


def _zero(op: Op) -> Constant:
    return Constant(np.zeros((), op.result_values[0].dtype)[()])


def _sum(op: Op, a: Fact, b: Fact) -> Fact:
    return a if _is(b, 0) else b if _is(a, 0) else None


def _difference(op: Op, a: Fact, b: Fact) -> Fact:
    return a if _is(b, 0) else None


def _product(op: Op, a: Fact, b: Fact) -> Fact:
    if _is(a, 0) or _is(b, 0):
        return _zero(op)
    return a if _is(b, 1) else b if _is(a, 1) else None


def _quotient(op: Op, a: Fact, b: Fact) -> Fact:
    return _zero(op) if _is(a, 0) else a if _is(b, 1) else None


def _conjunction(op: Op, a: Fact, b: Fact) -> Fact:
    return _zero(op) if _is(a, 0) or _is(b, 0) else None


_LAWS: Mapping[str, Callable[..., Fact]] = MappingProxyType(
    {
        **dict.fromkeys(("add", "add_any"), _sum),
        "sub": _difference,
        "mul": _product,
        "div": _quotient,
        "and": _conjunction,
    }
)


def _reduced(op: Op, known: Fact) -> Fact:
    """Of elements that are all equal, a maximum is one of them; their sum is known if they are zero."""
    is_same = op.name not in ("reduce_sum", "reduce_prod") or _is(known, 0)
    return known if isinstance(known, Constant) and is_same else None


def _selected(facts: Sequence[Fact]) -> Fact:
    which, *cases = facts
    if isinstance(which, Constant):
        return cases[int(which.number)]
    return cases[0] if all(case == cases[0] for case in cases) else None


def _converted(op: Op, known: Fact, source: Callable[[int, Any], int | None]) -> Fact:
    """A value that was widened and is narrowed again is itself."""
    dtype = op.result_values[0].dtype
    if isinstance(known, Constant):
        return Constant(np.asarray(known.number).astype(dtype)[()])
    if isinstance(known, Unchanged) and (narrow := source(known.value, dtype)) is not None:
        return Unchanged(narrow)
    return None


def _clamped(low: Any, x: Any, high: Any) -> Any:
    return np.minimum(np.maximum(x, low), high)


_COMPUTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
        **{"max": np.maximum, "min": np.minimum, "neg": np.negative, "abs": np.abs, "sign": np.sign},
        **{"square": np.square, "sqrt": np.sqrt, "exp": np.exp, "tanh": np.tanh, "is_finite": np.isfinite},
        **{"eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal},
        **{"lt": np.less, "le": np.less_equal, "and": np.bitwise_and, "or": np.bitwise_or},
        "not": np.bitwise_not,
        "clamp": _clamped,
        "pow": np.power,
    }
)


def _computed(op: Op, numbers: Sequence[Any]) -> Fact:
    """The number that an op makes of numbers; None if it is not finite, or if the op is none of those above."""
    if op.name == "integer_pow":
        return None if op.params["y"] < 0 else Constant(numbers[0] ** op.params["y"])
    if op.name not in _COMPUTED:
        return None
    with np.errstate(all="ignore"):
        made = _COMPUTED[op.name](*numbers)
    return Constant(made) if np.isfinite(made) else None
