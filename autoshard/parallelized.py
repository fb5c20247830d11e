"""A step that plans itself at its first call: the object that `parallelize` returns.

`jax.jit` keeps one program per signature. A `Parallelized` step keeps one plan and one program per signature: other shapes,
other static arguments or other NNX objects are searched separately. The first plan fixes the mesh and the layout of the
state. Later searches keep both, so that the state does not move when calls alternate.

A call whose signature is known runs its program without planning (`autoshard.signatures`).
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Concatenate, Self, overload

import jax
from jax.sharding import NamedSharding, PartitionSpec

from autoshard import (
    equinox_modules,
    lowerings,
    nnx_objects,
    pipeline_request,
    pipelines,
    placing,
    planning,
    programs,
)
from autoshard.calls import Call, Callee
from autoshard.cost_model.attached import attached_hardware
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_mesh, format_seconds
from autoshard.creation import Creation, Number
from autoshard.executors.jit import Program
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.executors.transfers import spread
from autoshard.like_pipelines import planned_like
from autoshard.options import Options
from autoshard.pins import ANYWHERE, Rested, as_in, resting_like
from autoshard.processes import Processes
from autoshard.progress import Progress, narrated
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import step_name
from autoshard.search.options import Options as SearchOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.plan.executors import MPMD
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.text_table import plural
from autoshard.search.result import SearchResult
from autoshard.signatures import BySignature, format_type, is_for, static_of, type_of
from autoshard.signatures import signature as signature_of
from autoshard.tracebacks import boundary
from autoshard.user_warning import warn

NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})

TRANSFORMATIONS = MappingProxyType(
    {
        "BatchTracer": "jax.vmap",
        "JVPTracer": "jax.jvp or jax.grad",
        "LinearizeTracer": "jax.grad, jax.vjp or jax.linearize",
        "DynamicJaxprTracer": "another jitted function, a loop or jax.eval_shape",
    }
)
"""Where a call happens, by the type of the arguments that it is given there (JAX 0.11 and 0.12)."""


@dataclass(frozen=True, eq=False)
class _Planned:
    """A signature with its plan and program."""

    signature: Any
    form: nnx_objects.ObjectsForm | None
    step: Step
    plan: Plan
    program: Program | PipelineProgram
    tree: Any
    types: tuple[Any, ...]


def _check_others(args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Checks the types of the step's other arguments, as `init` takes them."""
    if not isinstance(args, tuple | list):
        raise InputError(
            f"wanted args as the step's other arguments in a tuple, such as (batch,), got {type(args).__name__}"
        )
    if not (isinstance(kwargs, Mapping) and all(isinstance(name, str) for name in kwargs)):
        raise InputError(
            f"wanted kwargs as arguments by name, such as {{'batch': batch}}, got {type(kwargs).__name__}"
        )


def _in_a_line(plan: Plan | None) -> str:
    """A plan as `repr` sums it up."""
    if plan is None:
        return "not planned yet"
    how = f"mesh {format_mesh(tuple(plan.shardings[0].mesh.values()))}"
    if plan.is_pipeline:
        how = f"{plural(len(plan.stages), 'stage')}, schedule {plan.schedule}"
    if plan.is_edited:
        return f"{how}, edited by hand"
    return f"{how}, {format_seconds(plan.estimates.step_s)} a step predicted"


