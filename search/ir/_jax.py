"""The door to JAX's internals.

JAX's public surface does not cover everything a whole-step rewriter needs. What we rely on beyond it, all
present in JAX 0.11 and 0.12:

* equations carry `source_info` (name stack and traceback), and `jax._src.source_info_util` can print and
  re-enter it;
* `Primitive.bind` and `get_bind_params` re-apply an equation;
* `scan` says how many of its operands are constants and carries: by `num_consts`/`num_carry` (0.11), or by a
  flat tree of three children, `ft_in` (0.12); `while` and `cond` carry inner jaxprs in their parameters;
* a jitted function says in `_jit_info` which of its arguments are static;
* processes that `jax.distributed` has connected have a store in common, which its client reads and writes;
* jaxlib copies arrays to other devices shard by shard, by `batched_copy_array_to_devices_with_sharding`, in a tenth of the
  time that `device_put` takes to find out that this is all that is to be done;
* a collective over a named axis of `vmap` becomes one over dimensions, whose numbers are in its `axes` (none, if its
  operand did not depend on the place along the axis);
* where a step names devices, equations hold a `Sharding` or a `Device`: `sharding_constraint` and its like do nothing else;
* extended dtypes say in `_rules` how gradients add up, and `jax._src.core` how they are stored; `to_edtype` and
  `from_edtype` convert to them and back, and leave the bits as they are;
* `convert_element_type` makes a type weak, which promotion then adapts to others;
* primitives of `hijax` (0.12) come as equations `call_hi_primitive`, and say by `to_lojax` what they are made of;
* `make_jaxpr` returns a `ClosedJaxpr` (0.11) or a `Jaxpr` that holds its own constants (0.12).

What hand-written kernels say of themselves is read in `_jax_kernels`; what the compiler's process needs is in
`cost_model.xla._jax`.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import functools
import os
import re
from collections.abc import Generator, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import jax
import numpy as np
from jax._src import core as jax_core
from jax._src import distributed, source_info_util
from jax._src.lax import lax
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
"""What JAX raises where explicit shardings contradict one another."""

REMATS = frozenset({"checkpoint", "remat", "remat2"})


def jaxpr_consts(jaxpr: Any) -> tuple[list[Any], list[Any]]:
    """The constant variables of a (closed) jaxpr, and their values."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return list(inner.constvars), list(getattr(jaxpr, "consts", ()))


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr itself, whether it came closed or not."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def argument_names(jaxpr: Any) -> tuple[str, ...]:
    """One name per flat argument, in pytree-path form: `state.params['kernel']`."""
    info = open_jaxpr(jaxpr).debug_info
    return tuple(info.safe_arg_names(len(open_jaxpr(jaxpr).invars)))


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many leading operands of a `scan` are constants, and how many follow as carries."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


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
    """The platforms of each branch of `jax.lax.platform_dependent`, None for all others: of its `cond`, and of the
    `platform_index` that chooses. Of other ops, nothing."""
    return params["platforms"] if name == "platform_index" else params.get("branches_platforms") or ()


def as_expanded(eqn: Any) -> Any:
    """What a primitive of `hijax` is made of, as a jaxpr; None for other equations."""
    if eqn.primitive.name != "call_hi_primitive":
        return None
    made_of = functools.partial(eqn.primitive.to_lojax, **eqn.params)
    return jax.make_jaxpr(made_of)(*(v.aval for v in eqn.invars))


REDUCTIONS = {"psum": jax.lax.reduce_sum, "pmax": jax.lax.reduce_max, "pmin": jax.lax.reduce_min}


def as_reduction(eqn: Any) -> Any:
    """A collective over dimensions, which `vmap` makes of one over its named axis, as the reduction that JAX lowers it
    to, as a jaxpr; None for other equations."""
    if not (axes := _reduced_dims(eqn)):
        return None
    reduced = functools.partial(REDUCTIONS[eqn.primitive.name], axes=axes)
    return jax.make_jaxpr(reduced)(*(v.aval for v in eqn.invars))


