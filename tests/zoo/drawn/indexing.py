"""Shapes changed, entries looked up, put elsewhere and sorted."""

from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .dice import Dice
from .layer import Layer, Shape, Weight, distinct, elementwise

# --- shapes


def merged(dice: Dice, shape: Shape) -> Layer | None:
    """Two neighbours become one dimension."""
    if len(shape) < 2:
        return None
    dim = dice.below(len(shape) - 1)
    new = (*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])
    return elementwise(f"reshape {new}", lambda x: x.reshape(new))


def parted(dice: Dice, shape: Shape) -> Layer:
    """One dimension becomes two."""
    dim = dice.below(len(shape))
    outer = dice.pick([n for n in range(1, shape[dim] + 1) if shape[dim] % n == 0])
    new = (*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])
    return elementwise(f"reshape {new}", lambda x: x.reshape(new))


def transposed(dice: Dice, shape: Shape) -> Layer:
    order = dice.order(len(shape))
    return elementwise(f"transpose {order}", lambda x: x.transpose(order))


def padded(dice: Dice, shape: Shape) -> Layer:
    """With zeros or ones outside, some cut off, and zeros in between."""
    widths = [(dice.between(-1, 2), dice.between(-1, 2), dice.pick((0, 0, 0, 1))) for _ in shape]
    filler = dice.pick((0.0, 1.0))
    return elementwise(f"pad {widths}", lambda x: lax.pad(x, jnp.asarray(filler, x.dtype), widths))


def sliced(dice: Dice, shape: Shape) -> Layer:
    dim = dice.below(len(shape))
    start, stop = sorted(dice.order(shape[dim] + 1)[:2])
    stride = dice.pick((1, 1, 2, 3))
    return elementwise(
        f"slice {dim} {start}:{stop}:{stride}", lambda x: lax.slice_in_dim(x, start, stop, stride, dim)
    )


def reversed_(dice: Dice, shape: Shape) -> Layer:
    dims = dice.some(len(shape))
    return elementwise(f"reverse {dims}", lambda x: lax.rev(x, dims))


def rolled(dice: Dice, shape: Shape) -> Layer:
    dim = dice.below(len(shape))
    by = dice.between(1, shape[dim])
    return elementwise(f"roll {dim} by {by}", lambda x: jnp.roll(x, by, dim))


def repeated(dice: Dice, shape: Shape) -> Layer:
    """Along a new dimension or an old one; then no two entries are left alike."""
    dim, times, is_new = dice.below(len(shape)), dice.pick((2, 3, 8)), dice.flip()
    made = (
        [*shape[:dim], times, *shape[dim:]]
        if is_new
        else [*shape[:dim], shape[dim] * times, *shape[dim + 1 :]]
    )
    factor = dice.numbers(tuple(made))

    def apply(x):
        wide = jnp.broadcast_to(jnp.expand_dims(x, dim), made) if is_new else jnp.repeat(x, times, dim)
        return wide * factor.astype(x.dtype)

    return elementwise(f"repeat {dim} x{times}", apply)


def extended(dice: Dice, shape: Shape) -> Layer:
    """Beside a function of itself."""
    dim = dice.below(len(shape))
    return elementwise(f"extend {dim}", lambda x: jnp.concatenate([x, jnp.sin(2 * x)], dim))


def halves(dice: Dice, shape: Shape) -> Layer | None:
    """A gated linear unit."""
    dim = dice.below(len(shape))
    if shape[dim] % 2:
        return None

    def gated(x):
        value, gate = jnp.split(x, 2, dim)
        return value * jax.nn.sigmoid(gate)

    return elementwise(f"halves {dim}", gated)


def thirds(dice: Dice, shape: Shape) -> Layer | None:
    """Parts of unlike sizes, in another order."""
    dim = dice.below(len(shape))
    if shape[dim] < 4:
        return None
    at = list(accumulate((1, dice.between(1, shape[dim] - 2))))
    order = dice.order(3)

    def apply(x):
        parts = jnp.split(x, at, dim)
        return jnp.concatenate([parts[i] * (i + 0.5) for i in order], dim)

    return elementwise(f"thirds {dim} {at}", apply)


# --- lookups


def taken(dice: Dice, shape: Shape) -> Layer:
    """Entries at constant indices, some of them twice."""
    dim = dice.below(len(shape))
    index = dice.integers(shape[dim], dice.pick(((dice.size(),), (2, 4))))
    factor = dice.numbers(index.shape + (1,) * (len(shape) - dim - 1))
    return elementwise(
        f"take {dim} {index.shape}", lambda x: jnp.take(x, index, dim) * factor.astype(x.dtype)
    )


def taken_at_random_places(dice: Dice, shape: Shape) -> Layer | None:
    """Advanced indexing over two dimensions at once."""
    if len(shape) < 2:
        return None
    count = dice.size()
    rows, columns = dice.integers(shape[0], (count,)), dice.integers(shape[1], (count,))
    factor = dice.numbers((count,) + (1,) * (len(shape) - 2))
    return elementwise(f"points {count}", lambda x: x[rows, columns] * factor.astype(x.dtype))


