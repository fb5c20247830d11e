"""Ops that compute each result element from the operand elements at the same place, and identities.

Operands are of the result's shape, or scalars (predicates, clamp bounds, keys), which have no dimensions to
split.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from autoshard.search.ir.factors.loops import Loops
from autoshard.search.ir.factors.rule import Dims, Rule, RuleFn

ARITHMETIC = 1.0
"""FLOPs per element of an op that is one instruction (add, compare, select)."""

TRANSCENDENTAL = 10.0
"""FLOPs per element of an op that GPUs expand: range reduction, a short polynomial or special-function call,
rescaling. About ten instructions in CUDA's libm for exp, log, tanh, division and square root (CUDA C++
Programming Guide, "Arithmetic Instructions"); such ops are bound by memory anyway."""

SPECIAL = 50.0
"""FLOPs per element of series and continued fractions (digamma, igamma): tens of terms."""


def elementwise(flops_per_point: float, *, is_additive: bool = False) -> RuleFn:
    """The rule of an op with that many FLOPs per element."""

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        shape = outs[0].shape
        loops = Loops()
        dims = loops.dims(shape)
        operands = [dims if aval.shape == shape else _broadcast(dims, shape, aval.shape) for aval in ins]
        return loops.rule(
            operands, [dims] * len(outs), flops_per_point=flops_per_point, is_additive=is_additive
        )

    return rule


def _broadcast(dims: Dims, shape: Sequence[int], operand_shape: Sequence[int]) -> Dims:
    """The operand's dims when it is a scalar, or has size 1 where the result has more."""
    if not operand_shape:
        return ()
    assert len(operand_shape) == len(shape), (
        f"operand of shape {operand_shape} in an elementwise op on {shape}"
    )
    return tuple([() if size == 1 else dim for dim, size in zip(dims, operand_shape, strict=True)])


_LINEAR = elementwise(ARITHMETIC, is_additive=True)
_ONE = elementwise(ARITHMETIC)
_TEN = elementwise(TRANSCENDENTAL)
_MANY = elementwise(SPECIAL)
_MOVE = elementwise(0.0)
_LINEAR_MOVE = elementwise(0.0, is_additive=True)


def convert_element_type(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Between floats (real or complex) a conversion commutes with sums up to rounding; to or from integers it
    does not."""
    is_linear = _is_inexact(ins[0].dtype) and _is_inexact(outs[0].dtype)
    return (_LINEAR if is_linear else _ONE)(ins, outs, params)


def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, np.inexact)


def identity(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Each result is the operand of the same place: barriers, names, constraints, transfers."""
    del outs, params
    loops = Loops()
    dims = [loops.dims(getattr(aval, "shape", ())) for aval in ins]
    return loops.rule(dims, dims, is_additive=True)


_POINTWISE: dict[str, RuleFn] = {
    **dict.fromkeys(("add", "sub", "add_any", "neg"), _LINEAR),
    **dict.fromkeys(("mul", "max", "min", "abs", "sign", "square", "integer_pow", "one_minus_square"), _ONE),
    **dict.fromkeys(("eq", "ne", "ge", "gt", "le", "lt", "eq_to", "le_to", "lt_to", "is_finite"), _ONE),
    **dict.fromkeys(("and", "or", "xor", "not", "clz", "population_count", "mulhi"), _ONE),
    **dict.fromkeys(("shift_left", "shift_right_arithmetic", "shift_right_logical"), _ONE),
    **dict.fromkeys(("floor", "ceil", "round", "nextafter", "select_n", "clamp"), _ONE),
    **dict.fromkeys(("exp", "exp2", "expm1", "log", "log1p", "log2", "logistic", "pow"), _TEN),
    **dict.fromkeys(("div", "rem", "sqrt", "rsqrt", "cbrt", "polynomial"), _TEN),
    **dict.fromkeys(("sin", "cos", "tan", "asin", "acos", "atan", "atan2"), _TEN),
    **dict.fromkeys(("sinh", "cosh", "tanh", "asinh", "acosh", "atanh"), _TEN),
    **dict.fromkeys(("erf", "erfc", "erf_inv", "lgamma", "bessel_i0e", "bessel_i1e"), _TEN),
    **dict.fromkeys(("digamma", "polygamma", "zeta", "regularized_incomplete_beta"), _MANY),
    **dict.fromkeys(("igamma", "igammac", "igamma_grad_a", "random_gamma_grad"), _MANY),
    **dict.fromkeys(("real", "imag", "complex", "conj", "reduce_precision"), _LINEAR_MOVE),
    "zeros_like": _MOVE,
    "convert_element_type": convert_element_type,
}

POINTWISE = frozenset(_POINTWISE)
"""Ops that compute each result element from the operand elements at the same place."""

RULES: dict[str, RuleFn] = {
    **_POINTWISE,
    "host_update": _TEN,
    **dict.fromkeys(("copy", "name", "optimization_barrier", "stop_gradient", "stage"), identity),
    **dict.fromkeys(("device_put", "sharding_constraint", "layout_constraint", "reshard"), identity),
}
