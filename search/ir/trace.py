"""From a training step to its graph.

The step is traced whole, already differentiated, with `jax.make_jaxpr`, without annotations by the user. `phases` finds the
phases, `state` the state, `roles` the roles of arguments. The trace also rewrites the step:

* *Calls* (`jit`, `custom_jvp`, `custom_vjp`, `checkpoint`) are inlined. JAX lowers a differentiated `checkpoint` behind an
  optimization barrier, so that XLA cannot share the recomputation with the forward phase; the graph has this barrier, too.
* *Weak types* are dropped: a conversion that changes nothing else is removed.
* *Updates by zeros* are removed (`identities`).
* *Paddings by zeros* around convolutions and sums over windows become the windows' own (`paddings`).
* *Loops of no steps* are replaced by their carry, so that no later pass meets one.
* *Operands of products* that JAX converts as it lowers them, since their types differ, are converted before. The converted
  array takes memory, and the phases that read it share it.
* *Products of ragged groups* are expanded into dense ones, as the compiler does.
* *Collectives over a named axis of `vmap`* become reductions over the dimension that the axis has become.
* *Extended dtypes* that are stored element by element (Flax's `fp8_meta32`) are replaced by their storage dtypes, and
  their own sums of gradients are expanded. Arguments and results are converted. Typed keys stay keys.
* *Meshes that the step names* are removed, or refused (`own_meshes`).
* *Large constants of loops* that JAX has hoisted out of their bodies are moved back (`sinking`).
* *Updates of tables* are confined to the rows that the step looks up, where that gives the same numbers (`row_updates`).
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.cost_model.errors import InputError, first_line
from autoshard.search.ir import _jax, _jax_kernels, in_place, own_meshes
from autoshard.search.ir.factors import has_rule
from autoshard.search.ir.graph import Argument, Atom, Graph, Op, Phase, Step, Value, verify, without_dead_ops
from autoshard.search.ir.identities import without_zero_updates
from autoshard.search.ir.paddings import with_own_padding
from autoshard.search.ir.phases import with_phases
from autoshard.search.ir.roles import roles
from autoshard.search.ir.row_updates import with_row_updates
from autoshard.search.ir.sinking import sunk
from autoshard.search.ir.state import successors

TRACE_ERRORS = (jax.errors.JAXTypeError, jax.errors.JAXIndexError, TypeError, ValueError)
"""Errors of a function that `jax.jit` cannot trace: JAX's own, or the function's."""

PYTHON_ADVICE = (
    ". A Python bool or int among the arguments is an array in there, as under jax.jit: if the step branches on it, bind it "
    "with functools.partial, or name it in parallelize(static_argnames=...)"
)


def trace(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Step:
    """Traces `step` on the shapes of its arguments; branches by platform stay branches.

    Example:
      >>> import jax.numpy as jnp
      >>> step = trace(lambda w, x: w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w), jnp.ones((4, 2)), jnp.ones((8, 4)))
      >>> [a.role.value for a in step.arguments]
      ['parameter', 'batch']
    """
    return trace_call(None, step, args, kwargs)


def trace_call(
    platform: str | None,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    state: Sequence[str] = (),
) -> Step:
    """Traces a call of `step` on the shapes of its arguments, for one platform.

    Args:
      platform: JAX's name of the platform in lowering, "cuda" or "cpu", whose branch of `jax.lax.platform_dependent` is
        taken; None keeps the branches.
      step: a training step for one device, e.g. `(state, batch) -> (state, metrics)`.
      args: its arguments, or their shapes: pytrees of arrays or `jax.ShapeDtypeStruct`.
      kwargs: its keyword arguments, or their shapes.
      state: paths of arguments that come back as results, or are frozen weights, if that is not evident.

    Returns:
      The traced step.

    Raises:
      InputError: an argument is not an array, the step cannot be traced, names a mesh, has no branch for the platform, or
        changes an `nnx.State` without returning it, or `state` names no state.
    """
    start_s = time.perf_counter()
    leaves, in_tree = jax.tree_util.tree_flatten((args, kwargs))
    abstract = [
        _abstract(path, leaf) for path, leaf in jax.tree_util.tree_flatten_with_path((args, kwargs))[0]
    ]
    is_python = any(isinstance(leaf, bool | int) for leaf in leaves)
    args_, kwargs_ = jax.tree_util.tree_unflatten(in_tree, abstract)
    name = step_name(step)
    graph, names, out_shape, placements = _outline(
        name, step, args_, kwargs_, platform, PYTHON_ADVICE if is_python else ""
    )
    assert len(names) == len(leaves), f"{len(names)} argument names for {len(leaves)} leaves"
    held: frozenset[int] = frozenset()
    certain: dict[int, int] = {}
    if isinstance(out_shape, in_place.InPlace):
        held = frozenset(out_shape.left)
        graph, out_shape = in_place.changed_only(graph, out_shape)
        certain = in_place.successors(out_shape)
    graph = with_own_padding(without_zero_updates(with_phases(sunk(graph))))
    out_tree = jax.tree.structure(out_shape)
    verify(graph)
    found = successors(graph, in_tree, out_tree, names, certain, state)
    arguments = tuple(
        Argument(n, r) for n, r in zip(names, roles(graph, found, held.union(found.read_only)), strict=True)
    )
    return Step(
        name,
        with_row_updates(graph, found.replaces),
        arguments,
        _result_names(out_shape, names),
        found.replaces,
        in_tree,
        out_tree,
        time.perf_counter() - start_s,
        retyped=found.retyped,
        doubtful=found.doubtful,
        placements=placements,
        weak_arguments=_weak(abstract),
        weak_results=_weak(jax.tree.leaves(out_shape)),
    )


def _weak(shapes: Sequence[Any]) -> frozenset[int]:
    """The indices of the values whose type is weak."""
    return frozenset(i for i, x in enumerate(shapes) if _jax.is_weak(x))


def _result_names(out_shape: Any, arguments: Sequence[str]) -> tuple[str, ...]:
    """One name per flat result: its pytree path, or `new` and the path of the argument that it updates."""
    if not isinstance(out_shape, in_place.InPlace):
        return tuple(
            f"result{jax.tree_util.keystr(path)}" for path, _ in jax.tree.leaves_with_path(out_shape)
        )
    left = tuple(f"new {arguments[number]}" for number in sorted(out_shape.left))
    return (*_result_names(out_shape.result, ()), *left, *(f"made[{i}]" for i in range(len(out_shape.made))))


def step_name(step: Callable[..., Any]) -> str:
    """A step's name in messages and plans: that of the function, also inside a `functools.partial`."""
    while isinstance(step, functools.partial):
        step = step.func
    return getattr(step, "__name__", type(step).__name__)


