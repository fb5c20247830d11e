"""Ops that each device applies to its own shards, under `shard_map`: XLA's partitioner would not split them as planned.

* `top_k` it gathers if it is split over some axes of the mesh and not over others;
* a Pallas kernel is a black box to it: it gathers what the kernel reads. Under `vmap` the kernel runs once for each batch,
  so a device runs it for its own: a smaller grid over smaller arrays;
* of `custom_partitioning` it asks Python, while it compiles, what a device computes. The process that compiles may be
  another one (`verify`), so Python is asked here;
* a product whose terms are summed up in steps that the partitioner would join: each device computes its terms, and the
  reductions are named;
* a product or a sum for whose terms a barrier waits: they are one array, beside their sum (`search.plan.waited_terms`);
* a look-up in a table whose rows are split: each device serves the indices that fall in its part (`executors.look_up`), and
  the reductions are named.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.executors.look_up import looked_up
from autoshard.search.ir._jax import bind
from autoshard.search.ir._jax_kernels import pallas_on_shards, partitioned
from autoshard.search.ir.graph import Op, Value
from autoshard.search.ir.spec import PARTIAL, WHOLE, Spec, partition_spec
from autoshard.search.plan.named_sums import LOOK_UP

Specs = Sequence[PartitionSpec]

Reduction = tuple[tuple[str, ...], int]
"""Over which axes terms are summed up, and the dimension that is scattered over them; `WHOLE` for none."""


def reductions(specs: Sequence[Spec], axis_names: Sequence[str]) -> list[Reduction]:
    """What takes a value from each spec to the next, as long as terms of it are left to be added.

    Example:
      >>> reductions([(PARTIAL, PARTIAL, 0), (PARTIAL, 1, 0), (WHOLE, 1, 0)], ("replica", "data", "model"))
      [(('data',), 1), (('replica',), -1)]
    """
    found: list[Reduction] = []
    for before, after in pairwise(specs):
        axes = [a for a, (d, e) in enumerate(zip(before, after, strict=True)) if d == PARTIAL != e]
        found.append((tuple(axis_names[a] for a in axes), after[axes[0]]))
    return found


def on_shards(
    op: Op,
    inputs: Sequence[Value],
    operands: Sequence[Any],
    specs: tuple[Specs, Specs],
    sums: Sequence[Sequence[Reduction]],
    mesh: Mesh | AbstractMesh,
) -> list[Any]:
    """Applies an op to whole arrays, shard by shard.

    Args:
      op: one that works along dimensions that are whole, or that has a form for shards.
      inputs: what it reads, as values.
      operands: the arrays.
      specs: of the operands and of the results; they split evenly.
      sums: per result, how the devices' terms are summed up; nothing where they have none.
      mesh: the devices.
    """
    function, in_specs, out_specs = _on_device(op, inputs, *specs, mesh)

    def summed(*shards: Any) -> tuple[Any, ...]:
        return tuple(reduce(_reduced, steps, x) for x, steps in zip(function(*shards), sums, strict=True))

    mapped = jax.shard_map(
        summed, mesh=mesh, in_specs=tuple(in_specs), out_specs=tuple(out_specs), check_vma=False
    )
    return list(mapped(*operands))


def _reduced(x: jax.Array, reduction: Reduction) -> jax.Array:
    axes, dim = reduction
    if dim == WHOLE:
        return jax.lax.psum(x, axes)
    return jax.lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def _on_device(
    op: Op, inputs: Sequence[Value], in_specs: Specs, out_specs: Specs, mesh: Mesh | AbstractMesh
) -> tuple[Callable[..., Any], Specs, Specs]:
    """What one device computes, and how operands and results must lie for it."""
    if op.name == "custom_partitioning":
        wholes = zip(inputs, in_specs, strict=True), zip(op.result_values, out_specs, strict=True)
        return partitioned(op.params, mesh, *wholes)
    if op.name == LOOK_UP:
        return partial(looked_up, op, in_specs[0], mesh), in_specs, out_specs
    if op.name == "pallas_call":
        results = zip(op.result_values, out_specs, strict=True)
        local = [NamedSharding(mesh, spec).shard_shape(value.shape) for value, spec in results]
        return partial(_kernel, op, local), in_specs, out_specs
    return partial(_bound, op, op.params), in_specs, out_specs


def _kernel(op: Op, out_shapes: Sequence[tuple[int, ...]], *shards: jax.Array) -> tuple[Any, ...]:
    return _bound(op, pallas_on_shards(op.params, [x.shape for x in shards], out_shapes), *shards)


def _bound(op: Op, params: dict[str, Any], *shards: jax.Array) -> tuple[Any, ...]:
    return tuple(bind(op.primitive, list(shards), params))


def terms_one_after_another(spec: Spec, axis_names: Sequence[str]) -> PartitionSpec:
    """How devices' terms lie in one array, one after another along the first dimension.

    Example:
      >>> terms_one_after_another((PARTIAL, 0, 1), ("replica", "data", "model"))
      PartitionSpec(('replica', 'data'), 'model')
    """
    first, *others = partition_spec(spec, axis_names) or (None,)
    axes = tuple(a for d, a in zip(spec, axis_names, strict=True) if d == PARTIAL)
    within = first if isinstance(first, tuple) else (first,) * (first is not None)
    return PartitionSpec((*axes, *within), *others)


def sum_of_terms(terms: jax.Array, shape: Sequence[int]) -> jax.Array:
    """What they add up to."""
    return jax.lax.reduce_sum(terms.reshape(-1, *shape), axes=(0,))
