"""From a traced step to a pipeline that runs as one program: searched, or decided by a plan.

All stages have equally many devices, in order. The devices of a stage form replicas, each with microbatches of its own.
The devices of a replica share the work as a solution for the whole step decides (`search.pipeline.intra_op`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, inf

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.intra_op import NO_PINS, decided, replica_choices
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.spmd_search import SpmdCandidate, SpmdParts, SpmdProposal, SpmdSearch
from autoshard.search.pipeline.stage_decisions import recomputed_sites, written_down
from autoshard.search.plan.decisions import apart
from autoshard.search.plan.executors import SPMD
from autoshard.search.plan.plan import Estimates, Plan, PlanOnStep, Stage, StageEstimates
from autoshard.search.plan.recognition import check_is_for
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep
from autoshard.search.stopwatch import Stopwatch


@dataclass(frozen=True, eq=False)
class SpmdPipeline(PlanOnStep):
    """A plan on its step, as one program for all stages.

    Attributes:
      program: the program of all stages.
      sharding: the specs of its values on a replica's devices.
    """

    program: SpmdStep
    sharding: SpmdSharding


@uncollected()
def find(
    step: Step,
    cluster: Cluster,
    options: PipelineOptions,
    progress: Callable[[str], None] = lambda line: None,
    cutoff_s: float = inf,
    prepared: Prepared | None = None,
) -> SpmdPipeline:
    """Searches for the fastest pipeline that runs as one program and fits.

    Raises:
      InputError: the step has no loop over layers; its layers, the devices or the batch do not divide; or one program
        cannot run the schedule.
      NotSplittableError: the step has no microbatches; the message says why.
      InfeasibleError: nothing fits, or nothing is so fast; the message names the nearest.
    """
    watch = Stopwatch(step.trace_s)
    options = replace(
        options, memory_bytes=round(options.memory_share * options.memory_bytes), memory_share=1.0
    )
    found = SpmdSearch(step, cluster, options, progress, prepared).run(cutoff_s)
    watch.lap("search")
    pipeline = _pipeline(step, found, options.memory_bytes)
    watch.lap("plan")
    return pipeline.with_plan(search_s=watch.seconds)


def apply(step: Step, plan: Plan, place: str = "the plan") -> SpmdPipeline:
    """Applies a loaded plan to its step.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
    """
    candidate, parts = _read(step, plan, place)
    try:
        parts.solutions[candidate.shape] = decided(
            parts.step_problem, parts.cluster, plan.shardings[0], place
        )
        found = SpmdParts(step, parts).proposal(candidate)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e
    return _pipeline(step, found, plan.memory_bytes).with_plan(cluster=plan.cluster)


def choices(step: Step, plan: Plan, name: str, place: str = "the plan") -> tuple[str, ...]:
    """The possible values of a decision of a plan, whatever the other decisions are.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
    """
    _, parts = _read(step, plan, place)
    return replica_choices(parts.step_problem, parts.cluster, plan.shardings[0], name, place)


def _read(step: Step, plan: Plan, place: str) -> tuple[SpmdCandidate, Parts]:
    """The candidate that a plan describes, and the step in parts.

    Raises:
      PlanError: the plan is for another step, or is impossible.
    """
    check_is_for(plan, step, place)
    cluster = Cluster.from_json(plan.cluster, f"{place}: cluster")
    sharding, replicas = plan.shardings[0], plan.num_replicas
    if {(stage.replicas, stage.sharding) for stage in plan.stages} != {(replicas, 0)}:
        raise PlanError(f"{place}: wanted equal stages of one program, got {[*plan.stages]}")
    shape = tuple(sharding.mesh.values())
    candidate = SpmdCandidate(
        plan.schedule, len(plan.stages), plan.workers, replicas, shape, plan.microbatches
    )
    try:
        candidate.check(step, cluster)
        sites = recomputed_sites(step, plan, candidate.count, NO_PINS, place)
        return candidate, Parts.of(step, cluster, candidate.count, sites, decided=apart(step, sharding))
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e


def _pipeline(step: Step, found: SpmdProposal, memory_bytes: int) -> SpmdPipeline:
    candidate = found.candidate
    plan = written_down(
        step,
        found.parts.step_problem,
        (found.intra_op,),
        _estimates(found, memory_bytes),
        cluster=found.parts.cluster.to_json(),
        memory_bytes=memory_bytes,
        executor=SPMD,
        schedule=candidate.schedule,
        workers=candidate.workers,
        microbatches=candidate.microbatches,
        stages=(Stage(replicas=candidate.num_replicas),) * candidate.stages,
    )
    return SpmdPipeline(plan, found.program, found.sharding)


def _estimates(found: SpmdProposal, memory_bytes: int) -> Estimates:
    costs, memory = found.costs, found.memory(memory_bytes)
    of_stage = StageEstimates(
        forward_s=costs.pass_s(is_backward=False),
        backward_s=costs.pass_s(is_backward=True),
        update_s=costs.once_s,
        residual_bytes=round(memory.residual_bytes),
        state_bytes=round(memory.resting_bytes),
        peak_bytes=ceil(memory.peak_bytes),
    )
    return Estimates(
        step_s=found.step_s,
        peak_bytes=of_stage.peak_bytes,
        collectives=costs.collectives,
        bubble=found.bubble,
        between_s=costs.between_s,
        stages=(of_stage,) * found.candidate.stages,
    )