def _outline(
    name: str, step: Callable[..., Any], args: Any, kwargs: Any, platform: str | None, advice: str
) -> tuple[Graph, tuple[str, ...], Any, tuple[str, ...]]:
    """A step's graph, the names of its flat arguments, the shapes of its results, and its sharding annotations."""
    is_watched = in_place.holds_variables((args, kwargs))
    traced = in_place.watched(step) if is_watched else step
    try:
        with _jax.implicit_mesh():
            anew = functools.partial(
                traced
            )  # JAX keeps the trace of a function, perhaps one for another cluster
            jaxpr, out_shape = jax.make_jaxpr(anew, return_shape=True)(*args, **kwargs)
    except InputError:
        raise
    except (NameError, RuntimeError, _jax.ShardingTypeError, *TRACE_ERRORS) as e:
        if (refused := own_meshes.refusal(name, e, _where(e))) is not None:
            raise refused from e
        if not isinstance(e, TRACE_ERRORS):
            raise
        raise InputError(
            f"the step {name!r} cannot be traced by jax.jit, which autoshard needs: {first_line(e)}{_where(e)}{advice}",
            section="a-python-value-decides-what-is-traced",
        ) from e
    placements = own_meshes.placements(jaxpr)
    graph, names = whole_graph(jaxpr, platform), _jax.argument_names(jaxpr)
    if is_watched:
        out_shape, left = out_shape
        num_results = len(graph.outputs) - len(left)
        results, after = graph.outputs[:num_results], graph.outputs[num_results:]
        in_place.check(name, names, graph.inputs, results, dict(zip(left, after, strict=True)))
        graph = without_dead_ops(replace(graph, outputs=results))
    return graph, names, out_shape, placements


def _abstract(path: tuple[Any, ...], leaf: Any) -> Any:
    """An argument's shape, dtype and memory; 64-bit dtypes are narrowed as `jax_enable_x64` demands."""
    where = jax.tree_util.keystr(path[1:])
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        if not isinstance(leaf, bool | int | float | complex):
            raise InputError(
                f"every argument leaf must be an array or a jax.ShapeDtypeStruct; argument {where} is "
                f"{type(leaf).__name__} {leaf!r:.60}. {_remedy(leaf, is_argument=len(path) == 2)}"
            )
        return _jax.abstract_value((), jnp.result_type(leaf), not isinstance(leaf, bool))
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    of_type = _jax.host_value if kind == "pinned_host" else _jax.abstract_value
    return of_type(leaf.shape, _jax.narrowed(leaf.dtype), _jax.is_weak(leaf))


