"""From a traced step to a pipeline of it: searched, or decided by a plan.

Both ways lead to the same values: the step in parts, with its recomputation; a solution for each mesh of a replica; and the
stages. The programs of the stages, the specs of their values and all estimates follow from these.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from math import inf

from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.intra_op import decided, replica_choices
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline, planned
from autoshard.search.pipeline.plan_parts import group_of, placed_stages, read_parts
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.proposals import Stages
from autoshard.search.pipeline.schedules.registry import FAMILIES
from autoshard.search.pipeline.search import PipelineSearch
from autoshard.search.plan.plan import Plan
from autoshard.search.stopwatch import Stopwatch
from autoshard.search.tightening import Round, tightened

MAX_ROUNDS = 4
"""Largest number of searches under ever lower limits, if programs need more memory than layers' costs show. Source: a choice
of ours."""


@uncollected()
def find(
    step: Step,
    cluster: AnyCluster,
    options: PipelineOptions,
    progress: Callable[[str], None] = lambda line: None,
    cutoff_s: float = inf,
    prepared: Prepared | None = None,
) -> Pipeline:
    """Searches for the fastest pipeline that fits.

    Raises:
      InputError: there are more stages than layers, the devices or the batch do not divide, or no schedule has this name.
      NotSplittableError: the step has no microbatches; the message says why.
      InfeasibleError: nothing fits, or nothing is so fast; the message names the nearest.
    """
    watch = Stopwatch(step.trace_s)
    refused, prepared = list[InfeasibleError](), prepared or Prepared.within()

    def propose(limit_bytes: float, _: object) -> Round[Pipeline] | None:
        try:
            lower = replace(options, memory_share=limit_bytes / options.memory_bytes)
            found = PipelineSearch(step, cluster, lower, progress, prepared).run(cutoff_s)
            watch.lap("search")
        except InfeasibleError as e:
            refused.append(e)
            return None
        pipeline = planned(step, found, options.memory_bytes, options.offload)
        watch.lap("plan")
        promised_bytes = found.fullness(options.memory_bytes) * options.memory_bytes
        return Round(pipeline, promised_bytes, _needed_bytes(pipeline))

    smallest_bytes, usable_bytes = inf, options.memory_share * options.memory_bytes
    for latest in islice(tightened(propose, usable_bytes), MAX_ROUNDS):
        if latest.needed_bytes <= usable_bytes:
            return latest.proposal.with_plan(cluster=cluster.to_json(), search_s=watch.seconds)
        smallest_bytes = min(smallest_bytes, latest.needed_bytes)
    if smallest_bytes == inf:
        raise refused[0]
    raise InfeasibleError(
        f"no pipeline of {step.name} on {cluster.name} fits {format_bytes(options.memory_bytes)} a device: the nearest that "
        f"was found needs {format_bytes(smallest_bytes)}. Allow that, more microbatches or more stages, or use more devices"
    )


def apply(step: Step, plan: Plan, place: str = "the plan") -> Pipeline:
    """Applies a loaded plan to its step.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
    """
    schedule, cluster, parts = read_parts(step, plan, place)
    placed = placed_stages(parts, plan, cluster, schedule, place)
    for sharding in plan.shardings:
        here, shape = parts.on(group_of(cluster, sharding, place)), tuple(sharding.mesh.values())
        here.solutions[shape] = decided(here.step_problem, here.cluster, sharding, place)
    for n, one in enumerate(placed):
        group, _ = cluster.locate(one.first_device)
        if one.shape not in parts.on(group).solutions:
            raise PlanError(
                f"{place}: stages[{n}] stands on {group.name}, and its sharding is for another group of nodes"
            )
    copies, run_as = FAMILIES[schedule.name].copies, [parts] * len(placed)
    found = Stages(run_as, cluster, plan.num_replicas, placed, copies)
    again = planned(step, found.proposal(schedule), plan.memory_bytes)
    return again.with_plan(cluster=plan.cluster)


def choices(step: Step, plan: Plan, name: str, place: str = "the plan") -> tuple[str, ...]:
    """The possible values of a decision in each sharding of a plan, whatever the other decisions are.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
    """
    _, cluster, parts = read_parts(step, plan, place)
    there = [(sharding, parts.on(group_of(cluster, sharding, place))) for sharding in plan.shardings]
    first, *others = (replica_choices(p.step_problem, p.cluster, s, name, place) for s, p in there)
    return tuple(text for text in first if all(text in other for other in others))


def _needed_bytes(pipeline: Pipeline) -> float:
    """Bytes that the fullest device needs; if caps differ, scaled to the plan's cap."""
    taken, cap_bytes = pipeline.plan.estimates.stages, pipeline.plan.memory_bytes
    needed = zip(taken, pipeline.devices, strict=True)
    return max(stage.peak_bytes * (cap_bytes / place.cap_bytes) for stage, place in needed)
