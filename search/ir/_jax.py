"""The door to JAX's internals.

JAX's public API does not cover everything that a whole-step rewriter needs. This module relies on these internals, all
present in JAX 0.11 and 0.12:

* equations carry `source_info` (name stack and traceback), and `jax._src.source_info_util` can print and
  re-enter it;
* `Primitive.bind` and `get_bind_params` re-apply an equation;
* `scan` says how many of its operands are constants and carries: by `num_consts`/`num_carry` (0.11), or by a
  flat tree of three children, `ft_in` (0.12); `while` and `cond` carry inner jaxprs in their parameters;
* a jitted function lists its static arguments in `_jit_info`, and is an equation `jit` that holds its shardings;
* processes that `jax.distributed` has connected share a key-value store, which its client reads and writes;
* jaxlib copies arrays to other devices shard by shard, by `batched_copy_array_to_devices_with_sharding`, in a tenth of the
  time that `device_put` takes to choose this copy;
* a collective over a named axis of `vmap` becomes one over dimensions, whose numbers are in its `axes` (none, if its
  operand did not depend on the position along the axis);
* where a step names devices, equations hold a `Sharding` or a `Device`; `sharding_constraint` and the like do nothing else;
* extended dtypes define in `_rules` how gradients are added; `jax._src.core` knows how they are stored; `to_edtype` and
  `from_edtype` convert to them and back without changing the bits;
* `convert_element_type` makes a type weak, which promotion then adapts to others;
* a `dot_general` of operands of several types converts them as it is lowered, by `_handle_dot_precision`;
* primitives of `hijax` (0.12) are equations `call_hi_primitive`, which `to_lojax` expands into other primitives;
* `make_jaxpr` returns a `ClosedJaxpr` (0.11) or a `Jaxpr` that holds its own constants (0.12).

`_jax_kernels` reads the rules of hand-written kernels; `cost_model.xla._jax` serves the compiler's process.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import functools
import os
import re
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import distributed, source_info_util
from jax._src.lax import lax
from jax.experimental import compute_on
from jax.extend import core as jex_core
from jaxlib import xla_client

Literal = jex_core.Literal
Primitive = jex_core.Primitive
to_edtype_p, from_edtype_p = lax.to_edtype_p, lax.from_edtype_p
optimization_barrier_p = jax.lax.optimization_barrier_p

CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "eval_jaxpr": "call_jaxpr",
    "composite": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "linear_call": "callee",
    "remat_opt": "fwd_jaxpr",
    "checkpoint": "jaxpr",
    "remat": "jaxpr",
    "remat2": "jaxpr",
}
"""Primitives that only call an inner jaxpr, and the parameter that holds it: the ones that tracing inlines."""

ShardingTypeError = jax_core.ShardingTypeError
"""JAX's error for contradicting explicit shardings."""

REMATS = frozenset({"checkpoint", "remat", "remat2"})