def _remedy(leaf: Any, *, is_argument: bool) -> str:
    """The advice for a leaf that is no array: an argument as a whole, or a part of one."""
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return f"Register its type as a pytree: jax.tree_util.register_dataclass({type(leaf).__name__})"
    bind = "Bind it beforehand, e.g. with functools.partial, or name it in parallelize(static_argnames=...)"
    return (
        bind
        if is_argument
        else "Take it out of the argument; a step may close over a value that stays as it is"
    )


def _where(error: BaseException) -> str:
    """` (file:line)` of the innermost frame of the user's code in the error's traceback."""
    found, tb = "", error.__traceback__
    while tb is not None:
        file = tb.tb_frame.f_code.co_filename
        if file != __file__ and "site-packages" not in file and not file.startswith("<"):
            found = f" ({_jax.relative(file)}:{tb.tb_lineno})"
        tb = tb.tb_next
    return found


# --- the graph


def build_graph(jaxpr: Any, platform: str | None = None, caller: Any = None) -> Graph:
    """The graph of a (closed) jaxpr, with calls and branches by platform inlined and dead ops dropped. Every op is in the
    forward phase.

    Ops without a source line of their own have the `caller`'s source.
    """
    builder = _Builder(platform)
    inputs = tuple(builder.define(v) for v in _jax.open_jaxpr(jaxpr).invars)
    outputs = builder.inline(jaxpr, None, "", caller)
    graph = Graph(tuple(builder.values), inputs, tuple(builder.constants), tuple(builder.ops), outputs)
    return without_dead_ops(graph)


def whole_graph(jaxpr: Any, platform: str | None = None) -> Graph:
    """The graph of a whole function's jaxpr; it converts arguments and results of extended dtypes from and to these."""
    graph, ends = build_graph(jaxpr, platform), _jax.open_jaxpr(jaxpr)
    values = list(graph.values)
    entering, leaving = list[Op](), list[Op]()

    def converted(primitive: Any, params: dict[str, Any], source: Atom, target: int) -> Op:
        return Op(primitive, params, (source,), (target,), (values[target],), Phase.FORWARD, "", None, {})

    own: dict[int, int] = {}
    for v, value in zip(graph.inputs, (Value.of(var.aval) for var in ends.invars), strict=True):
        if value != values[v]:
            own[v] = len(values)
            values.append(value)
            entering.append(converted(_jax.from_edtype_p, {"dtype": values[v].dtype}, own[v], v))
    outputs = list(graph.outputs)
    for o, value in enumerate(Value.of(var.aval) for var in ends.outvars):
        if not _jax.is_extended(value.dtype) or value == graph.value(outputs[o]):
            continue
        if outputs[o] in graph.inputs:
            outputs[o] = own[outputs[o]]
            continue
        values.append(value)
        leaving.append(converted(_jax.to_edtype_p, {"edtype": value.dtype}, outputs[o], len(values) - 1))
        outputs[o] = len(values) - 1
    inputs = tuple(own.get(v, v) for v in graph.inputs)
    ops = (*entering, *graph.ops, *leaving)
    return replace(graph, values=tuple(values), inputs=inputs, ops=ops, outputs=tuple(outputs))


_SPELT_OUT = (
    _jax.as_expanded,
    _jax.as_no_steps,
    _jax.as_reduction,
    _jax.as_own_sum,
    _jax_kernels.as_dense,
)


def _spelt_out(eqn: Any) -> Any:
    """An equation's expansion into simpler ones, as a jaxpr; None for most equations, which are not expanded."""
    return next((inner for spelt_out in _SPELT_OUT if (inner := spelt_out(eqn)) is not None), None)


