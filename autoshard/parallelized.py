"""A step that plans itself at its first call: what `parallelize` makes of a function.

As `jax.jit` keeps a program for each signature, so is there a plan and a program for each here: for other shapes, other
static arguments, other objects. The first plan says how the state rests, on which mesh; later ones are searched with that
given, so that nothing moves when calls alternate.

A call that is like the last one only runs. JAX itself notices if it is not: the program refuses to be traced again.
"""

import contextlib
import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import nnx_objects, planning, programs
from autoshard.calls import Call, Callee
from autoshard.planning import AutoshardWarning
from cost_model import attached
from cost_model.cluster import Cluster
from cost_model.errors import InputError, first_line
from cost_model.hardware import parse_cluster
from executors.jit import Program
from executors.pipeline_program import PipelineProgram
from search.ir import _jax
from search.ir.graph import Role, Step
from search.ir.in_place import InPlace
from search.ir.trace import TRACE_ERRORS, step_name
from search.mesh_problem import OFFLOADED, Options
from search.pipeline.planning import PipelineOptions
from search.plan.pipeline_plan import PipelinePlan
from search.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Request:
    """What `parallelize` was asked for."""

    cluster: Any
    memory: Any
    mesh: Any
    pin: Any
    state: str | Sequence[str] | None
    remat: str | None
    stages: int | None
    schedule: str | None
    microbatches: int | None
    offload: Any
    plan: Plan | PipelinePlan | None
    place: str
    time_limit_s: float | None
    devices: Sequence[Any] | None
    static_argnums: int | Iterable[int] | None
    static_argnames: str | Iterable[str] | None


@dataclass(frozen=True, eq=False)
class _Planned:
    """A signature with its plan and program."""

    signature: Any
    form: nnx_objects.Form | None
    step: Step
    plan: Plan | PipelinePlan
    program: Program | PipelineProgram
    tree: Any
    types: tuple[Any, ...]


