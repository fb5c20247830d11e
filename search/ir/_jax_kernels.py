"""Hand-written kernels, `custom_partitioning` and `pallas_call`: their sharding rules and grids; cuDNN's attention, traced
for a GPU that need not be here; and the expansion of ops that the compiler has no kernel for.

This module relies on these internals of JAX, all present in JAX 0.11 and 0.12:

* a `custom_partitioning` equation holds the arguments of `def_partition`, and `jax._src` converts its sharding rule to
  Shardy's attribute, which lists the factors of each dimension;
* a primitive may be lowered by `mlir.lower_fun` of a function, which the lowering's closure holds; other lowerings may be
  any callables, without a name;
* a `pallas_call` equation holds its grid and blocks in `grid_mapping`. `vmap` adds a dimension to the grid and to the
  arrays that the kernel does not see: it is listed in `vmapped_dims`, squeezed out of the blocks, and the index maps pass
  its index through;
* while JAX traces cuDNN's attention, it asks three functions of one module for the versions of cuDNN and of this machine's
  GPU. It finds them by name in this module.
"""

# JAX and MLIR type these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportPrivateUsage=false

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.custom_partitioning_sharding_rule import sdy_sharding_rule_to_mlir, str_to_sdy_sharding_rule
from jax._src.interpreters import mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy

from autoshard.cost_model.errors import InputError
from autoshard.search.ir._jax import open_jaxpr


def as_partitioning(eqn: Any) -> Any:
    """The `custom_partitioning` that an equation is lowered to, as a jaxpr; None for other lowerings.

    Vendors give their own primitives a sharding rule in this way.
    """
    jaxpr = _as_lowered(eqn)
    eqns = () if jaxpr is None else open_jaxpr(jaxpr).eqns
    return jaxpr if any(e.primitive.name == "custom_partitioning" for e in eqns) else None


def as_dense(eqn: Any) -> Any:
    """JAX's expansion of a ragged product into dense ones, as a jaxpr; None for other equations.

    XLA:GPU expands a ragged product so by default, before any other pass: each row is multiplied by every group's matrix,
    with zeros for other groups (compiled for H100s; `xla/hlo/transforms/expanders/ragged_dot_rewriter.cc`). In the
    expansion, groups can be split (expert parallelism), and the cost model counts the flops that the device really runs.
    """
    return _as_lowered(eqn) if eqn.primitive.name == "ragged_dot_general" else None


def _as_lowered(eqn: Any) -> Any:
    """The function that an equation is lowered to by default, as a jaxpr; None if its default lowering is no function."""
    entry = mlir._lowerings.get(eqn.primitive)
    if entry is None or getattr(entry.rule, "__qualname__", "") != "lower_fun.<locals>.f_lowered":
        return None
    captured = inspect.getclosurevars(entry.rule).nonlocals
    avals = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(functools.partial(captured["fun"], **eqn.params))(*avals)


@dataclass(frozen=True, slots=True)
class ShardingRule:
    """The sharding rule of a `custom_partitioning`, as Shardy reads it.

    Attributes:
      sizes: extents of the factors.
      operands: per operand and dimension, the indices of its factors, major to minor.
      results: per result and dimension, the indices of its factors, major to minor.
      reduced: factors over which results are reduced.
      whole: factors that must not be split.
    """

    sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduced: frozenset[int]
    whole: frozenset[int]


