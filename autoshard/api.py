"""The public functions: `parallelize`, `search`, `emit`, `verify`, `eject`, `choices` and `explain`."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, overload

import jax

from autoshard import (
    compiled_peaks,
    lowerings,
    option_types,
    pipeline_explanation,
    pipeline_request,
    pipelines,
    planning,
)
from autoshard.calls import Call, Callee
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.hardware import parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.xla.process import Compiler
from autoshard.ejection.eject import SHARDINGS, Ejected, Ejection
from autoshard.ejection.objects import fault
from autoshard.ejection.stage_shardings import stage_shardings_file
from autoshard.executors.jit import Program
from autoshard.keywords import split_keywords
from autoshard.options import IN_DOUBT, Options, among
from autoshard.parallelized import Parallelized
from autoshard.pins import Pins, Rested
from autoshard.progress import Progress, narrated
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import step_name
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.explained import Explanation
from autoshard.search.plan.explained_pipeline import PipelineExplanation
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.tracebacks import boundary
from autoshard.traces.comparison import TraceComparison, compared
from autoshard.verification import judge
from autoshard.verification.pipeline_result import PipelineVerification
from autoshard.verification.result import Verification


@boundary
def search(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    cluster: str | os.PathLike[str] | AnyCluster,
    memory: str | int | None = None,
    mesh: Sequence[int] | None = None,
    pin: Pins | None = None,
    state: Any = None,
    remat: str | None = None,
    stages: int | str | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    executor: str | None = None,
    offload: Sequence[str] | str | None = None,
    time_limit_s: float | None = None,
    verify: str = IN_DOUBT,
    target_config: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    **abstract_kwargs: Any,
) -> Plan:
    """Searches for the fastest plan of a training step on a cluster, without any of its devices.

    Args:
      step: a training step for one device, e.g. `(state, batch) -> (state, metrics)`.
      *abstract_args: the shapes of the step's arguments: pytrees of `jax.ShapeDtypeStruct` (arrays work too). They may be
        given by keyword, too (`batch=shapes`). If an option has the name of an argument, such as `state`, a value of the
        option's type is the option, and any other value is the argument.
      cluster: a preset such as "64xH100-80GB", a `Cluster`, or a JSON file that describes one. For several kinds of node
        ("8xH100-80GB+16xA100-40GB", or a `MixedCluster`) the plan is a pipeline, and each stage runs on one kind.
      memory: the cap per device, such as "70GiB", bytes or "90%" of its memory. The default is the device's memory less the
        runtime's own need. With several kinds of device, each kind is also capped by its own default, and a percentage
        refers to the largest memory.
      mesh: sizes of the logical mesh's axes, outermost first; searched by default. Axes are named "data" (one axis),
        "data" and "model" (two), "replica", "data" and "model" (three).
      pin: fixed specs of arguments by pytree path, e.g. `{"params['emb']": P("model")}`. A spec is a `PartitionSpec` or a
        plan's text, `"P('model')"`. A path as `print(plan)` folds it, `"['layers'][*]['w*']"`, pins every argument that
        it matches. A `Plan` of one program pins all arguments that its step shares with this one. With stages, a spec
        is for the devices of a replica, with axes "data" and "model".
      state: pytree paths of arguments, or of parts of them, that come back as results and are donated, or of frozen weights
        that do not come back. By default they are derived from structure and dataflow; a warning names large arguments that
        are in doubt.
      remat: "never" recomputes only the parts that the step itself marks (`jax.checkpoint`). By default, if memory is
        scarce, recomputation in the backward phase is searched together with the sharding.
      stages: number of pipeline stages, each on a submesh of its own; the search chooses where each stage begins and its
        number of devices. 1 means one program. By default a pipeline is searched in the time limit if no program fits, or as
        far as its lower bound is below the program's time; the faster plan wins. "auto" does so without a limit. `mesh`,
        `pin`, `offload` or `microbatches` without stages mean one program. With stages, `mesh` is the mesh of each stage:
        the number of replicas that share a microbatch, then one or two axes of each replica's devices.
      schedule: the pipeline's schedule: "gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "circular", "zb-h1", "zb-h2",
        "zb-v", "dualpipe-v" or "chimera". By default all are tried as far as their bounds let them, and in one program
        "gpipe" and "circular".
      microbatches: number of microbatches of a step; their gradients are added up exactly before the update. By default
        several numbers are tried if memory is scarce, or for a pipeline. A step that couples the examples of its batch
        cannot have microbatches.
      executor: "jit" is one program without a pipeline. For a pipeline, "mpmd" runs a program per stage, and "spmd" one
        program for all stages. "spmd" needs a step whose layers are a loop (`jax.lax.scan`); it has one dispatch a step
        and equal stages, under "gpipe" or "circular". The default is the faster one by prediction; the plan's `executor`
        names it.
      offload: a tuple of values that rest in pinned host memory and are on the device only while they are read:
        "optimizer_state", "frozen_weights", "parameters", or pytree paths of arguments, whole or their beginnings;
        "residuals" may wait there for the backward phase. "never" offloads nothing. By default all of these but paths are
        tried if memory is scarce. With stages, state rests in the memory of its stage's host if it is named here, and
        nothing else is offloaded.
      time_limit_s: processor seconds for all of the search: one program (four fifths, if pipelines may follow), pipelines,
        further rounds after the compiler's objections, and the explanation if nothing fits; and seconds for the compiler.
        By default the search does a fixed amount of work, about 15 seconds on a usual machine, so that equal inputs give
        equal plans on every machine; if it finds no good plan by then, it goes on for as long again. `Plan.gap` is the
        remaining gap. A pipeline that `stages` asks for has no limit by default.
      verify: which plans XLA's GPU compiler judges, without a GPU. If a plan is compiled to more than the cap, the search
        continues under a lower limit. "auto" compiles a plan that may exceed the cap by the usual error of predicted peaks,
        if the compiler is installed; equal blocks are extrapolated as by `verify`. "always" compiles each plan, in full if
        an extrapolated peak is close to the cap, and installs the compiler as `verify` does. "never" compiles none. The
        plan's `estimates.compiled_peak_bytes` is the compiled peak, None if the plan was not compiled.
      target_config: as for `verify`.
      progress: called with one line per stage of the search; the default is the logger `autoshard`, at level INFO, or the
        screen if the program has not configured logging and the call takes more than a second.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      The fastest plan found, with its estimates and its certified gap.

    Raises:
      InputError: an argument, the cluster or an option cannot be used.
      InfeasibleError: no plan fits the cap, as predicted or as compiled; the message says what would fit.
      CompilerError: the compiler failed, with `verify="always"`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> def step(w, x):
      ...     return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
      >>> w, x = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
      >>> search(step, w, x, cluster="8xH100-80GB").num_devices
      8
    """
    keywords = among(locals())
    hardware = parse_hardware(keywords.pop("cluster"))
    call, own = _split_keywords("search", step, abstract_args, abstract_kwargs, **keywords)
    options = Options.of(own)
    pipeline_request.are_allowed(options)
    with narrated(step_name(step), "tracing", options.progress) as tell:
        traced = _traced(call, hardware, options.state)
        return _found(traced, hardware, options, tell).plan


def _found(
    step: Step, hardware: AnyCluster, options: Options, progress: Progress
) -> SearchResult | Pipeline | SpmdPipeline:
    """One program or a pipeline; the faster one if both are allowed."""

    def alone(own: Options) -> SearchResult:
        cluster = hardware.groups[0]  # one program's
        return compiled_peaks.one_program(step, cluster, planning.options(step, cluster, own), own, progress)

    return pipelines.one_program_or_pipeline(step, hardware, options, alone, progress)


def tracer(
    function: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], state: Any
) -> Callable[[AnyCluster], Step]:
    """A step with its arguments, to be traced for clusters; the function that takes them is named in messages."""
    call, own = _split_keywords(function, step, args, kwargs, state=state)
    return lambda hardware: _traced(call, hardware, own["state"])


def planned(
    traced: Step, hardware: AnyCluster, options: Options, progress: Progress = lambda line: None
) -> Plan:
    """The plan that `search` finds for a traced step."""
    return _found(traced, hardware, options, progress).plan


@boundary
def emit(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    devices: Sequence[Any] | None = None,
    state: Any = None,
    **abstract_kwargs: Any,
) -> Program | tuple[Program, ...]:
    """Writes a plan into its step: the result can be lowered, read and run.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments; by position or by keyword, as for `search`.
      plan: a plan or its file.
      devices: the devices in the cluster's order; real, simulated or compile-only (`jax.experimental.topologies`). The
        default is `jax.devices()`.
      state: as for `search`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      A `Program`: `program.fn.lower(*program.args)` is exactly the program that runs. It takes the variables of NNX
      objects, and returns the changed ones beside the result. A pipeline has one program for each stage and task, in the
      order of their first run (`program.name`: `forward 2`, `backward 2`, `weight gradient 2`, `reduce 2` for the sums
      over the stage's replicas, `update 2`).

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: there are fewer devices than the plan's mesh has.
    """
    options = {"plan": plan, "devices": devices, "state": state}
    call, own = _split_keywords("emit", step, abstract_args, abstract_kwargs, **options)
    given, place = loaded(own["plan"])
    hardware = planning.hardware(given, place)
    traced = _traced(call, hardware, own["state"])
    on: Sequence[Any] = jax.devices() if own["devices"] is None else own["devices"]
    found = lowerings.applied(traced, given, place)
    return lowerings.of(found).emit(found, hardware, on)


@boundary
def verify(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    full: bool = False,
    state: Any = None,
    target_config: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    **abstract_kwargs: Any,
) -> Verification | PipelineVerification:
    """Compiles a plan's program with XLA's own GPU compiler and compares it with the prediction. No GPU is needed.

    The compiler runs in a process of its own: JAX's platform and flags in this process do not change. It needs NVIDIA's JAX
    plugin. If this environment lacks it, the first call installs it into a folder of the user's cache (0.4 GB), which only
    the compiler's process sees.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments; by position or by keyword, as for `search`.
      plan: a plan or its file.
      full: whether to compile all of a stack of equal blocks. By default a few blocks are compiled and the rest is
        extrapolated: collectives, arguments and host copies exactly, the device's peak as an estimate.
      state: as for `search`.
      target_config: XLA's `GpuTargetConfigProto` in text, or its file, for a GPU that is no preset.
      timeout_s: seconds for the compiler and each program; by default there is no limit.
      progress: called with one line per stage, and every second while the compiler works; by default as for `search`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      Memory and collectives, predicted and compiled, and the verdict: `.fits`, `.differences`. A pipeline has a result for
      each stage: each different program is compiled once, for its submesh, and its peak includes the arrays that the
      schedule keeps there in the meantime.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: the compiler is not installed, or cannot be asked about the plan's cluster.
      CompilerError: the compiler failed, ran out of memory or took too long.

    Example:
      >>> print(autoshard.verify(train_step, state, batch, plan="plan.json"))  # doctest: +SKIP
    """
    call, own = _split_keywords(
        "verify",
        step,
        abstract_args,
        abstract_kwargs,
        plan=plan,
        full=full,
        state=state,
        target_config=target_config,
        timeout_s=timeout_s,
        progress=progress,
    )
    given, place = loaded(own["plan"])
    cluster = planning.hardware(given, place)
    compiler = Compiler(judge.target_config_text(own["target_config"]), own["timeout_s"])
    with narrated(step_name(step), "tracing", own["progress"]) as tell:
        verifier = judge.CompilerVerifier(cluster, compiler, tell)
        traced = _traced(call, cluster, own["state"])
        found = lowerings.applied(traced, given, place)
        return lowerings.of(found).verify(verifier, found, bool(own["full"]))


@boundary
def eject(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    only: str | None = None,
    form: str | None = None,
    verify: str = IN_DOUBT,
    state: Any = None,
    target_config: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
    progress: Progress | None = None,
    **abstract_kwargs: Any,
) -> Ejected:
    """Writes a plan down as plain JAX, in a file that does not import autoshard.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments; by position or by keyword, as for `search`.
      plan: a plan or its file.
      only: "shardings" for a dict of the arguments' specs by pytree path, of a pipeline stage by stage; by default the whole
        step.
      form: "wrapper", the user's own step jitted with the plan's shardings of arguments and results; or "written", the
        plan's program, an operation a line. The default is the wrapper if it compiles to the collectives and the peak of
        the plan's program, and otherwise the written program, if each of its operations has a public function.
      verify: whether XLA's GPU compiler, without a GPU, compiles the file's step beside the plan's program: "auto" if it is
        installed, "always" or "never".
      state: as for `search`.
      target_config: as for `verify`.
      timeout_s: seconds for the compiler and each program; by default there is no limit.
      progress: as for `verify`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      The file: `.text`, `.save(path)`, and `.differences` from the plan's program.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InputError: the step's arguments are neither pytrees by position nor NNX objects that `nnx.update` can carry, the plan
        has a program per stage (both have shardings only), or the written form is asked for and an operation has no public
        function.
      CompilerError: the compiler failed.

    Example:
      >>> autoshard.eject(train_step, state, batch, plan="plan.json").save("sharded_step.py")  # doctest: +SKIP
    """
    call, own = _split_keywords(
        "eject",
        step,
        abstract_args,
        abstract_kwargs,
        plan=plan,
        only=only,
        form=form,
        verify=verify,
        state=state,
        target_config=target_config,
        timeout_s=timeout_s,
        progress=progress,
    )
    given, place = loaded(own["plan"])
    hardware = planning.hardware(given, place)
    compiler = Compiler(judge.target_config_text(own["target_config"]), own["timeout_s"])
    with narrated(step_name(step), "tracing", own["progress"]) as tell:
        traced = _traced(call, hardware, own["state"])
        found = lowerings.applied(traced, given, place)
        program = lowerings.of(found).whole(found)
        if isinstance(found, Pipeline) and own["only"] is not None:
            return Ejected(stage_shardings_file(found, _names(call)), SHARDINGS)
        if program is None:
            raise InputError(
                f"{place} has a program for each stage, which a schedule dispatches: that is no one step in plain JAX. "
                'Eject its shardings, stage by stage: only="shardings". Or search with executor="spmd", or without stages'
            )
        own_step, own_args = (call.step, call.args) if call.apart is None else (step, abstract_args)
        ejection = Ejection(found, program, own_step, own_args, _names(call), hardware.groups[0])
        if own["only"] is not None:
            return ejection.shardings()
        if call.apart is not None and (reason := fault(call, abstract_args, traced)):
            raise InputError(
                f"{step_name(step)} takes NNX objects in a way that nnx.split and nnx.update do not carry: {reason}. Make "
                'it a function of states: nnx.split outside and nnx.merge inside. Or eject its shardings: only="shardings"'
            )
        if call.apart is None and not call.is_as_given:
            raise InputError(
                f"{step_name(step)} takes arguments that are no plain pytrees by position (Equinox modules, static or "
                "keyword arguments). Make it a function of pytrees: eqx.partition, functools.partial. Or eject its "
                'shardings: only="shardings"'
            )
        return ejection.whole(own["form"], ejection.oracle(own["verify"], compiler, tell))


def _names(call: Call) -> tuple[str, ...]:
    """A name for each argument of a program: its parameter's, or its number's."""
    try:
        parameters = list(inspect.signature(call.step).parameters.values())
    except (ValueError, TypeError):
        parameters = []
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    count = len(call.args)
    names = [*plain[:count], *(f"argument_{i}" for i in range(len(plain), count))]
    return (*names, *sorted(call.kwargs))


@boundary
def priced(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    state: str | Sequence[str] | None = None,
    **abstract_kwargs: Any,
) -> Plan:
    """A plan with new estimates: those of its decisions, whatever its file says.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments.
      plan: a plan or its file.
      state: as for `search`.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    call, own = _split_keywords("priced", step, abstract_args, abstract_kwargs, plan=plan, state=state)
    given, place = loaded(own["plan"])
    traced = _traced(call, planning.hardware(given, place), own["state"])
    return lowerings.applied(traced, given, place).plan


@boundary
def choices(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    name: str,
    state: Any = None,
    **abstract_kwargs: Any,
) -> tuple[str, ...]:
    """The values that one decision of a plan may be edited to; of a pipeline, in each of its shardings.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments; by position or by keyword, as for `search`.
      plan: a plan or its file.
      name: the decision's name in the plan, such as "forward dot_general".
      state: as for `search`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Raises:
      PlanError: the plan is for another step, or has no decision of this name.
      InputError: the step is given wrong arguments.
    """
    options = {"plan": plan, "name": name, "state": state}
    call, own = _split_keywords("choices", step, abstract_args, abstract_kwargs, **options)
    given, place = loaded(own["plan"])
    traced = _traced(call, planning.hardware(given, place), own["state"])
    return lowerings.choices(traced, given, own["name"], place)


@boundary
def explain(
    step: Callable[..., Any],
    /,
    *abstract_args: Any,
    plan: str | os.PathLike[str] | Plan,
    name: str,
    state: Any = None,
    **abstract_kwargs: Any,
) -> Explanation | PipelineExplanation:
    """Explains one decision of a plan: the best plan with another choice there, its price, and what would change with it.

    Prices are those of plans on the plan's mesh, with its microbatches and with what it recomputes and offloads. How an op
    is recomputed and where an argument rests are explained by estimates.

    Of a pipeline, `stages`, `schedule` and `microbatches` are explained: the fastest plan that other searches find with a
    neighbouring choice, which takes as long as these searches. Of its arguments, the answer has the stage and the sharding.

    Args:
      step: the step that the plan was made for.
      *abstract_args: the shapes of the step's arguments; by position or by keyword, as for `search`.
      plan: a plan or its file.
      name: the decision's name in the plan: the path of an argument, such as "params['emb']", or the name of an op; of a
        pipeline, `stages`, `schedule`, `microbatches`, or the path of an argument.
      state: as for `search`.
      **abstract_kwargs: the shapes of arguments that are given by keyword.

    Returns:
      The explanation, which prints as text: the choice, the runner-up with its price in seconds and bytes, the reason
      (`cheaper elsewhere`, `tie` or `not possible`), and the worth of 10% more memory.

    Raises:
      PlanError: the plan is for another step, or has no decision of this name.
      InfeasibleError: what the plan decides does not fit its memory cap.
      InputError: the step is given wrong arguments.

    Example:
      >>> print(autoshard.explain(train_step, state, batch, plan="plan.json", name="state['w']"))  # doctest: +SKIP
    """
    options = {"plan": plan, "name": name, "state": state}
    call, own = _split_keywords("explain", step, abstract_args, abstract_kwargs, **options)
    given, place = loaded(own["plan"])
    hardware = planning.hardware(given, place)
    traced = _traced(call, hardware, own["state"])
    if given.is_pipeline:
        return pipeline_explanation.explain(traced, given, hardware, own["name"], place)
    return planning.explained(traced, given, own["name"], place)


@boundary
def trace_compare(plan: str | os.PathLike[str] | Plan, profile: str | os.PathLike[str]) -> TraceComparison:
    """Puts a plan's predictions beside the trace of a real run.

    The trace is cut into steps, and the median one is compared: from its first kernel to the next step's. Numbers are the
    means of the devices in the trace. They hold for a trace of some steps after the first one, which compiles.

    Args:
      plan: a plan or its file.
      profile: the folder that was given to `jax.profiler.trace`; of several runs in it, the last one counts. Or one of the
        files there, `*.xplane.pb` or `*.trace.json.gz`.

    Returns:
      The comparison, which prints as text: the step's parts, and its kernels by class and its collectives by kind, the
      largest differences first.

    Raises:
      InputError: there is no trace, it has no kernels of GPUs, or it is of another step or of more devices.
      PlanError: the plan was edited by hand, so that its estimates are those of other decisions.

    Example:
      >>> with jax.profiler.trace("profile"):  # doctest: +SKIP
      ...     state, loss = train_step(state, batch)
      >>> print(autoshard.trace_compare(train_step.plan, "profile"))  # doctest: +SKIP
    """
    return compared(loaded(plan)[0], Path(profile))


class Keywords(TypedDict, total=False):
    """The options of `parallelize`, as type checkers see them."""

    cluster: str | os.PathLike[str] | AnyCluster | None
    memory: str | int | None
    mesh: Sequence[int] | None
    pin: Pins | None
    state: str | Sequence[str] | None
    donate: str | Sequence[str] | None
    remat: str | None
    stages: int | str | None
    schedule: str | None
    microbatches: int | None
    executor: str | None
    offload: Sequence[str] | str | None
    plan: str | os.PathLike[str] | Plan | None
    like: Parallelized[..., Any] | str | os.PathLike[str] | Plan | None
    time_limit_s: float | None
    verify: str
    devices: Sequence[Any] | None
    static_argnums: int | Iterable[int] | None
    static_argnames: str | Iterable[str] | None
    progress: Progress | None


class Decorator(Protocol):
    """`parallelize` with options, waiting for its step."""

    def __call__[**P, R](self, step: Callable[P, R], /) -> Parallelized[P, R]:
        """The parallelized step."""
        ...


@overload
def parallelize[**P, R](step: Callable[P, R], **options: Unpack[Keywords]) -> Parallelized[P, R]: ...


@overload
def parallelize(step: None = None, **options: Unpack[Keywords]) -> Decorator: ...


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
    plan: str | os.PathLike[str] | Plan | None = None,
    like: Parallelized[..., Any] | str | os.PathLike[str] | Plan | None = None,
    time_limit_s: float | None = None,
    verify: str = IN_DOUBT,
    devices: Sequence[Any] | None = None,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    progress: Progress | None = None,
) -> Any:
    """Makes a training step written for one device run on many.

    The first call traces the step, searches and compiles; later calls only run. State arguments (those that
    come back as results) are donated. Flax NNX objects among the arguments are changed in place, as under `nnx.jit`.
    Leaves of Equinox modules that are no arrays are constants of the step, as under `eqx.filter_jit`.

    Args:
      step: the training step; without it, a decorator is returned.
      cluster: the hardware; by default it is derived from the devices.
      memory: as for `search`; for attached GPUs the default is at most JAX's share of each GPU
        (`XLA_PYTHON_CLIENT_MEM_FRACTION`).
      mesh: as for `search`.
      pin: as for `search`.
      state: as for `search`.
      donate: pytree paths of arguments, or of parts of them, to donate besides the state: a result of equal shape, dtype and
        sharding reuses their memory.
      remat: as for `search`.
      stages: as for `search`; `donate` and `like` without stages mean one program, too.
      schedule: as for `search`.
      executor: as for `search`.
      microbatches: as for `search`.
      offload: as for `search`.
      plan: a plan or its file, used instead of a search. The step, its shapes and the number of devices must be the plan's.
        Options that the plan decides (`cluster`, `memory`, `mesh`, `pin`, `remat`, `stages`, `schedule`, `microbatches`,
        `executor`, `offload`) and `like` are refused beside it.
      like: a parallelized step on the same state, its plan, or the plan's file. Arguments that both steps share, such as the
        parameters in an evaluation, keep their sharding, on the same mesh; `cluster` and `mesh` are refused beside it.
        Arguments are matched by pytree path; if their names differ, by the rest of the path and by shape. Doubtful
        matches are left to the search. A step that is like a pipeline's step is a pipeline on its stages.
      time_limit_s: as for `search`.
      verify: as for `search`. On GPUs, a program is compiled before its first step anyway, and judged by that; "never" takes
        it as it is. A given plan is not searched, and not judged.
      devices: the devices to run on; by default all devices that JAX sees, or the first ones if `cluster` has fewer.
      static_argnums: positions of arguments that are constants of the step, as for `jax.jit`: each value has a plan of its
        own. Static arguments of an already jitted step stay static.
      static_argnames: names of arguments that are constants of the step, as for `jax.jit`.
      progress: as for `search`; compiling is a stage, too.

    Returns:
      A `Parallelized` step: it is called like the step, and has `.plan`, `.init` and `.lower` besides.

    Raises:
      InputError: an option cannot be used, or the step is parallelized already.

    Example:
      >>> @parallelize(memory="70GiB")  # doctest: +SKIP
      ... def train_step(state, batch): ...
    """
    keywords = among(locals())
    option_types.check(**keywords)
    if step is None:
        return functools.partial(parallelize, **keywords)
    if isinstance(step, Parallelized):
        raise InputError(f"the step {step.__name__!r} is parallelized already; decorate it once")
    if not callable(step):
        raise InputError(f"parallelize wants a function, got {type(step).__name__}")
    options = Options.of(keywords)
    if plan is not None:
        decided = (
            "cluster",
            "memory",
            "mesh",
            "pin",
            "remat",
            "offload",
            "stages",
            "schedule",
            "microbatches",
        )
        _refuse_beside("plan", options, *decided, "executor", "like")
    if like is not None:
        _refuse_beside("like", options, "cluster", "mesh")
    given = None if plan is None else loaded(plan)
    is_asked = pipeline_request.are_allowed(options) and stages is not None
    if is_asked or (given is not None and given[0].is_pipeline):
        pipeline_request.refuse(like=like)
    shared = like if like is None or isinstance(like, Parallelized) else Rested.by(_given("like=", like)[0])
    return Parallelized(step, options, given, shared)


