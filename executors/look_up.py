"""Lookups (`gather`) in a table whose rows are split over devices: each device serves the indices in its part.

The device whose rows contain an index owns it. An index before all rows belongs to the first device, an index behind all
rows to the last. So the op's mode for indices out of bounds (clip, fill) holds as on one device. Each device counts
indices from its first row and returns zeros for those that it does not own, so that the devices' results add up.
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
      op: the lookup. Its slices take one element, or all elements, of a dimension that is split.
      table_spec: the table's spec.
      mesh: the devices.
      table: the device's shard.
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
