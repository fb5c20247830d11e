"""Look-ups in arrays that rest in the host's memory, and updates of their rows: the rows travel, not the arrays.

A GPU reads and writes the host's pinned memory as its own, only slower. So a kernel on the device may gather rows from an
array there, or scatter rows into it, in place. JAX asks that all operands of an op be in one memory: the indices go to the
host first, and so do new rows; looked-up rows come back.

A look-up may fill in a number for an index outside of the array. Then the host's rows are bounded, and a mask on the device
fills it in.

This serves a phase in which no other op reads the array. A phase that reads it whole fetches it (`search.memory.fetches`).
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Phase


def by_rows(
    graph: Graph, on_host: Sequence[int], new_state: Mapping[int, Atom]
) -> frozenset[tuple[int, Phase]]:
    """The arrays in the host's memory of which a phase reads and writes rows only, each with that phase.

    Args:
      graph: a step's.
      on_host: the inputs that rest in the host's memory.
      new_state: by input, the output that replaces it in the next step.
    """
    wanted, found, whole = set(on_host), set[tuple[int, Phase]](), set[tuple[int, Phase]]()
    read = {v for op in graph.ops for v in op.operands}
    for op in graph.ops:
        for n, v in enumerate(op.inputs):
            if isinstance(v, int) and v in wanted:
                is_served = n == 0 and is_of_rows(op) and _stays(op, v, new_state, read)
                (found if is_served else whole).add((v, op.phase))
    return frozenset(found - whole)


def is_of_rows(op: Op) -> bool:
    """True if an op looks rows up in its first operand, or replaces rows of it."""
    if op.name not in ("gather", "scatter"):
        return False
    if is_filled(op) and not _jax.is_inexact(op.result_values[0].dtype):
        return False
    numbers = op.params["dimension_numbers"]
    chosen = numbers.start_index_map if op.name == "gather" else numbers.scatter_dims_to_operand_dims
    absent = numbers.collapsed_slice_dims if op.name == "gather" else numbers.inserted_window_dims
    return tuple(chosen) == tuple(absent) == (0,)


def is_filled(op: Op) -> bool:
    """True if a look-up fills in a number for indices outside of the array."""
    return op.name == "gather" and op.params["mode"] is lax.GatherScatterMode.FILL_OR_DROP


def bounded(op: Op) -> dict[str, Any]:
    """The parameters of a look-up that fills in nothing."""
    return {**op.params, "mode": lax.GatherScatterMode.CLIP, "fill_value": None}


def filled(op: Op, num_rows: int, indices: jax.Array, rows: jax.Array) -> jax.Array:
    """The result of a look-up that fills in a number, from its bounded rows."""
    number = op.params["fill_value"]
    inside = ((indices >= 0) & (indices < num_rows))[..., 0]
    at = jnp.expand_dims(inside, op.params["dimension_numbers"].offset_dims)
    return jnp.where(at, rows, jnp.asarray(jnp.nan if number is None else number, rows.dtype))


def _stays(op: Op, v: int, new_state: Mapping[int, Atom], read: set[int]) -> bool:
    """True if an op does not make another array of this size, but at most writes over it."""
    (out,) = op.outputs
    return op.name == "gather" or (new_state.get(v) == out and out not in read)
