"""A pipeline as an expert would sum it up: what `print(plan)` shows."""

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.headline import PlanShape, StageShape
from autoshard.search.plan.peak_band import is_known
from autoshard.search.plan.pipeline_head import cluster_of, edited, front, head, origin, recomputed
from autoshard.search.plan.pipeline_plan import PipelinePlan
from autoshard.search.plan.summary import memory_line, predicted_line
from autoshard.search.plan.text_table import aligned, fitted, plural, search_time
from autoshard.search.plan.work_shares import WorkShares


def summary(plan: PipelinePlan) -> str:
    """The plan in plain text: its stages, where they stand, and the time and the memory predicted for each.

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    parts = [
        edited(plan) or front(plan, _shape(plan), plan.estimates.shares, _memory(plan)),
        _head(plan),
        *([] if plan.is_edited else [_stages(plan)]),
        recomputed(plan),
        *([] if plan.is_edited else [search_time(plan.search_s)]),
        origin(plan),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _shape(plan: PipelinePlan) -> PlanShape:
    by_mesh: dict[tuple[str, tuple[int, ...]], WorkShares] = {
        (one.group, tuple(one.mesh.values())): one_share
        for one, one_share in zip(plan.decisions, plan.estimates.shares, strict=False)
    }
    groups = plan.stands_on or ("",) * len(plan.stages)
    stages = tuple(
        StageShape(stage.num_replicas, mesh, by_mesh.get((group, tuple(mesh.values()))))
        for stage, group in zip(plan.stages, groups, strict=True)
        for mesh in [stage.replica_mesh]
    )
    return PlanShape(stages, plan.schedule, plan.microbatches, plan.retention)


def _head(plan: PipelinePlan) -> list[str]:
    microbatches, replicas = (
        plural(plan.microbatches, "microbatch", "es"),
        plural(plan.num_replicas, "replica"),
    )
    rows = [
        (
            "pipeline",
            f"{plural(len(plan.stages), 'stage')} on {plural(plan.workers, 'worker')}, schedule {plan.schedule}",
        ),
        (
            "batch",
            f"{microbatches}, each split over {replicas} of a stage",
        ),
    ]
    return head(plan, *rows)


def _stages(plan: PipelinePlan) -> list[str]:
    """A line each: its submesh, its times for a microbatch, and its peak."""
    rows = [("", "first op", "mesh", "forward", "backward", "update", "peak", "on" if plan.groups else "")]
    groups = plan.stands_on or ("",) * len(plan.stages)
    for n, (stage, taken) in enumerate(zip(plan.stages, plan.estimates.stages, strict=True)):
        rows.append(
            (
                str(n),
                str(stage.first_op),
                format_mesh(tuple(stage.mesh.values())),
                format_seconds(taken.forward_s),
                format_seconds(taken.backward_s + taken.weight_gradient_s),
                format_seconds(taken.update_s),
                format_bytes(taken.peak_bytes),
                groups[n],
            )
        )
    axes = " x ".join(plan.stages[0].mesh)
    return [f"stages (mesh is {axes}; times are a microbatch's)", *aligned(rows, right=(1, 3, 4, 5, 6))]


def _memory(plan: PipelinePlan) -> list[str]:
    """A line for each kind of node, and with several kinds one for the fullest stage as compiled."""
    cluster, lines, compiled = cluster_of(plan), list[str](), plan.estimates.compiled_peak_bytes
    if not (groups := plan.stands_on):
        return [memory_line(plan.estimates, plan.memory_bytes, cluster.platform)]
    for group, cap in zip(cluster.groups, cluster.caps(plan.memory_bytes), strict=True):
        here = zip(plan.estimates.stages, groups, strict=True)
        peak = max((stage.peak_bytes for stage, name in here if name == group.name), default=0)
        errs = compiled is None and is_known(group.platform)
        lines.append(predicted_line(peak, cap, errs, f" on {group.name}"))
    if compiled is not None:
        lines.append(f"peak memory of the fullest stage: {format_bytes(compiled)} (compiled)")
    return lines
