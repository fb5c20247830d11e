"""A pipeline that is one program, summed up: what `print(plan)` shows."""

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.pipeline_head import cluster_of, head, recomputed
from autoshard.search.plan.spmd_plan import SpmdPlan
from autoshard.search.plan.text_table import aligned, fitted, plural, search_time


def summary(plan: SpmdPlan) -> str:
    """The plan in plain text: how devices, layers and examples are dealt out, and the time and the memory predicted.

    Raises:
      PlanError: a loaded plan's cluster does not make sense.
    """
    parts = [
        _head(plan),
        recomputed(plan),
        _collectives(plan),
        _time(plan),
        _memory(plan),
        search_time(plan.search_s),
    ]
    return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _head(plan: SpmdPlan) -> list[str]:
    whole = {**plan.mesh, **(plan.decisions.mesh if plan.decisions else {})}
    rows = [
        (
            "pipeline",
            f"{plural(plan.stages, 'stage')} of equal layers, schedule {plan.schedule}: {plan.executor}",
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
    said = plan.estimates
    rows = [
        ("forward pass of a stage", format_seconds(said.forward_s), "a microbatch"),
        ("backward pass of a stage", format_seconds(said.backward_s), "a microbatch"),
        ("between loops over layers", format_seconds(said.between_s), ""),
        ("once, and the update", format_seconds(said.update_s), ""),
    ]
    return [
        f"predicted step time: {format_seconds(said.step_s)}, in {said.bubble:.1%} of which stages wait"
        f"{cluster_of(plan).caveat}",
        *aligned(rows, right=(1,)),
    ]


def _memory(plan: SpmdPlan) -> list[str]:
    peak, cap = plan.estimates.peak_bytes, plan.memory_bytes
    return [
        f"predicted peak memory: {format_bytes(peak)} of {format_bytes(cap)} per device ({peak / cap:.0%})"
    ]
