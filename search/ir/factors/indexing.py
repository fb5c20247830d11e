"""Look-ups and updates at computed positions: gather, scatter, dynamic slices; sorting.

A dimension of the array that is looked up or updated one element at a time (an embedding's vocabulary) can be
split: each device serves the indices that fall in its part, as if the others pointed outside. For a gather,
the others contribute zero and the results sum (`SUM`). For a scatter, the part is of the result too, and
nothing is missing (`PARALLEL`).

The other way round, the updates of a scatter-add can be split while the array is whole on each device: the
results are then partial sums. The original operand must be in just one of them (elsewhere zero); whoever
emits the op sees to it, and need not where the operand is zero, as in the gradient of a look-up.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from autoshard.search.ir.factors.elementwise import ARITHMETIC
from autoshard.search.ir.factors.loops import Dim, Loops, mixing, resized_dims
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn


def gather(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Of each operand dim a slice takes all, one element or a part; batching dims are the indices' own."""
    operand, indices = ins
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    picked = Kind.SUM if _can_sum(operand.dtype) and not _is_on_host(operand) else Kind.UNSPLITTABLE
    loops = Loops()
    points = loops.dims(indices.shape[:-1])
    batching = _pick(points, numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    absent = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    whole, window = _windows(loops, operand.shape, sizes, batching, absent, picked, numbers.start_index_map)
    result = _interleave(len(outs[0].shape), numbers.offset_dims, window, points)
    index_vector = loops.dim(indices.shape[-1], Kind.UNSPLITTABLE)
    return loops.rule((whole, (*points, index_vector)), (result,))


def _can_sum(dtype: Any) -> bool:
    """Whether partial results can be added: not truth values, nor keys."""
    return isinstance(dtype, np.dtype) and dtype.kind != "b"


def _is_on_host(operand: Any) -> bool:
    """True if rows are read or written in the host's memory, by a kernel that knows the whole array's indices only."""
    return getattr(operand, "is_on_host", False)


def scatter(updates_kind: Kind, *, flops_per_update: float = 0.0) -> RuleFn:
    """Rules for scatters; `updates_kind` says how results of different updates combine."""

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        del outs
        operand, indices, updates = (aval.shape for aval in ins)
        numbers = params["dimension_numbers"]
        aligned = numbers.scatter_indices_batching_dims
        kinds = [Kind.PARALLEL if d in aligned else updates_kind for d in range(len(indices) - 1)]
        loops = Loops()
        points = tuple([loops.dim(n, kind) for n, kind in zip(indices, kinds, strict=False)])
        batching = _pick(points, numbers.operand_batching_dims, aligned)
        absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        present = iter(numbers.update_window_dims)
        sizes = [1 if d in absent else updates[next(present)] for d in range(len(operand))]
        picked = Kind.UNSPLITTABLE if _is_on_host(ins[0]) else Kind.PARALLEL
        whole, window = _windows(
            loops, operand, sizes, batching, absent, picked, numbers.scatter_dims_to_operand_dims
        )
        updated = _interleave(len(updates), numbers.update_window_dims, window, points)
        index_vector = loops.dim(indices[-1], Kind.UNSPLITTABLE)
        operands = (whole, (*points, index_vector), updated)
        return loops.rule(operands, (whole,), flops=flops_per_update * prod(updates))

    return rule


def _pick(points: Dims, operand_dims: Sequence[int], index_dims: Sequence[int]) -> dict[int, Dim]:
    """The batching dims of the operand, as the index dims that they are."""
    return {d: points[i] for d, i in zip(operand_dims, index_dims, strict=True)}


def _windows(
    loops: Loops,
    shape: Sequence[int],
    sizes: Sequence[int],
    batching: dict[int, Dim],
    absent: set[int],
    picked: Kind,
    indexed: Sequence[int],
) -> tuple[Dims, Dims]:
    """The dims of the array that windows of `sizes` are taken from, and of a window, less the `absent` ones.

    A dim that is `indexed` one element at a time is of the kind `picked`.
    """

    def dims(d: int) -> tuple[Dim, Dim]:
        if d in batching:
            return batching[d], ()
        if sizes[d] == shape[d]:
            return (dim := loops.dim(shape[d])), dim
        if sizes[d] == 1 and d in indexed:
            return loops.dim(shape[d], picked), ()
        return loops.dim(shape[d], Kind.UNSPLITTABLE), loops.dim(sizes[d], Kind.UNSPLITTABLE)

    pairs = [dims(d) for d in range(len(shape))]
    whole = tuple([dim for dim, _ in pairs])
    return whole, tuple([dim for d, (_, dim) in enumerate(pairs) if d not in absent])


def _interleave(rank: int, window_dims: Sequence[int], window: Dims, points: Dims) -> Dims:
    """The dims of an array of windows, `window_dims` of which are the windows' own."""
    inner, outer = iter(window), iter(points)
    return tuple([next(inner if d in window_dims else outer) for d in range(rank)])


RULES: dict[str, RuleFn] = {
    "gather": gather,
    "scatter": scatter(Kind.UNSPLITTABLE),
    **dict.fromkeys(("scatter-add", "scatter-sub"), scatter(Kind.SUM, flops_per_update=ARITHMETIC)),
    **dict.fromkeys(
        ("scatter-mul", "scatter-min", "scatter-max"), scatter(Kind.REDUCE, flops_per_update=ARITHMETIC)
    ),
    "dynamic_slice": mixing(lambda ins, outs, params: resized_dims(ins[0], outs[0])),
    "dynamic_update_slice": mixing(lambda ins, outs, params: resized_dims(ins[0], ins[1])),
    "sort": mixing(lambda ins, outs, params: (params["dimension"],)),
    "top_k": mixing(lambda ins, outs, params: (params["axis"],)),
    "approx_top_k": mixing(lambda ins, outs, params: (params["reduction_dimension"],)),
}
