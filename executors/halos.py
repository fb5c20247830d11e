"""Halos that the program exchanges by name, under `shard_map`: XLA's partitioner would move more, or does not split the op.

* A grouped convolution runs on shards in any case: the partitioner gathers its batch, and adds up the terms of its kernel's
  gradient over replicas too.
* The gradient of a transposed convolution's kernel: the partitioner moves whole parts.
* The gradient of a pooling whose windows overlap: the partitioner moves several arrays of many rows. Here each device
  scatters the gradients of its own windows, into its rows and its halo; the halo's sums go back to their owners.

Rows travel by a collective-permute in each direction. At the ends, where no neighbour sends any, they are padding. In the
backward phase an exchange waits for a gradient. Otherwise the compiler would share the forward phase's, and keep its rows.
"""

from collections.abc import Sequence
from math import inf, prod
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.search.ir._jax import bind
from autoshard.search.ir.factors.rule import Kind, Rule, Window
from autoshard.search.ir.graph import Op, Phase

Axes = tuple[str, ...]


def axes_of(spec: PartitionSpec, dim: int) -> Axes:
    """The mesh axes that split a dimension."""
    axes = spec[dim] if dim < len(spec) else None
    return () if axes is None else axes if isinstance(axes, tuple) else (axes,)


def borrowed(
    x: jax.Array,
    window: Window,
    axes: Axes,
    mesh: Mesh | AbstractMesh,
    padding: float = 0.0,
    after: jax.Array | None = None,
) -> jax.Array:
    """A device's part of an array with its halo along a window's dimension.

    Args:
      x: the part.
      window: the window.
      axes: the mesh axes that split the dimension.
      mesh: the devices.
      padding: the elements of rows that no device has.
      after: an array for whose first element the exchange waits.
    """
    d, n = window.dim, x.shape[window.dim]
    num_parts, at = prod(mesh.shape[a] for a in axes), lax.axis_index(axes)
    pieces = [x]
    if window.before:
        rows = _waiting(lax.slice_in_dim(x, n - window.before, n, axis=d), after)
        rows = _sent(rows, axes, num_parts, 1)
        pieces.insert(0, _padded(rows, at == 0, padding))
    if window.after:
        rows = _waiting(lax.slice_in_dim(x, 0, window.after, axis=d), after)
        rows = _sent(rows, axes, num_parts, -1)
        pieces.append(_padded(rows, at == num_parts - 1, padding))
    return lax.concatenate(pieces, d)


def returned(x: jax.Array, window: Window, axes: Axes, mesh: Mesh | AbstractMesh) -> jax.Array:
    """A device's part of sums over an array with halos: those for a halo are added to its owner's."""
    d, n = window.dim, x.shape[window.dim]
    num_parts, start, end = prod(mesh.shape[a] for a in axes), window.before, n - window.after
    part = lax.slice_in_dim(x, start, end, axis=d)
    if window.before:
        rows = _sent(lax.slice_in_dim(x, 0, start, axis=d), axes, num_parts, -1)
        part = _added(part, rows, d, end - start - window.before)
    if window.after:
        rows = _sent(lax.slice_in_dim(x, end, n, axis=d), axes, num_parts, 1)
        part = _added(part, rows, d, 0)
    return part


def _waiting(rows: jax.Array, after: jax.Array | None) -> jax.Array:
    if after is None:
        return rows
    return lax.optimization_barrier((rows, lax.slice(after, (0,) * after.ndim, (1,) * after.ndim)))[0]


def _sent(rows: jax.Array, axes: Axes, num_parts: int, step: int) -> jax.Array:
    """The rows of the device so many places before; zeros where there is none."""
    places = ((i, i + step) for i in range(num_parts))
    return lax.ppermute(rows, axes, [(i, j) for i, j in places if 0 <= j < num_parts])


def _padded(rows: jax.Array, is_end: jax.Array, padding: float) -> jax.Array:
    return jnp.where(is_end, jnp.asarray(padding, rows.dtype), rows) if padding else rows


def _added(x: jax.Array, rows: jax.Array, dim: int, start: int) -> jax.Array:
    edges = [(0, 0, 0)] * x.ndim
    edges[dim] = (start, x.shape[dim] - start - rows.shape[dim], 0)
    return x + lax.pad(rows, jnp.zeros((), rows.dtype), edges)


