"""From a traced step to a pipeline of it: as many stages as asked for, in a schedule that is named.

The devices are dealt evenly to the schedule's workers, in their order; a worker splits the examples of a microbatch over its
own. Where the step is cut is decided by `stage_cut`.
"""

from dataclasses import dataclass

import jax

from cost_model.cluster import Cluster
from cost_model.errors import InputError, PlanError
from search.ir.graph import Step
from search.ir.spec import AXIS_NAMES
from search.memory.microbatches import batch_divisors
from search.pipeline.batch_sharding import batch_sharding
from search.pipeline.pipeline_step import PipelineStep
from search.pipeline.programs import stage_programs
from search.pipeline.schedules.registry import FAMILIES, build_schedule
from search.pipeline.split_loops import num_positions
from search.pipeline.stage_cut import StageCut, balanced_cut
from search.pipeline.stages import forward_ops
from search.plan.pipeline_plan import PipelinePlan, Stage
from search.plan.schedule import Schedule
from search.plan.stage_programs import StagePrograms, StageSharding
from search.problem.fingerprint import fingerprint
from search.problem.flat_program import flatten

DEFAULT_SCHEDULE = "1f1b"

MICROBATCHES_PER_STAGE = 4
"""At most, where nobody says how many: the bubble is then about a fifth. Source: GPipe (Huang et al. 2019, section 2.3)
finds it negligible from four times as many microbatches as stages on."""

VIRTUAL_STAGES = 2
"""Stages per worker where a family leaves that open. Source: a choice of ours, the fewest there can be."""


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """What is asked for.

    Attributes:
      stages: in how many the step is cut.
      schedule: the family's name; None for 1F1B.
      microbatches: in how many the step goes through its batch; None for a few per stage.
    """

    stages: int
    schedule: str | None = None
    microbatches: int | None = None


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A plan, and what it means for its step.

    Attributes:
      plan: the plan.
      programs: what each stage runs.
      schedule: when.
      shardings: how each stage's values lie.
    """

    plan: PipelinePlan
    programs: StagePrograms
    schedule: Schedule
    shardings: tuple[StageSharding, ...]


def find(step: Step, cluster: Cluster, options: PipelineOptions) -> Pipeline:
    """Cuts a step into stages.

    Raises:
      InputError: there are more stages than there is to cut, the devices or the batch do not divide, or there is no such
        schedule.
      NotSplittableError: the step has no microbatches; says why.
    """
    name = options.schedule or DEFAULT_SCHEDULE
    microbatches = options.microbatches or _few_microbatches(step, options.stages)
    schedule = build_schedule(name, options.stages, microbatches, _num_workers(name, options.stages))
    parts = PipelineStep.of(step, microbatches)
    forward = forward_ops(parts)
    cut = balanced_cut(forward, parts.values, [num_positions(parts, op) for op in forward], options.stages)
    mesh = {AXIS_NAMES[1][0]: _devices_per_worker(cluster, schedule)}
    plan = PipelinePlan(
        step.name,
        fingerprint(flatten(step)),
        jax.__version__,
        cluster.to_json(),
        name,
        schedule.num_workers,
        microbatches,
        tuple(Stage(first, mesh) for first in (0, *cut.starts)),
    )
    return _pipeline(parts, cut, schedule, plan)


def apply(step: Step, plan: PipelinePlan, place: str = "the plan") -> Pipeline:
    """A loaded plan on the step that it is for.

    Raises:
      PlanError: it is for another step, or decides something impossible.
    """
    if plan.fingerprint != (own := fingerprint(flatten(step))):
        raise PlanError(
            f"{place} was made for another step (its {plan.step!r} has fingerprint {plan.fingerprint}, this {step.name!r} "
            f"has {own}). Plan again for this one"
        )
    try:
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.microbatches, plan.workers)
        parts = PipelineStep.of(step, plan.microbatches)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e
    first, *starts = (stage.first_op for stage in plan.stages)
    end = sum(num_positions(parts, op) for op in forward_ops(parts))
    if first or sorted({0, *starts}) != [0, *starts] or max((0, *starts)) >= end:
        raise PlanError(
            f"{place}: wanted stages that begin at op 0 and then at ascending ones below {end}, got {[first, *starts]}"
        )
    return _pipeline(parts, StageCut(tuple(starts)), schedule, plan)


def _pipeline(parts: PipelineStep, cut: StageCut, schedule: Schedule, plan: PipelinePlan) -> Pipeline:
    programs = stage_programs(parts, cut, schedule.splits_backward)
    shardings = tuple(batch_sharding(parts, stage.num_devices) for stage in plan.stages)
    return Pipeline(plan, programs, schedule, shardings)


def _few_microbatches(step: Step, num_stages: int) -> int:
    """The most that divide the batch, up to a few per stage."""
    most = MICROBATCHES_PER_STAGE * num_stages
    return max((n for n in batch_divisors(step) if n <= most), default=1)


def _num_workers(schedule: str, num_stages: int) -> int:
    """Groups of devices; errors are the schedule's to say."""
    family = FAMILIES.get(schedule)
    per_worker = 1 if family is None else family.stages_per_worker or VIRTUAL_STAGES
    return max(num_stages // per_worker, 1)


def _devices_per_worker(cluster: Cluster, schedule: Schedule) -> int:
    num, rest = divmod(cluster.num_devices, schedule.num_workers)
    if rest or not num:
        raise InputError(
            f"{cluster.num_devices} devices cannot be dealt to the {schedule.num_workers} workers of {schedule.num_stages} "
            f"stages under {schedule.name!r}, as many to each. Ask for a number of stages that gives a divisor of "
            f"{cluster.num_devices} workers, or use other devices"
        )
    return num
