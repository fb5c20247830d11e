"""Reductions over whole dimensions, running reductions along one, and reductions over windows."""

from collections.abc import Sequence
from enum import Enum, auto
from math import prod
from typing import Any

from autoshard.search.ir.factors.elementwise import ARITHMETIC, TRANSCENDENTAL
from autoshard.search.ir.factors.loops import Dim, Loops, mixing
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn, Window
from autoshard.search.ir.factors.windows import Sliding, over_rows, window


def reduction(kind: Kind, *, is_additive: bool = False) -> RuleFn:
    """The dims in `axes` are of `kind`, the others parallel."""

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        axes = params["axes"]
        loops = Loops()
        dims = tuple([loops.dim(n, kind if d in axes else Kind.PARALLEL) for d, n in enumerate(ins[0].shape)])
        kept = tuple([dim for d, dim in enumerate(dims) if d not in axes])
        return loops.rule((dims,), (kept,), flops_per_point=ARITHMETIC, is_additive=is_additive)

    return rule


def reduce(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """A reduction of several arrays at once by a user's function, of which no cross-device form is known."""
    reduced = params["dimensions"]
    loops = Loops()
    kinds = [Kind.UNSPLITTABLE if d in reduced else Kind.PARALLEL for d in range(len(ins[0].shape))]
    dims = tuple([loops.dim(n, kind) for n, kind in zip(ins[0].shape, kinds, strict=True)])
    kept = tuple([dim for d, dim in enumerate(dims) if d not in reduced])
    initial_values = [()] * (len(ins) - len(outs))
    operands = (*[dims] * len(outs), *initial_values)
    return loops.rule(operands, [kept] * len(outs), flops_per_point=ARITHMETIC * len(outs))


class Halos(Enum):
    """The exchange of halos for an op."""

    OF_OPERAND = auto()
    """Its operand's rows are exchanged, by XLA's partitioner."""
    OF_SCATTER = auto()
    """Rows of its second operand are exchanged, and sums for them return to their owners, by name."""
    NONE = auto()
    """Nothing exchanges them: dimensions that need halos stay whole."""


def windowed(halos: Halos, *, is_additive: bool = False) -> RuleFn:
    """Dimensions that the window leaves alone are parallel. The others are split with halos (`search.ir.factors.windows`)
    where equal parts of both sides lie over one another; elsewhere they stay whole.

    Serves gathers over windows (pooling) and scatters (its gradient) alike. One operation per element of each
    window, of which there are as many as elements in the smaller of the arrays.
    """

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        extents = params["window_dimensions"]
        arrays = [aval.shape for aval in (*ins, *outs) if len(aval.shape) == len(extents)]
        loops, windows, taken = Loops(), list[Window](), dict[tuple[int, int], Dim]()
        is_scatter = halos is Halos.OF_SCATTER
        read, made = (ins[1], ins[0]) if is_scatter else (ins[0], outs[0])
        for d, (rows, results) in enumerate(zip(read.shape, made.shape, strict=True)):
            slid = _sliding(rows, results, d, params)
            if not _is_moved(d, params) and rows == results:
                taken[d, rows] = loops.dim(rows)
            elif slid.has_aligned_results and _has(halos, slid):
                factor = loops.dim(rows // slid.stride)
                taken[d, results] = over_rows(loops, factor, slid.base_dilation)
                taken[d, rows] = over_rows(loops, factor, slid.stride)
                is_named = is_scatter and any(slid.halo)
                windows += window(factor, int(is_scatter), d, slid.halo, is_named, is_named)

        def dims(aval: Any) -> Dims:
            if len(aval.shape) != len(extents):
                return loops.dims(aval.shape, Kind.UNSPLITTABLE)
            return tuple(
                [
                    taken[at] if at in taken else loops.dim(at[1], Kind.UNSPLITTABLE)
                    for at in enumerate(aval.shape)
                ]
            )

        operands, results = [dims(aval) for aval in ins], [dims(aval) for aval in outs]
        flops = ARITHMETIC * min(prod(shape) for shape in arrays) * prod(extents)
        return loops.rule(operands, results, flops=flops, is_additive=is_additive, windows=windows)

    return rule


def _has(halos: Halos, slid: Sliding) -> bool:
    """Whether windows can be split: their halos are exchanged, or there are none. A scatter's windows must reach to the end
    of a part and its halo."""
    is_tight = slid.taps - slid.stride >= slid.low
    is_exchanged = halos is Halos.OF_OPERAND or (halos is Halos.OF_SCATTER and is_tight)
    return is_exchanged or not any(slid.halo)


def _sliding(rows: int, results: int, d: int, params: dict[str, Any]) -> Sliding:
    """The windows along a dimension."""
    keys = ("window_strides", "window_dilation", "base_dilation")
    of_window = (params[key][d] if key in params else 1 for key in keys)
    return Sliding(rows, results, params["window_dimensions"][d], *of_window, low=params["padding"][d][0])


def _is_moved(d: int, params: dict[str, Any]) -> bool:
    return params["window_dimensions"][d] != 1 or any(params["padding"][d])


def _along_axis(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> tuple[int]:
    return (params["axis"],)


POOLING_GRADIENT = "select_and_scatter_add"
"""The gradient of a max pooling."""

RULES: dict[str, RuleFn] = {
    "reduce_sum": reduction(Kind.SUM, is_additive=True),
    **dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), reduction(Kind.REDUCE)),
    **dict.fromkeys(("reduce_and", "reduce_or", "reduce_xor"), reduction(Kind.REDUCE)),
    **dict.fromkeys(("argmax", "argmin"), reduction(Kind.REDUCE)),
    "reduce": reduce,
    "cumsum": mixing(_along_axis, flops_per_point=ARITHMETIC, is_additive=True),
    **dict.fromkeys(("cumprod", "cummax", "cummin"), mixing(_along_axis, flops_per_point=ARITHMETIC)),
    "cumlogsumexp": mixing(_along_axis, flops_per_point=TRANSCENDENTAL),
    "reduce_window_sum": windowed(Halos.OF_OPERAND, is_additive=True),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min"), windowed(Halos.OF_OPERAND)),
    POOLING_GRADIENT: windowed(Halos.OF_SCATTER),
    **dict.fromkeys(("reduce_window", "select_and_scatter", "select_and_gather_add"), windowed(Halos.NONE)),
}