class _Builder:
    """Collects values and ops while jaxprs are inlined into one another."""

    def __init__(self, platform: str | None) -> None:
        self.platform = platform
        self.values: list[Value] = []
        self.constants: list[tuple[int, Any]] = []
        self.ops: list[Op] = []
        self._number: dict[Any, int] = {}
        self._conversions: dict[tuple[int, Any], int] = {}

    def new_value(self, aval: Any) -> int:
        self.values.append(Value.of(_jax.stored(aval)))
        return len(self.values) - 1

    def define(self, var: Any) -> int:
        self._number[var] = number = self.new_value(var.aval)
        return number

    def inline(
        self, jaxpr: Any, operands: tuple[Atom, ...] | None, scope: str, caller: Any
    ) -> tuple[Atom, ...]:
        """Appends the jaxpr's equations; its arguments are `operands`, or already defined when None."""
        env: dict[Any, Atom] = {}
        for var, content in zip(*_jax.jaxpr_consts(jaxpr), strict=True):
            env[var] = self.new_value(var.aval)
            self.constants.append((env[var], _jax.content_as_stored(content)))
        inner = _jax.open_jaxpr(jaxpr)
        if operands is not None:
            env.update(zip(inner.invars, operands, strict=True))

        def read(atom: Any) -> Atom:
            if isinstance(atom, _jax.Literal):
                return atom
            return env[atom] if atom in env else self._number[atom]

        for eqn in inner.eqns:
            source = eqn.source_info if caller is None or _jax.has_source(eqn.source_info) else caller
            results = self._equation(eqn, tuple(map(read, eqn.invars)), scope, source)
            env.update(zip(eqn.outvars, results, strict=True))
        return tuple(map(read, inner.outvars))

    def _equation(self, eqn: Any, operands: tuple[Atom, ...], scope: str, source: Any) -> tuple[Atom, ...]:
        scope = "/".join(filter(None, (scope, str(eqn.source_info.name_stack))))
        name = eqn.primitive.name
        if _jax.is_identity(eqn):
            return operands
        if name in _jax.CALLS and _jax.CALLS[name] in eqn.params:
            if name in _jax.REMATS and eqn.params.get("differentiated"):
                scope = f"{scope}/rematted_computation" if scope else "rematted_computation"
                if eqn.params.get("prevent_cse", True):
                    operands = self._barrier(operands, scope, source)
            return self.inline(eqn.params[_jax.CALLS[name]], operands, scope, source)
        if self.platform is not None and (alternatives := _jax.alternatives(name, eqn.params)):
            choice = self._choice(alternatives, source)
            if name == "platform_index":
                return (_jax.literal(np.int32(choice)),)
            return self.inline(eqn.params["branches"][choice], operands[1:], scope, source)
        if (inner := _spelt_out(eqn)) is not None:
            return self.inline(inner, operands, scope, source)
        bodies = {
            key: tuple(build_graph(j, self.platform, source) for j in jaxprs)
            for key, jaxprs in _jax.body_params(name, eqn.params).items()
        }
        operands = self._as_multiplied(eqn, operands, scope, source)
        if not (bodies or has_rule(name)) and (wrapped := _jax_kernels.as_partitioning(eqn)) is not None:
            return self.inline(wrapped, operands, scope, source)
        outputs = tuple(self.new_value(v.aval) for v in eqn.outvars)
        for params, of in _jax.one_by_one(eqn):
            self._append(eqn.primitive, params, operands[of], outputs[of], scope, source, bodies)
        return outputs

    def _as_multiplied(
        self, eqn: Any, operands: tuple[Atom, ...], scope: str, source: Any
    ) -> tuple[Atom, ...]:
        """The operands of a product in the types in which it multiplies them; those of other equations as they are."""
        types = _jax.product_types(eqn)
        if not types:
            return operands
        return tuple(
            self._converted(a, dtype, scope, source) if isinstance(a, int) else a
            for a, dtype in zip(operands, types, strict=True)
        )

    def _converted(self, v: int, dtype: Any, scope: str, source: Any) -> int:
        """A value in a type. XLA merges equal conversions, so products share one."""
        if self.values[v].dtype == dtype:
            return v
        if (v, dtype) not in self._conversions:
            aval = _jax.abstract_value(self.values[v].shape, dtype)
            self._conversions[v, dtype] = made = self.new_value(aval)
            self._append(*_jax.conversion(dtype), (v,), (made,), scope, source, {})
        return self._conversions[v, dtype]

    def _choice(self, alternatives: Sequence[Any], source: Any) -> int:
        """The index of this platform's branch."""
        for i, platforms in enumerate(alternatives):
            if platforms is None or self.platform in platforms:
                return i
        raise InputError(
            f"jax.lax.platform_dependent at {_jax.source_line(source)} has no branch for {self.platform}, which "
            "is what the cluster runs. Give it one, or a default="
        )

    def _barrier(self, operands: tuple[Atom, ...], scope: str, source_info: Any) -> tuple[Atom, ...]:
        held = tuple(a for a in operands if isinstance(a, int))
        outputs = tuple(self.new_value(self.values[v]) for v in held)
        self._append(_jax.optimization_barrier_p, {}, held, outputs, scope, source_info, {})
        through = dict(zip(held, outputs, strict=True))
        return tuple(through[a] if isinstance(a, int) else a for a in operands)

    def _append(
        self,
        primitive: Any,
        params: dict[str, Any],
        inputs: tuple[Atom, ...],
        outputs: tuple[int, ...],
        scope: str,
        source_info: Any,
        bodies: dict[str, tuple[Graph, ...]],
    ) -> None:
        values = tuple(self.values[v] for v in outputs)
        self.ops.append(
            Op(primitive, params, inputs, outputs, values, Phase.FORWARD, scope, source_info, bodies)
        )