def jaxpr_consts(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """The constant variables of a (closed) jaxpr, and their values."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return list(inner.constvars), list(getattr(jaxpr, "consts", ()))


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr inside a closed jaxpr; an open jaxpr itself."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """One name per flat argument, in pytree-path form: `state.params['kernel']`."""
    info = open_jaxpr(jaxpr).debug_info
    return tuple(info.safe_arg_names(len(open_jaxpr(jaxpr).invars)))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries among the operands of a `scan`, which begin with them in this order."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def manual_axes(params: dict[str, Any]) -> frozenset[str]:
    """The mesh axes that a `shard_map` takes over."""
    return frozenset(params.get("newly_manual_axes", params.get("manual_axes", ())))


def scan_params(
    params: dict[str, Any], num_consts: int, num_carry: int, num_xs: int, num_ys: int
) -> dict[str, Any]:
    """A `scan`'s parameters for other numbers of operands and results."""
    if "num_consts" in params:
        linear = (False,) * (num_consts + num_carry + num_xs)
        return {**params, "num_consts": num_consts, "num_carry": num_carry, "linear": linear}
    from jax._src import flattree  # of JAX 0.12

    ft_in = flattree.pack((flattree.nones(num_consts), flattree.nones(num_carry), flattree.nones(num_xs)))
    ft_out = flattree.pack((flattree.nones(num_carry), flattree.nones(num_ys)))
    return {**params, "ft_in": ft_in, "ft_out": ft_out}


def body_params(name: str, params: dict[str, Any]) -> dict[str, tuple[Any, ...]]:
    """The inner jaxprs of a control-flow equation, by parameter name."""
    if name == "scan":
        return {"jaxpr": (params["jaxpr"],)}
    if name == "while":
        return {"cond_jaxpr": (params["cond_jaxpr"],), "body_jaxpr": (params["body_jaxpr"],)}
    if name == "cond":
        return {"branches": tuple(params["branches"])}
    return {}


def alternatives(name: str, params: dict[str, Any]) -> tuple[tuple[str, ...] | None, ...]:
    """The platforms of each branch of `jax.lax.platform_dependent`; None for a default branch. Both its `cond` and its
    `platform_index` hold them; other ops have none."""
    return params["platforms"] if name == "platform_index" else params.get("branches_platforms") or ()


def as_expanded(eqn: Any) -> Any:
    """The expansion of a `hijax` primitive, as a jaxpr; None for other equations."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    made_of = functools.partial(eqn.primitive.to_lojax, **eqn.params)
    return jax.make_jaxpr(made_of)(*(v.aval for v in eqn.invars))


REDUCTIONS = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}


def as_reduction(eqn: Any) -> Any:
    """The reduction that JAX lowers a collective over dimensions to, as a jaxpr; None for other equations. `vmap` makes such
    a collective from one over its named axis."""
    if not (axes := _reduced_dims(eqn)):
        return None
    reduced = functools.partial(REDUCTIONS[eqn.primitive.name], axes=axes)
    return jax.make_jaxpr(reduced)(*(v.aval for v in eqn.invars))


def _reduced_dims(eqn: Any) -> tuple[int, ...] | None:
    """The dimensions of a collective; None if it is over a named axis, or if the equation is no collective."""
    axes = eqn.params.get("axes", ())
    is_over_dims = eqn.primitive.name in REDUCTIONS and all(isinstance(axis, int) for axis in axes)
    return axes if is_over_dims else None


def is_identity(eqn: Any) -> bool:
    """True if an equation's results have the bits of its operands: a collective over no dimension, a conversion between an
    extended dtype and its storage dtype, a conversion of a weak type alone, or a sharding annotation."""
    if only_changes_weakness(eqn):
        return True
    if eqn.primitive.name in PLACES or (eqn.primitive.name == "device_put" and names_devices(eqn)):
        return all(
            is_on_host(a.aval) == is_on_host(b.aval) for a, b in zip(eqn.invars, eqn.outvars, strict=True)
        )
    if eqn.primitive in (to_edtype_p, from_edtype_p):
        (before,), (after,) = eqn.invars, eqn.outvars
        return stored(before.aval).dtype == stored(after.aval).dtype
    return _reduced_dims(eqn) == ()


def as_no_steps(eqn: Any) -> Any:
    """A `scan` of no steps as a jaxpr: its initial carry, and empty stacks; None for other equations."""
    if eqn.primitive.name != "scan" or eqn.params["length"]:
        return None
    num_consts, num_carry = scan_counts(eqn.params)
    stacks = [v.aval for v in eqn.outvars[num_carry:]]

    def passed_on(*operands: Any) -> list[Any]:
        carry = operands[num_consts : num_consts + num_carry]
        return [*carry, *(jax.lax.empty(stack.shape, stack.dtype) for stack in stacks)]

    return jax.make_jaxpr(passed_on)(*(v.aval for v in eqn.invars))


def product_types(eqn: Any) -> tuple[Any, ...]:
    """The types to which JAX converts a product's operands, as it lowers it for CPUs and GPUs; empty if it converts none."""
    if eqn.primitive is not jax.lax.dot_general_p:
        return ()
    own, made = [v.aval.dtype for v in eqn.invars], eqn.outvars[0].aval.dtype
    asked = eqn.params["precision"]
    if isinstance(asked, (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)):
        lhs, rhs = own
        return tuple(lax.get_algorithm_compute_types(asked, lhs, rhs, made)[:2])
    are_eights = all(is_inexact(dtype) and itemsize(dtype) == 1 for dtype in own)
    return () if own[0] == own[1] or are_eights else (made, made)


def conversion(dtype: Any) -> tuple[Primitive, dict[str, Any]]:
    """The primitive that converts an array to a type, and its parameters."""
    return jax.lax.convert_element_type_p, {"new_dtype": dtype, "weak_type": False, "sharding": None}


def literal(content: np.generic) -> Literal:
    """A scalar as an operand."""
    return Literal(content, jax_core.ShapedArray((), content.dtype))


def has_source(source_info: Any) -> bool:
    """True if an equation has a line of the user's code; equations inside JAX's own jitted functions have none."""
    return next(iter(source_info_util.user_frames(source_info.traceback)), None) is not None


def source_line(source_info: Any) -> str:
    """`file:line` of the user's code that made an equation, or an empty string.

    Frames of installed packages are skipped if there is another one. Paths below the working directory are relative to it.
    """
    own = _user_frame(source_info)
    return f"{relative(own.file_name)}:{own.start_line}" if own else ""


def short_source_line(source_info: Any) -> str:
    """`folder/file:line` of the user's code that made an equation, for any working directory, or an empty string."""
    own = _user_frame(source_info)
    return f"{'/'.join(PurePath(os.path.abspath(own.file_name)).parts[-2:])}:{own.start_line}" if own else ""


def _user_frame(source_info: Any) -> Any:
    """The innermost frame of the user's code; else the innermost of an installed package; else None."""
    frames = list(source_info_util.user_frames(source_info.traceback)) if source_info is not None else []
    return next((f for f in frames if "site-packages" not in f.file_name), next(iter(frames), None))


def relative(file: str) -> str:
    """A path relative to the working directory, if the file is below it; else the path itself."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


@contextlib.contextmanager
def provenance(scope: str, source_info: Any) -> Generator[None]:
    """A context whose operations carry this name scope and source line into the compiler's metadata."""
    stack = source_info_util.current_name_stack()
    for part in filter(None, scope.split("/")):
        stack = stack.extend(part)
    traceback = source_info.traceback if source_info is not None else None
    with source_info_util.user_context(traceback, name_stack=stack):
        yield


PLACES = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
"""Primitives that only annotate a value's sharding."""


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    return jax_core.jaxprs_in_params(eqn.params)


def names_devices(eqn: Any) -> bool:
    """True if an equation names devices or shardings for its values."""
    return any(_named_devices(eqn))


def names_a_mesh(eqn: Any) -> bool:
    """True if an equation names a sharding other than a single device's, which the code of one device does not need."""
    return any(not isinstance(v, jax.Device | jax.sharding.SingleDeviceSharding) for v in _named_devices(eqn))


def _named_devices(eqn: Any) -> Iterator[Any]:
    """The devices and shardings that the user names in an equation. With a mesh set, JAX itself adds replicated shardings to
    some results; these are left out."""
    shardings = [v for key, v in eqn.params.items() if "sharding" in key or key == "devices"]
    is_users = eqn.primitive.name in ("sharding_constraint", "device_put", *CALLS)
    for group in shardings:
        for v in group if isinstance(group, tuple | list) else (group,):
            is_named = isinstance(v, jax.sharding.Sharding | jax.Device)
            if is_named and (is_users or any(getattr(v, "spec", ()))):
                yield v


_FOREIGN = (
    *(r"unbound axis name: (\w+)", r"of type Auto.* axis name: (\w+)", r"requires a non-empty mesh( )"),
    *(r"under a mesh context( )", r"[cC]ontext mesh( )"),
)
"""JAX's messages for an axis of no mesh or of a mesh that is not explicit, for a missing mesh, and for a wrong one."""


def foreign_axis(error: BaseException) -> str | None:
    """The mesh axis that a step names, if JAX failed to trace it for this reason; a blank if JAX does not name the axis.
    None for other errors."""
    if isinstance(error, ShardingTypeError):
        return " "
    found = next(filter(None, (re.search(pattern, str(error)) for pattern in _FOREIGN)), None)
    return found[1] if found else None


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context without a mesh: programs have their own meshes, and JAX would refuse devices outside of a set mesh."""
    return contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


@contextlib.contextmanager
def on_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Generator[None]:
    """A context in which this mesh replaces the user's (`jax.set_mesh`): JAX would refuse one of another size."""
    abstract = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh
    none = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(abstract):
        yield


def implicit_mesh() -> contextlib.AbstractContextManager[Any]:
    """A context in which the user's mesh (`jax.set_mesh`) has no explicit axes: the plan decides shardings."""
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return contextlib.nullcontext()
    axis_types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types)
    )


