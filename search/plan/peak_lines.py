"""The lines of a summary on peak memory: as compiled, or as predicted with its error band."""

from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes
from autoshard.search.plan.peak_band import band, doubt, is_known
from autoshard.search.plan.text_table import percent
from autoshard.search.plan.values import Estimates, PlanValues


def peak_lines(plan: PlanValues, cluster: AnyCluster) -> list[str]:
    """A line for each kind of node, and with several kinds one for the fullest stage as compiled."""
    compiled = plan.estimates.compiled_peak_bytes
    if not plan.groups:
        return [_memory_line(plan.estimates, plan.memory_bytes, cluster.platform)]
    lines, taken = list[str](), [*zip(plan.estimates.stages, plan.stands_on, strict=True)]
    for group, cap in zip(cluster.groups, cluster.caps(plan.memory_bytes), strict=True):
        peak = max((stage.peak_bytes for stage, name in taken if name == group.name), default=0)
        has_band = compiled is None and is_known(group.platform)
        lines.append(_predicted_line(peak, cap, has_band, f" on {group.name}"))
    if compiled is not None:
        lines.append(f"peak memory of the fullest stage: {format_bytes(compiled)} (compiled)")
    return lines


def _memory_line(estimates: Estimates, cap_bytes: int, platform: str) -> str:
    """The compiled peak and its share of the cap; or the predicted one, with its error band if that is known."""
    predicted, compiled = estimates.peak_bytes, estimates.compiled_peak_bytes
    if compiled is None:
        return _predicted_line(predicted, cap_bytes, is_known(platform))
    of_cap = _of_cap(compiled, cap_bytes)
    return (
        f"peak memory: {format_bytes(compiled)} (compiled) of {of_cap}, {format_bytes(predicted)} predicted"
    )


def _predicted_line(peak_bytes: int, cap_bytes: int, has_band: bool, where: str = "") -> str:
    """The predicted peak and its share of the cap; with its error band, and a doubt if the band crosses the cap."""
    line = f"predicted peak memory{where}: {format_bytes(peak_bytes)} of {_of_cap(peak_bytes, cap_bytes)}"
    return f"{line}, {error_band(peak_bytes, cap_bytes)}" if has_band else line


def error_band(peak_bytes: int, cap_bytes: int) -> str:
    """The compiled peaks that a predicted one may stand for, and a doubt if they cross the cap."""
    there = band(peak_bytes)
    least, most = format_bytes(there.least_bytes), format_bytes(there.most_bytes)
    return f"not compiled: {least} to {most}{doubt(peak_bytes, cap_bytes)}"


def _of_cap(peak_bytes: int, cap_bytes: int) -> str:
    return f"{format_bytes(cap_bytes)} per device ({percent(peak_bytes, cap_bytes)})"
