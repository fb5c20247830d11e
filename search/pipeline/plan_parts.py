"""The parts of a loaded plan: its schedule, its cluster, the step in parts, and the places of its stages.

The step is rewritten as the plan decides: microbatches, recomputation and state on the host. Layers begin at least where
the plan's stages do.
"""

from collections.abc import Sequence

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError, InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster, from_json
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.proposals import Placed
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.split_loops import num_positions
from autoshard.search.pipeline.stage_decisions import recomputed_sites
from autoshard.search.plan.decisions import apart, hosted
from autoshard.search.plan.plan import Plan, Sharding
from autoshard.search.plan.recognition import check_is_for
from autoshard.search.plan.schedule import Schedule


def read_parts(step: Step, plan: Plan, place: str) -> tuple[Schedule, AnyCluster, Parts]:
    """A plan's schedule, its cluster, and the step in parts.

    Raises:
      PlanError: the plan is for another step, or is impossible.
    """
    check_is_for(plan, step, place)
    try:
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.microbatches, plan.workers)
        given = from_json(plan.cluster, f"{place}: cluster")
        return schedule, _ordered(given, plan, place), _parts(step, plan, given.groups[0], place)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e


def _ordered(cluster: AnyCluster, plan: Plan, place: str) -> AnyCluster:
    """The cluster of a plan, with its groups of nodes in the order of the stages on them."""
    if not isinstance(cluster, MixedCluster):
        return cluster
    try:
        return cluster.ordered(plan.groups)
    except ClusterError as e:
        raise ClusterError(f"{place}: groups: {e}") from e


def group_of(cluster: AnyCluster, sharding: Sharding, place: str) -> Cluster:
    """The nodes of a sharding."""
    groups = {group.name: group for group in cluster.groups}
    if len(groups) == 1:
        return cluster.groups[0]
    if sharding.group not in groups:
        raise PlanError(
            f"{place}: wanted shardings for a group of nodes, {' or '.join(map(repr, groups))}, got {sharding.group!r}"
        )
    return groups[sharding.group]


def _parts(step: Step, plan: Plan, first: Cluster, place: str) -> Parts:
    """The step in a plan's parts, with its recomputation and its state on the host; layers begin where stages do."""
    num_replicas = {stage.replicas for stage in plan.stages}
    if len(num_replicas) != 1:
        raise PlanError(f"{place}: wanted as many replicas of each stage, got {sorted(num_replicas)}")
    count = plan.microbatches * plan.num_replicas
    pins = {n: read_partition_spec(s) for n, s in plan.options.get("pin", {}).items()}
    sites = recomputed_sites(step, plan, count, pins, place)
    borders = [stage.first_op for stage in plan.stages]
    _check_borders(PipelineStep.of(step, count), borders, place)
    decided = tuple(zip(*(apart(step, sharding) for sharding in plan.shardings), strict=True))
    on_host = [hosted(step, sharding, place) for sharding in plan.shardings]
    if len({*on_host}) != 1:
        raise PlanError(f"{place}: all of its shardings must rest the same arguments on the host")
    return Parts.of(step, first, count, sites, borders, pins=pins, decided=decided, hosted=on_host[0])


def _check_borders(step: PipelineStep, borders: Sequence[int], place: str) -> None:
    """Refuses stages that do not begin one after another, the first one at op 0."""
    end = sum(num_positions(step, op) for op in step.forward_ops)
    if borders[0] or sorted({*borders}) != [*borders] or borders[-1] >= end:
        raise PlanError(
            f"{place}: wanted stages that begin at op 0 and then at ascending ones below {end}, got {[*borders]}"
        )


def placed_stages(
    parts: Parts, plan: Plan, cluster: AnyCluster, schedule: Schedule, place: str
) -> list[Placed]:
    """The places of a plan's stages. Workers have the devices one after another."""
    starts = [parts.layers.starts.index(stage.first_op) for stage in plan.stages]
    sizes = [plan.devices_of(plan.stages[schedule.stages_of(w)[0]]) for w in range(schedule.num_workers)]
    firsts = [sum(sizes[: schedule.workers_of(n)[0]]) for n in range(len(plan.stages))]
    if (total := sum(sizes)) != cluster.num_devices:
        raise PlanError(f"{place}: its stages have {total} devices, its cluster {cluster.num_devices}")
    for n, (first, stage) in enumerate(zip(firsts, plan.stages, strict=True)):
        last = first + plan.devices_of(stage) - 1
        if cluster.locate(first)[0] != cluster.locate(last)[0]:
            raise PlanError(
                f"{place}: stage {n} would stand on devices {first} to {last}, which are not all "
                f"of one kind; the groups of nodes are {cluster}"
            )
    ends = [*starts[1:], parts.layers.num_layers]
    shapes = [tuple(plan.sharding_of(stage).mesh.values()) for stage in plan.stages]
    return [Placed(*one) for one in zip(starts, ends, firsts, shapes, strict=True)]
