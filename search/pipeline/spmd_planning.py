"""From a traced step to a pipeline of it that is one program: as many equal stages as asked for, in one of two schedules.

The devices are dealt evenly to the stages, in their order; each device of a stage has microbatches of its own.
"""

from dataclasses import dataclass

import jax

from cost_model.cluster import Cluster
from cost_model.errors import InputError, PlanError
from search.ir.graph import Step
from search.memory.microbatches import batch_divisors
from search.pipeline.schedules.registry import build_schedule
from search.pipeline.spmd import spmd_step
from search.plan.spmd_plan import ONE_PROGRAM, SpmdPlan
from search.plan.spmd_step import SpmdStep
from search.problem.fingerprint import fingerprint
from search.problem.flat_program import flatten

STAGES_PER_WORKER = {"gpipe": 1, "circular": 2}
"""By schedule. Source: a choice of ours, the fewest there can be."""

MICROBATCHES_PER_STAGE = 4
"""At most, where nobody says how many. Source: GPipe (Huang et al. 2019, section 2.3) finds the bubble negligible from four
times as many microbatches as stages on."""

AXES = ("stage", "data")


@dataclass(frozen=True, slots=True)
class SpmdOptions:
    """What is asked for.

    Attributes:
      stages: in how many the layers are cut.
      schedule: `gpipe` or `circular`; None for GPipe's.
      microbatches: of each device; None for a few per stage.
    """

    stages: int
    schedule: str | None = None
    microbatches: int | None = None


@dataclass(frozen=True, eq=False)
class SpmdPipeline:
    """A plan, and the program that it means for its step."""

    plan: SpmdPlan
    program: SpmdStep


def find(step: Step, cluster: Cluster, options: SpmdOptions) -> SpmdPipeline:
    """Cuts a step's layers into stages.

    Raises:
      InputError: the step has no loop over layers, these, the devices or the batch do not divide, or one program has no
        such schedule.
      NotSplittableError: the step has no microbatches; says why.
    """
    name, stages = options.schedule or "gpipe", options.stages
    workers = stages // STAGES_PER_WORKER.get(name, 1)
    per_worker, rest = divmod(cluster.num_devices, max(workers, 1))
    if rest or not per_worker:
        raise InputError(
            f"{cluster.num_devices} devices cannot be dealt to {workers} groups with {stages // workers} stages each, as "
            f"many to each. Ask for a number of stages that gives a divisor of {cluster.num_devices} groups"
        )
    microbatches = options.microbatches or _few_microbatches(step, stages, per_worker)
    _check_schedule(name, stages, microbatches, workers)
    _check_batch(step, microbatches, per_worker)
    plan = SpmdPlan(
        step.name,
        fingerprint(flatten(step)),
        jax.__version__,
        cluster.to_json(),
        name,
        microbatches,
        stages,
        dict(zip(AXES, (workers, per_worker), strict=True)),
    )
    return SpmdPipeline(plan, spmd_step(step, microbatches * per_worker, workers, stages // workers))


def apply(step: Step, plan: SpmdPlan, place: str = "the plan") -> SpmdPipeline:
    """A loaded plan on the step that it is for.

    Raises:
      PlanError: it is for another step, or decides something impossible.
    """
    if plan.fingerprint != (own := fingerprint(flatten(step))):
        raise PlanError(
            f"{place} was made for another step (its {plan.step!r} has fingerprint {plan.fingerprint}, this {step.name!r} "
            f"has {own}). Plan again for this one"
        )
    cluster = Cluster.from_json(plan.cluster, f"{place}: cluster")
    try:
        again = find(step, cluster, SpmdOptions(plan.stages, plan.schedule, plan.microbatches))
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e
    if dict(again.plan.mesh) != dict(plan.mesh):
        raise PlanError(f"{place}: wanted the mesh {dict(again.plan.mesh)}, got {dict(plan.mesh)}")
    return SpmdPipeline(plan, again.program)


def _few_microbatches(step: Step, stages: int, per_worker: int) -> int:
    """The most that divide the batch on as many devices, up to a few per stage."""
    counts = (n // per_worker for n in batch_divisors(step) if n % per_worker == 0)
    return max((n for n in counts if n <= MICROBATCHES_PER_STAGE * stages), default=1)


def _check_batch(step: Step, microbatches: int, per_worker: int) -> None:
    """That each device of a stage has microbatches of its own."""
    divisors = batch_divisors(step)
    if divisors and microbatches * per_worker not in divisors:
        raise InputError(
            f"{max(divisors)} examples cannot be dealt to the {per_worker} devices of each stage in {microbatches} "
            f"microbatches on each: that makes {microbatches * per_worker} parts. Take a batch that is a multiple of that, "
            "or other numbers of microbatches or stages"
        )


def _check_schedule(name: str, stages: int, microbatches: int, workers: int) -> None:
    """That one program can run it."""
    if name not in STAGES_PER_WORKER:
        raise InputError(
            f"schedule={name!r} cannot be run by {ONE_PROGRAM}, in which all stages do the same at any time. Choose one of "
            f"{', '.join(STAGES_PER_WORKER)}, or leave out executor="
        )
    build_schedule(name, stages, microbatches, workers)