def _reduced_dims(eqn: Any) -> tuple[int, ...] | None:
    """Over which dimensions a collective is; None where it is over a named axis, or where there is no collective."""
    axes = eqn.params.get("axes", ())
    is_over_dims = eqn.primitive.name in REDUCTIONS and all(isinstance(axis, int) for axis in axes)
    return axes if is_over_dims else None


def is_identity(eqn: Any) -> bool:
    """Whether an equation's results are stored as its operands: a collective over no dimension; a conversion between an
    extended dtype and that of the numbers that its elements are stored as; a conversion of a weak type alone; what says on
    which devices values lie."""
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
    """What a `scan` of no steps is, as a jaxpr: its carry as it came, and empty stacks; None for other equations."""
    if eqn.primitive.name != "scan" or eqn.params["length"]:
        return None
    num_consts, num_carry = scan_counts(eqn.params)
    stacks = [v.aval for v in eqn.outvars[num_carry:]]

    def passed_on(*operands: Any) -> list[Any]:
        carry = operands[num_consts : num_consts + num_carry]
        return [*carry, *(jax.lax.empty(stack.shape, stack.dtype) for stack in stacks)]

    return jax.make_jaxpr(passed_on)(*(v.aval for v in eqn.invars))


def literal(content: np.generic) -> Literal:
    """A scalar as an operand."""
    return Literal(content, jax_core.ShapedArray((), content.dtype))


def has_source(source_info: Any) -> bool:
    """Whether an equation knows a line of the user's code; those inside JAX's own jitted functions do not."""
    return next(iter(source_info_util.user_frames(source_info.traceback)), None) is not None


def source_line(source_info: Any) -> str:
    """`file:line` of the user's code that made an equation, or an empty string.

    Installed packages are passed over where there is a frame of somebody else; paths below the working directory
    are relative to it.
    """
    own = _user_frame(source_info)
    return f"{relative(own.file_name)}:{own.start_line}" if own else ""


def short_source_line(source_info: Any) -> str:
    """The same with the file's folder and name alone, from whichever directory it is asked for."""
    own = _user_frame(source_info)
    return f"{'/'.join(PurePath(os.path.abspath(own.file_name)).parts[-2:])}:{own.start_line}" if own else ""


def _user_frame(source_info: Any) -> Any:
    """The innermost frame of the user's code; one of an installed package where there is no other."""
    frames = list(source_info_util.user_frames(source_info.traceback)) if source_info is not None else []
    return next((f for f in frames if "site-packages" not in f.file_name), next(iter(frames), None))


def relative(file: str) -> str:
    """A path as seen from the working directory, if it is below it."""
    return os.path.relpath(file) if file.startswith(os.getcwd() + os.sep) else file


@contextlib.contextmanager
def provenance(scope: str, source_info: Any) -> Generator[None]:
    """Operations bound inside carry this name scope and source line into the compiler's metadata."""
    stack = source_info_util.current_name_stack()
    for part in filter(None, scope.split("/")):
        stack = stack.extend(part)
    traceback = source_info.traceback if source_info is not None else None
    with source_info_util.user_context(traceback, name_stack=stack):
        yield


PLACES = frozenset({"sharding_constraint", "reshard", "mesh_cast"})
"""Primitives that do nothing but to say how a value lies."""


def inner_jaxprs(eqn: Any) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    return jax_core.jaxprs_in_params(eqn.params)


def names_devices(eqn: Any) -> bool:
    """Whether an equation says on which devices values lie."""
    return any(_named_devices(eqn))


def names_a_mesh(eqn: Any) -> bool:
    """Whether an equation says how values lie on several devices: more than the code of one would."""
    return any(not isinstance(v, jax.Device | jax.sharding.SingleDeviceSharding) for v in _named_devices(eqn))


def _named_devices(eqn: Any) -> Iterator[Any]:
    """The devices and shardings that an equation names. Where a mesh is set, JAX itself says of some results that they are
    whole."""
    said = [v for key, v in eqn.params.items() if "sharding" in key or key == "devices"]
    is_users = eqn.primitive.name in ("sharding_constraint", "device_put", *CALLS)
    for group in said:
        for v in group if isinstance(group, tuple | list) else (group,):
            is_named = isinstance(v, jax.sharding.Sharding | jax.Device)
            if is_named and (is_users or any(getattr(v, "spec", ()))):
                yield v


