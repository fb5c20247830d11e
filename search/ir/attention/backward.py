"""The gradients of queries, keys and values, from the log-sum-exp of rows.

A block's probabilities are computed anew. In a ring, the gradients of keys and values travel behind these: they arrive while
a block is computed, take up its share, and are sent on. One step more brings them home.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.search.ir.attention.blocks import (
    Block,
    Local,
    block_at,
    blocks_of,
    decided,
    joined,
    row_blocks,
    scored,
)
from autoshard.search.ir.attention.layout import Layout, canonical
from autoshard.search.ir.attention.ring import Ring
from autoshard.search.ir.attention.scores import Scores


def _gradients(block: Block, own: Sequence[Any], k: Any, v: Any, into: Sequence[Any]) -> tuple[Any, Any, Any]:
    """The gradients of a block's queries, keys and values, added to those of other blocks. Groups and rows are summed over
    as one dimension: for two, the compiler writes out transposed scores."""
    (q, seen, statistic, correction), (dq, dk, dv), dtype = own, into, statistic_dtype(own)
    z, pulled = jax.vjp(block.values, scored(q, k, dtype))
    p = jnp.exp(z.astype(dtype) - statistic[..., None])
    dp = jnp.einsum("bgie,bje->bgij", seen, v, preferred_element_type=dtype)
    (ds,) = pulled((p * (dp - correction[..., None])).astype(z.dtype))
    ds, p = ds.astype(q.dtype), p.astype(seen.dtype)
    return (
        dq + jnp.einsum("bgij,bjd->bgid", ds, k, preferred_element_type=dtype),
        dk + jnp.einsum("bnj,bnd->bjd", _as_rows(ds), _as_rows(q), preferred_element_type=dtype),
        dv + jnp.einsum("bnj,bne->bje", _as_rows(p), _as_rows(seen), preferred_element_type=dtype),
    )


def _as_rows(x: Any) -> Any:
    """An array with the rows of all groups in one dimension."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def statistic_dtype(own: Sequence[Any]) -> Any:
    """The dtype in which gradients are added up."""
    return own[2].dtype


def _back_through(local: Local, own: Any, there: Any, into: Any) -> Any:
    """The gradients of all rows, by block, and of the keys and values that are there."""
    (arrays, rows, i), (k, v, columns, j) = own, there
    size, num = local.key_block, local.num_key_blocks
    keys, places = local.key_blocks(k, v, columns), j.reshape(num, -1)

    def row(carry: Any, x: Any) -> Any:
        n, arrays, i, dq = x
        mine = block_at(rows, n)

        def column(at: Any, state: Any) -> Any:
            dq, dk, dv = state
            (k, v, columns), j = block_at(keys, at), block_at(places, at)
            block = decided(local, i, j, mine, columns)

            def compute(state: Any) -> Any:
                dq, dk, dv = state
                one = _gradients(block, arrays, k, v, (dq, block_at(dk, at), block_at(dv, at)))
                return one[0], _put(dk, one[1], at), _put(dv, one[2], at)

            if local.scores.mask is None:
                return compute(state)
            return lax.cond(block.is_skipped(arrays[2]), lambda s: s, compute, (dq, dk, dv))

        dq, dk, dv = lax.fori_loop(0, num, column, (dq, *carry))
        return (dk, dv), dq

    dq, (dk, dv) = into
    cut = blocks_of(dk, 1, size), blocks_of(dv, 1, size)
    (dk, dv), dq = lax.scan(row, cut, (jnp.arange(len(i)), arrays, i, dq))
    return dq, (joined(dk, 1), joined(dv, 1))


def _put(blocks: Any, block: Any, at: Any) -> Any:
    return lax.dynamic_update_index_in_dim(blocks, block, at, 0)


def backward(layout: Layout, scores: Scores, dtypes: Sequence[Any], ring: Ring, *arrays: Any) -> list[Any]:
    """The gradients of queries, keys and values, of one device's part of an attention.

    Args:
      layout: the dimensions of operands and results.
      scores: the softmax's argument.
      dtypes: of the results.
      ring: the devices that split the sequence.
      *arrays: queries, keys, values, the output, the log-sum-exp, the output's gradient, and the operands of the score
        function.
    """
    local = Local(layout, scores, ring, [x.shape for x in arrays[:3]])
    query, key, value, output, statistic, gradient = arrays[:6]
    q = local.take("query", query, layout.query)
    k, v = local.take("key", key, layout.key), local.take("value", value, layout.value)
    seen = local.take("output", gradient, layout.output_gradient)
    # Otherwise the compiler takes the scores of a single block from the forward phase, and keeps them until here.
    q, k, v, seen = lax.optimization_barrier((q, k, v, seen))
    statistic = ring.dealt(canonical(statistic, layout.statistics, local.rows, local.sizes), 2)
    kind = statistic.dtype
    made = local.take("output", output, layout.output)
    correction = (made.astype(kind) * seen.astype(kind)).sum(-1)
    rows, columns = local.operands(arrays[6:])
    size = local.block
    i = ring.positions(ring.place, local.num_queries).reshape(-1, size)
    cut = tuple(blocks_of(x, 2, size) for x in (q, seen, statistic, correction))
    own = (cut, row_blocks(rows, size), i)
    dq = jnp.zeros(cut[0].shape, kind)
    zeros = (jnp.zeros(k.shape, kind), jnp.zeros(v.shape, kind))

    def step(n: Any, moving: Any, dq: Any) -> Any:
        j = ring.positions((ring.place - n) % ring.size, local.num_keys)
        return _back_through(local, own, (*moving, j), (dq, zeros))

    moving = (k, v, columns)
    if ring.size == 1:
        dq, sums = step(0, moving, dq)
    else:
        following = ring.sent_on(moving)
        dq, sums = step(0, moving, dq)

        def around(n: Any, state: Any) -> Any:
            moving, dq, sums = state
            dq, found = step(n, moving, dq)
            return ring.sent_on(moving), dq, _sum(ring.sent_on(sums), found)

        moving, dq, sums = lax.fori_loop(1, ring.size - 1, around, (following, dq, sums))
        dq, found = step(ring.size - 1, moving, dq)
        sums = ring.sent_on(_as(_sum(ring.sent_on(sums), found), dtypes[1:]))
    kinds = (("query", joined(dq, 2)), ("key", sums[0]), ("value", sums[1]))
    return [
        local.give(kind, x, dims, dtype)
        for (kind, x), dims, dtype in zip(kinds, layout.gradients, dtypes, strict=True)
    ]


def _sum(left: Any, right: Any) -> Any:
    return jax.tree.map(jnp.add, left, right)


def _as(arrays: Sequence[Any], dtypes: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(x.astype(dtype) for x, dtype in zip(arrays, dtypes, strict=True))
