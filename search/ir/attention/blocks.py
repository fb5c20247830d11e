"""One device's part of an attention, cut into blocks of queries and keys."""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.search.ir.attention.layout import (
    CHANNEL,
    KEY,
    QUERY,
    VALUE_CHANNEL,
    Dims,
    Label,
    Layout,
    canonical,
    laid_out,
)
from autoshard.search.ir.attention.ring import Ring
from autoshard.search.ir.attention.scores import Scores

BLOCK_ELEMENTS = 1 << 25
"""Most scores in a block: 128 MiB in float32. Source: a product of 1,024 rows and columns for each of 32 heads, which fills
an H100."""

MAX_BLOCK, MIN_BLOCK = 2048, 16
"""Bounds on the rows and columns of a block. Source: powers of two; `BLOCK_ELEMENTS` decides between them."""

UNDERFLOW = 800.0
"""Distance from a row's log-sum-exp at which a masked score's probability is zero. Source: exp(-746) is zero in float64, and
exp(-104) in float32."""


def block_size(num_batches: int, length: int) -> int:
    """Rows, and columns, of a block: a power of two, or the whole length if that is not divisible."""
    size = MAX_BLOCK
    while size > MIN_BLOCK and num_batches * size * size > BLOCK_ELEMENTS:
        size //= 2
    while size >= MIN_BLOCK:
        if length % size == 0:
            return size
        size //= 2
    return length


class Local:
    """One device's part of an attention, in canonical form: queries [b, g, i, d], keys [b, j, d], values [b, j, e]."""

    def __init__(self, layout: Layout, scores: Scores, ring: Ring, shapes: Sequence[Sequence[int]]) -> None:
        self.layout, self.scores, self.ring = layout, scores, ring
        self.sizes = layout.sizes(*shapes)
        batch, group = layout.batch, layout.group
        self.rows: tuple[Sequence[Label], ...] = (batch, group, (QUERY,))
        self.orders = {
            "query": (*self.rows, (CHANNEL,)),
            "key": (batch, (KEY,), (CHANNEL,)),
            "value": (batch, (KEY,), (VALUE_CHANNEL,)),
            "output": (*self.rows, (VALUE_CHANNEL,)),
        }
        num_batches = prod(self.sizes[a] for a in (*batch, *group))
        self.num_queries, self.num_keys = self.sizes[QUERY], self.sizes[KEY]
        self.block = block_size(num_batches, self.num_queries // (2 if ring.is_zigzag else 1))
        self.key_block = block_size(num_batches, self.num_keys // (2 if ring.is_zigzag else 1))

    @property
    def num_key_blocks(self) -> int:
        """Number of blocks of keys."""
        return self.num_keys // self.key_block

    def key_blocks(self, k: Any, v: Any, columns: dict[int, Any]) -> tuple[Any, Any, dict[int, Any]]:
        """Keys, values and operands of columns in blocks of keys, the blocks first."""
        size = self.key_block
        return (
            blocks_of(k, 1, size),
            blocks_of(v, 1, size),
            {n: blocks_of(x, 3, size) for n, x in columns.items()},
        )

    def take(self, kind: str, x: Any, dims: Dims) -> Any:
        """An array in canonical form, dealt out."""
        order = self.orders[kind]
        at = next(n for n, dim in enumerate(order) if tuple(dim) in ((QUERY,), (KEY,)))
        return self.ring.dealt(canonical(x, dims, order, self.sizes), at)

    def give(self, kind: str, x: Any, dims: Dims, dtype: Any) -> Any:
        """An array in the layout and dtype of a result."""
        order = self.orders[kind]
        at = next(n for n, dim in enumerate(order) if tuple(dim) in ((QUERY,), (KEY,)))
        return laid_out(self.ring.collected(x.astype(dtype), at), dims, order, self.sizes)

    def operands(self, arrays: Sequence[Any]) -> tuple[dict[int, Any], dict[int, Any]]:
        """The score function's operands: those of rows [b, g, i, 1], and those of columns [b, 1, 1, j], by number."""
        rows, columns = dict[int, Any](), dict[int, Any]()
        for n, (x, dims) in enumerate(zip(arrays, self.layout.operands, strict=True)):
            flat = {a for dim in dims for a in dim}
            batch = [a for a in self.layout.batch if a in flat]
            order = (batch, [a for a in self.layout.group if a in flat], [QUERY if KEY not in flat else KEY])
            x = self._over_batches(canonical(x, dims, order, self.sizes), batch)
            is_split = QUERY in flat or KEY in flat
            x = self.ring.dealt(x, 2) if is_split else x
            if KEY in flat:
                columns[n] = x[:, :, None, :]
            else:
                rows[n] = x[..., None]
        return rows, columns

    def _over_batches(self, x: Any, held: Sequence[Label]) -> Any:
        """An operand of some batches, spread over all of them; of none, it stays as it is."""
        if not held or len(held) == len(self.layout.batch):
            return x
        shape = [self.sizes[a] if a in held else 1 for a in self.layout.batch]
        whole = [self.sizes[a] for a in self.layout.batch]
        spread = jnp.broadcast_to(x.reshape(*shape, *x.shape[1:]), (*whole, *x.shape[1:]))
        return spread.reshape(prod(whole), *x.shape[1:])

    def accumulator(self, dtype: Any) -> Any:
        """The dtype of sums."""
        return jnp.promote_types(dtype, jnp.float32)


def blocks_of(x: Any, dim: int, size: int) -> Any:
    """An array cut along a dimension, the blocks first."""
    cut = x.reshape(*x.shape[:dim], x.shape[dim] // size, size, *x.shape[dim + 1 :])
    return jnp.moveaxis(cut, dim, 0)


def joined(x: Any, dim: int) -> Any:
    """The array of which these are the blocks."""
    x = jnp.moveaxis(x, 0, dim)
    return x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def row_blocks(rows: Mapping[int, Any], size: int) -> dict[int, Any]:
    """Row operands by block; one that is equal for all rows goes to each block."""
    return {n: blocks_of(x, 2, size) if x.shape[2] > 1 else x[None] for n, x in rows.items()}


def block_at(blocks: Any, n: Any) -> Any:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, n if x.shape[0] > 1 else 0, 0, keepdims=False), blocks
    )


@dataclass(frozen=True)
class Block:
    """The positions and masks of a block, by which its scores follow from queries and keys."""

    scores: Scores
    positions: Mapping[Label, Any]
    operands: Sequence[Any]

    def values(self, score: Any) -> Any:
        return self.scores.values(score.astype(self.scores.dtype), self.positions, self.operands)

    def is_skipped(self, row_bounds: Any) -> Any:
        """Whether every probability of the block is exactly zero: it is masked, and the rows know scores that outweigh the
        mask's number."""
        mask = self.scores.mask
        assert mask is not None, "there is a mask"
        hidden = self.scores.is_masked(self.positions, self.operands)
        return jnp.all(hidden) & jnp.all(row_bounds > mask.fill + UNDERFLOW)


def decided(local: Local, i: Any, j: Any, rows: Any, columns: Any) -> Block:
    positions = {QUERY: i[None, None, :, None], KEY: j[None, None, None, :]}
    found = {**rows, **columns}
    return Block(local.scores, positions, [found[n] for n in range(len(found))])


def scored(q: Any, k: Any, dtype: Any) -> Any:
    return jnp.einsum("bgid,bjd->bgij", q, k, preferred_element_type=dtype)