class Parallelized:
    """A training step that runs on many devices; made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], request: Request) -> None:
        functools.update_wrapper(self, step, updated=())
        self.__name__: str = step_name(step)
        self.callee = Callee.of(step, request.static_argnums, request.static_argnames)
        self._request = request
        self._planned: list[_Planned] = []
        """The first one first; shared by the bound methods."""
        self._owner: tuple[Any, ...] = ()
        self._last: _Planned | None = None
        self._plain: list[_Planned] = []
        """Those whose programs take what a call is given, by position."""
        self._telling: tuple[int, ...] = ()
        """The leaves by which these are told apart, where their pytrees are the same."""

    def __get__(self, instance: Any, owner: Any = None) -> "Parallelized":
        """The step as a method."""
        if instance is None:
            return self
        bound = copy.copy(self)
        bound._owner, bound._plain = (instance,), []
        return bound

    @property
    def plan(self) -> Plan | PipelinePlan:
        """The plan in use: that of the last call.

        Raises:
          InputError: nothing has been planned yet.
        """
        if self._last is not None:
            return self._last.plan
        if self._planned:
            return self._planned[-1].plan
        if self._request.plan is None:
            raise InputError(f"{self.__name__} has no plan yet: call it, its .init or its .lower first")
        return self._request.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: the arguments and results of the decorated function."""
        if self._plain:
            args, kwargs = self.callee.by_position(args, kwargs)
            known = None if kwargs else self._like_before(args)
            if known is not None:
                self._last = known
                with contextlib.suppress(_RetracedError, ValueError, TypeError):
                    return known.program.fn(*args)
        call = self._call(args, kwargs)
        planned, is_new = self._prepared(call)
        with programs.room_for(planned.plan):
            returned, given = _run(planned.program, call.positional, is_new)
        return call.result(returned, given)

    def init(self, create: Callable[..., Any], *create_args: Any, args: tuple[Any, ...] = ()) -> Any:
        """Creates the state directly on its shards.

        Args:
          create: makes the step's first argument, or its first ones in a tuple; it is traced once and run sharded.
          *create_args: its arguments, such as a PRNG key.
          args: the step's other arguments, or their shapes.

        Returns:
          What `create` returns, each array sharded as the plan says.

        Raises:
          InputError: `create` cannot be traced, or its state does not suit the step.
        """
        created, given = _Created.of(create, create_args), len(self._owner) + len(args)
        shapes, numbers = created.shapes(), created.numbers()
        if not (isinstance(shapes, tuple) and self.callee.is_short_of(1 + given, len(shapes) + given)):
            shapes, numbers = (shapes,), (numbers,)
        planned, _ = self._prepared(self._call((*shapes, *args), {}))
        places = zip(
            jax.tree.leaves(self._call((*numbers, *args), {}).positional),
            jax.tree.leaves(planned.program.shardings),
            strict=True,
        )
        return created.on({n: sharding for n, sharding in places if isinstance(n, _Number)})

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step lowered for its devices, as `jax.jit(...).lower` gives it; arguments may be shapes."""
        program = self._prepared(self._call(args, kwargs))[0].program
        if isinstance(program, PipelineProgram):
            raise InputError(
                f"{self.__name__} is a pipeline, which runs many programs: there is no one that could be lowered. Leave out "
                "stages= to lower it"
            )
        return program.fn.lower(*program.args)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        last = self._last or next(iter(self._planned), None)
        like = None if last is None else last.form
        return self.callee.call((*self._owner, *args), kwargs, like, bool(self._owner))

    def _prepared(self, call: Call) -> tuple[_Planned, bool]:
        """The plan and program for a call, and whether they have just been made."""
        signature = _signature(call)
        known = next((p for p in self._planned if p.signature == signature), None)
        self._last = known or self._searched(call, signature)
        if known is None:
            self._planned.append(self._last)
            if not (call.kwargs or call.static or call.form or self._owner):
                self._plain.append(self._last)
                self._telling = _telling(self._plain)
        return self._last, known is None

    def _like_before(self, args: tuple[Any, ...]) -> _Planned | None:
        """The plan that these arguments probably have; its program refuses others. Arrays that are there twice have none."""
        leaves, tree = jax.tree.flatten(args)
        if len(set(map(id, leaves))) < len(leaves):
            return None
        for planned in self._plain:
            if planned.tree == tree and all(_type(leaves[i]) == planned.types[i] for i in self._telling):
                return planned
        return None

    def _searched(self, call: Call, signature: Any) -> _Planned:
        if any(_jax.is_tracer(x) for x in jax.tree.leaves(call.positional)):
            raise InputError(
                f"{self.__name__} is a parallelized step and cannot be called inside another jitted function"
            )
        request = self._request
        devices = list(jax.devices() if request.devices is None else request.devices)
        hardware = self._hardware(devices)
        if request.plan is None and hardware.num_devices > len(devices):
            raise InputError(
                f"the cluster {hardware.name} has {hardware.num_devices} devices, and there are {len(devices)} to run on. "
                "Leave cluster= out to plan for these, or use search to plan for others"
            )
        traced = planning.traced(call.step, hardware, call.args, call.kwargs, request.state)
        leaves, tree = jax.tree.flatten(call.positional)
        types = tuple(map(_type, leaves))
        if (pipeline := self._pipeline()) is not None:
            plan, program = programs.pipelined(traced, hardware, pipeline, request.place, devices, _retraced)
            return _Planned(signature, call.form, traced, plan, program, tree, types)
        if isinstance(request.plan, Plan) and not self._planned:
            found = planning.applied(traced, request.plan, request.place)
            program = programs.built(found, hardware, devices, _retraced)
        else:
            options = self._options(traced, hardware)
            found, program = programs.searched(traced, hardware, options, devices, _retraced)
        return _Planned(signature, call.form, found.step, found.plan, program, tree, types)

    def _pipeline(self) -> PipelineOptions | PipelinePlan | None:
        """The pipeline that is asked for; of other shapes than a plan is for, one of as many stages."""
        request = self._request
        if isinstance(plan := request.plan, PipelinePlan):
            again = PipelineOptions(len(plan.stages), plan.schedule)
            return again if self._planned else plan
        if request.stages is None or request.stages == 1:
            return None
        return PipelineOptions(request.stages, request.schedule, request.microbatches)

    def _options(self, traced: Step, hardware: Cluster) -> Options:
        """What is asked of the search; after the first one, that the state rests as it does."""
        asked = self._request
        given = asked.plan if isinstance(asked.plan, Plan) else None
        options = planning.options(
            traced,
            hardware,
            asked.memory if given is None else given.memory_bytes,
            asked.mesh,
            asked.pin,
            asked.time_limit_s,
            asked.remat,
            asked.microbatches,
            asked.offload,
        )
        if not self._planned:
            return options
        warnings.warn(
            f"the arguments of {self.__name__} changed in shape or structure; planning once for the new ones too, with "
            "the state where it is",
            AutoshardWarning,
            stacklevel=5,
        )
        return _resting_as(self._planned[0], traced, options)

    def _hardware(self, devices: Sequence[Any]) -> Cluster:
        """What the plan is for, or what it will be made for."""
        request = self._request
        if request.plan is not None:
            return planning.cluster(request.plan, request.place)
        return parse_cluster(attached.cluster_name(devices) if request.cluster is None else request.cluster)


@dataclass(frozen=True, eq=False)
class _Created:
    """A state that is yet to be created: the call that does it, and what comes of it."""

    call: Call
    jaxpr: Any
    returned: Any

    @classmethod
    def of(cls, create: Callable[..., Any], args: tuple[Any, ...]) -> "_Created":
        call = Callee.of(create).call(args, {})
        try:
            with _jax.implicit_mesh():
                jaxpr, returned = jax.make_jaxpr(call.step, return_shape=True)(
                    *jax.tree.map(_unplaced, call.args)
                )
        except TRACE_ERRORS as e:
            raise InputError(f"init: {step_name(create)} cannot be traced by jax.jit: {first_line(e)}") from e
        return cls(call, jaxpr, returned)

    def shapes(self) -> Any:
        """The state, as shapes."""
        return self._holding(jax.tree.leaves(self.returned))

    def numbers(self) -> Any:
        """The state, each array being its number among the results of the jaxpr."""
        return self._holding(map(_Number, range(len(jax.tree.leaves(self.returned)))))

    def on(self, shardings: Mapping[int, Any]) -> Any:
        """Creates it on shardings, by number; what has none is no state."""
        meshes = dict.fromkeys(sharding.mesh for sharding in shardings.values())
        first = next(iter(meshes))
        numbers = range(len(jax.tree.leaves(self.returned)))
        places = {n: shardings.get(n, NamedSharding(first, PartitionSpec())) for n in numbers}
        given = jax.device_put(jax.tree.leaves(self.call.args), NamedSharding(first, PartitionSpec()))
        made: dict[int, Any] = {}
        for mesh in meshes:
            made |= self._made_on(mesh, {n: place for n, place in places.items() if place.mesh == mesh})
        flat = [made[n] for n in numbers]
        return self.call.result(jax.tree.unflatten(jax.tree.structure(self.returned), flat), given)

    def _made_on(self, mesh: Any, places: Mapping[int, Any]) -> dict[int, Any]:
        """What of it lies on one mesh."""

        def create(*args: Any) -> Any:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                flat = _jax.as_function(self.jaxpr)(*args)
            return {n: flat[n] for n in places}

        given = jax.device_put(jax.tree.leaves(self.call.args), NamedSharding(mesh, PartitionSpec()))
        return jax.jit(create, out_shardings=dict(places))(*given)

    def _holding(self, leaves: Iterable[Any]) -> Any:
        held = jax.tree.unflatten(jax.tree.structure(self.returned), leaves)
        given = [None] * len(jax.tree.leaves(self.call.args))
        return nnx_objects.put_together(held, given, None) if isinstance(held, InPlace) else held


def _unplaced(x: Any) -> Any:
    """An array's type, without where it lies."""
    if not isinstance(x, jax.Array):
        return x
    return jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=getattr(x, "weak_type", False))


