"""Constant arrays as source: short ones number by number, long ones by the rule that makes them, or from a file beside.

Most long constants of a step are positions, masks and numbers repeated. So an array is looked at as a reader would: as one
number, as an array that is repeated along some dimensions, as numbers in even steps, as a triangle of two numbers. Other
long arrays, such as tables of sines, go into an `.npz` beside the file, under a name. No array is approximated: a rule
counts if it makes the same bits.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from autoshard.ejection import source

MAX_PRINTED = 64
"""Largest number of elements of an array that is printed number by number. Source: a choice of ours; a reader skips longer
ones."""

MAX_EXACT = 2**24
"""Whole numbers up to here are exact in float32."""


def constant(content: Any) -> str | None:
    """The source of an array; None if it is long and follows no rule.

    Raises:
      UnwritableError: it has an extended dtype.

    Example:
      >>> constant(np.arange(0, 200, 2, np.int32))
      'jnp.arange(0, 200, 2, dtype=jnp.int32)'
    """
    source.dtype(content.dtype)
    x = np.asarray(content)
    return printed(x) if x.size <= MAX_PRINTED else next(_ruled(x), None)


def stored(content: Any, name: str) -> tuple[str, np.ndarray]:
    """The source of an array that an `.npz` holds under this name, and what that holds: types that NumPy's files do not know
    go in as whole numbers of their size."""
    x = np.asarray(content)
    there = f"CONSTANTS[{source.quoted(name)}]"
    if x.dtype.isbuiltin == 1:  # not registered by ml_dtypes
        return f"jnp.asarray({there})", x
    return f"jnp.asarray({there}.view({source.dtype(x.dtype)}))", x.view(f"uint{8 * x.dtype.itemsize}")


def printed(x: Any) -> str:
    """The source of an array, number by number.

    Raises:
      UnwritableError: it has an extended dtype.
    """
    numbers = source.numbers(repr(x.tolist()))
    return (
        f"jnp.array({numbers}, {source.dtype(x.dtype)})" if x.shape else f"{source.dtype(x.dtype)}({numbers})"
    )


def _ruled(x: np.ndarray) -> Iterator[str]:
    """The rules that make a long array, the simplest first."""
    if _is_same(x, np.broadcast_to(x.flat[0], x.shape)):
        yield f"jnp.full({source.text(x.shape)}, {printed(x.flat[0])})"
        return
    yield from _repeated(x)
    yield from _in_steps(x)
    yield from _triangle(x)


def _repeated(x: np.ndarray) -> Iterator[str]:
    """An array that is the same along some dimensions."""
    first = x[tuple(slice(0, 1) if _is_same(x, x.take([0], d)) else slice(None) for d in range(x.ndim))]
    if first.size < x.size and (inner := constant(np.ascontiguousarray(first))):
        yield f"jnp.broadcast_to({inner}, {source.text(x.shape)})"


def _in_steps(x: np.ndarray) -> Iterator[str]:
    """Whole numbers in even steps, in the order in which an array lies."""
    flat = x.reshape(-1)
    if x.dtype.kind not in "iuf" and str(x.dtype) != "bfloat16":
        return
    start, step = (
        int(n) if np.isfinite(n) and n == int(n) else None for n in (flat[0], float(flat[1]) - float(flat[0]))
    )
    if (
        start is None
        or step is None
        or step == 0
        or max(abs(start), abs(start + step * flat.size)) > MAX_EXACT
    ):
        return
    stop = start + step * flat.size
    if _is_same(flat, np.arange(start, stop, step).astype(x.dtype)):
        counted = f"jnp.arange({start}, {stop}, {step}, dtype=jnp.int32)"
        if x.dtype != np.int32:
            counted = f"{counted}.astype({source.dtype(x.dtype)})"
        yield counted if x.ndim == 1 else f"{counted}.reshape({source.text(x.shape)})"


def _triangle(x: np.ndarray) -> Iterator[str]:
    """Two numbers on either side of a diagonal, in each matrix of a stack."""
    if x.ndim < 2:
        return
    *around, rows, columns = x.shape
    low, high = x.reshape(-1, rows, columns)[0, -1, 0], x.reshape(-1, rows, columns)[0, 0, -1]
    first_row = _alike(x.reshape(-1, rows, columns)[0, 0], low)
    mask = np.tri(rows, columns, int(first_row.sum()) - 1, dtype=bool)
    if not _is_same(x, np.broadcast_to(np.where(mask, low, high).astype(x.dtype), x.shape)):
        return
    offset = int(first_row.sum()) - 1
    triangle = f"jnp.tri({rows}, {columns}, {offset}, dtype=bool)"
    if x.dtype == np.bool_:
        triangle = triangle if low else f"~{triangle}"
    else:
        triangle = f"jnp.where({triangle}, {printed(low)}, {printed(high)})"
    yield (
        f"jnp.broadcast_to({triangle}, {source.text(x.shape)})"
        if math.prod(around) > 1
        else (f"{triangle}.reshape({source.text(x.shape)})" if around else triangle)
    )


def _alike(x: np.ndarray, value: Any) -> np.ndarray:
    """Where an array has a value, to the bit."""
    return (x == value) | ((x != x) & (value != value))


def _is_same(x: np.ndarray, other: np.ndarray) -> bool:
    """Whether two arrays of a type have the same bits, where they meet: a zero's sign counts."""
    there = np.broadcast_to(other, x.shape)
    return np.ascontiguousarray(x).tobytes() == np.ascontiguousarray(there).tobytes()