def convolution(
    op: Op,
    rule: Rule,
    shape: Sequence[int],
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    lhs: jax.Array,
    rhs: jax.Array,
) -> jax.Array:
    """A device's part of a convolution: its groups, its rows, and its terms of the sums over what it has only a part of.

    Args:
      op: the convolution.
      rule: its factors.
      shape: the shape of the whole left operand.
      specs: the specs of the operands.
      mesh: the devices.
      lhs: the device's shard of the left operand.
      rhs: the device's shard of the right operand.
    """
    params = {**op.params, **_groups(op.params, shape, lhs)}
    padding, numbers = [*params["padding"]], params["dimension_numbers"]
    for window in rule.windows:
        if axes := axes_of(specs[0], window.dim):
            lhs = borrowed(lhs, window, axes, mesh, after=rhs if op.phase is Phase.BACKWARD else None)
            n = numbers.lhs_spec[2:].index(window.dim)
            padding[n] = _padding(op, rule, window, n, lhs, rhs)
    (result,) = bind(op.primitive, [lhs, rhs], {**params, "padding": tuple(padding)})
    return result


def summed_axes(rule: Rule, specs: Sequence[PartitionSpec]) -> Axes:
    """The mesh axes that split a loop over which an op sums."""
    found = dict[str, None]()
    for dims, spec in zip(rule.operands, specs, strict=True):
        for d, dim in enumerate(dims):
            if dim and rule.factors[dim[0]].kind is Kind.SUM:
                found |= dict.fromkeys(axes_of(spec, d))
    return tuple(found)


def _groups(params: dict[str, Any], shape: Sequence[int], lhs: jax.Array) -> dict[str, int]:
    """The groups that a device has, from the share of the left operand that it has."""
    batch, feature, *_ = params["dimension_numbers"].lhs_spec
    groups = {"batch_group_count": batch, "feature_group_count": feature}
    return {
        key: params[key] * lhs.shape[d] // shape[d] if params[key] > 1 else 1 for key, d in groups.items()
    }


def _padding(op: Op, rule: Rule, window: Window, n: int, lhs: jax.Array, rhs: jax.Array) -> tuple[int, int]:
    """The padding of a device's windows along the n-th spatial dimension, which is split."""
    params, numbers = op.params, op.params["dimension_numbers"]
    taps, d = rhs.shape[numbers.rhs_spec[n + 2]], numbers.out_spec[n + 2]
    results, steps = op.result_values[0].shape[d], rule.results[0][d]
    if window.factor in steps:  # a device has rows of the result
        results = _results(lhs, window, params, n)
    stride, dilation, base_dilation = (
        params[key][n] for key in ("window_strides", "rhs_dilation", "lhs_dilation")
    )
    low = params["padding"][n][0] - window.before * base_dilation
    read = (results - 1) * stride + (taps - 1) * dilation + 1
    return low, read - low - (lhs.shape[window.dim] - 1) * base_dilation - 1


def _results(lhs: jax.Array, window: Window, params: dict[str, Any], n: int) -> int:
    """Rows of the result that lie over a device's rows of the operand."""
    rows = lhs.shape[window.dim] - window.before - window.after
    return rows * params["lhs_dilation"][n] // params["window_strides"][n]


def pooling_gradient(
    op: Op,
    rule: Rule,
    specs: Sequence[PartitionSpec],
    mesh: Mesh | AbstractMesh,
    source: jax.Array,
    operand: jax.Array,
) -> jax.Array:
    """A device's part of the gradient of a pooling by maxima or minima.

    Args:
      op: the gradient.
      rule: its factors.
      specs: the specs of the operands.
      mesh: the devices.
      source: the device's shard of the result's gradient.
      operand: the device's shard of the pooling's operand.
    """
    split = [(w, axes) for w in rule.windows if (axes := axes_of(specs[1], w.dim))]
    padding, never = [*op.params["padding"]], -inf if op.params["select_prim"].name == "ge" else inf
    for window, axes in split:
        operand = borrowed(operand, window, axes, mesh, never)
        padding[window.dim] = (0, 0)
    (result,) = bind(op.primitive, [source, operand], {**op.params, "padding": tuple(padding)})
    for window, axes in reversed(split):
        result = returned(result, window, axes, mesh)
    return result
