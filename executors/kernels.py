"""Ops that each device applies to its own shards, under `shard_map`: XLA's partitioner would not split them as planned.

* `top_k` it gathers if it is split over some axes of the mesh and not over others;
* a Pallas kernel is a black box to it: it gathers what the kernel reads. Under `vmap` the kernel runs once for each batch,
  so a device runs it for its own: a smaller grid over smaller arrays;
* of `custom_partitioning` it asks Python, while it compiles, what a device computes. The process that compiles may be
  another one (`verify`), so Python is asked here.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from search.ir._jax import bind
from search.ir._jax_kernels import pallas_on_shards, partitioned
from search.ir.graph import Op, Value

Specs = Sequence[PartitionSpec]


def on_shards(
    op: Op,
    inputs: Sequence[Value],
    operands: Sequence[Any],
    specs: tuple[Specs, Specs],
    mesh: Mesh | AbstractMesh,
) -> list[Any]:
    """Applies an op to whole arrays, shard by shard.

    Args:
      op: one that works along dimensions that are whole, or that has a form for shards.
      inputs: what it reads, as values.
      operands: the arrays.
      specs: of the operands and of the results; they split evenly.
      mesh: the devices.
    """
    function, in_specs, out_specs = _on_device(op, inputs, *specs, mesh)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=tuple(in_specs), out_specs=tuple(out_specs), check_vma=False
    )
    return list(mapped(*operands))


def _on_device(
    op: Op, inputs: Sequence[Value], in_specs: Specs, out_specs: Specs, mesh: Mesh | AbstractMesh
) -> tuple[Callable[..., Any], Specs, Specs]:
    """What one device computes, and how operands and results must lie for it."""
    if op.name == "custom_partitioning":
        wholes = zip(inputs, in_specs, strict=True), zip(op.result_values, out_specs, strict=True)
        return partitioned(op.params, mesh, *wholes)
    local = [
        NamedSharding(mesh, spec).shard_shape(value.shape)
        for value, spec in zip(op.result_values, out_specs, strict=True)
    ]
    return partial(_bound, op, local), in_specs, out_specs


def _bound(op: Op, out_shapes: Sequence[tuple[int, ...]], *shards: jax.Array) -> tuple[Any, ...]:
    params = op.params
    if op.name == "pallas_call":
        params = pallas_on_shards(params, [x.shape for x in shards], out_shapes)
    return tuple(bind(op.primitive, list(shards), params))
