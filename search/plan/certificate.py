"""The certificate of a plan in words: its gap to the fastest plan, and the plans among which the gap is proven."""

import math

from autoshard.cost_model.units import (
    format_bytes,
    format_mesh,
)
from autoshard.search.plan.values import PlanValues


def certified_gap(plan: PlanValues) -> str:
    """The gap that the solver certified, in words."""
    if plan.gap is None and plan.is_pipeline:
        return "certified gap: none"
    if plan.gap is None:
        return "certified gap: none, as these decisions were edited by hand"
    is_proven = plan.gap < 1e-9  # the solver's own rounding
    within = "it is the fastest" if is_proven else f"within {_rounded_up(100 * plan.gap)}% of the fastest"
    if plan.is_pipeline:
        return (
            f"certified gap: {within} pipeline, as if none had a bubble, communicated or waited for its host"
        )
    return f"certified gap: {within} plan of its search space"


def certificate(plan: PlanValues) -> list[str]:
    """The plans of which the certificate of one program speaks."""
    if plan.gap is None or plan.is_pipeline:
        return []
    meshes, own = ", ".join(map(format_mesh, plan.meshes)), tuple(plan.decisions.mesh.values())
    besides = [] if own in plan.meshes else [f"  nothing is proven on its own mesh, {format_mesh(own)}"]
    decisions = plan.decisions
    equals = [
        *["number of microbatches"] * (decisions.microbatches > 1),
        *["recomputation"] * any(text.startswith("remat") for text in decisions.retention.values()),
        *["arrays on the host"] * bool(plan.estimates.host_bytes),
    ]
    rows = [
        f"  need at most {format_bytes(plan.memory_bytes)} in program order",
        f"  are on mesh {meshes}",
        *[f"  have its {' and '.join(equals)}"] * bool(equals),
    ]
    return ["the gap is certified among plans that", *rows, *besides]


def _rounded_up(percent: float) -> str:
    """Two digits, never less than the number, as it is certified."""
    unit = 10.0 ** (math.floor(math.log10(percent)) - 1)
    return f"{math.ceil(percent / unit - 1e-6) * unit:.10g}"