def sharding_rule(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> ShardingRule | None:
    """The rule of a `custom_partitioning` equation; None if it has none.

    Raises:
      InputError: the rule does not suit the operands' shapes.
    """
    if params["sharding_rule"] is None:
        return None
    try:
        return _read(params, ins, outs)
    except ValueError as e:
        raise InputError(
            f"the sharding_rule of {open_jaxpr(params['call']).debug_info.func_src_info}, which is wrapped in "
            f"custom_partitioning, cannot be: {e}"
        ) from e


def _read(params: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> ShardingRule:
    rule: Any = params["sharding_rule"]
    options = {}
    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        in_types, out_types = (list(map(_ir_type, avals)) for avals in (ins, outs))
        if callable(rule):
            rule = rule(*params["static_args"], AbstractMesh((), ()), in_types, out_types)
            rule, options = rule if isinstance(rule, tuple | list) else (rule, {})
        if isinstance(rule, str):
            rule = str_to_sdy_sharding_rule(rule, **options)
        lowered: Any = sdy_sharding_rule_to_mlir(rule, in_types, out_types)
        return ShardingRule(
            tuple(lowered.factor_sizes),
            tuple(map(_mapped, lowered.operand_mappings)),
            tuple(map(_mapped, lowered.result_mappings)),
            frozenset(lowered.reduction_factors),
            frozenset((*lowered.need_replication_factors, *lowered.permutation_factors)),
        )


def _ir_type(aval: Any) -> ir.Type:
    return ir.RankedTensorType.get(aval.shape, mlir.dtype_to_ir_type(np.dtype(aval.dtype)))


def _mapped(array: Any) -> tuple[tuple[int, ...], ...]:
    dims = sdy.TensorMappingAttr(array).dim_mappings
    return tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in dims)


def partitioned(
    params: dict[str, Any],
    mesh: Mesh | AbstractMesh,
    operands: Iterable[tuple[Any, PartitionSpec]],
    results: Iterable[tuple[Any, PartitionSpec]],
) -> tuple[Callable[..., Any], tuple[PartitionSpec, ...], tuple[PartitionSpec, ...]]:
    """The computation of a `custom_partitioning` equation on each device, as XLA's partitioner requests it.

    Args:
      operands: the whole operands, each with its spec.
      results: the whole results, each with the requested spec.

    Returns:
      A function from the flat operands' shards to the results' shards; the specs that it requires of the operands, and
      those of its results, which may differ from the given ones.
    """

    def shape(array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        padded = PartitionSpec(*spec, *[None] * (len(array.shape) - len(spec)))
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, padded))

    in_tree, out_tree = params["in_tree"], params["out_tree"]
    _, function, out_shardings, in_shardings = params["partition"](
        *params["static_args"],
        mesh,
        in_tree.unflatten(shape(*o) for o in operands),
        out_tree.unflatten(shape(*r) for r in results),
    )

    def on_shards(*shards: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.tree.leaves(function(*in_tree.unflatten(shards))))

    return on_shards, _specs(in_tree, in_shardings), _specs(out_tree, out_shardings)


def _specs(tree: Any, shardings: Any) -> tuple[PartitionSpec, ...]:
    return tuple(sharding.spec for sharding in tree.flatten_up_to(shardings))


def batch_dims(params: dict[str, Any]) -> tuple[tuple[int | None, ...], ...]:
    """The batch dimensions that `vmap` added to a `pallas_call`: per array and dimension, the grid's dimension that steps
    along it, unseen by the kernel; None for the kernel's own. Arrays are those with blocks: inputs, then outputs."""
    grid = params["grid_mapping"]
    return tuple(_stepped(block, grid.vmapped_dims) for block in grid.block_mappings)


def _stepped(block: Any, vmapped_dims: Sequence[int]) -> tuple[int | None, ...]:
    index_map = open_jaxpr(block.index_map_jaxpr)
    steps = {id(index_map.invars[d]): d for d in vmapped_dims}
    squeezed = [type(size).__name__ == "Squeezed" for size in block.block_shape]
    if len(index_map.outvars) != len(squeezed):  # an index that is no number
        return (None,) * len(squeezed)
    return tuple(steps.get(id(v)) if s else None for v, s in zip(index_map.outvars, squeezed, strict=True))


def grid(params: dict[str, Any]) -> tuple[int, ...]:
    """The grid of a `pallas_call`."""
    return params["grid_mapping"].grid


