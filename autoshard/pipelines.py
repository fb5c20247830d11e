"""Pipelines as users ask for them: from `stages=` and what stands beside it to a pipeline on its step.

Who says nothing of stages gets a pipeline where that is faster, or the only plan that fits. As a pipeline's search takes
much longer than one program's, it is made only where it may pay. A pipeline computes what one program does; so at most it
saves what that waits for communication, computes twice or does not share out.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, Self

from autoshard import planning
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.units import format_seconds
from autoshard.planning import Asked
from autoshard.processes import ALONE, Processes
from autoshard.progress import Progress
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline import planning as pipelines
from autoshard.search.pipeline import spmd_planning
from autoshard.search.pipeline.planning import Pipeline
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.proposals import DISPATCH_S, Parts
from autoshard.search.pipeline.search import PipelineOptions
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.pipeline_plan import PipelinePlan
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spmd_plan import (
    EXECUTORS,
    ONE_PROGRAM,
    PROGRAM_PER_STAGE,
    SpmdPlan,
    is_of_one_program,
)
from autoshard.user_warning import warn

AUTO = "auto"
"""How users ask for as many stages as are best, or none, however long the search takes."""

WORTH = 0.15
"""Of the step, what a pipeline has to be able to save for one to be searched unasked. Source: a choice of ours; of what it
may save, its own bubble and transfers take about a half."""

MUCH_FASTER = 1.3
"""One program is at most so many times as fast as a pipeline's microbatches, where its devices always have work: its kernels
take more examples at a time. Source: a choice of ours."""

UNASKED_S = 75.0
"""Nominal seconds (`search.solver.clock`) for a pipeline that nobody asks for; what was begun by then is ended. Source: a
choice of ours; one of 39B in 48 unrolled layers on 64 devices takes 63, GPT-3's in 96 layers on 1,024 takes 52."""

