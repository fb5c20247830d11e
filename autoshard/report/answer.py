"""The answer that stands at the top of a report: the numbers that a reader looks for first, and the sentences."""

from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.markup import Html, element, joined
from autoshard.report.sentences import filling, limit, more_memory
from autoshard.search.plan.headline import mfu
from autoshard.search.plan.peak_band import is_known
from autoshard.search.plan.peak_lines import error_band
from autoshard.search.plan.text_table import percent
from autoshard.search.plan.values import PlanValues


def answer(plan: PlanValues, cluster: AnyCluster, gap: str) -> Html:
    """Numbers and sentences."""
    sentences = {
        "Limits the step": limit(plan),
        "Fills the memory": filling(plan),
        "More memory": more_memory(plan),
        "Certificate": gap[:1].upper() + gap[1:] + ".",
    }
    rows = (joined((element("dt", name), element("dd", text))) for name, text in sentences.items())
    return joined((_numbers(plan, cluster), element("dl", *rows, class_="sentences")))


def _numbers(plan: PlanValues, cluster: AnyCluster) -> Html:
    """The four numbers that a reader looks for first."""
    estimates, cap = plan.estimates, plan.memory_bytes
    utilization = mfu(estimates.shares, cluster.groups, estimates.step_s)
    peak, is_compiled = estimates.compiled_peak_bytes, estimates.compiled_peak_bytes is not None
    shown = peak if peak is not None else estimates.peak_bytes
    numbers = [
        ("Step time", format_seconds(estimates.step_s), "predicted"),
        ("MFU", "unknown" if utilization is None else percent(utilization), "of the devices' peak FLOP/s"),
        ("Peak memory", format_bytes(shown), _peak_note(plan, cluster, is_compiled)),
        ("Cap", format_bytes(cap), f"per device; {percent(shown, cap)} filled"),
    ]
    if plan.is_pipeline:
        numbers.insert(2, ("Bubble", percent(estimates.bubble), "of the step, workers wait"))
    each = (
        element("div", element("dt", name), element("dd", element("b", value), element("small", note)))
        for name, value, note in numbers
    )
    return element("dl", *each, class_="numbers")


def _peak_note(plan: PlanValues, cluster: AnyCluster, is_compiled: bool) -> str:
    predicted = plan.estimates.peak_bytes
    if is_compiled:
        return f"compiled; {format_bytes(predicted)} predicted"
    if not all(is_known(group.platform) for group in cluster.groups):
        return "predicted"
    return f"predicted, {error_band(predicted, plan.memory_bytes)}"
