"""Pipelines as users ask for them: from `stages=` and what stands beside it to a pipeline on its step."""

import contextlib
import math
from dataclasses import dataclass
from typing import Any, overload

from autoshard import planning
from autoshard.planning import Asked
from autoshard.processes import ALONE, Processes
from autoshard.progress import Progress
from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, InputError, PlanError
from search.ir.graph import Step
from search.pipeline import planning as pipelines
from search.pipeline import spmd_planning
from search.pipeline.planning import Pipeline
from search.pipeline.search import PipelineOptions
from search.pipeline.spmd_planning import SpmdOptions, SpmdPipeline
from search.plan.pipeline_plan import PipelinePlan
from search.plan.plan import Plan
from search.plan.spmd_plan import EXECUTORS, ONE_PROGRAM, PROGRAM_PER_STAGE, SpmdPlan

AUTO = "auto"
"""How users ask for as many stages as are best, or none."""


@dataclass(frozen=True, slots=True)
class Stages:
    """A pipeline that is asked for.

    Attributes:
      count: of stages; None to search it.
      schedule: the family's name, if it is said.
      executor: what is to run it; all but a program per stage is dealt evenly, and not searched.
    """

    count: int | None
    schedule: str | None = None
    executor: str = PROGRAM_PER_STAGE


def asked_for(stages: int | str | None, schedule: str | None, executor: str | None = None) -> Stages | None:
    """The pipeline that is asked for, if one is.

    Raises:
      InputError: there cannot be so many stages, no such executor, or a schedule or an executor without any stages.
    """
    if executor is not None and executor not in EXECUTORS:
        raise InputError(
            f"no executor is called {executor!r}. Choose one of {', '.join(map(repr, EXECUTORS))}"
        )
    if stages == AUTO:
        return Stages(None, schedule)
    if stages is not None and not isinstance(stages, int):
        raise InputError(f"wanted stages as a whole number, or {AUTO!r} to have it searched, got {stages!r}")
    if stages is not None and stages < 1:
        raise InputError(f"wanted at least 1 stage, got {stages}")
    if stages is not None and stages > 1:
        return Stages(stages, schedule, executor or PROGRAM_PER_STAGE)
    for name, value in (("schedule", schedule), ("executor", executor)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} is of a pipeline, and there is none with stages={stages}. Say how many stages"
            )
    return None


def fastest(
    step: Step,
    cluster: Cluster,
    wanted: Stages,
    asked: Asked,
    progress: Progress = lambda line: None,
) -> Plan | PipelinePlan:
    """The faster of the plans for one program and for a pipeline of any number of stages.

    Raises:
      InfeasibleError: neither fits; says what would make one program fit.
    """
    alone, refused = None, None
    try:
        alone = planning.find(step, cluster, planning.options(step, cluster, asked), progress).plan
    except InfeasibleError as e:
        refused = e
    cutoff_s = math.inf if alone is None else alone.estimates.step_s
    with contextlib.suppress(InfeasibleError, InputError):  # where there is no pipeline, there is one program
        found = pipelines.find(step, cluster, _options(cluster, wanted, asked), progress, cutoff_s).plan
        if found.estimates.step_s < cutoff_s:
            return found
    if alone is None:
        raise refused or AssertionError("a search finds a plan or says why not")
    return alone


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
    cluster: Cluster,
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
    if wanted.executor == ONE_PROGRAM and wanted.count is not None:
        progress(f"cutting the layers into {wanted.count} stages")
        options = SpmdOptions(wanted.count, wanted.schedule, asked.microbatches, _stage_mesh(asked))
        return processes.found_by_the_first(
            lambda: spmd_planning.find(step, cluster, options),
            lambda data, place: applied(step, SpmdPlan.from_json(data, place), place),
        )
    return searched(step, cluster, wanted, asked, progress, processes)


def searched(
    step: Step,
    cluster: Cluster,
    wanted: Stages,
    asked: Asked,
    progress: Progress = lambda line: None,
    processes: Processes = ALONE,
) -> Pipeline:
    """A step as a pipeline with a program per stage; arguments and errors as of `found`."""
    options = _options(cluster, wanted, asked)
    return processes.found_by_the_first(
        lambda: pipelines.find(step, cluster, options, progress),
        lambda data, place: applied(step, PipelinePlan.from_json(data, place), place),
    )


@overload
def applied(step: Step, plan: PipelinePlan, place: str) -> Pipeline: ...


@overload
def applied(step: Step, plan: SpmdPlan, place: str) -> SpmdPipeline: ...


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


def _options(cluster: Cluster, wanted: Stages, asked: Asked) -> PipelineOptions:
    if asked.remat not in (None, "never"):
        raise InputError(f'wanted remat="never", or nothing to have it searched, got {asked.remat!r}')
    if asked.microbatches is not None and asked.microbatches < 1:
        raise InputError(f"wanted at least 1 microbatch, got {asked.microbatches}")
    return PipelineOptions(
        planning.limit_bytes(cluster, asked),
        wanted.count,
        wanted.schedule,
        asked.microbatches,
        _stage_mesh(asked),
        asked.remat,
    )