LEAST_TASKS = 8
"""Of a pipeline: two stages, two microbatches, forward and backward."""


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline that is asked for, or may be.

    Attributes:
      count: of stages; None to search it, and to take one program where that is faster.
      schedule: the family's name, if it is said.
      executor: what is to run it; None for what is predicted to be faster.
      always: whether it is searched even where it can save little.
    """

    count: int | None
    schedule: str | None = None
    executor: str | None = None
    always: bool = True


WHERE_IT_PAYS = Stages(None, always=False)
"""What is asked for where nothing is said."""


class OneProgram(Protocol):
    """What a search for one program finds."""

    @property
    def plan(self) -> Plan:
        """The plan."""
        ...

    @property
    def saveable_s(self) -> float:
        """What a plan of another kind may save of a step at most."""
        ...

    def waited(self, part: str, seconds: float) -> Self:
        """With what its user has waited for besides."""
        ...


def asked_for(
    stages: int | str | None, schedule: str | None, executor: str | None = None, is_open: bool = False
) -> Stages | None:
    """The pipeline that is asked for, if one is.

    Args:
      stages: as users say it.
      schedule: likewise.
      executor: likewise.
      is_open: whether, if nothing is said of stages, it may be a pipeline as well as one program.

    Raises:
      InputError: there cannot be so many stages, no such executor, or a schedule or an executor without any stages.
    """
    if executor is not None and executor not in EXECUTORS:
        raise InputError(
            f"no executor is called {executor!r}. Choose one of {', '.join(map(repr, EXECUTORS))}"
        )
    if stages == AUTO:
        return Stages(None, schedule, executor)
    stages = None if stages is None else int(stages)
    if stages is not None and stages < 1:
        raise InputError(f"wanted at least 1 stage, got {stages}")
    if stages is not None and stages > 1:
        return Stages(stages, schedule, executor)
    for name, value in (("schedule", schedule), ("executor", executor)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} is of a pipeline, and there is none with stages={stages}. Say how many stages, or "
                f"stages={AUTO!r}"
            )
    return WHERE_IT_PAYS if is_open and stages is None else None


def across_kinds(cluster: MixedCluster, wanted: Stages | None) -> Stages:
    """The pipeline that is asked for on several kinds of node: one in any case, with a program per stage.

    Raises:
      InputError: one program is asked for, or what only that has.
    """
    if wanted is None or wanted.executor == ONE_PROGRAM:
        only = "executor=" if wanted else "stages=1, pin=, offload=, time_limit_s=, like=, donate="
        raise InputError(
            f"one program runs on devices of one kind, and {cluster.name} has several: {cluster}. Leave out what only one "
            f"program has ({only}), and say stages={AUTO!r} beside mesh= or microbatches=; or plan for devices of one kind"
        )
    return replace(wanted, executor=PROGRAM_PER_STAGE)


def leaves_open(asked: Asked, **others: Any) -> bool:
    """Whether what is asked for suits a pipeline as well as one program. A mesh, how arguments rest, in how many parts the
    batch is taken and the solver's time are one program's, unless stages are asked for."""
    of_one = (asked.mesh, asked.pin or None, asked.offload, asked.microbatches, asked.time_limit_s)
    return all(one is None for one in (*of_one, *others.values()))


def fastest[One: OneProgram](
    step: Step,
    cluster: Cluster,
    wanted: Stages,
    asked: Asked,
    alone: Callable[[], One],
    progress: Progress = lambda line: None,
    processes: Processes = ALONE,
) -> One | Pipeline | SpmdPipeline:
    """The faster of one program and a pipeline of any number of stages.

    Args:
      step: the traced step.
      cluster: what it will run on.
      wanted: what is asked for of a pipeline.
      asked: what else is asked of the search.
      alone: searches for one program.
      progress: called with one line a stage of the work.
      processes: those that run it, of which the first one searches.

    Raises:
      InfeasibleError: neither fits; says what would make one program fit.
    """
    found, refused, start_s = None, InfeasibleError(), perf_counter()
    try:
        found = alone()
    except InfeasibleError as e:
        refused = e
    alone_s = perf_counter() - start_s
    if found is not None and not (wanted.always or _may_pay(found)):
        return found
    cutoff_s = math.inf if found is None else found.plan.estimates.step_s
    progress(
        "looking for a pipeline, " + ("as nothing else fits" if found is None else "which may be faster")
    )
    try:
        faster = searched(step, cluster, wanted, asked, progress, processes, cutoff_s)
        return _waited(faster, "one program", alone_s)
    except (InfeasibleError, InputError) as e:
        progress(f"no pipeline: {e}")
        if found is None:
            raise refused from e
    return found.waited("pipelines", perf_counter() - start_s - alone_s)


def _waited[Found: (Pipeline, SpmdPipeline, Pipeline | SpmdPipeline)](
    found: Found, part: str, seconds: float
) -> Found:
    """A pipeline, with what its user has waited for besides."""
    search_s = {**found.plan.search_s, part: seconds}
    return replace(found, plan=replace(found.plan, search_s=search_s))


def _may_pay(found: OneProgram) -> bool:
    """Whether a pipeline may be so much faster than one program that it is worth to be searched."""
    least_s = max(WORTH * found.plan.estimates.step_s, LEAST_TASKS * DISPATCH_S)
    return found.plan.num_devices > 1 and found.saveable_s > least_s


def refuse(**options: Any) -> None:
    """What cannot be asked of a pipeline.

    Raises:
      InputError: some of it is.
    """
    if said := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"a pipeline is planned without {', '.join(f'{name}=' for name in said)}. Leave that out, or the pipeline"
        )


def found(
    step: Step,
    cluster: AnyCluster,
    wanted: Stages | PipelinePlan | SpmdPlan,
    asked: Asked,
    place: str = "",
    progress: Progress = lambda line: None,
    processes: Processes = ALONE,
) -> Pipeline | SpmdPipeline:
    """A step as a pipeline.

    Args:
      step: the traced step.
      cluster: what it will run on.
      wanted: what is asked for, or a plan.
      asked: what else is asked of the search.
      place: how messages call the plan.
      progress: called with one line a stage of the work.
      processes: those that run it, of which the first one searches.

    Raises:
      InputError: what is asked for cannot be.
      InfeasibleError: nothing fits.
      PlanError: the plan is for another step, or decides something impossible.
    """
    if isinstance(wanted, PipelinePlan | SpmdPlan):
        return applied(step, wanted, place)
    return searched(step, cluster, wanted, asked, progress, processes)


def found_or_alone[One: OneProgram](
    step: Step,
    cluster: Cluster,
    wanted: Stages,
    asked: Asked,
    alone: Callable[[], One],
    progress: Progress = lambda line: None,
    processes: Processes = ALONE,
) -> One | Pipeline | SpmdPipeline:
    """Another call of a step that is a pipeline, as one too, or as one program if it cannot be: a last batch may have fewer
    examples than there are microbatches.

    Args:
      step: the call, traced.
      cluster: what it will run on.
      wanted: the pipeline of the first call.
      asked: what else is asked of the search.
      alone: searches for one program.
      progress: called with one line a stage of the work.
      processes: those that run it, of which the first one searches.

    Raises:
      InfeasibleError: nothing fits.

    Warns:
      AutoshardWarning: it is one program.
    """
    try:
        return searched(step, cluster, wanted, asked, progress, processes)
    except InputError as e:
        warn(f"this call of {step.name} is planned as one program, since it cannot be a pipeline: {e}")
        return alone()


def searched(
    step: Step,
    cluster: AnyCluster,
    wanted: Stages,
    asked: Asked,
    progress: Progress = lambda line: None,
    processes: Processes = ALONE,
    cutoff_s: float = math.inf,
) -> Pipeline | SpmdPipeline:
    """A step as a pipeline that takes less than the cutoff; arguments and errors as of `found`."""
    options = _options(cluster, wanted, asked)

    def apply(data: Any, place: str) -> Pipeline | SpmdPipeline:
        kind = SpmdPlan if is_of_one_program(data) else PipelinePlan
        return applied(step, kind.from_json(data, place), place)

    return processes.found_by_the_first(
        lambda: _faster(step, cluster, options, wanted, progress, cutoff_s), apply
    )


def _faster(
    step: Step,
    cluster: AnyCluster,
    options: PipelineOptions,
    wanted: Stages,
    progress: Progress,
    cutoff_s: float,
) -> Pipeline | SpmdPipeline:
    """By prediction, of what either executor can run; they share what they know of the step, and their time."""
    prepared = Prepared.within(math.inf if wanted.always else UNASKED_S)
    executor, as_one, start_s = wanted.executor, None, perf_counter()
    if isinstance(cluster, Cluster) and executor != PROGRAM_PER_STAGE:
        try:
            as_one = spmd_planning.find(step, cluster, options, progress, cutoff_s, prepared)
        except (InfeasibleError, InputError) as e:
            if executor == ONE_PROGRAM:
                raise
            progress(f"not as one program for all stages: {e}")
        else:
            if executor == ONE_PROGRAM:
                return as_one
            cutoff_s = as_one.plan.estimates.step_s
    as_one_s = perf_counter() - start_s
    try:
        found = pipelines.find(step, cluster, options, progress, cutoff_s, prepared)
        if isinstance(cluster, MixedCluster) and options.stages is None:
            plain = prepared.parts[found.plan.microbatches * found.plan.num_replicas]
            told_s = perf_counter()
            _tell_of_parts(step, cluster, found.plan, plain, progress)
            found = _waited(found, "one kind of device alone", perf_counter() - told_s)
        is_tried = isinstance(cluster, Cluster) and executor != PROGRAM_PER_STAGE
        return _waited(found, "as one program", as_one_s) if is_tried else found
    except (InfeasibleError, InputError) as e:
        if as_one is None:
            raise
        progress(f"not with a program per stage: {e}")
        return _waited(as_one, "with a program per stage", perf_counter() - start_s - as_one_s)


def _tell_of_parts(
    step: Step, cluster: MixedCluster, plan: PipelinePlan, parts: Parts, progress: Progress
) -> None:
    """Warns where one program on nodes of one kind alone is faster than a pipeline on all."""
    alone_s = dict[str, float]()
    for group, cap_bytes in zip(cluster.groups, cluster.caps(plan.memory_bytes), strict=True):
        if parts.least_s(group) > MUCH_FASTER * plan.estimates.step_s:
            continue
        progress(f"looking for one program on {group.name} alone")
        with suppress(InfeasibleError):
            found = planning.find(step, group, planning.options(step, group, Asked(cap_bytes)), progress)
            alone_s[group.name] = found.plan.estimates.step_s
    fastest = min(alone_s, key=alone_s.__getitem__, default=None)
    if fastest is not None and alone_s[fastest] < plan.estimates.step_s:
        warn(
            f"{fastest} alone is predicted to run {step.name} in {format_seconds(alone_s[fastest])}, and all of "
            f"{cluster.name} in {format_seconds(plan.estimates.step_s)}. Ask for it alone, or give the step a larger batch"
        )


def applied(step: Step, plan: PipelinePlan | SpmdPlan, place: str) -> Pipeline | SpmdPipeline:
    """A given plan on its step.

    Raises:
      PlanError: it is for another step, or decides something impossible.
    """
    try:
        if isinstance(plan, SpmdPlan):
            return spmd_planning.apply(step, plan, place)
        return pipelines.apply(step, plan, place)
    except InputError as e:
        raise PlanError(str(e)) from e


def _stage_mesh(asked: Asked) -> tuple[int, ...] | None:
    mesh = planning.mesh_shape(asked.mesh)
    if mesh is not None and (len(mesh) not in (2, 3) or min(mesh) < 1):
        raise InputError(
            f"wanted the mesh of a stage as its number of replicas and 1 or 2 axes of each one's devices, such as (2, 4), "
            f"got {mesh}"
        )
    return mesh


def _options(cluster: AnyCluster, wanted: Stages, asked: Asked) -> PipelineOptions:
    if asked.remat not in (None, "never"):
        raise InputError(f'wanted remat="never", or nothing to have it searched, got {asked.remat!r}')
    if asked.microbatches is not None and asked.microbatches < 1:
        raise InputError(f"wanted at least 1 microbatch, got {asked.microbatches}")
    return PipelineOptions(
        planning.limit_bytes(cluster, asked),
        wanted.count,
        wanted.schedule,
        planning.whole(asked.microbatches),
        _stage_mesh(asked),
        asked.remat,
        asked.memory_share,
    )