class Parallelized[**P, R]:
    """A training step that runs on many devices; made by `parallelize`. `P` and `R` are the parameters and the results of
    the function that it was made of."""

    def __init__(
        self,
        step: Callable[P, R],
        options: Options,
        given: tuple[Plan, str] | None = None,
        like: "Parallelized[..., Any] | Rested | None" = None,
    ) -> None:
        """Waits for the first call.

        Args:
          step: the training step.
          options: the user's options.
          given: the plan that `options.plan` names, and its name in messages; the step is then not searched.
          like: the step, or the resting state of the plan, that `options.like` names.
        """
        functools.update_wrapper(self, step, updated=())
        self.__name__: str = step_name(step)
        self.callee = Callee.of(step, options.static_argnums, options.static_argnames)
        self._options, self._given_plan, self._shared = options, given, like
        self._planned: list[_Planned] = []
        """In the order of planning; bound methods share this list, and `_ran`."""
        self._ran: list[_Planned] = []
        self._owner: tuple[Any, ...] = ()
        self._last: _Planned | None = None
        self._plain = BySignature[_Planned]()
        """Single programs that have run and take a call's positional arguments as they come."""

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__[S, **Q, T](
        self: "Parallelized[Concatenate[S, Q], T]", instance: S, owner: Any = None
    ) -> "Parallelized[Q, T]": ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """The step bound to an instance, as a method."""
        if instance is None:
            return self
        bound = copy.copy(self)
        bound._owner, bound._plain = (instance,), BySignature[_Planned]()
        return bound

    @property
    def owner(self) -> tuple[Any, ...]:
        """The object of a bound method, as its first argument; empty for a function."""
        return self._owner

    @property
    @boundary
    def plan(self) -> Plan:
        """The plan of the last call.

        Raises:
          InputError: the step has no plan yet.
        """
        if (plan := self._known_plan) is None:
            raise InputError(f"{self.__name__} has no plan yet: call it, its .init or its .lower first")
        return plan

    @property
    def _known_plan(self) -> Plan | None:
        if self._last is not None:
            return self._last.plan
        return self._planned[-1].plan if self._planned else self._given

    def __repr__(self) -> str:
        return f"<parallelized {self.__name__}: {_in_a_line(self._known_plan)}>"

    def __copy__(self) -> Self:
        """Another one with the same plans and programs."""
        again = object.__new__(type(self))
        again.__dict__.update(self.__dict__)
        return again

    def __deepcopy__(self, memo: dict[int, Any]) -> "Parallelized[P, R]":
        """One that is not planned yet: the step may be a method, and plans are of the object that it had."""
        again = Parallelized(
            copy.deepcopy(self.callee.step, memo), self._options, self._given_plan, self._shared
        )
        again._owner = copy.deepcopy(self._owner, memo)
        return again

    @boundary
    def __reduce__(self) -> Any:
        """Refuses to be pickled.

        Raises:
          InputError: always.
        """
        raise InputError(
            f"{self.__name__} is a parallelized step and cannot be pickled, as its programs are for this process's devices. "
            "Pickle the function that it was made of, save its plan (.plan.save), and parallelize there with plan="
        )

    @boundary
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Runs one step; arguments and results are those of the decorated function."""
        given, named = args, kwargs
        if self._plain.all:
            given, named = self.callee.by_position(args, kwargs)
            known = None if named else self._plain.like(given)
            if known is not None:
                self._last = known
                try:
                    return placing.called(known.program, given)
                except placing.RetracedError:
                    pass
                except placing.FAILURES:
                    if not self._is_refused(known, given):
                        raise
        call = self._call(given, named)
        planned = self._prepared(call)
        is_first = planned not in self._ran
        narrated = self._narrated("compiling") if is_first else contextlib.nullcontext()
        with programs.room_for(planned.plan), narrated:
            returned, placed = placing.run(
                planned.program, call.positional, planned.step, is_first, self._advice
            )
        if is_first:
            self._keep(planned, call)
        return call.result(returned, placed)

    def _is_refused(self, known: _Planned, args: tuple[Any, ...]) -> bool:
        """True if a program that was called without checks refused its arguments, so that nothing ran."""
        if not is_for(known, args):
            return True
        is_refused = placing.is_refused(known.program, args, known.step)
        if is_refused and not placing.are_distinct(args):
            self._plain.forget(known)  # XLA logs each time that it is given an array twice
        return is_refused

    @boundary
    def init[State](
        self,
        create: Callable[..., State],
        *create_args: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
    ) -> State:
        """Creates the state directly on its shards.

        Args:
          create: returns the step's first argument, or a tuple of its first ones; it is traced once and runs sharded.
          *create_args: the arguments of `create`, such as a PRNG key.
          args: the step's other arguments, or their shapes, in a tuple.
          kwargs: those of them that are given by keyword, by name.

        Returns:
          The result of `create`, each array sharded as the plan says.

        Raises:
          InputError: `create` cannot be traced, or its state does not suit the step.
        """
        creation = self._creation(create, create_args)
        return creation.on(*self._places(creation, args, kwargs))

    @boundary
    def abstract_state(
        self,
        create: Callable[..., Any],
        *create_args: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
    ) -> Any:
        """The state that `init` would create, as `jax.ShapeDtypeStruct`s with shardings, to restore a checkpoint to.

        Arrays that one of several processes holds alone are spread over all devices, as by `for_checkpoint`; the next call
        moves them to their own devices. The step is planned if it has no plan yet, and a call with the restored state needs
        no new trace.

        Args:
          create: as for `init`.
          *create_args: as for `init`.
          args: as for `init`.
          kwargs: as for `init`.

        Raises:
          InputError: as for `init`.
        """
        creation = self._creation(create, create_args)
        (mesh, places), devices = self._places(creation, args, kwargs), self._devices()
        shapes = jax.tree.leaves(creation.returned)
        places = {n: spread(shapes[n].shape, place, devices) for n, place in places.items()}
        return creation.abstract(spread((), NamedSharding(mesh, PartitionSpec()), devices).mesh, places)

    @boundary
    def for_checkpoint(self, state: Any) -> Any:
        """The state in the form that Orbax can save. With several processes, Orbax refuses arrays that one process holds
        alone, such as those of a pipeline's stage. These are split over all devices, or replicated; others are unchanged.

        Args:
          state: the step's results, or part of them.

        Example:
          >>> checkpointer.save(folder, train_step.for_checkpoint(state))  # doctest: +SKIP
        """
        return placing.spread_out(state, self._devices())

    @boundary
    def in_shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The shardings in which a call wants its arguments, known before the first call. Use them to place batches ahead of
        time, or to make global arrays of each process's part. The step is planned if it has no plan yet.

        Args:
          *args: as for a call; arrays or their shapes.
          **kwargs: as for a call.

        Returns:
          For each argument by position, its pytree with a `jax.sharding.NamedSharding` for each array; None for a static
          argument, and for a leaf of an Equinox module that is no array. Keyword-only arguments follow in alphabetical
          order.

        Example:
          >>> _, wanted = train_step.in_shardings(state, batch)  # doctest: +SKIP
          >>> state, metrics = train_step(state, jax.device_put(batch, wanted))  # doctest: +SKIP
        """
        call = self._call(args, kwargs)
        wanted = equinox_modules.arrays(self._prepared(call).program.shardings)
        return call.with_static_ones(wanted)[len(self._owner) :]

    @boundary
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for its devices, as `jax.jit(...).lower` does; arguments may be shapes."""
        program = self._prepared(self._call(args, kwargs)).program
        if isinstance(program, PipelineProgram):
            raise InputError(
                f"{self.__name__} is a pipeline, which runs many programs: there is no one that could be lowered. Ask for "
                "stages=1 to lower it"
            )
        with _jax.no_mesh():
            return program.fn.lower(*program.args)

    def _creation(self, create: Callable[..., Any], args: tuple[Any, ...]) -> Creation:
        with planning.kernels_of(self._hardware()):
            return Creation.of(create, args)

    def _places(
        self, creation: Creation, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Any, dict[int, Any]]:
        """The mesh of the first argument, and the shardings of the arrays to create, by their number."""
        _check_others(args, kwargs)
        shapes, numbers = creation.shapes(), creation.numbers()
        if not self._are_several(shapes, args, kwargs):
            shapes, numbers = (shapes,), (numbers,)
        if (refusal := self._refusal((*shapes, *args), kwargs)) is not None:
            raise InputError(
                f"{self.__name__} cannot be called with the state that {creation.name} creates and with args= and kwargs=: "
                f"{refusal}. args= has the step's other arguments in a tuple, and kwargs= those that are given by keyword"
            )
        program = self._prepared(self._filled((*shapes, *args), kwargs)).program
        created = jax.tree.leaves(self._filled((*numbers, *args), kwargs).positional)
        shardings = jax.tree.leaves(program.shardings)
        places = zip(created, shardings, strict=True)
        return shardings[0].mesh, {n: sharding for n, sharding in places if isinstance(n, Number)}

    def _are_several(self, state: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if the elements of a state tuple are the step's first arguments, rather than the tuple its first one.
        Parameters with defaults may allow both; the tuple is then one argument if the step can be planned so."""
        if not isinstance(state, tuple) or self._refusal((*state, *args), kwargs) is not None:
            return False
        alone = (state, *args)
        return self._refusal(alone, kwargs) is not None or not self._can_be_planned(alone, kwargs)

    def _can_be_planned(self, values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        try:
            self._prepared(self._filled(values, kwargs))
        except InputError:
            return False
        return True

    def _filled(self, values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """A call with `values` as the first arguments that `kwargs` leave."""
        return self._pure(*self.callee.filled((*self._owner, *values), kwargs))

    def _refusal(self, values: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TypeError | None:
        """The error of such a call that the step's own signature refuses."""
        return self.callee.refusal(*self.callee.filled((*self._owner, *values), kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        return self._pure((*self._owner, *args), kwargs)

    def _pure(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        last = self._last or next(iter(self._planned), None)
        like = None if last is None else last.form
        return self.callee.call(args, kwargs, like, bool(self._owner))

    def _prepared(self, call: Call) -> _Planned:
        """The plan and program for a call."""
        signature = signature_of(call)
        known = next((p for p in self._planned if p.signature == signature), None)
        if known is None:
            with self._narrated("tracing") as tell:
                known = self._searched(call, signature, tell)
            self._planned.append(known)
        self._last = known
        return known

    def _keep(self, planned: _Planned, call: Call) -> None:
        """Records a program that has run. If it is one program, and the call had positional arrays only, later calls of its
        signature run it unchecked."""
        self._ran.append(planned)
        if isinstance(planned.program, Program) and call.is_as_given and not self._owner:
            self._plain.add(planned)

    def _narrated(self, first: str) -> AbstractContextManager[Progress]:
        return narrated(self.__name__, first, self._options.progress)

    def _searched(self, call: Call, signature: Any, tell: Progress) -> _Planned:
        tracer = next(filter(_jax.is_tracer, jax.tree.leaves(call.positional)), None)
        if tracer is not None:
            inside = TRANSFORMATIONS.get(type(tracer).__name__, "a JAX transformation")
            raise InputError(
                f"{self.__name__} is a parallelized step and cannot be called inside {inside}. Transform the function that "
                "it was made of, and parallelize the result"
            )
        devices, hardware = self._devices(), self._hardware()
        if self._given_plan is None and hardware.num_devices > len(devices):
            raise InputError(
                f"the cluster {hardware.name} has {hardware.num_devices} devices, and there are {len(devices)} to run on. "
                "Leave cluster= out to plan for these, or use search to plan for others"
            )
        traced = self._traced(call, hardware, devices)
        leaves, tree = jax.tree.flatten(call.positional)
        types = tuple(map(type_of, leaves))
        given = self._plan_for(traced)
        if self._planned and (change := self._what_changed(call, traced, tree, types, given is not None)):
            warn(change)
        Processes.of(devices).agree_on(traced, devices, self._given)
        found, plan, program = self._made(traced, given, hardware, devices, tell)
        return _Planned(signature, call.form, found, plan, program, tree, types)

    def _traced(self, call: Call, hardware: AnyCluster, devices: Sequence[Any]) -> Step:
        """The step as this call gives it arguments. A call that the step's own signature refuses fails as the step does."""
        try:
            return planning.traced(call.step, hardware, call.args, call.kwargs, self._options.state, devices)
        except InputError as e:
            if isinstance(e.__cause__, TypeError) and self.callee.refusal(*call.whole) is not None:
                raise e.__cause__ from None
            raise

    def _made(
        self,
        traced: Step,
        given: tuple[Plan, str] | None,
        hardware: AnyCluster,
        devices: Sequence[Any],
        tell: Progress,
    ) -> tuple[Step, Plan, Program | PipelineProgram]:
        """The traced step (rewritten as its plan says), its plan and its program."""
        given_up = planning.arguments_of(traced, self._options.donate)
        if given is not None:
            found = lowerings.applied(traced, *given)
            return self._running(traced, found, hardware, devices, given_up)
        if (other := self._like_pipeline) is not None:
            found = planned_like(traced, other, self._options.memory)
            return self._running(traced, found, hardware, devices, given_up)
        cluster = hardware.groups[0]  # one program's
        asked = self._asked(traced)

        def alone(own: Options) -> programs.Built:
            options = self._of_one_program(traced, cluster, own)
            return programs.searched(
                traced, cluster, options, devices, placing.retraced, tell, given_up, asked
            )

        found = pipelines.one_program_or_pipeline(
            traced, hardware, asked, alone, tell, Processes.of(devices), is_later=bool(self._planned)
        )
        if isinstance(found, programs.Built):
            return found.found.step, found.plan, found.program
        return self._running(traced, found, hardware, devices, given_up)

    def _running(
        self,
        traced: Step,
        found: lowerings.Found,
        hardware: AnyCluster,
        devices: Sequence[Any],
        given_up: AbstractSet[int],
    ) -> tuple[Step, Plan, Program | PipelineProgram]:
        """A plan on its step as `_made` returns it."""
        program = lowerings.of(found).run(found, hardware, devices, placing.retraced, given_up)
        return (found.step if isinstance(found, SearchResult) else traced), found.plan, program

    def _what_changed(
        self, call: Call, traced: Step, tree: Any, types: tuple[Any, ...], is_known: bool
    ) -> str:
        """The reason why a call needs a new search or program; empty for the computation of an earlier call."""
        latest, form = self._planned[-1], call.form
        if latest.form and form and (attribute := nnx_objects.changed_attribute(latest.form, form)):
            return (
                f"an attribute of what {self.__name__} is given has changed: {attribute}. What is no array is a constant of "
                "the program, which is made once for each value. If it changes often, make it an nnx.Variable of an array"
            )
        if static_of(call) != latest.signature[0]:
            return f"the static arguments of {self.__name__} changed; planning once for the new ones too"
        if is_known:
            return ""
        what, leaf = "shape or structure", ""
        changed = [i for i, old in enumerate(latest.types) if tree == latest.tree and types[i] != old]
        if changed:
            i = next((i for i in changed if types[i][0] != latest.types[i][0]), changed[0])
            what = what if types[i][0] != latest.types[i][0] else "type"
            name, new, old = traced.arguments[i].name, format_type(types[i]), format_type(latest.types[i])
            leaf = f" ({name} is {new}, and was {old})"
        where = "" if self._is_pipeline else ", with the state where it is"
        return f"the arguments of {self.__name__} changed in {what}{leaf}; planning once for the new ones too{where}"

    @property
    def _first(self) -> Plan | None:
        """The plan of the first call, or the given one."""
        return self._planned[0].plan if self._planned else self._given

    @property
    def _is_pipeline(self) -> bool:
        """Whether the step runs as a pipeline, or may."""
        return pipeline_request.are_allowed(self._options) if self._first is None else self._first.is_pipeline

    def _asked(self, traced: Step) -> Options:
        """The options of this search. A given plan leaves only its memory cap. Unless the user names a number of stages, the
        first plan's stages are kept. For other shapes than the first call's, options that do not suit them are left out."""
        asked, first = self._options, self._first
        if self._given is not None:
            asked = Options(memory=self._given.memory_bytes, verify=asked.verify)
        if first is None:
            return asked
        if first.is_pipeline and asked.num_stages is None:
            how = {"schedule": first.schedule, "executor": first.executor}
            asked = replace(asked, stages=len(first.stages), **how)
        elif not first.is_pipeline:
            asked = replace(asked, stages=1, schedule=None, executor=None)
        if not self._planned:
            return asked
        return planning.suiting(traced, asked, tuple(first.shardings[0].mesh.values()))

    def _plan_for(self, traced: Step) -> tuple[Plan, str] | None:
        """A plan that spares the search: the given one, or that of an earlier call with this computation."""
        if not self._planned:
            return self._given_plan
        own = planning.fingerprint_of(traced)
        same = (
            p.plan
            for p in self._planned
            if p.plan.fingerprint == own and p.step.arguments == traced.arguments
        )
        return next(((plan, "the plan before") for plan in same), None)

    def _of_one_program(self, traced: Step, hardware: Cluster, asked: Options) -> SearchOptions:
        """The options of the search; after the first plan they keep the layout of the state."""
        like = self._like
        resting = ANYWHERE if like is None else resting_like(traced, like)
        if asked.memory is None and like is not None:
            asked = replace(asked, memory=like.plan.memory_bytes)
        if not self._planned or self._planned[0].plan.is_pipeline:
            return planning.options(traced, hardware, asked, resting)
        options = planning.options(
            traced, hardware, replace(asked, offload=None), as_in(traced, self._rested).then(resting)
        )
        return replace(options, offload=options.offload or "never")

    @property
    @boundary
    def _rested(self) -> Rested:
        """The layout of the state at rest, for another step that shares it.

        Raises:
          InputError: the step has no plan yet, or is a pipeline.
        """
        plan = self._planned[0].plan if self._planned else self.plan
        if plan.is_pipeline:
            raise InputError(
                f"{self.__name__} is a pipeline in one program for all stages, and no step can be like it. Leave out like=, "
                f"or ask for executor={MPMD!r} or stages=1 there"
            )
        if not self._planned:
            return Rested.by(plan)
        first = self._planned[0].step
        shapes = zip(
            (a.name for a in first.arguments), (x.shape for x in first.abstract_inputs()), strict=True
        )
        return Rested(plan, dict(shapes))

    @property
    def _like(self) -> Rested | None:
        like = self._shared
        return like._rested if isinstance(like, Parallelized) else like

    @property
    def _like_pipeline(self) -> Pipeline | None:
        """The pipeline of the step of `like=`, if it has a program per stage."""
        like = self._shared
        if not isinstance(like, Parallelized) or (plan := like._known_plan) is None or plan.executor != MPMD:
            return None
        first = like._planned[0] if like._planned else None
        if first is None:
            raise InputError(
                f"{like.__name__} is a pipeline that was not called yet, so it is unknown which arguments its stages have. "
                "Call it, or its .init, before a step that is like it"
            )
        found = lowerings.applied(first.step, first.plan, "like=")
        assert isinstance(found, Pipeline)
        return found

    @property
    def _given(self) -> Plan | None:
        return None if self._given_plan is None else self._given_plan[0]

    def _devices(self) -> Sequence[Any]:
        devices = self._options.devices
        if devices is None and isinstance(self._shared, Parallelized):
            return self._shared._devices()
        return list(jax.devices() if devices is None else devices)

    def _hardware(self) -> AnyCluster:
        """The cluster of the given plan, of `like`, of `cluster=`, or of the attached devices."""
        if self._given_plan is not None:
            return planning.hardware(*self._given_plan)
        if (pipeline := self._like_pipeline) is not None:
            return planning.hardware(pipeline.plan, "like=")
        if (like := self._like) is not None:
            return planning.cluster(like.plan, "like=")
        cluster = self._options.cluster
        return attached_hardware(self._devices()) if cluster is None else parse_hardware(cluster)

    @property
    def _advice(self) -> str:
        """Advice for a warning about arguments that have to move in each call."""
        if self._is_pipeline:
            return "Each stage of a pipeline has devices of its own: let .init create it there"
        if self._shared is not None:
            return "Its arguments differ from those of the step that it is like, or rest on the host there"
        return "If they are another step's state, say so: parallelize(..., like=that_step), or pin= its plan"
