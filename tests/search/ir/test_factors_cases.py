"""One small equation per kind of rule, captured from JAX, and what must hold of every rule.

The other `test_factors_*` modules run the same cases: `split` by cutting the operands, `types` through
JAX's type checker.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from autoshard.search.ir.factors import Rule, rule_for
from autoshard.search.ir.factors.rule import Kind

pytestmark = pytest.mark.devices


@dataclass(frozen=True, slots=True)
class Equation:
    """A primitive with concrete operands."""

    primitive: Any
    operands: tuple[Any, ...]
    params: dict[str, Any]
    in_avals: tuple[Any, ...]
    out_avals: tuple[Any, ...]

    @property
    def rule(self) -> Rule:
        return rule_for(self.primitive.name, self.in_avals, self.out_avals, self.params)

    def run(self, operands: tuple[Any, ...], params: dict[str, Any]) -> list[Any]:
        results = self.primitive.bind(*operands, **params)
        return list(results) if self.primitive.multiple_results else [results]


def capture(name: str, function: Callable[..., Any], *args: Any) -> Equation:
    """The last equation of that primitive in the trace of `function(*args)`."""
    trace = jax.make_jaxpr(function)(*args)
    found = list(_equations(name, getattr(trace, "jaxpr", trace), trace.consts, args))
    assert found, f"no {name} in {trace}"
    return found[-1]


def _equations(name: str, jaxpr: Any, consts: Any, args: Any) -> Iterator[Equation]:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    for eqn in jaxpr.eqns:
        operands = tuple(v.val if hasattr(v, "val") else env[v] for v in eqn.invars)
        avals = tuple(v.aval for v in eqn.invars), tuple(v.aval for v in eqn.outvars)
        found = Equation(eqn.primitive, operands, eqn.params, *avals)
        if eqn.primitive.name == "jit":
            inner = eqn.params["jaxpr"]
            yield from _equations(name, getattr(inner, "jaxpr", inner), inner.consts, operands)
        elif eqn.primitive.name == name:
            yield found
        if eqn is not jaxpr.eqns[-1]:  # whose results nobody reads
            env.update(zip(eqn.outvars, found.run(operands, eqn.params), strict=True))


def floats(*shape: int) -> np.ndarray:
    """Distinct numbers in (0, 1), far enough apart for any comparison."""
    values = (np.arange(prod(shape)) + 0.5) / max(1, prod(shape))
    return np.random.default_rng(7).permutation(values).reshape(shape).astype(np.float32)


def integers(*shape: int, below: int = 6) -> np.ndarray:
    return np.random.default_rng(8).integers(0, below, shape).astype(np.int32)


def complexes(*shape: int) -> np.ndarray:
    return (floats(*shape) + 1j * floats(*shape)[::-1]).astype(np.complex64)


def truths(*shape: int) -> np.ndarray:
    return floats(*shape) > 0.5


X = floats(4, 6)
Y = floats(4, 6)[::-1].copy()

UNARY = (
    *("abs", "ceil", "floor", "round", "sign", "neg", "square", "is_finite", "sqrt", "rsqrt", "cbrt"),
    *(
        "exp",
        "exp2",
        "expm1",
        "log",
        "log1p",
        "log2",
        "logistic",
        "sin",
        "cos",
        "tan",
        "asin",
        "acos",
        "atan",
    ),
    *("sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erf_inv", "lgamma", "digamma"),
    *("bessel_i0e", "bessel_i1e"),
)
BINARY = (
    *("add", "sub", "mul", "div", "rem", "max", "min", "pow", "atan2", "nextafter", "eq", "ne", "ge", "gt"),
    *("le", "lt", "igamma", "igammac", "polygamma", "zeta"),
)
BITWISE = ("and", "or", "xor", "shift_left", "shift_right_arithmetic", "shift_right_logical")
LAX_NAMES = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}


def conv(layout: str, lhs: tuple[int, ...], rhs: tuple[int, ...], **kwargs: Any) -> tuple[Any, ...]:
    options = {
        "window_strides": (1, 1),
        "padding": "SAME",
        "dimension_numbers": tuple(layout.split()),
        **kwargs,
    }
    return ("conv_general_dilated", partial(lax.conv_general_dilated, **options), floats(*lhs), floats(*rhs))


def conv_gradient(argnum: int, name: tuple[Any, ...]) -> tuple[Any, ...]:
    _, function, lhs, rhs = name
    gradient = jax.grad(lambda a, b: (function(a, b) ** 2).sum(), argnums=argnum)
    return ("conv_general_dilated", gradient, lhs, rhs)


def take(numbers: lax.GatherDimensionNumbers, sizes: tuple[int, ...]) -> Callable[..., Any]:
    return partial(lax.gather, dimension_numbers=numbers, slice_sizes=sizes, mode="fill")


PLAIN_CONV = conv("NHWC HWIO NHWC", (4, 8, 8, 6), (3, 3, 6, 4))
STRIDED_CONV = conv("NHWC HWIO NHWC", (4, 8, 8, 6), (3, 3, 6, 4), window_strides=(2, 2))
TRANSPOSED_CONV = conv(
    "NHWC HWIO NHWC", (2, 8, 8, 3), (3, 3, 3, 4), lhs_dilation=(2, 2), padding=[(2, 1), (1, 2)]
)
GROUPED_CONV = conv("NCHW OIHW NCHW", (4, 12, 5, 5), (8, 3, 3, 3), feature_group_count=4)
DEPTHWISE_CONV = conv("NHWC HWIO NHWC", (4, 6, 6, 8), (3, 3, 1, 8), feature_group_count=8)

# id: (primitive, function, *operands)
CASES: dict[str, tuple[Any, ...]] = {
    **{name: (name, getattr(lax, name), X) for name in UNARY},
    "acosh": ("acosh", lax.acosh, X + 1),
    **{name: (name, getattr(lax, name), X + 1, Y + 2) for name in BINARY},
    **{
        name: (name, getattr(lax, LAX_NAMES.get(name, name)), integers(4, 6, below=40), integers(4, 6) + 1)
        for name in BITWISE
    },
    "not": ("not", lax.bitwise_not, integers(4, 6)),
    "population_count": ("population_count", lax.population_count, integers(4, 6)),
    "clz": ("clz", lax.clz, integers(4, 6)),
    "integer_pow": ("integer_pow", lambda x: lax.integer_pow(x, 3), X),
    "clamp": ("clamp", lax.clamp, np.float32(0.3), X, np.float32(0.6)),
    "clamp-full": ("clamp", lax.clamp, X * 0.5, X, X * 2),
    "select_n": ("select_n", lax.select_n, truths(4, 6), X, Y + 1),
    "select_n-scalar": ("select_n", lax.select_n, np.bool_(True), X, Y + 1),
    "add_any": ("add_any", jax.grad(lambda x: (lax.sin(x) + lax.cos(x)).sum()), X),
    "float-to-float": ("convert_element_type", lambda x: lax.convert_element_type(x, "bfloat16"), X),
    "float-to-int": ("convert_element_type", lambda x: lax.convert_element_type(x * 9, "int32"), X),
    "reduce_precision": ("reduce_precision", lambda x: lax.reduce_precision(x, 8, 10), X),
    "complex": ("complex", lax.complex, X, Y),
    "real": ("real", lax.real, complexes(4, 6)),
    "imag": ("imag", lax.imag, complexes(4, 6)),
    "conj": ("conj", lax.conj, complexes(4, 6)),
    "copy": ("copy", jnp.copy, X),
    "barrier": ("optimization_barrier", lambda *xs: lax.optimization_barrier(xs), X, floats(8)),
    "name": ("name", lambda x: checkpoint_name(x, "x"), X),
    "dot": ("dot_general", lax.dot, X, floats(6, 8)),
    "dot-vector": ("dot_general", lax.dot, X, floats(6)),
    "dot-batch": (
        "dot_general",
        partial(jnp.einsum, "bqhd,bkhd->bhqk"),
        floats(2, 4, 6, 8),
        floats(2, 4, 6, 8),
    ),
    "dot-size-1": ("dot_general", partial(jnp.einsum, "bmk,bkn->bmn"), floats(1, 4, 6), floats(1, 6, 1)),
    "dot-two-contracted": (
        "dot_general",
        partial(jnp.einsum, "bsd,bsh->dh"),
        floats(2, 4, 6),
        floats(2, 4, 8),
    ),
    "conv": PLAIN_CONV,
    "conv-strided": STRIDED_CONV,
    "conv-dilated": conv("NHWC HWIO NHWC", (2, 8, 8, 3), (3, 3, 3, 4), rhs_dilation=(2, 2)),
    "conv-volume": conv(
        "NDHWC DHWIO NDHWC",
        (2, 8, 8, 4, 2),
        (5, 3, 1, 2, 3),
        window_strides=(1, 2, 1),
        padding=[(2, 2), (1, 1), (0, 0)],
    ),
    "conv-transposed": TRANSPOSED_CONV,
    "conv-transposed-kernel-gradient": conv_gradient(1, TRANSPOSED_CONV),
    "conv-nchw": conv("NCHW OIHW NCHW", (4, 6, 8, 8), (2, 6, 3, 3), padding="VALID"),
    "conv-input-gradient": conv_gradient(0, STRIDED_CONV),
    "conv-kernel-gradient": conv_gradient(1, STRIDED_CONV),
    "conv-grouped": GROUPED_CONV,
    "conv-grouped-input-gradient": conv_gradient(0, GROUPED_CONV),
    "conv-grouped-kernel-gradient": conv_gradient(1, GROUPED_CONV),
    "conv-depthwise": DEPTHWISE_CONV,
    "conv-depthwise-kernel-gradient": conv_gradient(1, DEPTHWISE_CONV),
    "conv-batch-groups": conv("NCHW OIHW NCHW", (8, 6, 5, 5), (8, 6, 3, 3), batch_group_count=4),
    "reshape-split": ("reshape", lambda x: lax.reshape(x, (4, 2, 3)), X),
    "reshape-merge": ("reshape", lambda x: lax.reshape(x, (8, 6)), floats(2, 4, 6)),
    "reshape-both": ("reshape", lambda x: lax.reshape(x, (4, 12, 2)), floats(4, 2, 12)),
    "reshape-gcd": ("reshape", lambda x: lax.reshape(x, (4, 6)), floats(6, 4)),
    "reshape-size-1": ("reshape", lambda x: lax.reshape(x, (1, 4, 1, 6)), floats(4, 6, 1)),
    "reshape-permuted": ("reshape", lambda x: lax.reshape(x, (24,), (1, 0)), X),
    "transpose": ("transpose", lambda x: lax.transpose(x, (2, 0, 1)), floats(2, 4, 6)),
    "squeeze": ("squeeze", lambda x: lax.squeeze(x, (1,)), floats(4, 1, 6)),
    "broadcast": (
        "broadcast_in_dim",
        lambda x: lax.broadcast_in_dim(x, (2, 4, 8, 6), (1, 2, 3)),
        floats(4, 1, 6),
    ),
    "broadcast-scalar": ("broadcast_in_dim", lambda x: lax.broadcast(x, (4, 6)), np.float32(3)),
    "tile": ("tile", lambda x: lax.tile(x, (2, 1)), X),
    "rev": ("rev", lambda x: lax.rev(x, (1,)), X),
    "slice": ("slice", lambda x: lax.slice(x, (0, 1), (4, 5)), X),
    "slice-strided": ("slice", lambda x: lax.slice(x, (0, 0), (4, 6), (1, 2)), X),
    "pad": ("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, 2, 1))), X, np.float32(5)),
    "pad-shifted": ("pad", lambda x, v: lax.pad(x, v, ((0, 0, 0), (1, -1, 0))), X, np.float32(5)),
    "concatenate": ("concatenate", lambda *xs: lax.concatenate(xs, 1), X, floats(4, 2)),
    "concatenate-equal": ("concatenate", lambda *xs: lax.concatenate(xs, 1), X, Y),
    "split": ("split", lambda x: lax.split(x, (2, 4), 1), X),
    "iota": ("iota", lambda: lax.broadcasted_iota("int32", (4, 6), 1)),
    "bitcast": ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, "int32"), X),
    "bitcast-narrow": ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, "int16"), X),
    "reduce_sum": ("reduce_sum", lambda x: lax.reduce_sum(x, (0, 2)), floats(2, 4, 6)),
    "reduce_max": ("reduce_max", lambda x: lax.reduce_max(x, (1,)), X),
    "reduce_min": ("reduce_min", lambda x: lax.reduce_min(x, (0,)), X),
    "reduce_prod": ("reduce_prod", lambda x: lax.reduce_prod(x, (1,)), X),
    "reduce_and": ("reduce_and", lambda x: lax.reduce_and(x, (1,)), truths(4, 6)),
    "reduce_or": ("reduce_or", lambda x: lax.reduce_or(x, (1,)), truths(4, 6)),
    "reduce_xor": ("reduce_xor", lambda x: lax.reduce_xor(x, (1,)), integers(4, 6)),
    "argmax": ("argmax", lambda x: lax.argmax(x, 1, "int32"), X),
    "argmin": ("argmin", lambda x: lax.argmin(x, 0, "int32"), X),
    "reduce": (
        "reduce",
        lambda x, y: lax.reduce(
            (x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,)
        ),
        X,
        Y,
    ),
    **{
        name: (name, lambda x, name=name: getattr(lax, name)(x, 1), X)
        for name in ("cumsum", "cumprod", "cummax")
    },
    "cummin": ("cummin", lambda x: lax.cummin(x, 0, reverse=True), X),
    "cumlogsumexp": ("cumlogsumexp", lambda x: lax.cumlogsumexp(x, 1), X),
    "max-pool": (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
        floats(4, 6, 6, 2),
    ),
    "sum-pool": (
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
        floats(4, 6, 6, 2),
    ),
    "overlapping-pool": (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "SAME"),
        floats(2, 6, 6, 2),
    ),
    "overlapping-pool-gradient": (
        "select_and_scatter_add",
        jax.grad(
            lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2).sum()
        ),
        floats(2, 6, 6, 2),
    ),
    "sum-pool-gradient": (
        "reduce_window_sum",
        lambda x: lax.reduce_window_sum_p.bind(
            x,
            window_dimensions=(1, 3, 3, 1),
            window_strides=(1, 1, 1, 1),
            padding=((0, 0), (2, 1), (2, 1), (0, 0)),
            base_dilation=(1, 2, 2, 1),
            window_dilation=(1, 1, 1, 1),
        ),
        floats(2, 4, 4, 2),
    ),
    "strided-pool": (
        "reduce_window_sum",
        lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 1), (2, 1), "VALID"),
        X,
    ),
    "max-pool-gradient": (
        "select_and_scatter_add",
        jax.grad(
            lambda x: (
                lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") ** 2
            ).sum()
        ),
        floats(4, 6, 6, 2),
    ),
    "embedding": ("gather", lambda table, ids: table[ids], floats(8, 6), integers(4, 2, below=8)),
    "embedding-gradient": (
        "scatter-add",
        jax.grad(lambda table, ids: (table[ids] ** 2).sum()),
        floats(8, 6),
        integers(4, 2, below=8),
    ),
    "take-along": ("gather", lambda x, i: jnp.take_along_axis(x, i, 1), X, integers(4, 2)),
    "take-along-gradient": (
        "scatter-add",
        jax.grad(lambda x, i: (jnp.take_along_axis(x, i, 1) ** 2).sum()),
        X,
        integers(4, 2),
    ),
    "gather-points": ("gather", lambda x, i, j: x[i, j], X, integers(2, 3, below=4), integers(2, 3)),
    "gather-windows": (
        "gather",
        take(
            lax.GatherDimensionNumbers(offset_dims=(1, 2), collapsed_slice_dims=(), start_index_map=(1,)),
            (4, 2),
        ),
        X,
        integers(3, 1, below=4),
    ),
    "gather-kept-1": (
        "gather",
        take(
            lax.GatherDimensionNumbers(offset_dims=(0, 2), collapsed_slice_dims=(), start_index_map=(1,)),
            (4, 1),
        ),
        X,
        integers(3, 1),
    ),
    "gather-truths": ("gather", lambda x, i: x[i], truths(4, 6), integers(2, below=4)),
    "scatter": ("scatter", lambda x, i, u: x.at[i].set(u), jnp.asarray(X), np.int32([2, 0]), floats(2, 6)),
    "scatter-add": (
        "scatter-add",
        lambda x, i, u: x.at[i].add(u),
        jnp.asarray(X),
        integers(8, below=4),
        floats(8, 6),
    ),
    "scatter-mul": (
        "scatter-mul",
        lambda x, i, u: x.at[i].multiply(u, unique_indices=True),
        jnp.asarray(X),
        np.int32([2, 0]),
        floats(2, 6),
    ),
    "scatter-max": (
        "scatter-max",
        lambda x, i, u: x.at[i].max(u),
        jnp.asarray(X),
        integers(8, below=4),
        floats(8, 6),
    ),
    "scatter-min": (
        "scatter-min",
        lambda x, i, u: x.at[i].min(u),
        jnp.asarray(X),
        integers(8, below=4),
        floats(8, 6),
    ),
    "scatter-points": (
        "scatter-add",
        lambda x, i, j, u: x.at[i, j].add(u),
        jnp.asarray(X),
        integers(8, below=4),
        integers(8),
        floats(8),
    ),
    "scatter-windows": ("scatter-add", lambda x, u: x.at[:, 2:4].add(u), jnp.asarray(X), floats(4, 2)),
    "dynamic_slice": ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i), (4, 2)), X, np.int32(1)),
    "dynamic_update_slice": (
        "dynamic_update_slice",
        lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i)),
        X,
        floats(4, 2),
        np.int32(1),
    ),
    "sort": ("sort", lambda x, y: lax.sort((x, y), dimension=1), X, Y),
    "top_k": ("top_k", lambda x: lax.top_k(x, 2), X),
    "fft": ("fft", lambda x: lax.fft(x, "FFT", (6,)), complexes(4, 6)),
    "cholesky": ("cholesky", lambda x: lax.linalg.cholesky(x @ x.mT + jnp.eye(3)), floats(4, 3, 3)),
    "qr": ("qr", lambda x: lax.linalg.qr(x, full_matrices=False), floats(4, 3, 3)),
    "eigh": ("eigh", lambda x: lax.linalg.eigh(x + x.mT), floats(4, 3, 3)),
    "svd": ("svd", lambda x: lax.linalg.svd(x, full_matrices=False), floats(4, 5, 3)),
    "lu": ("lu", lax.linalg.lu, floats(4, 3, 3)),
    "triangular_solve": (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a + 3 * jnp.eye(3), b, left_side=True, lower=True),
        floats(2, 3, 3),
        floats(2, 3, 4),
    ),
    "triangular_solve-right": (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a + 3 * jnp.eye(3), b, left_side=False),
        floats(2, 3, 3),
        floats(2, 4, 3),
    ),
}


@cache
def equation(case: str) -> Equation:
    return capture(*CASES[case])


@pytest.mark.parametrize("case", CASES)
def test_dims_multiply_to_their_sizes(case: str):
    eqn = equation(case)
    rule = eqn.rule
    for avals, dims_of in ((eqn.in_avals, rule.operands), (eqn.out_avals, rule.results)):
        for aval, dims in zip(avals, dims_of, strict=True):
            sizes = tuple(prod(rule.factors[f].size for f in dim) for dim in dims)
            assert sizes == aval.shape, rule


@pytest.mark.parametrize("case", CASES)
def test_no_loop_has_one_iteration(case: str):
    assert all(factor.size > 1 for factor in equation(case).rule.factors)


@pytest.mark.parametrize("case", CASES)
def test_summed_factors_are_in_no_result(case: str):
    rule = equation(case).rule
    carried = {f for dims in rule.results for dim in dims for f in dim}
    assert not any(rule.factors[f].kind in (Kind.SUM, Kind.REDUCE) for f in carried)


@pytest.mark.parametrize("case", [case for case in CASES if case != "nextafter"])
def test_additive_means_that_sums_commute(case: str):
    """`f(a + b) == f(a) + f(b)`, every operand a sum: exactly what `is_additive` claims, and no less.

    Truth values have no sums, and `nextafter` differs from its operand by less than any tolerance.
    """
    eqn = equation(case)
    first = tuple(np.asarray(x) for x in eqn.operands)
    second = tuple(_other(x) for x in first)
    whole = eqn.run(tuple(a + b for a, b in zip(first, second, strict=True)), eqn.params)
    parts = zip(eqn.run(first, eqn.params), eqn.run(second, eqn.params), strict=True)
    has_sums = bool(first) and all(np.asarray(x).dtype != bool for x in (*first, *whole))
    commutes = has_sums and all(
        np.allclose(np.asarray(sum_, np.complex64), np.asarray(a + b, np.complex64), rtol=0.02, atol=1e-5)
        for sum_, (a, b) in zip(whole, parts, strict=True)
    )
    assert eqn.rule.is_additive == commutes


def _other(x: np.ndarray) -> np.ndarray:
    """Another operand of the type, of other signs and order; integers stay within their range."""
    moved = np.roll(x, 1)
    return moved if x.dtype.kind in "biu" else (moved * -1.75).astype(x.dtype)


EXACT_FLOPS = ["dot", "dot-vector", "dot-batch", "dot-two-contracted", "conv-nchw"]
NEAR_FLOPS = [case for case in CASES if case.startswith("conv") and case not in EXACT_FLOPS]


@pytest.mark.parametrize("case", EXACT_FLOPS)
def test_flops_are_those_that_xla_counts(case: str):
    assert _flops(equation(case).rule) == _xla_flops(equation(case))


@pytest.mark.parametrize("case", NEAR_FLOPS)
def test_flops_of_padded_convolutions_are_near_those_that_xla_counts(case: str):
    """XLA leaves out the taps that fall on padding: up to half of them on these tiny images."""
    ratio = _flops(equation(case).rule) / _xla_flops(equation(case))
    assert 0.95 <= ratio <= 2.0


FLOPS_BY_HAND = {
    # an operation for each element that is combined with another
    "reduce_sum": 2 * 4 * 6,
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod", "reduce_and", "argmax", "argmin"), 4 * 6),
    "reduce": 2 * 4 * 6,  # of two arrays at once
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin"), 4 * 6),
    # or for each element of every window
    "max-pool": (4 * 3 * 3 * 2) * (2 * 2),
    "sum-pool": (4 * 3 * 3 * 2) * (3 * 3),
    "strided-pool": (2 * 6) * 1,
    "max-pool-gradient": (4 * 3 * 3 * 2) * (2 * 2),
    # or for each that is added to an array
    "embedding-gradient": 4 * 2 * 6,
    "take-along-gradient": 4 * 2,
    **dict.fromkeys(("scatter-add", "scatter-max", "scatter-min"), 8 * 6),
    "scatter-mul": 2 * 6,
    "scatter-points": 8,
    "scatter-windows": 4 * 2,
    # stacks of matrices: Golub and Van Loan's leading terms; the transform's by FFTW's convention
    "cholesky": 4 * 3**3 / 3,
    "lu": 4 * 2 * 3**3 / 3,
    "qr": 4 * 4 * 3**3 / 3,
    "eigh": 4 * 9 * 3**3,
    "svd": 4 * 21 * 5 * 3 * 3,
    **dict.fromkeys(("triangular_solve", "triangular_solve-right"), 2 * 3**2 * 4),
    "fft": 4 * 5 * 6 * np.log2(6),
}
MOVES = [
    *("real", "imag", "complex", "conj", "reduce_precision", "copy", "barrier", "name"),
    *(case for case in CASES if case.startswith(("reshape-", "slice", "pad", "concatenate", "bitcast"))),
    *("transpose", "squeeze", "broadcast", "broadcast-scalar", "tile", "rev", "split", "iota"),
    *(case for case in CASES if case.startswith("gather-")),
    *("embedding", "take-along", "scatter", "dynamic_slice", "dynamic_update_slice", "sort", "top_k"),
]


@pytest.mark.parametrize("case", FLOPS_BY_HAND)
def test_flops_are_those_that_one_counts_by_hand(case: str):
    assert _flops(equation(case).rule) == pytest.approx(FLOPS_BY_HAND[case])


@pytest.mark.parametrize("case", MOVES)
def test_what_only_moves_elements_computes_nothing(case: str):
    assert _flops(equation(case).rule) == 0


@pytest.mark.parametrize("case", [*UNARY, *BINARY, *BITWISE])
def test_an_elementwise_op_takes_one_instruction_an_element_or_several(case: str):
    assert _flops(equation(case).rule) / (4 * 6) in (1, 10, 50)


def _flops(rule: Rule) -> float:
    return rule.flops_per_point * rule.num_points


def _xla_flops(eqn: Equation) -> float:
    lowered = jax.jit(lambda *xs: eqn.run(xs, eqn.params)).lower(*eqn.operands)
    return lowered.cost_analysis()["flops"]


def test_kinds_of_a_matrix_product():
    rule = equation("dot").rule
    assert [(f.size, f.kind) for f in rule.factors] == [(4, Kind.PARALLEL), (6, Kind.SUM), (8, Kind.PARALLEL)]
