"""A rule promises about pieces: cut the operands along a factor, run the primitive on each, combine.

Here every promise is kept by hand, with numpy and the primitive itself; nothing is sharded. What a compiler
must adapt (shapes in parameters, indices relative to a piece) is adapted in the tables below, for tests only.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from jax import lax

from autoshard.search.ir.factors.rule import Dims, Factor, Kind, Rule, Window
from tests.search.ir.test_factors_cases import (
    BINARY,
    BITWISE,
    CASES,
    UNARY,
    Equation,
    capture,
    equation,
    floats,
)

pytestmark = pytest.mark.devices

FILL = lax.GatherScatterMode.FILL_OR_DROP

COMBINE: dict[str, Callable[..., Any]] = {
    "reduce_max": np.maximum,
    "reduce_min": np.minimum,
    "reduce_prod": np.multiply,
    "reduce_and": np.logical_and,
    "reduce_or": np.logical_or,
    "reduce_xor": np.bitwise_xor,
    "scatter-mul": np.multiply,
    "scatter-max": np.maximum,
    "scatter-min": np.minimum,
}
"""How partial results of REDUCE factors combine. Arg-max is not here: it needs the values too."""

NEUTRAL = {
    "scatter-add": 0.0,
    "scatter-sub": 0.0,
    "scatter-mul": 1.0,
    "scatter-max": -np.inf,
    "scatter-min": np.inf,
}
"""What the operand of a scatter is in all pieces of its updates but the first."""


Call = tuple[tuple[np.ndarray, ...], dict[str, Any]]
"""Operands and parameters for the primitive."""


@dataclass(frozen=True)
class Piece:
    """A part of an equation: its rule with local sizes, its operands, and where it lies along each factor."""

    eqn: Equation
    rule: Rule
    operands: tuple[np.ndarray, ...]
    offsets: dict[int, int]

    def cut(self, factor: int, num: int) -> list["Piece"]:
        size = self.rule.factors[factor].size // num
        return [self._part(factor, size, index) for index in range(num)]

    def _borrowed(self, x: np.ndarray, window: Window, start: int, size: int) -> np.ndarray:
        """Some iterations of a windowed factor, with the rows that windows read before and behind them: those of the
        neighbours, or padding."""
        rows = x.shape[window.dim] // self.rule.factors[window.factor].size
        padding = -np.inf if self.eqn.primitive.name == "reduce_window_max" else 0.0
        edges = [(window.before, window.after) if d == window.dim else (0, 0) for d in range(x.ndim)]
        around = np.pad(x, edges, constant_values=padding)
        taken = range(start * rows, (start + size) * rows + window.before + window.after)
        return around.take(taken, axis=window.dim)

    def _part(self, factor: int, size: int, index: int) -> "Piece":
        factors = list(self.rule.factors)
        operands = [
            _take(x, dims, factors, factor, index * size, size)
            for x, dims in zip(self.operands, self.rule.operands, strict=True)
        ]
        for window in self.rule.windows:
            if window.factor == factor:
                operands[window.operand] = self._borrowed(
                    self.operands[window.operand], window, index * size, size
                )
        if _sums_updates(self.eqn, self.rule, factor) and index > 0:
            operands[0] = np.full_like(operands[0], NEUTRAL[self.eqn.primitive.name])
        factors[factor] = Factor(size, factors[factor].kind)
        offset = self.offsets.get(factor, 0) + index * size
        return Piece(
            self.eqn,
            replace(self.rule, factors=tuple(factors)),
            tuple(operands),
            {**self.offsets, factor: offset},
        )

    def call(self) -> Call:
        adapt = ADAPT.get(self.eqn.primitive.name, lambda piece, params: (piece.operands, params))
        return adapt(self, dict(self.eqn.params))

    def result_shape(self, index: int = 0) -> tuple[int, ...]:
        return _shape(self.rule.results[index], self.rule.factors)


def _sums_updates(eqn: Equation, rule: Rule, factor: int) -> bool:
    return eqn.primitive.name in NEUTRAL and rule.factors[factor].kind in (Kind.SUM, Kind.REDUCE)


def _shape(dims: Dims, factors: Any) -> tuple[int, ...]:
    return tuple(prod(factors[f].size for f in dim) for dim in dims)


def _take(x: np.ndarray, dims: Dims, factors: Any, factor: int, start: int, size: int) -> np.ndarray:
    """Some iterations of one factor: its dim is opened into its factors and closed again."""
    at = next((d for d, dim in enumerate(dims) if factor in dim), None)
    if at is None:
        return x
    opened = x.reshape(*x.shape[:at], *(factors[f].size for f in dims[at]), *x.shape[at + 1 :])
    part = opened.take(range(start, start + size), axis=at + dims[at].index(factor))
    return part.reshape(*x.shape[:at], -1, *x.shape[at + 1 :])


def _join(parts: list[np.ndarray], dims: Dims, factors: Any, factor: int) -> np.ndarray:
    """The inverse of `_take`, for all pieces of a factor; `factors` have the pieces' sizes."""
    order = [f for dim in dims for f in dim]
    opened = [part.reshape([factors[f].size for f in order]) for part in parts]
    joined = np.concatenate(opened, axis=order.index(factor))
    whole = {factor: Factor(factors[factor].size * len(parts))}
    return joined.reshape([prod(whole.get(f, factors[f]).size for f in dim) for dim in dims])