_FOREIGN = (
    *(r"unbound axis name: (\w+)", r"of type Auto.* axis name: (\w+)", r"requires a non-empty mesh( )"),
    *(r"under a mesh context( )", r"[cC]ontext mesh( )"),
)
"""What JAX says where an axis is of no mesh, or of one that is not explicit; where no mesh is set, or another one."""


def foreign_axis(error: BaseException) -> str | None:
    """The axis that a step names as if it ran on a mesh, where that is why JAX could not trace it; a blank where JAX does
    not say which."""
    if isinstance(error, ShardingTypeError):
        return " "
    found = next(filter(None, (re.search(said, str(error)) for said in _FOREIGN)), None)
    return found[1] if found else None


def no_mesh() -> contextlib.AbstractContextManager[Any]:
    """Inside, no mesh is set: programs have meshes of their own, and JAX would refuse other devices than a set mesh has."""
    return contextlib.nullcontext() if jax.sharding.get_abstract_mesh().empty else jax.set_mesh(None)


@contextlib.contextmanager
def on_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> Generator[None]:
    """Inside, values are on this mesh, whichever the user has set (`jax.set_mesh`): JAX would refuse one of another size."""
    abstract = mesh if isinstance(mesh, jax.sharding.AbstractMesh) else mesh.abstract_mesh
    none = jax.sharding.AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(none), jax.sharding.use_abstract_mesh(abstract):
        yield


def implicit_mesh() -> contextlib.AbstractContextManager[Any]:
    """Inside, no axis of the mesh that a user has set (`jax.set_mesh`) is explicit: shardings are decided elsewhere."""
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Explicit not in mesh.axis_types:
        return contextlib.nullcontext()
    axis_types = (jax.sharding.AxisType.Auto,) * len(mesh.axis_names)
    return jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=axis_types)
    )


