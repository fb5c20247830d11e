"""The face: `parallelize`, `search`, `emit` and `verify`."""

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard import planning, programs
from autoshard.planning import AutoshardWarning, Pins
from autoshard.verification import judge
from autoshard.verification.result import Verification
from cost_model import attached
from cost_model.cluster import Cluster
from cost_model.errors import InputError, PlanError, first_line
from cost_model.hardware import parse_cluster
from cost_model.xla.process import Compiler
from executors.jit import Program
from search.ir import _jax
from search.ir.graph import Step
from search.ir.trace import TRACE_ERRORS
from search.plan.plan import Plan


def search(
    step: Callable[..., Any],
    *abstract_args: Any,
    cluster: str | os.PathLike[str] | Cluster,
    memory: str | int | None = None,
    mesh: Sequence[int] | None = None,
    pin: Pins | None = None,
    remat: str | None = None,
    microbatches: int | None = None,
    offload: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    verify: bool = False,
    target_config: str | os.PathLike[str] | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Plan:
    """Finds how to run a training step fastest on a cluster, without any of its devices.

    Args:
      step: a training step for one device, e.g. `(state, batch) -> (state, metrics)`.
      *abstract_args: its arguments' shapes: pytrees of `jax.ShapeDtypeStruct` (arrays work too).
      cluster: a preset such as "64xH100-80GB", a `Cluster`, or a JSON file that describes one.
      memory: the cap per device, such as "70GiB" or bytes; by default the device's memory less what the
        runtime needs.
      mesh: sizes of the logical mesh's axes, outermost first; by default it is searched. Axes are named "data"
        (one axis), "data" and "model" (two), "replica", "data" and "model" (three).
      pin: specs in which arguments must rest, by pytree path, e.g. `{"params['emb']": P("model")}`.
      remat: "never" to recompute nothing but what the step itself does (`jax.checkpoint`); by default, where memory is
        scarce, what to recompute in the backward phase is searched with the sharding.
      microbatches: in how many the step goes through its batch, its gradients added up exactly, before it updates; by
        default several are tried where memory is scarce. What couples the examples of a batch forbids them.
      offload: what rests in pinned host memory and is on the device only while it is read, in a tuple: "optimizer_state",
        "parameters"; "residuals" may wait there for the backward phase. "never" for nothing; by default all this is tried
        where memory is scarce.
      time_limit_s: processor seconds for the solver; the plan states the gap that is left (`Plan.gap`).
      verify: whether XLA's GPU compiler judges if the plan fits: where it does not, the search goes on under a
        lower limit. Equal blocks are extrapolated as by `verify`, unless the peak comes close to the cap. Needs the
        extra `autoshard[verify]`.
      target_config: as for `verify`.
      progress: called with one line per stage of the search.

    Returns:
      The fastest plan found, with its estimates and the solver's certified gap.

    Raises:
      InputError: an argument, the cluster or an option cannot be used.
      InfeasibleError: nothing fits the cap; says what would.
      CompilerError: the compiler that should verify failed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
      >>> search(step, w, x, cluster="8xH100-80GB").num_devices
      8
    """
    hardware = parse_cluster(cluster)
    traced = _traced(step, hardware, abstract_args, {})
    options = planning.options(
        traced, hardware, memory, mesh, pin, time_limit_s, remat, microbatches, offload
    )
    if not verify:
        return planning.find(traced, hardware, options, progress).plan
    asked = judge.CompilerVerifier(hardware, Compiler(judge.target_config_text(target_config)), progress)
    return judge.fitting(
        lambda limit, said: planning.find(traced, hardware, replace(options, memory_bytes=limit), said),
        asked.verified,
        options.memory_bytes,
        progress,
    ).plan


def emit(
    step: Callable[..., Any], *abstract_args: Any, plan: Plan, devices: Sequence[Any] | None = None
) -> Program:
    """Writes a plan into its step, so that anyone can lower and read what runs.

    Args:
      step: the step that the plan was made for.
      *abstract_args: its arguments' shapes.
      plan: what `search` returned, or `Plan.load`.
      devices: in the cluster's order; real, simulated or compile-only (`jax.experimental.topologies`). By
        default those that JAX sees.

    Returns:
      A `Program`: `program.fn.lower(*program.args)` is exactly what runs.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: there are fewer devices than the plan's mesh has.
    """
    hardware = planning.cluster(plan, "the plan")
    found = planning.applied(_traced(step, hardware, abstract_args, {}), plan, "the plan")
    return programs.built(found, hardware, jax.devices() if devices is None else devices)


def verify(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    full: bool = False,
    target_config: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Compiles a plan's program with XLA's own GPU compiler, which needs no GPU, and compares.

    The compiler runs in a process of its own: JAX's platform and flags in this one stay as they are. It needs the
    extra `autoshard[verify]`.

    Args:
      step: the step that the plan was made for.
      *abstract_args: its arguments' shapes.
      plan: a plan or its file.
      full: whether to compile all of a stack of equal blocks; by default a few of them are, and the rest is
        extrapolated: collectives, arguments and host copies exactly, the device's peak as an estimate.
      target_config: XLA's `GpuTargetConfigProto` in text, or its file, for a GPU that is no preset.
      timeout_s: seconds for the compiler and each program; by default it may take as long as it does.
      progress: called with one line per stage, and every second while the compiler works.

    Returns:
      Memory and collectives, predicted and compiled, and the verdict: `.fits`, `.differences`.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: the compiler is not installed, or cannot be asked about the plan's cluster.
      CompilerError: the compiler failed, ran out of memory or took too long.

    Example:
      >>> print(autoshard.verify(train_step, state, batch, plan="plan.json"))  # doctest: +SKIP
    """
    given, place = _given(plan)
    cluster = planning.cluster(given, place)
    asked = judge.CompilerVerifier(
        cluster, Compiler(judge.target_config_text(target_config), timeout_s), progress
    )
    progress("tracing the step")
    traced = _traced(step, cluster, abstract_args, {})
    return asked.verified(planning.applied(traced, given, place), full)


def parallelize(
    step: Callable[..., Any] | None = None,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    memory: str | int | None = None,
    mesh: Sequence[int] | None = None,
    pin: Pins | None = None,
    remat: str | None = None,
    microbatches: int | None = None,
    offload: Sequence[str] | str | None = None,
    plan: str | os.PathLike[str] | Plan | None = None,
    time_limit_s: float | None = None,
    devices: Sequence[Any] | None = None,
) -> Any:
    """Makes a training step written for one device run on many.

    The first call traces the step, searches and compiles; later calls only run. State arguments (those that
    come back as results) are donated.

    Args:
      step: the training step; when left out, a decorator is returned.
      cluster: the hardware; by default what the devices are.
      memory: as for `search`.
      mesh: as for `search`.
      pin: as for `search`.
      remat: as for `search`.
      microbatches: as for `search`.
      offload: as for `search`.
      plan: a plan or its file: no search. The step, its shapes and the number of devices must be the plan's.
      time_limit_s: as for `search`.
      devices: where to run; by default all that JAX sees.

    Returns:
      A `Parallelized` step: call it as before; it has `.plan`, `.init` and `.lower` besides.

    Raises:
      InputError: an option cannot be used, or the step is parallelized already.

    Example:
      >>> @parallelize(memory="70GiB")  # doctest: +SKIP
      ... def train_step(state, batch): ...
    """
    if step is None:
        return functools.partial(
            parallelize,
            cluster=cluster,
            memory=memory,
            mesh=mesh,
            pin=pin,
            remat=remat,
            microbatches=microbatches,
            offload=offload,
            plan=plan,
            time_limit_s=time_limit_s,
            devices=devices,
        )
    if isinstance(step, Parallelized):
        raise InputError(f"the step {step.__name__!r} is parallelized already; decorate it once")
    if not callable(step):
        raise InputError(f"parallelize wants a function, got {type(step).__name__}")
    given, place = (None, "") if plan is None else _given(plan)
    request = _Request(
        cluster, memory, mesh, pin, remat, microbatches, offload, given, place, time_limit_s, devices
    )
    return Parallelized(step, request)


@dataclass(frozen=True, slots=True)
class _Request:
    """What `parallelize` was asked for."""

    cluster: Any
    memory: Any
    mesh: Any
    pin: Any
    remat: str | None
    microbatches: int | None
    offload: Any
    plan: Plan | None
    place: str
    time_limit_s: float | None
    devices: Sequence[Any] | None


class Parallelized:
    """A training step that runs on many devices; made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], request: _Request) -> None:
        self.__name__: str = getattr(step, "__name__", type(step).__name__)
        functools.update_wrapper(self, step, updated=())
        self._step, self._request = step, request
        self._plan: Plan | None = request.plan
        self._program: Program | None = None
        self._signature: Any = None

    @property
    def plan(self) -> Plan:
        """The plan in use.

        Raises:
          InputError: nothing has been planned yet.
        """
        if self._plan is None:
            raise InputError(f"{self.__name__} has no plan yet: call it, its .init or its .lower first")
        return self._plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one step: the arguments and results of the decorated function."""
        if self._program is not None and not kwargs:
            try:
                return self._program.fn(*args)
            except (_RetracedError, ValueError, TypeError):
                if self._is_planned_for(args, kwargs) and self._is_placed(args):
                    raise
        self._prepare(args, kwargs)
        assert self._program is not None
        with programs.room_for(self.plan):
            placed = jax.device_put(_positional(args, kwargs), self._program.shardings)
            return self._program.fn(*placed)

    def init(self, create: Callable[..., Any], *create_args: Any, args: tuple[Any, ...] = ()) -> Any:
        """Creates the state directly on its shards.

        Args:
          create: makes the step's first argument; it is traced once and run sharded.
          *create_args: its arguments, such as a PRNG key.
          args: the step's other arguments, or their shapes.

        Returns:
          What `create` returns, each array sharded as the plan says.

        Raises:
          InputError: `create` cannot be traced, or its state does not suit the step.
        """
        try:
            jaxpr, shapes = jax.make_jaxpr(create, return_shape=True)(*create_args)
        except TRACE_ERRORS as e:
            raise InputError(
                f"init: {getattr(create, '__name__', 'create')} cannot be traced by jax.jit: {first_line(e)}"
            ) from e
        self._prepare((shapes, *args), {})
        assert self._program is not None
        shardings, tree = jax.tree.flatten(self._program.shardings[0])
        flat = jax.jit(_jax.as_function(jaxpr), out_shardings=shardings)(*jax.tree.leaves(create_args))
        return jax.tree.unflatten(tree, flat)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The step lowered for its devices, as `jax.jit(...).lower` gives it; arguments may be shapes."""
        self._prepare(args, kwargs)
        assert self._program is not None
        return self._program.fn.lower(*self._program.args)

    def _is_planned_for(self, args: Any, kwargs: Any) -> bool:
        return self._signature == _signature(args, kwargs)

    def _is_placed(self, args: Any) -> bool:
        assert self._program is not None
        wanted = jax.tree.leaves(self._program.shardings)
        return all(
            getattr(x, "sharding", None) == s for x, s in zip(jax.tree.leaves(args), wanted, strict=True)
        )

    def _prepare(self, args: Any, kwargs: Any) -> None:
        """Plans and builds for these arguments, if that has not been done."""
        if self._is_planned_for(args, kwargs):
            return
        leaves = jax.tree.leaves((args, kwargs))
        if any(_jax.is_tracer(x) for x in leaves):
            raise InputError(
                f"{self.__name__} is a parallelized step and cannot be called inside another jitted function"
            )
        request = self._request
        devices = list(jax.devices() if request.devices is None else request.devices)
        hardware = self._hardware(devices)
        traced = _traced(self._step, hardware, args, kwargs)
        if request.plan is not None:
            if self._signature is not None:
                raise PlanError(
                    f"the arguments of {self.__name__} changed in shape or structure, and {request.place} was "
                    "made for the first ones. Pass arguments of the same shapes, or leave plan= out to search again"
                )
            found = planning.applied(traced, request.plan, request.place)
            self._program = programs.built(found, hardware, devices, _retraced)
        else:
            if self._signature is not None:
                warnings.warn(
                    f"the arguments of {self.__name__} changed in shape or structure; searching again for the new ones",
                    AutoshardWarning,
                    stacklevel=3,
                )
            options = planning.options(
                traced,
                hardware,
                request.memory,
                request.mesh,
                request.pin,
                request.time_limit_s,
                request.remat,
                request.microbatches,
                request.offload,
            )
            found, self._program = programs.searched(traced, hardware, options, devices, _retraced)
        self._plan, self._signature = found.plan, _signature(args, kwargs)

    def _hardware(self, devices: Sequence[Any]) -> Cluster:
        """What the plan is for, or what it will be made for."""
        request = self._request
        if request.plan is not None:
            return planning.cluster(request.plan, request.place)
        return parse_cluster(attached.cluster_name(devices) if request.cluster is None else request.cluster)


class _RetracedError(Exception):
    """JAX began to trace the step for other shapes than those planned for."""


def _retraced() -> None:
    raise _RetracedError


def _positional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs[k] for k in sorted(kwargs)))


def _signature(args: Any, kwargs: Any) -> Any:
    leaves, tree = jax.tree.flatten((args, kwargs))
    return tree, tuple((getattr(x, "shape", ()), getattr(x, "dtype", type(x))) for x in leaves)


def _given(plan: str | os.PathLike[str] | Plan) -> tuple[Plan, str]:
    """A plan, and how messages call it."""
    return (plan, "the plan") if isinstance(plan, Plan) else (Plan.load(plan), str(plan))


def _traced(step: Callable[..., Any], cluster: Cluster, args: Any, kwargs: Any) -> Step:
    if isinstance(step, Parallelized):
        step = step.__wrapped__  # type: ignore[attr-defined]
    return planning.traced(step, cluster, args, kwargs)


__all__ = ["AutoshardWarning", "Parallelized", "emit", "parallelize", "search", "verify"]
