"""From a traced step to a pipeline of it that is one program: as many equal stages as asked for, in one of two schedules.

The devices are dealt evenly to the stages, in their order. A stage's devices are replicas, each with microbatches of its
own, and the devices of each, which share the work on these as a search for the whole step says (`search.pipeline.intra_op`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import jax

from cost_model.cluster import Cluster
from cost_model.errors import InputError, PlanError
from search.ir.graph import Step
from search.memory.microbatches import batch_divisors, looped
from search.mesh_problem import StepProblem
from search.pipeline.intra_op import IntraOp, decided, solved
from search.pipeline.pipeline_step import PipelineStep
from search.pipeline.schedules.registry import build_schedule
from search.pipeline.spmd import spmd_step, written
from search.pipeline.spmd_sharding import spmd_sharding
from search.plan.spmd_plan import ONE_PROGRAM, SpmdPlan
from search.plan.spmd_step import SpmdSharding, SpmdStep
from search.problem.fingerprint import fingerprint
from search.problem.flat_program import flatten

STAGES_PER_WORKER = {"gpipe": 1, "circular": 2}
"""By schedule. Source: a choice of ours, the fewest there can be."""

MICROBATCHES_PER_STAGE = 4
"""At most, where nobody says how many. Source: GPipe (Huang et al. 2019, section 2.3) finds the bubble negligible from four
times as many microbatches as stages on."""

AXES = ("stage", "replica")
"""The first axes of the mesh: of groups of devices, and of the replicas in each. Those of a replica's devices are behind."""


@dataclass(frozen=True, slots=True)
class SpmdOptions:
    """What is asked for.

    Attributes:
      stages: in how many the layers are cut.
      schedule: `gpipe` or `circular`; None for GPipe's.
      microbatches: of each replica; None for a few per stage.
      mesh: of each stage: how many replicas it has, then the mesh of a replica's devices; None for replicas of one device.
    """

    stages: int
    schedule: str | None = None
    microbatches: int | None = None
    mesh: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class SpmdPipeline:
    """A plan, and what it means for its step.

    Attributes:
      plan: the plan.
      program: what runs.
      sharding: how the devices of a replica share it.
    """

    plan: SpmdPlan
    program: SpmdStep
    sharding: SpmdSharding


def find(step: Step, cluster: Cluster, options: SpmdOptions) -> SpmdPipeline:
    """Cuts a step's layers into stages, and searches how the devices of a replica share the work.

    Raises:
      InputError: the step has no loop over layers, these, the devices or the batch do not divide, or one program has no
        such schedule.
      NotSplittableError: the step has no microbatches; says why.
    """
    name, stages = options.schedule or "gpipe", options.stages
    workers = stages // STAGES_PER_WORKER.get(name, 1)
    num_replicas, *shape = options.mesh or (_per_worker(cluster, workers, stages),)
    microbatches = options.microbatches or _few_microbatches(step, stages, num_replicas)
    plan = SpmdPlan(
        step.name,
        fingerprint(flatten(step)),
        jax.__version__,
        cluster.to_json(),
        name,
        microbatches,
        stages,
        dict(zip(AXES, (workers, num_replicas), strict=True)),
    )
    _check(step, cluster, plan, shape)
    if prod(shape) == 1:
        return SpmdPipeline(plan, _unshared(step, plan), SpmdSharding(plan.num_replicas))
    problem = _problem(step, cluster, plan)
    intra_op = solved(problem, cluster, tuple(shape))
    return _shared(step, replace(plan, decisions=intra_op.on_mesh.codec.decisions(intra_op.labels)), intra_op)


def apply(step: Step, plan: SpmdPlan, place: str = "the plan") -> SpmdPipeline:
    """A loaded plan on the step that it is for.

    Raises:
      PlanError: it is for another step, or decides something impossible.
    """
    plan.check_is_for(step, place)
    cluster = Cluster.from_json(plan.cluster, f"{place}: cluster")
    if tuple(plan.mesh) != AXES:
        raise PlanError(f"{place}: wanted a mesh with the axes {AXES}, got {tuple(plan.mesh)}")
    shape = tuple(plan.decisions.mesh.values()) if plan.decisions else ()
    try:
        _check(step, cluster, plan, shape)
        if plan.decisions is None:
            return SpmdPipeline(plan, _unshared(step, plan), SpmdSharding(plan.num_replicas))
        intra_op = decided(_problem(step, cluster, plan), cluster, plan.decisions, shape, place)
        return _shared(step, plan, intra_op)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e


def _unshared(step: Step, plan: SpmdPlan) -> SpmdStep:
    """What runs where replicas are single devices."""
    return spmd_step(step, plan.num_parts, plan.num_workers, plan.stages // plan.num_workers)


def _problem(step: Step, cluster: Cluster, plan: SpmdPlan) -> StepProblem:
    """What there is to share."""
    return StepProblem.of(looped(step, plan.num_parts), [""] * len(step.arguments), cluster.device)


def _shared(step: Step, plan: SpmdPlan, intra_op: IntraOp) -> SpmdPipeline:
    parts = PipelineStep.of_loop(intra_op.step_problem.step)
    program = written(step, parts, plan.num_workers, plan.stages // plan.num_workers)
    return SpmdPipeline(plan, program, spmd_sharding(intra_op, parts, program, plan.num_replicas))


def _per_worker(cluster: Cluster, workers: int, stages: int) -> int:
    """Devices of each group."""
    per_worker, rest = divmod(cluster.num_devices, max(workers, 1))
    if rest or not per_worker:
        raise InputError(
            f"{cluster.num_devices} devices cannot be dealt to {workers} groups with {stages // max(workers, 1)} stages "
            f"each, as many to each. Ask for a number of stages that gives a divisor of {cluster.num_devices} groups"
        )
    return per_worker


def _check(step: Step, cluster: Cluster, plan: SpmdPlan, shape: Sequence[int]) -> None:
    """That one program can run a plan, with replicas of such a mesh."""
    workers, replicas = plan.mesh.values()
    _check_schedule(plan.schedule, plan.stages, plan.microbatches, workers)
    if (taken := workers * replicas * prod(shape)) != cluster.num_devices:
        raise InputError(
            f"{workers} groups of mesh {(replicas, *shape)} take {taken} devices, and {cluster.name} has "
            f"{cluster.num_devices}. Take another mesh or number of stages"
        )
    _check_batch(step, plan.microbatches, replicas)


def _few_microbatches(step: Step, stages: int, num_replicas: int) -> int:
    """The most that divide the batch on as many replicas, up to a few per stage."""
    counts = (n // num_replicas for n in batch_divisors(step) if n % num_replicas == 0)
    return max((n for n in counts if n <= MICROBATCHES_PER_STAGE * stages), default=1)


def _check_batch(step: Step, microbatches: int, num_replicas: int) -> None:
    """That each replica of a stage has microbatches of its own."""
    divisors = batch_divisors(step)
    if divisors and microbatches * num_replicas not in divisors:
        raise InputError(
            f"{max(divisors)} examples cannot be dealt to the {num_replicas} replicas of each stage in {microbatches} "
            f"microbatches on each: that makes {microbatches * num_replicas} parts. Take a batch that is a multiple, "
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