def pallas_on_shards(
    params: dict[str, Any], in_shapes: Sequence[tuple[int, ...]], out_shapes: Sequence[tuple[int, ...]]
) -> dict[str, Any]:
    """The parameters of a `pallas_call` for arrays with smaller batch dimensions."""
    mapping = params["grid_mapping"]
    shapes = (*in_shapes[len(in_shapes) - mapping.num_inputs :], *out_shapes)
    sizes = {
        step: n
        for shape, steps in zip(shapes, batch_dims(params), strict=True)
        for n, step in zip(shape, steps, strict=True)
    }
    blocks = [
        block.replace(array_aval=block.array_aval.update(shape=shape))
        for block, shape in zip(mapping.block_mappings, shapes, strict=True)
    ]
    grid = tuple(sizes.get(d, n) for d, n in enumerate(mapping.grid))
    out_avals = [a.update(shape=s) for a, s in zip(params["out_avals"], out_shapes, strict=True)]
    return {
        **params,
        "grid_mapping": mapping.replace(grid=grid, block_mappings=tuple(blocks)),
        "out_avals": tuple(out_avals),
    }


# --- cuDNN's attention

CUDNN_VERSION = 91200
"""The version of cuDNN where this machine has none: 9.12. Source: the oldest one that `jax-cuda13-plugin` 0.12 accepts."""


@dataclass(eq=False, slots=True)
class Target:
    """The GPUs that a step is traced for.

    Attributes:
      capability: their compute capability; None if this machine's counts.
      was_asked: whether JAX has asked for it. If not, the kernels in a trace are those of an earlier trace, which JAX kept.
    """

    capability: tuple[int, int] | None
    was_asked: bool = False


_target: ContextVar[Target | None] = ContextVar("_target", default=None)
"""The current trace's target; other threads have none."""

_replacing = threading.RLock()


@contextlib.contextmanager
def cudnn_for(capability: tuple[int, int] | None) -> Generator[Target]:
    """A context in which JAX traces cuDNN's attention for a target, on a machine that may lack cuDNN and GPUs.

    JAX's own checks of shapes and dtypes remain. JAX does not repeat them for a function that it has traced before.
    Other threads meet JAX's own answers. If two threads want a context, one waits.

    Args:
      capability: the compute capability of the target's GPUs; if it is None, JAX asks this machine's.
    """
    with _replacing:
        own = {name: getattr(cudnn, name) for name in _ANSWERS}
        target = Target(capability)
        token = _target.set(target)
        for name, answer in _ANSWERS.items():
            setattr(cudnn, name, functools.partial(_answered, answer, own[name]))
        try:
            yield target
        finally:
            for name, function in own.items():
                setattr(cudnn, name, function)
            _target.reset(token)


def _answered(answer: Callable[..., Any], own: Callable[..., Any], *args: Any) -> Any:
    """An answer for the current trace's target; JAX's own answer where there is no target."""
    if (target := _target.get()) is None:
        return own(*args)
    target.was_asked = True
    return answer(own, target.capability, *args)


def _version(own: Callable[[], int], capability: tuple[int, int] | None) -> int:
    try:
        return own()
    except RuntimeError:  # JAX finds no cuDNN
        return CUDNN_VERSION


def _reaches(own: Callable[[str], bool], capability: tuple[int, int] | None, least: str) -> bool:
    return own(least) if capability is None else capability >= _numbers(least)


def _equals(own: Callable[[str], bool], capability: tuple[int, int] | None, wanted: str) -> bool:
    return own(wanted) if capability is None else capability == _numbers(wanted)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


_ANSWERS: dict[str, Callable[..., Any]] = {
    "check_cudnn_version": _version,
    "check_compute_capability": _reaches,
    "is_cuda_compute_capability_equal": _equals,
}
"""The functions of JAX that ask for this machine's cuDNN and GPU, with the target's answers."""