def taken_along(dice: Dice, shape: Shape) -> Layer:
    """A gather in batches, at computed indices."""
    dim = dice.below(len(shape))
    return elementwise(
        f"take along {dim}",
        lambda x: jnp.take_along_axis(x, jnp.argsort(distinct(jnp.sin(3 * x)), dim), dim),
    )


def bucketed(dice: Dice, shape: Shape) -> Layer:
    """A table's rows, at indices made of the values."""
    rows, width = dice.pick((8, 12, 24)), dice.pick((1, 3, 8))

    def apply(weights, key, x):
        index = jnp.clip(jnp.floor(x * 3 + rows / 2), 0, rows - 1).astype(jnp.int32)
        return weights[index] * (1 + x[..., None])

    return Layer(f"table {rows}x{width}", apply, Weight((rows, width)))


def one_hot(dice: Dice, shape: Shape) -> Layer:
    """The same lookup as a product."""
    rows, width = dice.pick((8, 12, 24)), dice.pick((1, 3, 8))

    def apply(weights, key, x):
        index = jnp.clip(x * 3 + rows / 2, 0, rows - 1).astype(jnp.int32)
        return jax.nn.one_hot(index, rows, dtype=x.dtype) @ weights + 0.1 * x[..., None]

    return Layer(f"one-hot {rows}x{width}", apply, Weight((rows, width)))


def dynamically_sliced(dice: Dice, shape: Shape) -> Layer:
    dim = dice.below(len(shape))
    length = dice.between(1, shape[dim])

    def apply(x):
        return lax.dynamic_slice_in_dim(x, jnp.argmax(distinct(x.ravel()[:5])), length, dim)

    return elementwise(f"dynamic slice {dim} {length}", apply)


# --- stores


def dynamically_updated(dice: Dice, shape: Shape) -> Layer:
    """A window, where an entry says, is replaced."""
    window = tuple(dice.between(1, n) for n in shape)

    def apply(x):
        at = jnp.argmax(distinct(x.ravel()[:4]))
        part = jnp.tanh(2 * x[tuple(slice(n) for n in window)])
        return lax.dynamic_update_slice(x, part, [at if d == 0 else 0 for d in range(x.ndim)])

    return elementwise(f"dynamic update {window}", apply)


def segment_sum(dice: Dice, shape: Shape) -> Layer:
    """Rows are added up by constant or computed segments."""
    count, is_computed = dice.pick((3, 8, 12)), dice.flip()
    segments = dice.integers(count, (shape[0],))

    def apply(x):
        index = jnp.argsort(distinct(x.reshape(len(x), -1)[:, 0])) % count if is_computed else segments
        return jax.ops.segment_sum(x, index, count) + 0.1 * x.mean(0)

    return elementwise(f"segments {count}", apply)


STORES = {
    "add": lambda x, at, part: x.at[at].add(0.5 * part),
    "subtract": lambda x, at, part: x.at[at].subtract(0.5 * part),
    "set": lambda x, at, part: x.at[at].set(part),
    "max": lambda x, at, part: distinct(x).at[at].max(part),
    "multiply": lambda x, at, part: x.at[at].multiply(1 + 0.1 * jnp.tanh(part), unique_indices=True),
}


def stored(dice: Dice, shape: Shape) -> Layer:
    """A scatter along one dimension, no place twice."""
    name, dim = dice.pick(list(STORES)), dice.below(len(shape))
    rows = np.array(dice.order(shape[dim])[: dice.between(1, shape[dim])], np.int32)
    at = (*[slice(None)] * dim, rows)
    return elementwise(f"scatter {name} {dim} {len(rows)}", lambda x: STORES[name](x, at, jnp.sin(2 * x[at])))


# --- orders


def sorted_(dice: Dice, shape: Shape) -> Layer:
    dim = dice.below(len(shape))
    return elementwise(f"sort {dim}", lambda x: jnp.sort(distinct(x), dim))


def sorted_by_key(dice: Dice, shape: Shape) -> Layer:
    """Two arrays in the order of one of them."""
    dim = dice.below(len(shape))
    return elementwise(
        f"sort by key {dim}", lambda x: lax.sort((distinct(jnp.sin(3 * x)), x), dimension=dim, num_keys=1)[1]
    )


def top_k(dice: Dice, shape: Shape) -> Layer:
    count = dice.between(1, min(shape[-1], 4))

    def apply(x):
        values, places = lax.top_k(distinct(x), count)
        return values * (1 + 0.1 * places)

    return elementwise(f"top {count}", apply)


def median(dice: Dice, shape: Shape) -> Layer:
    dim = dice.below(len(shape))
    return elementwise(f"median {dim}", lambda x: x - 0.5 * jnp.median(distinct(x), dim, keepdims=True))


INDEXING = (
    merged,
    parted,
    transposed,
    padded,
    sliced,
    reversed_,
    rolled,
    repeated,
    extended,
    halves,
    thirds,
    taken,
    taken_at_random_places,
    taken_along,
    bucketed,
    one_hot,
    dynamically_sliced,
    dynamically_updated,
    segment_sum,
    stored,
    stored,
    sorted_,
    sorted_by_key,
    top_k,
    median,
)