def _given(reader: str, plan: str | os.PathLike[str] | Plan) -> tuple[Plan, str]:
    """A plan of one program, and its name in messages."""
    given, place = loaded(plan)
    if given.is_pipeline:
        raise InputError(f"{reader} wants the plan of one program, and {place} is a pipeline's")
    return given, place


def loaded(plan: str | os.PathLike[str] | Plan) -> tuple[Plan, str]:
    """A plan of any kind, and its name in messages."""
    if isinstance(plan, Plan):
        return plan, "the plan"
    if plan is None:
        raise InputError("wanted plan as a plan or its file, got None")
    return Plan.load(plan), str(plan)


def _refuse_beside(decider: str, options: Options, *names: str) -> None:
    """Refuses options that `plan=` or `like=` (the decider) has decided already."""
    if given := [name for name in names if getattr(options, name) is not None]:
        raise InputError(
            f"{decider}= has decided what {', '.join(f'{name}=' for name in given)} would say: leave that out, or leave out "
            f"{decider}= to search again"
        )


def _split_keywords(
    function: str, step: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **options: Any
) -> tuple[Call, dict[str, Any]]:
    """A call of the step, and the options of a function that takes the step's arguments beside its own options.

    Raises:
      InputError: the step is no function, a keyword is unknown, or an option has a wrong type.
    """
    if not callable(step):
        raise InputError(f"{function} wants a step, which is a function, got {type(step).__name__}")
    callee, owner = (step.callee, step.owner) if isinstance(step, Parallelized) else (Callee.of(step), ())
    args = (*owner, *args)
    kwargs, own = split_keywords(function, callee, len(args), kwargs, options)
    return callee.call(args, kwargs, is_bound=bool(owner)), own


def _traced(call: Call, cluster: AnyCluster, state: str | Sequence[str] | None) -> Step:
    return planning.traced(call.step, cluster, call.args, call.kwargs, state)
