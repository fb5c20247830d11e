"""The face: `parallelize`, `search`, `emit` and `verify`."""

import functools
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, overload

import jax

from autoshard import option_types, pipelines, planning, programs
from autoshard.calls import Callee
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.executors.jit import Program
from autoshard.parallelized import AnyPlan, Parallelized, Request
from autoshard.pins import Pins, Rested
from autoshard.pipelines import Stages
from autoshard.planning import Asked
from autoshard.progress import Progress, narrated
from autoshard.search.driver import SearchResult
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import step_name
from autoshard.search.pipeline.planning import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.json_file import read_file
from autoshard.search.plan.pipeline_plan import PipelinePlan, is_of_pipeline
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spmd_plan import SpmdPlan, is_of_one_program
from autoshard.tracebacks import boundary
from autoshard.user_warning import AutoshardWarning
from autoshard.verification import judge, pipeline_judge
from autoshard.verification.pipeline_result import PipelineVerification
from autoshard.verification.result import Verification


@boundary
def search(
    step: Callable[..., Any],
    *abstract_args: Any,
    cluster: str | os.PathLike[str] | AnyCluster,
    memory: str | int | None = None,
    mesh: Sequence[int] | None = None,
    pin: Pins | None = None,
    state: str | Sequence[str] | None = None,
    remat: str | None = None,
    stages: int | str | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    executor: str | None = None,
    offload: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    verify: bool = False,
    target_config: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> AnyPlan:
    """Finds how to run a training step fastest on a cluster, without any of its devices.

    Args:
      step: a training step for one device, e.g. `(state, batch) -> (state, metrics)`.
      *abstract_args: its arguments' shapes: pytrees of `jax.ShapeDtypeStruct` (arrays work too).
      cluster: a preset such as "64xH100-80GB", a `Cluster`, or a JSON file that describes one. Of several kinds of node
        ("8xH100-80GB+16xA100-40GB", or a `MixedCluster`) the plan is a pipeline, whose stages each stand on one kind.
      memory: the cap per device, such as "70GiB", bytes or "90%" of its memory; by default the device's memory less what the
        runtime needs. Devices of several kinds have at most what each kind has by default, and a share is of the largest's.
      mesh: sizes of the logical mesh's axes, outermost first; by default it is searched. Axes are named "data"
        (one axis), "data" and "model" (two), "replica", "data" and "model" (three).
      pin: specs in which arguments must rest, by pytree path, e.g. `{"params['emb']": P("model")}`: as `PartitionSpec` or
        as a plan's text, `"P('model')"`. A path as `print(plan)` folds it, `"['layers'][*]['w*']"`, pins all that it stands
        for; a `Plan` pins all arguments that its step shares with this one.
      state: arguments, or parts of them by pytree path, that come back as results and are donated; by default those of which
        it is evident from structure and dataflow. A warning names large ones that are in doubt.
      remat: "never" to recompute nothing but what the step itself does (`jax.checkpoint`); by default, where memory is
        scarce, what to recompute in the backward phase is searched with the sharding.
      stages: in how many the step is cut, to run as a pipeline, on submeshes of their own; where they begin and how many
        devices each has is searched. 1 for one program. By default it is one program, unless nothing fits so, or that waits
        for communication or recomputes so much that a pipeline is searched, too, and is faster. "auto" searches both in any
        case, which takes longer. `mesh`, `pin`, `offload`, `microbatches` or `time_limit_s` without stages mean one
        program. With stages, `mesh` is that of each: how many replicas share out a microbatch, and one or two axes of
        each one's devices.
      schedule: of the pipeline: "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "circular", "zb-h1", "zb-h2", "zb-v",
        "dualpipe-v" or "chimera"; by default "1f1b" and "zb-h1" are tried, and in one program "gpipe" and "circular".
      microbatches: in how many the step goes through its batch, its gradients added up exactly, before it updates; by
        default several are tried where memory is scarce, or for a pipeline. What couples the examples of a batch forbids
        them.
      executor: of the pipeline: "a program per stage", or "one program" for all stages, of a step whose layers are a loop
        (`jax.lax.scan`): one dispatch a step, equal stages, under "gpipe" or "circular". By default what is predicted to be
        faster; the plan's `executor` says which.
      offload: what rests in pinned host memory and is on the device only while it is read, in a tuple: "optimizer_state",
        "parameters", or pytree paths of arguments, whole or their beginnings; "residuals" may wait there for the backward
        phase. "never" for nothing; by default all this but paths is tried where memory is scarce.
      time_limit_s: processor seconds for the solver. By default it does as much work as takes about 15 on a usual machine,
        so that the same inputs give the same plan on any. The plan states the gap that is left (`Plan.gap`).
      verify: whether XLA's GPU compiler judges if the plan fits: where it does not, the search goes on under a
        lower limit. Equal blocks are extrapolated as by `verify`, unless the peak comes close to the cap. Needs the
        extra `autoshard[verify]`.
      target_config: as for `verify`.
      progress: called with one line per stage of the search; by default the logger `autoshard` is, at level INFO.

    Returns:
      The fastest plan found, with its estimates and the solver's certified gap; where that is a pipeline, a `PipelinePlan`
      or, if all its stages are one program, an `SpmdPlan`.

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
    option_types.check(
        memory=memory,
        mesh=mesh,
        pin=pin,
        state=state,
        remat=remat,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        executor=executor,
        offload=offload,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    hardware = parse_hardware(cluster)
    asked = Asked(memory, mesh, pin, remat, microbatches, offload, time_limit_s)
    wanted = pipelines.asked_for(stages, schedule, executor, is_open=pipelines.leaves_open(asked))
    if wanted is not None:
        pipelines.refuse(pin=pin or None, offload=offload, time_limit_s=time_limit_s)
    with narrated(step_name(step), "tracing", progress) as tell:
        traced = _traced(step, hardware, abstract_args, state)
        if not verify:
            return _found(traced, hardware, wanted, asked, tell).plan
        cap_bytes = planning.limit_bytes(hardware, asked)
        verifier = judge.CompilerVerifier(hardware, Compiler(judge.target_config_text(target_config)), tell)
        return judge.fitting(
            lambda limit, said: _found(
                traced, hardware, wanted, replace(asked, memory_share=limit / cap_bytes), said
            ),
            lambda found, full: (
                verifier.verified(found, full)
                if isinstance(found, SearchResult)
                else pipeline_judge.verified(verifier, found)
            ),
            cap_bytes,
            tell,
        ).plan


def _found(
    step: Step, hardware: AnyCluster, wanted: Stages | None, asked: Asked, progress: Progress
) -> SearchResult | Pipeline | SpmdPipeline:
    """One program, a pipeline, or what of them is faster."""
    if isinstance(hardware, MixedCluster):
        across = pipelines.across_kinds(hardware, wanted)
        return pipelines.searched(step, hardware, across, asked, progress)
    if wanted is not None and wanted.count is not None:
        return pipelines.searched(step, hardware, wanted, asked, progress)

    def alone() -> SearchResult:
        return planning.find(step, hardware, planning.options(step, hardware, asked), progress)

    return alone() if wanted is None else pipelines.fastest(step, hardware, wanted, asked, alone, progress)


@overload
def emit(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: Plan | SpmdPlan,
    devices: Sequence[Any] | None = None,
    state: str | Sequence[str] | None = None,
) -> Program: ...


@overload
def emit(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: PipelinePlan,
    devices: Sequence[Any] | None = None,
    state: str | Sequence[str] | None = None,
) -> tuple[Program, ...]: ...


@overload
def emit(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: str | os.PathLike[str],
    devices: Sequence[Any] | None = None,
    state: str | Sequence[str] | None = None,
) -> Program | tuple[Program, ...]: ...


@boundary
def emit(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: str | os.PathLike[str] | AnyPlan,
    devices: Sequence[Any] | None = None,
    state: str | Sequence[str] | None = None,
) -> Program | tuple[Program, ...]:
    """Writes a plan into its step, so that anyone can lower and read what runs.

    Args:
      step: the step that the plan was made for.
      *abstract_args: its arguments' shapes.
      plan: a plan or its file.
      devices: in the cluster's order; real, simulated or compile-only (`jax.experimental.topologies`). By
        default those that JAX sees.
      state: as for `search`.

    Returns:
      A `Program`: `program.fn.lower(*program.args)` is exactly what runs. Of NNX objects it takes the variables, and
      returns those that change beside the result. Of a pipeline, one for each stage and what it does (`program.name`:
      `forward 2`, `backward 2`, `weight gradient 2`, `reduce 2` for its replicas' sums, `update 2`), as they first run.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: there are fewer devices than the plan's mesh has.
    """
    option_types.check(plan=plan, devices=devices, state=state)
    given, place = loaded(plan)
    hardware = planning.hardware(given, place)
    traced = _traced(step, hardware, abstract_args, state)
    devices = jax.devices() if devices is None else devices
    if isinstance(given, Plan):
        return programs.built(planning.applied(traced, given, place), hardware.groups[0], devices)
    return programs.emitted(pipelines.applied(traced, given, place), hardware, devices)


@boundary
def verify(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: str | os.PathLike[str] | AnyPlan,
    full: bool = False,
    state: str | Sequence[str] | None = None,
    target_config: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
) -> Verification | PipelineVerification:
    """Compiles a plan's program with XLA's own GPU compiler, which needs no GPU, and compares.

    The compiler runs in a process of its own: JAX's platform and flags in this one stay as they are. It needs the
    extra `autoshard[verify]`.

    Args:
      step: the step that the plan was made for.
      *abstract_args: its arguments' shapes.
      plan: a plan or its file.
      full: whether to compile all of a stack of equal blocks; by default a few of them are, and the rest is
        extrapolated: collectives, arguments and host copies exactly, the device's peak as an estimate.
      state: as for `search`.
      target_config: XLA's `GpuTargetConfigProto` in text, or its file, for a GPU that is no preset.
      timeout_s: seconds for the compiler and each program; by default it may take as long as it does.
      progress: called with one line per stage, and every second while the compiler works; by default as for `search`.

    Returns:
      Memory and collectives, predicted and compiled, and the verdict: `.fits`, `.differences`. Of a pipeline, stage by
      stage: each different program is compiled once, for its submesh; peaks count what the schedule has there meanwhile.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: the compiler is not installed, or cannot be asked about the plan's cluster.
      CompilerError: the compiler failed, ran out of memory or took too long.

    Example:
      >>> print(autoshard.verify(train_step, state, batch, plan="plan.json"))  # doctest: +SKIP
    """
    option_types.check(plan=plan, state=state, timeout_s=timeout_s, progress=progress)
    given, place = loaded(plan)
    cluster = planning.hardware(given, place)
    compiler = Compiler(judge.target_config_text(target_config), timeout_s)
    with narrated(step_name(step), "tracing", progress) as tell:
        verifier = judge.CompilerVerifier(cluster, compiler, tell)
        traced = _traced(step, cluster, abstract_args, state)
        if isinstance(given, Plan):
            return verifier.verified(planning.applied(traced, given, place), full)
        return pipeline_judge.verified(verifier, pipelines.applied(traced, given, place))


@boundary
def choices(
    step: Callable[..., Any],
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    name: str,
    state: str | Sequence[str] | None = None,
) -> tuple[str, ...]:
    """All that a decision of a plan may be edited to.

    Args:
      step: the step that the plan was made for.
      *abstract_args: its arguments' shapes.
      plan: a plan or its file.
      name: of the decision, as the plan has it, such as "forward dot_general".
      state: as for `search`.

    Raises:
      PlanError: the plan is for another step, or nothing is decided under this name.
    """
    given, place = _given(plan)
    traced = _traced(step, planning.cluster(given, place), abstract_args, state)
    return planning.choices(traced, given, name, place)


@boundary
def parallelize(
    step: Callable[..., Any] | None = None,
    *,
    cluster: str | os.PathLike[str] | AnyCluster | None = None,
    memory: str | int | None = None,
    mesh: Sequence[int] | None = None,
    pin: Pins | None = None,
    state: str | Sequence[str] | None = None,
    donate: str | Sequence[str] | None = None,
    remat: str | None = None,
    stages: int | str | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    executor: str | None = None,
    offload: Sequence[str] | str | None = None,
    plan: str | os.PathLike[str] | AnyPlan | None = None,
    like: Parallelized | str | os.PathLike[str] | Plan | None = None,
    time_limit_s: float | None = None,
    devices: Sequence[Any] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Any:
    """Makes a training step written for one device run on many.

    The first call traces the step, searches and compiles; later calls only run. State arguments (those that
    come back as results) are donated. Flax NNX objects among the arguments are changed in place, as under `nnx.jit`.

    Args:
      step: the training step; when left out, a decorator is returned.
      cluster: the hardware; by default what the devices are.
      memory: as for `search`; on GPUs that are attached, by default at most what JAX may use of each
        (`XLA_PYTHON_CLIENT_MEM_FRACTION`).
      mesh: as for `search`.
      pin: as for `search`.
      state: as for `search`.
      donate: arguments, or parts of them by pytree path, that are given up besides the state: a result of the same shape and
        dtype that lies alike is made in their memory.
      remat: as for `search`.
      stages: as for `search`; `donate` and `like` without stages mean one program, too.
      schedule: as for `search`.
      executor: as for `search`.
      microbatches: as for `search`.
      offload: as for `search`.
      plan: a plan or its file: no search. The step, its shapes and the number of devices must be the plan's; options that it
        has decided (`cluster`, `memory`, `mesh`, `pin`, `remat`, `stages`, `schedule`, `microbatches`, `executor`,
        `offload`) are refused beside it.
      like: a parallelized step on the same state, or its plan or that one's file: what this step shares with it, such as the
        parameters in an evaluation, rests as there, on the same mesh. Arguments are the same by pytree path; where their
        names differ, by the rest of the path and by shape. What is in doubt is left to the search.
      time_limit_s: as for `search`.
      devices: where to run; by default all that JAX sees.
      static_argnums: positions of arguments that are constants of the step, as for `jax.jit`: each value has a plan of its
        own. Those that are static to an already jitted step are so here.
      static_argnames: the same by name.
      progress: as for `search`; compiling is a stage, too.

    Returns:
      A `Parallelized` step: call it as before; it has `.plan`, `.init` and `.lower` besides.

    Raises:
      InputError: an option cannot be used, or the step is parallelized already.

    Example:
      >>> @parallelize(memory="70GiB")  # doctest: +SKIP
      ... def train_step(state, batch): ...
    """
    options: dict[str, Any] = {
        "cluster": cluster,
        "memory": memory,
        "mesh": mesh,
        "pin": pin,
        "state": state,
        "donate": donate,
        "remat": remat,
        "stages": stages,
        "schedule": schedule,
        "microbatches": microbatches,
        "executor": executor,
        "offload": offload,
        "plan": plan,
        "like": like,
        "time_limit_s": time_limit_s,
        "devices": devices,
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "progress": progress,
    }
    option_types.check(**options)
    if step is None:
        return functools.partial(parallelize, **options)
    if isinstance(step, Parallelized):
        raise InputError(f"the step {step.__name__!r} is parallelized already; decorate it once")
    if not callable(step):
        raise InputError(f"parallelize wants a function, got {type(step).__name__}")
    decided = {"memory": memory, "mesh": mesh, "pin": pin, "remat": remat, "offload": offload}
    if plan is not None:
        counts = {"stages": stages, "schedule": schedule, "microbatches": microbatches, "executor": executor}
        _refuse_beside("plan", cluster=cluster, **decided, **counts, like=like)
    if like is not None:
        _refuse_beside("like", cluster=cluster, mesh=mesh)
    given = None if plan is None else loaded(plan)
    asked = Asked(memory, mesh, pin, remat, microbatches, offload, time_limit_s)
    is_open = pipelines.leaves_open(asked, donate=donate, like=like, plan=plan)
    pipeline = pipelines.asked_for(stages, schedule, executor, is_open)
    is_asked = pipeline is not None and pipeline.always
    if is_asked or (given is not None and not isinstance(given[0], Plan)):
        pipelines.refuse(
            pin=pin or None, offload=offload, time_limit_s=time_limit_s, donate=donate, like=like
        )
    shared = like if like is None or isinstance(like, Parallelized) else Rested.by(_given(like)[0])
    request = Request(
        asked,
        pipeline,
        cluster,
        state,
        donate,
        given,
        shared,
        devices,
        static_argnums,
        static_argnames,
        progress,
    )
    return Parallelized(step, request)


def _given(plan: str | os.PathLike[str] | Plan) -> tuple[Plan, str]:
    """A plan, and how messages call it."""
    return (plan, "the plan") if isinstance(plan, Plan) else (Plan.load(plan), str(plan))


def loaded(plan: str | os.PathLike[str] | AnyPlan) -> tuple[AnyPlan, str]:
    """A plan of any kind, and how messages call it."""
    if isinstance(plan, AnyPlan):
        return plan, "the plan"
    data, place = read_file(plan), str(plan)
    kind = SpmdPlan if is_of_one_program(data) else PipelinePlan if is_of_pipeline(data) else Plan
    return kind.from_json(data, place), place


def _refuse_beside(decider: str, **options: Any) -> None:
    """What a plan, or a step that this one is like, has decided cannot be asked for beside it."""
    if said := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"{decider}= has decided what {', '.join(f'{name}=' for name in said)} would say: leave that out, or leave out "
            f"{decider}= to search again"
        )


def _traced(
    step: Callable[..., Any], cluster: AnyCluster, args: tuple[Any, ...], state: str | Sequence[str] | None
) -> Step:
    callee = step.callee if isinstance(step, Parallelized) else Callee.of(step)
    call = callee.call(args, {})
    return planning.traced(call.step, cluster, call.args, call.kwargs, state)


__all__ = ["AutoshardWarning", "Parallelized", "emit", "parallelize", "search", "verify"]