Splits = tuple[tuple[int, int], ...]
"""Factors, and into how many pieces each is cut."""


def pieces(piece: Piece, splits: Splits) -> Iterator[Piece]:
    if not splits:
        yield piece
        return
    (factor, num), *rest = splits
    for part in piece.cut(factor, num):
        yield from pieces(part, tuple(rest))


def run(eqn: Equation, *calls: Call) -> list[list[np.ndarray]]:
    """The results of each call, from one program: several take longer to compile."""
    operands, params = zip(*calls, strict=True)
    program = jax.jit(lambda operands: list(map(eqn.run, operands, params)))
    return [[np.asarray(x) for x in results] for results in program(operands)]


def combined(piece: Piece, splits: Splits, found: Iterator[list[np.ndarray]]) -> list[np.ndarray]:
    """The results from those of the pieces of `splits`, in their order."""
    if not splits:
        return next(found)
    (factor, num), *rest = splits
    parts = piece.cut(factor, num)
    runs = [combined(part, tuple(rest), found) for part in parts]
    whole_elsewhere = list(piece.rule.factors)
    whole_elsewhere[factor] = parts[0].rule.factors[factor]
    return [
        _combine(list(results), dims, piece, factor, whole_elsewhere)
        for results, dims in zip(zip(*runs, strict=True), piece.rule.results, strict=True)
    ]


def _combine(parts: list[np.ndarray], dims: Dims, piece: Piece, factor: int, factors: Any) -> np.ndarray:
    if any(factor in dim for dim in dims):
        return _join(parts, dims, factors, factor)
    kind = piece.rule.factors[factor].kind
    if kind == Kind.SUM:
        return np.sum(parts, axis=0, dtype=parts[0].dtype)
    if kind == Kind.REDUCE:
        combined = parts[0]
        for part in parts[1:]:
            combined = COMBINE[piece.eqn.primitive.name](combined, part)
        return combined
    for part in parts[1:]:
        np.testing.assert_array_equal(part, parts[0])
    return parts[0]


def _with_result_shape(key: str) -> Callable[[Piece, dict[str, Any]], Any]:
    return lambda piece, params: (piece.operands, {**params, key: piece.result_shape()})


def _local_slice(piece: Piece, params: dict[str, Any]) -> Any:
    whole, local = piece.eqn.in_avals[0].shape, piece.operands[0].shape
    limits = [n if n < m else m for n, m in zip(local, params["limit_indices"], strict=True)]
    limits = [m if n == w else n for n, w, m in zip(local, whole, limits, strict=True)]
    return piece.operands, {**params, "limit_indices": tuple(limits)}


