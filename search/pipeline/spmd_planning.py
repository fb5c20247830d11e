"""From a traced step to a pipeline of it that is one program: searched, or as a plan says.

The devices are dealt evenly to the stages, in their order. A stage's devices are replicas, each with microbatches of its
own, and the devices of each, which share the work on these as a search for the whole step says (`search.pipeline.intra_op`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf, prod

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError, PlanError
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Step
from autoshard.search.memory.microbatches import looped
from autoshard.search.pipeline.intra_op import decided
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.proposals import Parts
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.search import PipelineOptions
from autoshard.search.pipeline.simulator import Simulation, StageCost, simulate
from autoshard.search.pipeline.spmd_costs import AXES
from autoshard.search.pipeline.spmd_search import Dealt, SpmdParts, SpmdProposal, SpmdSearch
from autoshard.search.plan.measured_shares import measured_shares
from autoshard.search.plan.recognition import check_is_for, outlined
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.plan.spmd_plan import SpmdEstimates, SpmdPlan
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.stopwatch import Stopwatch


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


@uncollected()
def find(
    step: Step,
    cluster: Cluster,
    options: PipelineOptions,
    progress: Callable[[str], None] = lambda line: None,
    cutoff_s: float = inf,
    prepared: Prepared | None = None,
) -> SpmdPipeline:
    """Searches for the fastest pipeline that is one program and fits.

    Args:
      step: the traced step.
      cluster: where it will run.
      options: what is asked for.
      progress: called with one line per stage.
      cutoff_s: what it has to take less than.
      prepared: as of `SpmdSearch`.

    Raises:
      InputError: the step has no loop over layers, these, the devices or the batch do not divide, or one program has no
        such schedule.
      NotSplittableError: the step has no microbatches; says why.
      InfeasibleError: nothing fits, or is so fast; says what is nearest.
    """
    watch = Stopwatch(step.trace_s)
    options = replace(
        options, memory_bytes=round(options.memory_share * options.memory_bytes), memory_share=1.0
    )
    found = SpmdSearch(step, cluster, options, progress, prepared).run(cutoff_s)
    watch.lap("search")
    pipeline = _pipeline(step, found, options.memory_bytes)
    watch.lap("plan")
    return replace(pipeline, plan=replace(pipeline.plan, search_s=watch.seconds))


def apply(step: Step, plan: SpmdPlan, place: str = "the plan") -> SpmdPipeline:
    """A loaded plan on the step that it is for.

    Raises:
      PlanError: it is for another step, or decides something impossible.
    """
    check_is_for(plan, step, place)
    cluster = Cluster.from_json(plan.cluster, f"{place}: cluster")
    if tuple(plan.mesh) != AXES:
        raise PlanError(f"{place}: wanted a mesh with the axes {AXES}, got {tuple(plan.mesh)}")
    shape = tuple(plan.decisions.mesh.values()) if plan.decisions else (1,)
    dealt = Dealt(plan.schedule, plan.stages, plan.num_workers, plan.num_replicas, shape, plan.microbatches)
    try:
        dealt.check(step, cluster)
        sites = frozenset()
        if plan.retention:
            sites, _ = RetentionCodec(fold(flatten(looped(step, dealt.count)), ())).read(
                plan.retention, place
            )
        parts = Parts.of(step, [""] * len(step.arguments), cluster, dealt.count, sites)
        if plan.decisions:
            parts.solutions[shape] = decided(parts.step_problem, cluster, plan.decisions, shape, place)
        found = SpmdParts(step, parts).proposal(dealt)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e
    again = _pipeline(step, found, plan.memory_bytes)
    return replace(again, plan=replace(again.plan, cluster=plan.cluster))


def simulated(plan: SpmdPlan) -> Simulation:
    """The ticks of a plan in time, as its estimates say: of what stages take in loops over layers, with sending."""
    said = plan.estimates
    cost = StageCost(said.forward_s, said.backward_s, residual_bytes=said.residual_bytes)
    schedule = build_schedule(plan.schedule, plan.stages, plan.microbatches, plan.num_workers)
    return simulate(schedule, [cost] * plan.stages)


def _pipeline(step: Step, found: SpmdProposal, memory_bytes: int) -> SpmdPipeline:
    problem, dealt, intra_op = found.parts.step_problem, found.dealt, found.intra_op
    is_shared = prod(dealt.shape) > 1
    plan = SpmdPlan(
        step.name,
        fingerprint(step),
        jax.__version__,
        found.parts.cluster.to_json(),
        memory_bytes,
        dealt.schedule,
        dealt.microbatches,
        dealt.stages,
        dict(zip(AXES, (dealt.workers, dealt.num_replicas), strict=True)),
        RetentionCodec(problem.plain).said(problem.sites) if problem.sites else {},
        _estimates(found, memory_bytes),
        intra_op.on_mesh.codec.decisions(intra_op.labels) if is_shared else None,
        outline=outlined(step),
    )
    return SpmdPipeline(plan, found.program, found.sharding)


def _estimates(found: SpmdProposal, memory_bytes: int) -> SpmdEstimates:
    costs, memory, intra_op = found.costs, found.memory(memory_bytes), found.intra_op
    return SpmdEstimates(
        found.step_s,
        found.bubble,
        round(memory.peak_bytes),
        costs.pass_s(is_backward=False),
        costs.pass_s(is_backward=True),
        costs.between_s,
        costs.once_s,
        round(memory.residual_bytes),
        round(memory.resting_bytes),
        costs.collectives,
        measured_shares(intra_op.on_mesh.memory.costed, intra_op.labels),
    )
