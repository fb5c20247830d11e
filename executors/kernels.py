"""Ops that each device applies to its own shards, under `shard_map`: XLA's partitioner would not split them as planned.

* `top_k`: the partitioner gathers the operand if it is split over some axes of the mesh and not over others.
* A Pallas kernel: it is a black box to the partitioner, which gathers the kernel's operands. Under `vmap` the kernel runs
  once for each batch, so a device runs it for its own batches: a smaller grid over smaller arrays.
* `custom_partitioning`: the partitioner asks Python, while it compiles, for the computation of a device. Another process
  may compile the program (`verify`), so this module asks Python.
* A grouped convolution: the partitioner gathers the batch, and adds up the terms of the kernel's gradient over replicas
  too. Here each device computes its groups of its examples, or its terms of them, which are then added up.
* Ops whose halos the partitioner does not exchange well (`executors.halos`).
* A product whose terms are reduced in steps that the partitioner would join: each device computes its terms, and explicit
  collectives reduce them.
* A product or a sum whose terms a barrier holds back: the terms are one array, beside their sum
  (`search.plan.barrier_terms`).
* Blockwise attention: the devices that split its sequence are a ring, through which keys and values travel.
* A lookup in a table whose rows are split: each device serves the indices in its part (`executors.look_up`), and explicit
  collectives reduce the terms.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from itertools import pairwise
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.executors.halos import axes_of, convolution, pooling_gradient, summed_axes
from autoshard.executors.look_up import looked_up
from autoshard.search.ir._jax import bind
from autoshard.search.ir._jax_kernels import pallas_on_shards, partitioned
from autoshard.search.ir.attention.layout import QUERY
from autoshard.search.ir.attention.op import BACKWARD, FORWARD, applied
from autoshard.search.ir.attention.ring import Ring, ring_over
from autoshard.search.ir.factors import Rule, rule_for
from autoshard.search.ir.factors.reduction import POOLING_GRADIENT
from autoshard.search.ir.graph import Op, Value
from autoshard.search.ir.spec import PARTIAL, WHOLE, Spec, partition_spec
from autoshard.search.plan.named_sums import LOOK_UP

CONVOLUTION = "conv_general_dilated"

Specs = Sequence[PartitionSpec]

Reduction = tuple[tuple[str, ...], int]
"""The mesh axes over which terms are summed, and the dimension that is scattered over them; `WHOLE` for none."""


def reductions(specs: Sequence[Spec], axis_names: Sequence[str]) -> list[Reduction]:
    """The reductions that take a value from each spec to the next; every step sums terms over at least one axis.

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
      op: an op that works along whole dimensions, or that has a form for shards.
      inputs: its operands, as values.
      operands: its operands, as arrays.
      specs: the specs of the operands and of the results; they split evenly.
      sums: per result, the reductions of the devices' terms; empty where there are no terms.
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
    """The computation of one device, and the specs of its operands and results."""
    if op.name == "custom_partitioning":
        wholes = zip(inputs, in_specs, strict=True), zip(op.result_values, out_specs, strict=True)
        return partitioned(op.params, mesh, *wholes)
    if op.name in (FORWARD, BACKWARD):
        ring = _ring(op, inputs[0].shape, in_specs[0], mesh)
        return partial(_attention, op, ring, in_specs[0]), in_specs, out_specs
    if op.name == LOOK_UP:
        return partial(looked_up, op, in_specs[0], mesh), in_specs, out_specs
    if op.name == "pallas_call":
        results = zip(op.result_values, out_specs, strict=True)
        local = [NamedSharding(mesh, spec).shard_shape(value.shape) for value, spec in results]
        return partial(_kernel, op, local), in_specs, out_specs
    if op.name in (CONVOLUTION, POOLING_GRADIENT):
        rule = rule_for(op.name, inputs, op.result_values, op.params)
        if op.name == CONVOLUTION:
            return partial(_convolution, op, rule, inputs[0].shape, in_specs, mesh), in_specs, out_specs
        return partial(_pooling_gradient, op, rule, in_specs, mesh), in_specs, out_specs
    return partial(_bound, op, op.params), in_specs, out_specs


def _convolution(
    op: Op, rule: Rule, shape: Sequence[int], specs: Specs, mesh: Mesh | AbstractMesh, *shards: jax.Array
) -> tuple[jax.Array]:
    """A device's part of a convolution. The terms of a grouped one are summed; those of others are the op's result."""
    terms, axes = convolution(op, rule, shape, specs, mesh, *shards), summed_axes(rule, specs)
    return (jax.lax.psum(terms, axes) if axes and rule.is_missplit else terms,)


def _pooling_gradient(
    op: Op, rule: Rule, specs: Specs, mesh: Mesh | AbstractMesh, *shards: jax.Array
) -> tuple[jax.Array]:
    return (pooling_gradient(op, rule, specs, mesh, *shards),)


def _ring(op: Op, shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Ring:
    """The devices that split the sequence of an attention whose queries have this shape and spec."""
    at = next(d for d, labels in enumerate(op.params["layout"].query) if QUERY in labels)
    names = axes_of(spec, at)
    return ring_over(op.params["scores"], names, prod(mesh.shape[name] for name in names), shape[at])


def _attention(op: Op, ring: Ring, spec: PartitionSpec, *shards: jax.Array) -> tuple[Any, ...]:
    """A device's results. The gradients of keys and values are summed over devices with other query heads.

    Args:
      op: the attention, or its gradient.
      ring: the devices that split the sequence.
      spec: the spec of the queries.
      *shards: the device's shards of the operands.
    """
    results = applied(op.name, op.params, ring, *shards)
    layout = op.params["layout"]
    axes = tuple(
        a for d, labels in enumerate(layout.query) if labels[:1] in layout.groups for a in axes_of(spec, d)
    )
    if op.name == FORWARD or not axes:
        return tuple(results)
    query, *others = results
    return (query, *(jax.lax.psum(x, axes) for x in others))


def _kernel(op: Op, out_shapes: Sequence[tuple[int, ...]], *shards: jax.Array) -> tuple[Any, ...]:
    return _bound(op, pallas_on_shards(op.params, [x.shape for x in shards], out_shapes), *shards)


def _bound(op: Op, params: dict[str, Any], *shards: jax.Array) -> tuple[Any, ...]:
    return tuple(bind(op.primitive, list(shards), params))


def terms_one_after_another(spec: Spec, axis_names: Sequence[str]) -> PartitionSpec:
    """The spec of an array that holds devices' terms one after another along its first dimension.

    Example:
      >>> terms_one_after_another((PARTIAL, 0, 1), ("replica", "data", "model"))
      PartitionSpec(('replica', 'data'), 'model')
    """
    first, *others = partition_spec(spec, axis_names) or (None,)
    axes = tuple(a for d, a in zip(spec, axis_names, strict=True) if d == PARTIAL)
    within = first if isinstance(first, tuple) else (first,) * (first is not None)
    return PartitionSpec((*axes, *within), *others)


def sum_of_terms(terms: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The sum of the terms that an array holds one after another along its first dimension."""
    return jax.lax.reduce_sum(terms.reshape(-1, *shape), axes=(0,))