def _local_iota(piece: Piece, params: dict[str, Any]) -> Any:
    return piece.operands, {**params, "shape": piece.result_shape()}


def _local_conv(piece: Piece, params: dict[str, Any]) -> Any:
    """Group counts follow from the local feature and batch sizes, padding from the rows at hand."""
    numbers, (lhs, rhs) = params["dimension_numbers"], (x.shape for x in piece.operands)
    out = piece.result_shape()
    specs = (spec[2:] for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec))
    steps = (params[key] for key in ("window_strides", "rhs_dilation", "lhs_dilation"))
    each = zip(*specs, params["padding"], zip(*steps, strict=True), strict=True)
    padding = (_local_padding(piece, d, (rhs[k], out[y]), pad, at) for d, k, y, pad, at in each)
    return piece.operands, {
        **params,
        "padding": tuple(padding),
        "feature_group_count": lhs[numbers.lhs_spec[1]] // rhs[numbers.rhs_spec[1]],
        "batch_group_count": max(1, lhs[numbers.lhs_spec[0]] // out[numbers.out_spec[0]]),
    }


def _local_pool(piece: Piece, params: dict[str, Any]) -> Any:
    out = piece.result_shape()
    steps = (params[key] for key in ("window_strides", "window_dilation", "base_dilation"))
    each = zip(params["window_dimensions"], out, params["padding"], zip(*steps, strict=True), strict=True)
    padding = (_local_padding(piece, d, (taps, y), pad, at) for d, (taps, y, pad, at) in enumerate(each))
    return piece.operands, {**params, "padding": tuple(padding)}


def _local_padding(
    piece: Piece, d: int, sizes: Sequence[int], whole: tuple[int, int], steps: Sequence[int]
) -> tuple[int, int]:
    """The padding of a dim of the first operand: less before by the rows that it has borrowed, and as much behind as the
    results need. A dim that was not cut keeps its own."""
    (taps, results), (stride, dilation, base_dilation) = sizes, steps
    cut = [w for w in piece.rule.windows if (w.operand, w.dim) == (0, d) and w.factor in piece.offsets]
    if not cut:
        return whole
    low = whole[0] - cut[0].before * base_dilation
    read = (results - 1) * stride + (taps - 1) * dilation + 1
    return low, read - low - ((piece.operands[0].shape[d] - 1) * base_dilation + 1)


def _local_gather(piece: Piece, params: dict[str, Any]) -> Any:
    """Indices count from the piece's start; those outside give zero."""
    operand, indices = piece.operands
    numbers, sizes = params["dimension_numbers"], list(params["slice_sizes"])
    whole = piece.eqn.in_avals[0].shape
    for d, dim in enumerate(piece.rule.operands[0]):
        if sizes[d] == whole[d]:
            sizes[d] = operand.shape[d]
        elif dim and (offset := piece.offsets.get(dim[0])) is not None and d in numbers.start_index_map:
            indices = _shifted(indices, numbers.start_index_map.index(d), offset)
    return (operand, indices), {**params, "slice_sizes": tuple(sizes), "fill_value": 0, "mode": FILL}


def _local_scatter(piece: Piece, params: dict[str, Any]) -> Any:
    """Indices count from the piece's start; updates outside are dropped."""
    operand, indices, updates = piece.operands
    numbers = params["dimension_numbers"]
    carried = {f for dim in piece.rule.operands[2] for f in dim}
    for position, d in enumerate(numbers.scatter_dims_to_operand_dims):
        for f in piece.rule.operands[0][d]:
            if f not in carried and f in piece.offsets:
                indices = _shifted(indices, position, piece.offsets[f])
    return (operand, indices, updates), {**params, "mode": FILL}


def _shifted(indices: np.ndarray, position: int, offset: int) -> np.ndarray:
    """Negative indices are outside, too: JAX has resolved Python's before."""
    moved = np.array(indices)
    moved[..., position] -= offset
    return moved


ADAPT: dict[str, Callable[[Piece, dict[str, Any]], Any]] = {
    "reshape": _with_result_shape("new_sizes"),
    "broadcast_in_dim": _with_result_shape("shape"),
    "iota": _local_iota,
    "slice": _local_slice,
    "tile": lambda piece, params: (piece.operands, _local_reps(piece, params)),
    "dynamic_slice": _with_result_shape("slice_sizes"),
    "conv_general_dilated": _local_conv,
    **dict.fromkeys(("reduce_window_max", "reduce_window_sum"), _local_pool),
    "gather": _local_gather,
    **dict.fromkeys(NEUTRAL, _local_scatter),
    "scatter": _local_scatter,
}


def _local_reps(piece: Piece, params: dict[str, Any]) -> dict[str, Any]:
    sizes = zip(piece.result_shape(), piece.operands[0].shape, strict=True)
    return {**params, "reps": tuple(n // m for n, m in sizes)}


def whole(eqn: Equation) -> Piece:
    return Piece(eqn, eqn.rule, tuple(np.asarray(x) for x in eqn.operands), {})


def check(eqn: Equation, *ways: Splits) -> None:
    one = whole(eqn)
    calls = (part.call() for splits in ways for part in pieces(one, splits))
    expected, *parts = run(eqn, (one.operands, eqn.params), *calls)
    found = iter(parts)
    for splits in ways:
        for got, want in zip(combined(one, splits, found), expected, strict=True):
            assert got.shape == want.shape
            tolerance = {"rtol": 1e-4, "atol": 1e-5} if want.dtype.kind in "fc" else {"rtol": 0.0}
            np.testing.assert_allclose(got, want, err_msg=str(splits), **tolerance)


def splittable(rule: Rule) -> list[tuple[int, int]]:
    """(factor, pieces) for each factor that can be split, into the fewest pieces."""
    return [
        (f, next(n for n in range(2, factor.size + 1) if factor.size % n == 0))
        for f, factor in enumerate(rule.factors)
        if factor.kind != Kind.UNSPLITTABLE
    ]


ARG_REDUCTIONS = ("argmax", "argmin")
"""Cases whose partial results have no binary combination: they have a test of their own."""

COUNTED = {"iota": 1}
"""The factor along which an iota counts: a device's place is in no parameter of the primitive."""


def provable(case: str) -> tuple[tuple[int, int], ...]:
    """The splits to try: not along which an iota counts, nor along which sums go back to their owners
    (`tests/executors/test_halos.py`)."""
    rule = equation(case).rule
    returned = {window.factor for window in rule.windows if window.is_returned}
    return tuple(split for split in splittable(rule) if split[0] not in {COUNTED.get(case), *returned})


ELEMENTWISE = {*UNARY, *BINARY, *BITWISE} - {"exp", "add", "and"}
"""Functions of single elements, but for three: that they are, JAX's type checker says, too."""

SPLIT = [
    pytest.param(case, marks=[pytest.mark.slow] if case in ELEMENTWISE else [])
    for case in CASES
    if case not in ARG_REDUCTIONS
]


@pytest.mark.parametrize("case", SPLIT)
def test_each_factor_split_and_all_factors_split(case: str):
    splits = provable(case)
    check(equation(case), *((split,) for split in splits), splits)


@pytest.mark.parametrize("case", ["argmax", "argmin"])
def test_arg_reductions_combine_by_value(case: str):
    eqn = equation(case)
    (axis,) = eqn.params["axes"]
    (factor,) = [f for f, factor in enumerate(eqn.rule.factors) if factor.kind == Kind.REDUCE]
    x = np.moveaxis(np.asarray(eqn.operands[0]), axis, -1)
    size = x.shape[-1] // 2
    halves = run(eqn, *(piece.call() for piece in whole(eqn).cut(factor, 2)))
    places = np.stack([found + i * size for i, (found,) in enumerate(halves)])
    values = np.take_along_axis(x, np.moveaxis(places, 0, -1), -1)
    winner = getattr(values, case)(-1)
    np.testing.assert_array_equal(
        np.take_along_axis(places, winner[None], 0)[0], np.asarray(eqn.run(eqn.operands, eqn.params)[0])
    )


@st.composite
def dots(draw: st.DrawFn) -> Equation:
    """A dot_general with every kind of dim, in any order."""
    labels = {
        "b": draw(st.integers(0, 2)),
        "k": draw(st.integers(0, 2)),
        "m": draw(st.integers(0, 1)),
        "n": 1,
    }
    names = [f"{kind}{i}" for kind, count in labels.items() for i in range(count)]
    sizes = {name: draw(st.sampled_from([1, 2, 3, 4])) for name in names}
    left = draw(st.permutations([name for name in names if name[0] != "n"]))
    right = draw(st.permutations([name for name in names if name[0] != "m"]))
    numbers = tuple(
        tuple(tuple(side.index(name) for name in names if name[0] == kind) for side in (left, right))
        for kind in "kb"
    )
    shapes = ([sizes[name] for name in side] for side in (left, right))
    return capture(
        "dot_general", lambda a, b: lax.dot_general(a, b, numbers), *(floats(*shape) for shape in shapes)
    )


@given(eqn=dots(), data=st.data())
def test_any_dot_general(eqn: Equation, data: st.DataObject):
    splits = splittable(eqn.rule)
    assume(splits)
    check(eqn, tuple(data.draw(st.lists(st.sampled_from(splits), unique=True, max_size=3))))


@st.composite
def reshapes(draw: st.DrawFn) -> Equation:
    """Two ways to group the same prime factors."""
    primes = draw(st.lists(st.sampled_from([2, 2, 3, 5]), min_size=1, max_size=5))
    source, target = (_grouped(draw, draw(st.permutations(primes))) for _ in range(2))
    assume(source != target)
    return capture("reshape", lambda x: lax.reshape(x, target), floats(*source))


def _grouped(draw: st.DrawFn, primes: list[int]) -> tuple[int, ...]:
    cuts = sorted(draw(st.lists(st.integers(0, len(primes)), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, len(primes)], strict=True)
    return tuple(prod(primes[a:b]) for a, b in bounds)


@given(eqn=reshapes())
def test_any_reshape(eqn: Equation):
    check(eqn, tuple(splittable(eqn.rule)))


@given(shape=st.lists(st.integers(1, 4), max_size=3), data=st.data())
def test_any_transpose_broadcast_and_sum(shape: list[int], data: st.DataObject):
    order = data.draw(st.permutations(range(len(shape))))

    def check_all(name: str, function: Callable[..., Any]) -> None:
        eqn = capture(name, function, floats(*shape))
        check(eqn, tuple(splittable(eqn.rule)))

    check_all("transpose", lambda x: lax.transpose_p.bind(x, permutation=tuple(order)))
    kept = sorted(data.draw(st.permutations(range(len(shape) + 2)))[: len(shape)])
    target = [2] * (len(shape) + 2)
    for d, n in zip(kept, shape, strict=True):
        target[d] = data.draw(st.sampled_from([n, 3 if n == 1 else n]))
    check_all("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, target, kept))
    axes = data.draw(st.sets(st.integers(0, len(shape) - 1), min_size=1)) if shape else ()
    check_all("reduce_sum", lambda x: lax.reduce_sum_p.bind(x, axes=tuple(sorted(axes)), out_sharding=None))


def test_a_chain_of_reshapes_has_a_gcd_factor():
    rule = equation("reshape-gcd").rule
    assert rule.factors[0] == Factor(2, Kind.PARALLEL)
    assert {factor.kind for factor in rule.factors[1:]} == {Kind.UNSPLITTABLE}
