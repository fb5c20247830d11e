"""The devices of a plan, as they stand in nodes: who does what.

A cell is a device, in the cluster's order. Cells of one shade have one place on the outermost axis that is split: one worker
of a pipeline, one half of a mesh of two. Nodes that are alike are drawn once.
"""

from collections.abc import Mapping
from itertools import accumulate, product

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_mesh
from autoshard.report.markup import Html, element, joined, table
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.plan.executors import EXECUTORS
from autoshard.search.plan.headline import axis_words
from autoshard.search.plan.plan_meshes import whole_mesh
from autoshard.search.plan.summary import axis_link, stage_predictions
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import PlanValues

MAX_NODES = 4
"""Nodes that are drawn; a larger cluster repeats them."""

SHADES = 4
"""Shades that tell neighbours apart."""


def cluster_map(plan: PlanValues, cluster: AnyCluster, is_priced: bool) -> Html:
    """The devices, and a table of the mesh's axes or of the stages."""
    below = _stages(plan, is_priced) if plan.is_pipeline else _axes(plan, cluster)
    return joined((_nodes(plan, cluster), below))


def _nodes(plan: PlanValues, cluster: AnyCluster) -> Html:
    places, groups = _places(plan), sorted(cluster.groups, key=lambda group: _rank(plan, group))
    nodes = [group for group in groups for _ in range(group.num_nodes)]
    firsts = [*accumulate((group.devices_per_node for group in nodes), initial=0)]
    shown = (
        _node(f"node {n}, {group.device.name}", places[firsts[n] : firsts[n + 1]], firsts[n])
        for n, group in enumerate(nodes[:MAX_NODES])
    )
    left = len(nodes[MAX_NODES:])
    more = element("p", f"and {plural(left, 'node')} more", class_="note") if left else None
    label = f"{plural(len(nodes), 'node')}, {plural(len(places), 'device')}"
    return element("div", *shown, more, class_="nodes", role="group", aria_label=label)


def _rank(plan: PlanValues, group: Cluster) -> int:
    """The place of a group of nodes in the order in which stages stand on them."""
    return plan.groups.index(group.name) if group.name in plan.groups else 0


def _node(title: str, places: list[tuple[str, int]], first: int) -> Html:
    cells = (
        element("li", str(n), class_=f"shade{shade % SHADES}", title=place, aria_label=f"device {n}: {place}")
        for n, (place, shade) in enumerate(places, first)
    )
    return element("div", element("h3", title), element("ol", *cells), class_="node")


def _places(plan: PlanValues) -> list[tuple[str, int]]:
    """For each device its place in words, and a number that its neighbours on the outermost axis share."""
    if plan.is_pipeline:
        counts = [plan.devices_of(stage) for stage in plan.stages[: plan.workers]]
        return [(f"worker {w}", w) for w, count in enumerate(counts) for _ in range(count)]
    mesh = whole_mesh(plan)
    outer = next((n for n, size in enumerate(mesh.values()) if size > 1), 0)
    at = product(*(range(size) for size in mesh.values()))
    return [
        (", ".join(f"{axis} {i}" for axis, i in zip(mesh, place, strict=True)), place[outer]) for place in at
    ]


def _axes(plan: PlanValues, cluster: AnyCluster) -> Html:
    """The axes of one program's mesh."""
    mesh, (group,) = plan.decisions.mesh, cluster.groups
    uses = {use.axis: axis_words(use).format(use.size) for one in plan.estimates.shares for use in one.axes}
    rows = [
        (axis, str(size), uses.get(axis, "-" if size == 1 else "not known"), *_link(group, mesh, n))
        for n, (axis, size) in enumerate(mesh.items())
    ]
    title = "Axes of the mesh, outermost first"
    return table(title, ("axis", "devices", "shares the work as", "link", "bandwidth"), rows, right=(1, 4))


def _link(group: Cluster, mesh: Mapping[str, int], axis: int) -> tuple[str, str]:
    sizes = tuple(mesh.values())
    return ("-", "-") if sizes[axis] == 1 else axis_link(MeshModel(group, sizes), axis)


def _stages(plan: PlanValues, is_priced: bool) -> Html:
    """A row for each stage of a pipeline."""
    groups = plan.stands_on or ("-",) * len(plan.stages)
    has_cuts = any(stage.first_op for stage in plan.stages)
    axes = " x ".join(plan.mesh_of(plan.stages[0]))
    schedule = build_schedule(plan.schedule, len(plan.stages), plan.microbatches, plan.workers)
    rows = [
        (
            str(n),
            ", ".join(str(w) for w in range(plan.workers) if n in schedule.stages_of(w)),
            format_mesh(tuple(plan.mesh_of(stage).values())),
            groups[n],
            str(stage.first_op) if has_cuts else "-",
            *(stage_predictions(plan.estimates.stages[n]) if is_priced else ("-",) * 4),
        )
        for n, stage in enumerate(plan.stages)
    ]
    head = ("stage", "worker", f"mesh ({axes})", "nodes", "first op", "forward", "backward", "update", "peak")
    executor = f"{plan.executor}: {EXECUTORS[plan.executor]}"
    title = f"Stages. Executor {executor}. Times are those of a microbatch"
    kept = [n for n in range(len(head)) if any(row[n] != "-" for row in rows)]
    right = [i for i, n in enumerate(kept) if n not in (2, 3)]
    return table(title, [head[n] for n in kept], [[row[n] for n in kept] for row in rows], right)