def bind(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Applies an equation's primitive, and returns a list of results."""
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def result_types(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """The shapes and types that JAX infers for an equation's results."""
    return jax.eval_shape(functools.partial(bind, primitive, params=params), operands)


def is_key_dtype(dtype: Any) -> bool:
    """True if `dtype` is that of a typed PRNG key."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_extended(dtype: Any) -> bool:
    """True if `dtype` is an extended dtype of JAX: a typed PRNG key, or one that defines its own sum of gradients."""
    return not isinstance(dtype, np.dtype) and jax.numpy.issubdtype(dtype, jax.dtypes.extended)


@functools.lru_cache(maxsize=256)
def itemsize(dtype: Any) -> int:
    """Stored bytes of one element; for a typed PRNG key, those of its data."""
    if not is_extended(dtype):
        return np.dtype(dtype).itemsize
    element = jax_core.physical_element_aval(dtype)
    return element.size * element.dtype.itemsize


@functools.lru_cache(maxsize=256)
def is_stored_alike(dtype: Any) -> bool:
    """True if `dtype` is an extended dtype whose elements are stored as one number each: Flax's `fp8_meta32` as float32.

    A typed PRNG key is stored as several numbers. JAX cannot split arrays whose elements are single numbers: in its
    `sharding_impls`, `check_replicated_trailing_dims` takes all dimensions for an element's if the element has none.
    """
    return is_extended(dtype) and not jax_core.physical_element_aval(dtype).shape


def stored(aval: Any) -> Any:
    """An abstract value in the dtype that its elements are stored in."""
    return jax_core.physical_aval(aval) if is_stored_alike(getattr(aval, "dtype", None)) else aval


def content_as_stored(content: Any) -> Any:
    """A constant in the dtype that its elements are stored in."""
    if not is_stored_alike(getattr(content, "dtype", None)):
        return content
    return from_edtype_p.bind(content, dtype=jax_core.physical_element_aval(content.dtype).dtype)


def is_inexact(dtype: Any) -> bool:
    """True if the elements are stored as real or complex floating-point numbers."""
    return jax.numpy.issubdtype(stored(jax_core.ShapedArray((), dtype)).dtype, np.inexact)


def as_own_sum(eqn: Any) -> Any:
    """The sum of two gradients of an extended dtype as the dtype defines it (`fp8_meta32`: the maximum), as a jaxpr; None
    for other equations."""
    if eqn.primitive.name != "add_any" or not is_extended(dtype := eqn.outvars[0].aval.dtype):
        return None
    return jax.make_jaxpr(functools.partial(dtype._rules.add, dtype))(*(v.aval for v in eqn.invars))


def is_on_host(aval: Any) -> bool:
    """True if an abstract value is in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def names_memory(params: dict[str, Any]) -> bool:
    """True if a `device_put` names kinds of memory only, and no devices."""
    return all(isinstance(target, jax.memory.Space) for target in params["devices"])


def one_by_one(eqn: Any) -> Iterator[tuple[dict[str, Any], slice]]:
    """An equation's parameters without devices and weak types, with the slice of its operands and results. A `device_put` of
    several arrays yields the parameters of one `device_put` per array.

    A device or sharding as the target only matters by its kind of memory, since the step is written for one device.
    """
    if eqn.primitive.name != "device_put":
        params = {k: None if isinstance(v, jax.sharding.Sharding) else v for k, v in eqn.params.items()}
        is_conversion = eqn.primitive is jax.lax.convert_element_type_p
        yield {**params, "weak_type": False} if is_conversion else params, slice(None)
        return
    params, ends = eqn.params, zip(eqn.invars, eqn.outvars, strict=True)
    kept = zip(params["devices"], params["srcs"], params["copy_semantics"], ends, strict=True)
    for n, (target, source, semantics, (operand, result)) in enumerate(kept):
        was_on_host, goes_to_host = is_on_host(operand.aval), is_on_host(result.aval)
        if not isinstance(target, jax.memory.Space):
            there = jax.memory.Space.Host if goes_to_host else jax.memory.Space.Device
            target = None if was_on_host == goes_to_host else there
        one = {**params, "devices": (target,), "srcs": (source,), "copy_semantics": (semantics,)}
        yield one, slice(n, n + 1)


def on_host(function: Any) -> Any:
    """A function of arrays in the host's memory, computed by its processors; the results stay there. (Earlier releases of
    JAX call it `compute_on2`, and have another `compute_on`.)"""
    of_arrays = getattr(compute_on, "compute_on2", None) or compute_on.compute_on
    return of_arrays(function, compute_type="device_host", out_memory_spaces=jax.memory.Space.Host)


def host_value(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    """An abstract argument of this type in the host's memory, for `make_jaxpr`."""
    return jax_core.ShapedArray(shape, dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)


def abstract_value(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """An abstract argument of this type, for `make_jaxpr`."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


def is_weak(x: Any) -> bool:
    """True if the type of an array or abstract value is weak in type promotion; keys never have a weak type."""
    return bool(getattr(x, "weak_type", False))


def with_weak_type(x: Any, weak: bool) -> Any:
    """An array, converted to a weak or to a strong type."""
    if is_weak(x) == weak:
        return x
    dtype = jax.typeof(x).dtype
    return jax.lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak, sharding=None)


def only_changes_weakness(eqn: Any) -> bool:
    """True if an equation is a conversion that changes nothing but the weakness of a type."""
    params = eqn.params
    return (
        eqn.primitive is jax.lax.convert_element_type_p
        and params["new_dtype"] == eqn.invars[0].aval.dtype
        and params.get("sharding") is None
    )


@dataclass(frozen=True, slots=True)
class JittedCall:
    """A traced call of a jitted function.

    Attributes:
      jaxpr: its body; it may be closed, and then holds constants.
      operands: per argument of the body, the number of the flat argument of the call.
      out_shardings: per result.
    """

    jaxpr: Any
    operands: tuple[int, ...]
    out_shardings: tuple[Any, ...]


def jitted_call(fn: Any, args: Sequence[Any]) -> JittedCall:
    """Traces a function that does nothing but call a jitted one."""
    outer = open_jaxpr(jax.make_jaxpr(fn)(*args))
    (eqn,) = outer.eqns
    assert list(eqn.outvars) == list(outer.outvars), "a result of the call is not one of the jitted function"
    numbers = {v: i for i, v in enumerate(outer.invars)}
    return JittedCall(
        eqn.params["jaxpr"], tuple(numbers[v] for v in eqn.invars), tuple(eqn.params["out_shardings"])
    )


def is_jitted(function: Any) -> bool:
    """True if a function was returned by `jax.jit`."""
    return hasattr(function, "_jit_info")


def static_names(function: Any) -> tuple[str, ...]:
    """The names of a jitted function's static arguments; empty for any other function."""
    info = getattr(function, "_jit_info", None)
    if info is None:
        return ()
    known = [] if info.fun_signature is None else list(info.fun_signature.parameters)
    return (*info.static_argnames, *(known[i] for i in info.static_argnums if i < len(known)))


WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
"""The dtypes that JAX lacks without `jax_enable_x64`."""


def narrowed(dtype: Any) -> Any:
    """The dtype that JAX converts this one to, under the current `jax_enable_x64`."""
    return jax.dtypes.canonicalize_dtype(dtype) if dtype in WIDE else dtype


def is_tracer(x: Any) -> bool:
    """True if a value exists only inside a JAX transformation."""
    return isinstance(x, jax_core.Tracer)


def coordination() -> Any:
    """The client of the service that connects processes; None for a single process."""
    return distributed.global_state.client


def process_number() -> int:
    """This process's number among those that `jax.distributed` has connected; 0 for a single process. Unlike
    `jax.process_index`, it starts no backend."""
    return distributed.global_state.process_id


def copied(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Copies of arrays on other devices of this process, with as many devices and the same shards as before."""
    devices = [sharding._internal_device_list for sharding in shardings]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(devices)
    return xla_client.batched_copy_array_to_devices_with_sharding(arrays, devices, shardings, reuse)
