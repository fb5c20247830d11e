"""A look-up in a table of which each device has some rows: it serves the indices that fall in its part.

An index is owned by the device in whose rows it falls; one that lies before all rows by the first, one behind them by the
last. So what the op says of indices that point outside (to clip them, to fill in) holds as on one device. Indices are
counted from where a device's rows begin, and what a device does not own counts nothing, so that the devices' results add up.
"""

from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.search.ir._jax import bind
from autoshard.search.ir.graph import Op


def looked_up(
    op: Op, table_spec: PartitionSpec, mesh: Mesh | AbstractMesh, table: jax.Array, indices: jax.Array
) -> tuple[jax.Array]:
    """A device's terms of a `gather`, inside `jax.shard_map`.

    Args:
      op: the look-up. Dimensions of which its slices take one element may be split, and those of which they take all.
      table_spec: how the table is split.
      mesh: the devices.
      table: a device's part.
      indices: of shape [..., indexed dimensions], counted from the first row of the whole table.
    """
    numbers, sizes = op.params["dimension_numbers"], list(op.params["slice_sizes"])
    owned = jnp.ones(indices.shape[:-1], bool)
    for d, axes in enumerate(table_spec):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        num_parts, size = prod(mesh.shape[name] for name in names), table.shape[d]
        if num_parts > 1 and d in numbers.start_index_map and sizes[d] == 1:
            component, part = numbers.start_index_map.index(d), jax.lax.axis_index(names)
            own = jnp.clip(indices[..., component] // size, 0, num_parts - 1) == part
            owned &= own
            indices = indices.at[..., component].add(-(part * size).astype(indices.dtype))
        elif sizes[d] == num_parts * size:
            sizes[d] = size
    (found,) = bind(op.primitive, [table, indices], {**op.params, "slice_sizes": tuple(sizes)})
    return (jnp.where(jnp.expand_dims(owned, numbers.offset_dims), found, jnp.zeros((), found.dtype)),)
