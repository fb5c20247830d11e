"""Sums of products: matrix products in all their generality, and convolutions."""

from collections.abc import Sequence
from math import prod
from typing import Any

from autoshard.search.ir.factors.loops import Dim, Loops
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn, Window
from autoshard.search.ir.factors.windows import Sliding, over_rows, window

FLOPS_PER_PRODUCT_SUM = 2.0
"""A multiplication and an addition."""


def dot_general(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """`(b, m, k), (b, k, n) -> (b, m, n)`, any number of each in any order; `k` is summed."""
    del outs
    lhs, rhs = (aval.shape for aval in ins)
    numbers: tuple[tuple[Sequence[int], Sequence[int]], ...] = params["dimension_numbers"]
    summed, batch = numbers
    loops = Loops()
    left = tuple([loops.dim(n, Kind.SUM if d in summed[0] else Kind.PARALLEL) for d, n in enumerate(lhs)])
    bound: dict[int, Dim] = {
        r: left[d] for d, r in zip((*summed[0], *batch[0]), (*summed[1], *batch[1]), strict=True)
    }
    right = tuple([bound[d] if d in bound else loops.dim(n) for d, n in enumerate(rhs)])
    free_left = [dim for d, dim in enumerate(left) if d not in batch[0] and d not in summed[0]]
    free_right = [dim for d, dim in enumerate(right) if d not in bound]
    result = (*[left[d] for d in batch[0]], *free_left, *free_right)
    return loops.rule((left, right), (result,), flops_per_point=FLOPS_PER_PRODUCT_SUM)


def conv_general_dilated(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """`(n, c, *x), (o, c, *k) -> (n, o, *y)`, laid out by `dimension_numbers`; `c` is summed.

    Groups are one more parallel loop, the major part of the dimensions that they divide: `c` and `o` under
    `feature_group_count`, `n` and `o` under `batch_group_count`. Spatial dimensions split with halos
    (`search.ir.factors.windows`) where equal parts lie over one another. FLOPs count every kernel tap of
    every output position (padding included, as dense kernels do), but not the holes that `lhs_dilation` (the gradient of
    a strided convolution) puts between inputs.

    Each device runs a grouped convolution on its own shards, and terms are added up there. XLA's partitioner gathers the
    batch of one in feature groups, and of one in batch groups (the gradient of its kernel) it adds the terms of replicas up
    as well, so that the numbers are wrong (measured with JAX 0.12 on meshes of one and of two axes). For the gradient of a
    transposed convolution's kernel it moves whole parts, not halos.
    """
    lhs, rhs = (aval.shape for aval in ins)
    (out,) = (aval.shape for aval in outs)
    numbers = params["dimension_numbers"]
    lhs_batch, lhs_feature, *lhs_space = numbers.lhs_spec
    rhs_out, rhs_in, *rhs_space = numbers.rhs_spec
    out_batch, out_feature, *out_space = numbers.out_spec
    feature_groups, batch_groups = params["feature_group_count"], params["batch_group_count"]
    is_grouped = batch_groups * feature_groups > 1

    loops = Loops()
    batch_group, feature_group = loops.dim(batch_groups), loops.dim(feature_groups)
    batch = loops.dim(out[out_batch])
    feature_in = loops.dim(rhs[rhs_in], Kind.SUM)
    feature_out = loops.dim(rhs[rhs_out] // (batch_groups * feature_groups))
    grouped_out = batch_group + feature_group + feature_out

    left = {lhs_batch: batch_group + batch, lhs_feature: feature_group + feature_in}
    right = {rhs_out: grouped_out, rhs_in: feature_in}
    result = {out_batch: batch, out_feature: grouped_out}
    windows, examples = list[Window](), batch
    for n, (d, k, y) in enumerate(zip(lhs_space, rhs_space, out_space, strict=True)):
        slid = _sliding(lhs[d], out[y], rhs[k], params, n)
        if slid.has_aligned_results:
            factor = loops.dim(slid.rows // slid.stride)
            right[k] = loops.dim(slid.taps, Kind.UNSPLITTABLE)
            left[d], result[y] = (
                over_rows(loops, factor, step) for step in (slid.stride, slid.base_dilation)
            )
            windows += window(factor, 0, d, slid.halo, is_grouped)
        elif slid.has_aligned_taps:
            factor, examples = loops.dim(slid.rows // slid.dilation, Kind.SUM), feature_in
            result[y] = loops.dim(slid.results, Kind.UNSPLITTABLE)
            left[d], right[k] = (
                over_rows(loops, factor, step) for step in (slid.dilation, slid.base_dilation)
            )
            windows += window(factor, 0, d, slid.taps_halo, is_grouped or slid.base_dilation > 1)
        else:
            left[d], right[k], result[y] = loops.dims((slid.rows, slid.taps, slid.results), Kind.UNSPLITTABLE)

    taps = prod(rhs) * prod(out[d] for d in out_space) * out[out_batch] / prod(params["lhs_dilation"])
    return loops.rule(
        (_in_order(left), _in_order(right)),
        (_in_order(result),),
        flops=FLOPS_PER_PRODUCT_SUM * taps,
        is_missplit=is_grouped,
        windows=windows,
        examples=examples if windows else (),
    )


def _sliding(rows: int, results: int, taps: int, params: dict[str, Any], n: int) -> Sliding:
    """The windows along a convolution's n-th spatial dimension."""
    of_window = (params[key][n] for key in ("window_strides", "rhs_dilation", "lhs_dilation"))
    return Sliding(rows, results, taps, *of_window, low=params["padding"][n][0])


def _in_order(dims: dict[int, Dim]) -> Dims:
    return tuple([dims[d] for d in range(len(dims))])


RULES: dict[str, RuleFn] = {
    "dot_general": dot_general,
    "conv_general_dilated": conv_general_dilated,
}
