"""Attention as one kernel: cuDNN's, which JAX calls for `jax.nn.dot_product_attention(implementation="cudnn")`.

JAX wraps it in `custom_partitioning` while it lowers, with a sharding rule that ties the result to the query alone; keys and
values must be split alike, and sequences must not. Batches and heads are parallel, here as in the formula. Where several
query heads share one of keys and values, the heads are a compound dimension, with the shared ones as its major part.

Blockwise attention (`search.ir.attention`) also splits the sequence: of queries, keys and values alike, because
these travel the ring of the devices that have it. The gradients of keys and values sum over the query heads that share them.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from autoshard.search.ir.attention.layout import KEY, QUERY, Layout
from autoshard.search.ir.attention.layout import Dims as Labels
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.factors.contraction import FLOPS_PER_PRODUCT_SUM
from autoshard.search.ir.factors.loops import Dim, Loops, opaque
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn

HEADS_FIRST = 1
"""The value of the parameter `layout` for (batch, heads, sequence, channels); else the sequence comes before the heads."""

FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 2, 5
"""Matrix products: scores and output; scores again, and the gradients of values, probabilities, queries and keys."""


def attention(num_products: int) -> RuleFn:
    """The rule of the kernel, or of its gradient.

    Operands are query, key, value, bias, the valid lengths of both sequences, four arrays of packed and paged variants and
    those of a user's score function; the gradient has the softmax's statistics, the result and its gradient before the last
    of these. What is not used is empty.
    """
    num_plain = 10 if num_products == FORWARD_PRODUCTS else 13

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        is_plain = not any(prod(a.shape) for a in ins[6:10]) and len(ins) == num_plain
        counts_heads = params["dropout_rate"] or params["mask_type"].name == "ALIBI"
        if not is_plain or counts_heads:  # on a device, the kernel would count from zero
            return replace(opaque(ins, outs, params), is_kernel=True)
        return _plain(ins, outs, params["layout"] == HEADS_FIRST, num_products)

    return rule


def _plain(ins: Sequence[Any], outs: Sequence[Any], heads_first: bool, num_products: int) -> Rule:
    query, key = ins[0].shape, ins[1].shape
    heads_at, sequence_at = (1, 2) if heads_first else (2, 1)
    loops = Loops()
    batch = loops.dim(query[0], _kind(0, outs))
    shared = loops.dim(key[heads_at], _kind(1, outs))
    group = loops.dim(query[heads_at] // key[heads_at])

    def fixed(n: int) -> Dim:
        return loops.dim(n, Kind.UNSPLITTABLE)

    def array(shape: Sequence[int]) -> Dims:
        heads = shared + group if shape[heads_at] == query[heads_at] else shared
        middle = {heads_at: heads, sequence_at: fixed(shape[sequence_at])}
        return (batch, middle[1], middle[2], fixed(shape[3]))

    def by_head(shape: Sequence[int]) -> Dims:
        """Of bias and statistics: (batch, heads, ...), each of which may be 1."""
        if len(shape) < 3:
            return tuple(map(fixed, shape))
        return (
            batch if shape[0] > 1 else (),
            shared + group if shape[1] > 1 else (),
            *map(fixed, shape[2:]),
        )

    def lengths(shape: Sequence[int]) -> Dims:
        return (batch,) if tuple(shape) == (query[0],) else tuple(map(fixed, shape))

    shapes = [aval.shape for aval in ins]
    operands = [*map(array, shapes[:3]), by_head(shapes[3]), *map(lengths, shapes[4:6])]
    operands += [tuple(map(fixed, shape)) for shape in shapes[6:10]]
    operands += [by_head(shape) for shape in shapes[10:11]] + [array(shape) for shape in shapes[11:13]]
    num_arrays = 1 if num_products == FORWARD_PRODUCTS else 3
    results = [array(aval.shape) if r < num_arrays else by_head(aval.shape) for r, aval in enumerate(outs)]
    flops = num_products * FLOPS_PER_PRODUCT_SUM * prod(query) * key[sequence_at]
    return loops.rule(operands, results, flops=flops, is_kernel=True)


def _kind(dim: int, outs: Sequence[Any]) -> Kind:
    """Of batches or heads. They stay whole where the gradient of a bias sums over them, inside the kernel."""
    is_summed = len(outs) > 3 and outs[3].shape[dim] == 1
    return Kind.UNSPLITTABLE if is_summed else Kind.PARALLEL


def blockwise(num_products: int) -> RuleFn:
    """The rule of a blockwise attention, or of its gradient."""

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        layout: Layout = params["layout"]
        sizes = layout.sizes(*(aval.shape for aval in ins[:3]))
        loops = Loops()
        is_forward = num_products == FORWARD_PRODUCTS
        kinds = {"b": Kind.PARALLEL, "g": Kind.PARALLEL if is_forward else Kind.REDUCE}
        others = {a: n for a, n in sizes.items() if a not in (QUERY, KEY)}
        of = {a: loops.dim(n, kinds.get(a[0], Kind.UNSPLITTABLE)) for a, n in others.items()}
        sequence = Kind.PARALLEL if sizes[QUERY] == sizes[KEY] else Kind.UNSPLITTABLE
        of[QUERY] = of[KEY] = loops.dim(sizes[QUERY], sequence)
        if sizes[QUERY] != sizes[KEY]:
            of[KEY] = loops.dim(sizes[KEY], sequence)

        def dims(labels: Labels) -> Dims:
            return tuple(sum((of[a] for a in dim), ()) for dim in labels)

        read, made = [layout.query, layout.key, layout.value], [layout.output, layout.statistics]
        if not is_forward:
            read, made = [*read, *made, layout.output_gradient], [*layout.gradients]
        shared = prod(n for a, n in sizes.items() if a[0] in "bg") * sizes[QUERY] * sizes[KEY]
        channels = sizes["d"] + sizes["e"]
        flops = num_products / 2 * FLOPS_PER_PRODUCT_SUM * shared * channels
        return loops.rule(
            [*map(dims, read), *map(dims, layout.operands)],
            list(map(dims, made)),
            flops=flops,
            is_kernel=True,
        )

    return rule


RULES: dict[str, RuleFn] = {
    FORWARD: blockwise(FORWARD_PRODUCTS),
    BACKWARD: blockwise(BACKWARD_PRODUCTS),
    "dot_product_attention_fwd_wrapper": attention(FORWARD_PRODUCTS),
    "dot_product_attention_bwd_wrapper": attention(BACKWARD_PRODUCTS),
}
