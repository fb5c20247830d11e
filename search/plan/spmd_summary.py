"""A pipeline that is one program, as an expert would sum it up: the text of `print(plan)`."""

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.headline import PlanShape, StageShape
from autoshard.search.plan.pipeline_head import cluster_of, edited, front, head, origin, recomputed
from autoshard.search.plan.spmd_plan import SpmdPlan
from autoshard.search.plan.summary import memory_line
from autoshard.search.plan.text_table import aligned, fitted, plural, search_time
from autoshard.search.plan.work_shares import WorkShares


def summary(plan: SpmdPlan) -> str:
    """The plan in plain text: how devices, layers and examples are dealt out, and the time and the memory predicted.

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    parts = [
        edited(plan) or front(plan, _shape(plan), _shares(plan), _memory(plan)),
        _head(plan),
        recomputed(plan),
        *([] if plan.is_edited else [_collectives(plan), _time(plan), search_time(plan.search_s)]),
        origin(plan),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _shares(plan: SpmdPlan) -> list[WorkShares]:
    return [plan.estimates.shares] if plan.estimates.shares else []


def _shape(plan: SpmdPlan) -> PlanShape:
    mesh = plan.decisions.mesh if plan.decisions else dict[str, int]()
    stage = StageShape(plan.num_replicas, mesh, plan.estimates.shares)
    return PlanShape((stage,) * plan.stages, plan.schedule, plan.microbatches, plan.retention)


def _head(plan: SpmdPlan) -> list[str]:
    whole = {**plan.mesh, **(plan.decisions.mesh if plan.decisions else {})}
    rows = [
        (
            "pipeline",
            f"{plural(plan.stages, 'stage')} of equal layers, schedule {plan.schedule}",
        ),
        ("mesh", f"{format_mesh(tuple(whole.values()))} ({' x '.join(whole)})"),
        ("batch", f"{plural(plan.microbatches, 'microbatch', 'es')} on each replica of a stage"),
    ]
    return head(plan, *rows)


def _collectives(plan: SpmdPlan) -> list[str]:
    found = sorted(plan.estimates.collectives, key=lambda c: -c.seconds)
    rows = [
        (c.kind, f"over {', '.join(c.axes)}", f"{c.count}x", format_bytes(c.bytes), format_seconds(c.seconds))
        for c in found
        if c.bytes
    ]
    return ["collectives per step (bytes per device)", *aligned(rows, right=(2, 3, 4))] if rows else []


def _time(plan: SpmdPlan) -> list[str]:
    estimates = plan.estimates
    rows = [
        ("forward pass of a stage", format_seconds(estimates.forward_s), "a microbatch"),
        ("backward pass of a stage", format_seconds(estimates.backward_s), "a microbatch"),
        ("between loops over layers", format_seconds(estimates.between_s), ""),
        ("update, once a step", format_seconds(estimates.update_s), ""),
    ]
    return [
        "time per step",
        *aligned(rows, right=(1,)),
    ]


def _memory(plan: SpmdPlan) -> list[str]:
    return [memory_line(plan.estimates, plan.memory_bytes, cluster_of(plan).platform)]