class _Number(int):
    """The number of a result, in its place."""


class _RetracedError(Exception):
    """JAX began to trace the step for other shapes than those planned for."""


def _retraced() -> None:
    raise _RetracedError


def _run(
    program: Program | PipelineProgram, args: tuple[Any, ...], is_first: bool
) -> tuple[Any, tuple[Any, ...]]:
    """What a program returns, and the arguments as they lay on its devices; they are brought there if need be."""
    if not is_first and _are_distinct(args):
        try:
            return program.fn(*args), args
        except (_RetracedError, ValueError, TypeError):
            if _is_placed(program, args):
                raise
    placed = _placed(program, args)
    return program.fn(*placed), placed


def _are_distinct(args: tuple[Any, ...]) -> bool:
    """Whether no array is there twice: one that is donated must not be read elsewhere in the call."""
    leaves = jax.tree.leaves(args)
    return len(set(map(id, leaves))) == len(leaves)


def _is_placed(program: Program | PipelineProgram, args: tuple[Any, ...]) -> bool:
    wanted = jax.tree.leaves(program.shardings)
    return all(getattr(x, "sharding", None) == s for x, s in zip(jax.tree.leaves(args), wanted, strict=True))


def _placed(program: Program | PipelineProgram, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments on a program's devices."""
    leaves, tree = jax.tree.flatten(args)
    shardings, seen = jax.tree.leaves(program.shardings), set[int]()
    moved: list[int] = []
    for i, (x, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        if getattr(x, "sharding", None) != sharding:
            moved.append(i)
        elif id(x) in seen:
            leaves[i] = jnp.copy(x)
        seen.add(id(x))
    there = [_own(leaves[i], shardings[i]) if i in program.donated_leaves else leaves[i] for i in moved]
    for i, x in zip(moved, jax.device_put(there, [shardings[i] for i in moved]), strict=True):
        leaves[i] = x
    return jax.tree.unflatten(tree, leaves)


def _own(x: Any, sharding: Any) -> Any:
    """An array to be moved and then donated. Where a device will hold all of it, its shard may be the user's own array,
    which would be lost: it is copied."""
    return jnp.copy(x) if isinstance(x, jax.Array) and sharding.shard_shape(x.shape) == x.shape else x


def _telling(plans: Sequence[_Planned]) -> tuple[int, ...]:
    """The leaves that differ among plans for the same pytree."""
    pairs = [(a, b) for a, b in itertools.combinations(plans, 2) if a.tree == b.tree]
    differing = {i for a, b in pairs for i, (x, y) in enumerate(zip(a.types, b.types, strict=True)) if x != y}
    return tuple(sorted(differing))


def _signature(call: Call) -> Any:
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    static = tuple((key, type(value), value) for key, value in call.static)
    return static, tree, tuple(map(_type, leaves)), call.form


def _type(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return leaf.shape, leaf.dtype
    dtype = getattr(leaf, "dtype", None)
    return type(leaf) if dtype is None else (leaf.shape, _jax.narrowed(dtype))


def _resting_as(first: _Planned, step: Step, options: Options) -> Options:
    """The options with the state resting as in the first plan, on its mesh."""
    assert isinstance(first.plan, Plan)
    resting: dict[str, PartitionSpec] = {}
    hosted: set[Role] = set()
    shapes = {a.name: v.shape for a, v in zip(step.arguments, step.abstract_inputs(), strict=True)}
    for argument, leaf in zip(first.step.arguments, jax.tree.leaves(first.program.args), strict=True):
        if argument.role is not Role.BATCH and shapes.get(argument.name) == leaf.shape:
            resting[argument.name] = leaf.sharding.spec
            hosted |= {argument.role} if leaf.sharding.memory_kind == "pinned_host" else set()
    offload = tuple(kind for kind, role in OFFLOADED.items() if role in hosted)
    return replace(
        options,
        mesh=tuple(first.plan.decisions.mesh.values()),
        pins=resting | dict(options.pins or {}),
        offload=offload or "never",
    )