def bind(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """Applies an equation's primitive; always a list of results."""
    out = primitive.bind(*operands, **primitive.get_bind_params(params))
    return list(out) if primitive.multiple_results else [out]


def result_types(primitive: Any, operands: list[Any], params: dict[str, Any]) -> list[Any]:
    """The shapes and types that JAX infers for an equation's results."""
    return jax.eval_shape(functools.partial(bind, primitive, params=params), operands)


def is_key_dtype(dtype: Any) -> bool:
    """Whether `dtype` is a typed PRNG key."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_extended(dtype: Any) -> bool:
    """Whether `dtype` is one of JAX's extended dtypes: a typed PRNG key, or one with a sum of its own for gradients."""
    return not isinstance(dtype, np.dtype) and jax.numpy.issubdtype(dtype, jax.dtypes.extended)


@functools.lru_cache(maxsize=256)
def itemsize(dtype: Any) -> int:
    """Bytes of one element as it is stored: of a typed PRNG key, those of its data."""
    if not is_extended(dtype):
        return np.dtype(dtype).itemsize
    element = jax_core.physical_element_aval(dtype)
    return element.size * element.dtype.itemsize


@functools.lru_cache(maxsize=256)
def is_stored_alike(dtype: Any) -> bool:
    """Whether `dtype` is an extended dtype whose elements are stored as numbers: Flax's `fp8_meta32` as float32.

    A typed PRNG key is stored as several numbers. Arrays of single numbers JAX cannot split: in its `sharding_impls`,
    `check_replicated_trailing_dims` takes all dimensions for those of an element, if an element has none.
    """
    return is_extended(dtype) and not jax_core.physical_element_aval(dtype).shape


def stored(aval: Any) -> Any:
    """An abstract value in the dtype of the numbers that its elements are stored as."""
    return jax_core.physical_aval(aval) if is_stored_alike(getattr(aval, "dtype", None)) else aval


def content_as_stored(content: Any) -> Any:
    """A constant in the dtype of the numbers that its elements are stored as."""
    if not is_stored_alike(getattr(content, "dtype", None)):
        return content
    return from_edtype_p.bind(content, dtype=jax_core.physical_element_aval(content.dtype).dtype)


def is_inexact(dtype: Any) -> bool:
    """Whether its elements are stored as real or complex floating-point numbers."""
    return jax.numpy.issubdtype(stored(jax_core.ShapedArray((), dtype)).dtype, np.inexact)


def as_own_sum(eqn: Any) -> Any:
    """A sum of two gradients of an extended dtype, as that dtype defines it (`fp8_meta32`: their maximum), as a jaxpr; None
    for other equations."""
    if eqn.primitive.name != "add_any" or not is_extended(dtype := eqn.outvars[0].aval.dtype):
        return None
    return jax.make_jaxpr(functools.partial(dtype._rules.add, dtype))(*(v.aval for v in eqn.invars))


def is_on_host(aval: Any) -> bool:
    """Whether an abstract value lies in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def names_memory(params: dict[str, Any]) -> bool:
    """Whether a `device_put` is to a kind of memory, wherever the array lies."""
    return all(isinstance(target, jax.memory.Space) for target in params["devices"])


def one_by_one(eqn: Any) -> Iterator[tuple[dict[str, Any], slice]]:
    """The parameters of what an equation does, without devices and weak types; of a `device_put` of several arrays, those
    of one for each, with its number among the operands and results.

    In a step that is written for one device, a device or sharding as target says the kind of memory only, or nothing.
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


def host_value(shape: tuple[int, ...], dtype: Any, weak_type: bool) -> Any:
    """What `make_jaxpr` takes for an argument of this type that lies in the host's memory."""
    return jax_core.ShapedArray(shape, dtype, weak_type=weak_type, memory_space=jax.memory.Space.Host)


def abstract_value(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> jax.ShapeDtypeStruct:
    """What `make_jaxpr` takes for an argument of this type."""
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak_type)


def is_weak(x: Any) -> bool:
    """Whether the type of an array, or of its shape, is weak in type promotion; those of keys never are."""
    return bool(getattr(x, "weak_type", False))


def with_weak_type(x: Any, weak: bool) -> Any:
    """An array with a type that is weak, or is not."""
    if is_weak(x) == weak:
        return x
    dtype = jax.typeof(x).dtype
    return jax.lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=weak, sharding=None)


def only_changes_weakness(eqn: Any) -> bool:
    """Whether a conversion leaves its operand as it is but for a weak type."""
    params = eqn.params
    return (
        eqn.primitive is jax.lax.convert_element_type_p
        and params["new_dtype"] == eqn.invars[0].aval.dtype
        and params.get("sharding") is None
    )


def is_jitted(function: Any) -> bool:
    """Whether a function is what `jax.jit` returns."""
    return hasattr(function, "_jit_info")


def static_names(function: Any) -> tuple[str, ...]:
    """The arguments that are static to a function that `jax.jit` returned, by name; none of any other function."""
    info = getattr(function, "_jit_info", None)
    if info is None:
        return ()
    known = [] if info.fun_signature is None else list(info.fun_signature.parameters)
    return (*info.static_argnames, *(known[i] for i in info.static_argnums if i < len(known)))


WIDE = frozenset(map(np.dtype, ("float64", "int64", "uint64", "complex128")))
"""The dtypes of which there are none without `jax_enable_x64`."""


def narrowed(dtype: Any) -> Any:
    """The dtype that JAX makes of one, as `jax_enable_x64` is now."""
    return jax.dtypes.canonicalize_dtype(dtype) if dtype in WIDE else dtype


def is_tracer(x: Any) -> bool:
    """Whether a value only exists inside a JAX transformation."""
    return isinstance(x, jax_core.Tracer)


def coordination() -> Any:
    """The client of the service that connects processes; there is one where there are several."""
    return distributed.global_state.client


def copied(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Arrays on other devices of this process, each on as many and in the same shards as before."""
    devices = [sharding._internal_device_list for sharding in shardings]
    reuse = [xla_client.ArrayCopySemantics.REUSE_INPUT] * len(devices)
    return xla_client.batched_copy_array_to_devices_with_sharding(arrays, devices, shardings, reuse)
