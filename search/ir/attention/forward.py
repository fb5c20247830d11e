"""The output of an attention, and the log-sum-exp of each row of scores.

Each block of keys adds to the sums of a row: its largest score, the sum of exponentials, the weighted sum of values. If a
larger score turns up, what there is is scaled down. In a ring, keys and values are sent on while their blocks are computed.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Sequence
from functools import partial
from typing import Any

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
from autoshard.search.ir.attention.layout import Layout, laid_out
from autoshard.search.ir.attention.ring import Ring
from autoshard.search.ir.attention.scores import Scores

Sums = tuple[Any, Any, Any]
"""Of rows: the largest score, the sum of exponentials, and the weighted sum of values."""


def _added(block: Block, q: Any, k: Any, v: Any, sums: Sums) -> Sums:
    """The sums of rows with one more block of keys."""
    largest, total, weighted = sums
    z = block.values(scored(q, k, largest.dtype)).astype(largest.dtype)
    new = jnp.maximum(largest, z.max(-1))
    shift = jnp.where(jnp.isfinite(new), new, 0.0)
    p, rescaled = jnp.exp(z - shift[..., None]), jnp.exp(largest - shift)
    seen = jnp.einsum("bgij,bje->bgie", p.astype(v.dtype), v, preferred_element_type=largest.dtype)
    return new, total * rescaled + p.sum(-1), weighted * rescaled[..., None] + seen


def _through(local: Local, own: Any, there: Any, sums: Any) -> Any:
    """The sums of all rows, by block, with the keys that are there."""
    (q, rows, i), (k, v, columns, j) = own, there
    num = local.num_key_blocks
    keys, places = local.key_blocks(k, v, columns), j.reshape(num, -1)

    def row(carry: None, x: Any) -> tuple[None, Sums]:
        n, q, i, sums = x
        mine = block_at(rows, n)

        def column(m: Any, sums: Sums) -> Sums:
            at = (n - m) % num
            (k, v, columns), j = block_at(keys, at), block_at(places, at)
            block = decided(local, i, j, mine, columns)
            compute = partial(_added, block, q, k, v)
            if local.scores.mask is None:
                return compute(sums)
            return lax.cond(block.is_skipped(sums[0]), lambda s: s, compute, sums)

        return carry, lax.fori_loop(0, num, column, sums)

    return lax.scan(row, None, (jnp.arange(len(q)), q, i, sums))[1]


def forward(layout: Layout, scores: Scores, dtypes: Sequence[Any], ring: Ring, *arrays: Any) -> list[Any]:
    """The output and the log-sum-exp of rows, of one device's part of an attention.

    Args:
      layout: the dimensions of operands and results.
      scores: the softmax's argument.
      dtypes: of the results.
      ring: the devices that split the sequence.
      *arrays: queries, keys, values, and the operands of the score function.
    """
    local = Local(layout, scores, ring, [x.shape for x in arrays[:3]])
    query, key, value = arrays[:3]
    q = local.take("query", query, layout.query)
    k, v = local.take("key", key, layout.key), local.take("value", value, layout.value)
    rows, columns = local.operands(arrays[3:])
    size, kind = local.block, local.accumulator(q.dtype)
    i = ring.positions(ring.place, local.num_queries).reshape(-1, size)
    own = (blocks_of(q, 2, size), row_blocks(rows, size), i)
    num, shape = len(i), (*q.shape[:2], size)
    sums: Any = (
        jnp.full((num, *shape), -jnp.inf, kind),
        jnp.zeros((num, *shape), kind),
        jnp.zeros((num, *shape, v.shape[-1]), kind),
    )

    def seen(step: Any, moving: Any, sums: Any) -> Any:
        j = ring.positions((ring.place - step) % ring.size, local.num_keys)
        return _through(local, own, (*moving, j), sums)

    moving = (k, v, columns)
    if ring.size > 1:

        def around(step: Any, state: Any) -> Any:
            moving, sums = state
            return ring.sent_on(moving), seen(step, moving, sums)

        moving, sums = lax.fori_loop(0, ring.size - 1, around, (moving, sums))
    largest, total, weighted = map(partial(joined, dim=2), seen(ring.size - 1, moving, sums))
    output = local.give("output", weighted / total[..., None], layout.output, dtypes[0])
    statistics = ring.collected((largest + jnp.log(total)).astype(dtypes[1]), 2)
    return [output, laid_out(statistics, layout.statistics, local.rows, local.sizes)]
