"""The answer that stands at the top of a report: the kind of plan, its numbers, and three sentences.

The sentences say what limits the step, what fills the memory, and what more memory could win. Each follows from the plan's
estimates by a rule that is written here; none is a guess.
"""

from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.markup import Html, element, joined
from autoshard.search.plan.headline import mfu
from autoshard.search.plan.peak_band import band, is_known, may_exceed
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import Collective, PlanValues

FULL = 0.9
"""Of the cap: a plan that holds less has room for a tenth more as it is."""


SMALL = 0.2
"""Of the step: visible communication up to this share does not limit it."""


def answer(plan: PlanValues, cluster: AnyCluster, gap: str) -> Html:
    """Numbers and sentences.

    Args:
      plan: with the estimates of its decisions.
      cluster: the plan's.
      gap: the certified gap in words.
    """
    sentences = {
        "Limits the step": limit(plan),
        "Fills the memory": filling(plan),
        "More memory": more_memory(plan),
        "Certificate": gap[:1].upper() + gap[1:] + ".",
    }
    said = (joined((element("dt", name), element("dd", text))) for name, text in sentences.items())
    return joined((_numbers(plan, cluster), element("dl", *said, class_="sentences")))


def _numbers(plan: PlanValues, cluster: AnyCluster) -> Html:
    """The four numbers that a reader looks for first."""
    estimates, cap = plan.estimates, plan.memory_bytes
    utilization = mfu(estimates.shares, cluster.groups, estimates.step_s)
    peak, is_compiled = estimates.compiled_peak_bytes, estimates.compiled_peak_bytes is not None
    shown = peak if peak is not None else estimates.peak_bytes
    numbers = [
        ("Step time", format_seconds(estimates.step_s), "predicted"),
        ("MFU", "unknown" if utilization is None else percent(utilization, 1), "of the devices' peak FLOP/s"),
        ("Peak memory", format_bytes(shown), _peak_note(plan, cluster, is_compiled)),
        ("Cap", format_bytes(cap), f"per device; {percent(shown, cap)} filled"),
    ]
    if plan.is_pipeline:
        numbers.insert(2, ("Bubble", percent(estimates.bubble, 1), "of the step, workers wait"))
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
    there = band(predicted)
    doubt = "; it may not fit" if may_exceed(predicted, plan.memory_bytes) else ""
    return f"predicted, not compiled: {format_bytes(there.least_bytes)} to {format_bytes(there.most_bytes)}{doubt}"


# --- sentences


def limit(plan: PlanValues) -> str:
    """What limits the step: computation, communication, or the bubble; and by how much."""
    return _limit_of_pipeline(plan) if plan.is_pipeline else _limit_of_program(plan)


def _limit_of_pipeline(plan: PlanValues) -> str:
    estimates = plan.estimates
    slowest = max(range(len(estimates.stages)), key=lambda n: _microbatch_s(plan, n))
    waits = f"Workers wait {percent(estimates.bubble, 1)} of the step for one another."
    stage = f"A microbatch takes {format_seconds(_microbatch_s(plan, slowest))} on stage {slowest}"
    others = (
        ", the slowest one." if len({_microbatch_s(plan, n) for n in range(len(plan.stages))}) > 1 else ""
    )
    between = (
        f" Ops between the loops over layers take {format_seconds(estimates.between_s)} a step."
        if estimates.between_s
        else ""
    )
    slow = f"{stage}{others or ', as on all others.'}"
    first, then = (waits, slow) if estimates.bubble >= SMALL else (slow, waits)
    return f"{first} {then}{between}"


def _microbatch_s(plan: PlanValues, stage: int) -> float:
    taken = plan.estimates.stages[stage]
    return taken.forward_s + taken.backward_s + taken.weight_gradient_s


def _limit_of_program(plan: PlanValues) -> str:
    estimates = plan.estimates
    visible_s = max(0.0, estimates.step_s - estimates.compute_s)
    moving_s = visible_s + estimates.hidden_s
    computing = f"{format_seconds(estimates.compute_s)} of {format_seconds(estimates.step_s)}"
    if moving_s == 0:
        return f"Computation alone: {computing}. The plan communicates nothing."
    hidden = (
        f"Of {format_seconds(moving_s)} of communication, {format_seconds(estimates.hidden_s)} run behind it"
    )
    if visible_s <= SMALL * estimates.step_s:
        return f"Computation: {computing}. {hidden}; {format_seconds(visible_s)} are visible.{_again(plan)}"
    most = max(estimates.collectives, key=lambda one: one.seconds, default=None)
    by = f" Most of it is {words(most)}, {format_seconds(most.seconds)}." if most else ""
    waits = f"{format_seconds(visible_s)} of {format_seconds(estimates.step_s)} are visible communication"
    computes = f"computation takes {format_seconds(estimates.compute_s)}"
    if visible_s <= estimates.compute_s:
        return f"Computation and communication: {computes}, {waits}.{by}{_again(plan)}"
    return f"Communication: {waits}; {computes}.{by}{_again(plan)}"


def _again(plan: PlanValues) -> str:
    again_s = plan.estimates.recompute_s
    return f" Recomputation takes {format_seconds(again_s)} of it." if again_s else ""


def words(one: Collective) -> str:
    """A collective in words: `all-gather over data, model`."""
    return f"{one.kind} over {', '.join(one.axes)}"


def filling(plan: PlanValues) -> str:
    """What fills the memory at its peak."""
    estimates = plan.estimates
    if plan.is_pipeline:
        n = max(range(len(estimates.stages)), key=lambda n: estimates.stages[n].peak_bytes)
        stage = estimates.stages[n]
        return (
            f"Stage {n} holds most: {format_bytes(stage.peak_bytes)}. Its state takes {format_bytes(stage.state_bytes)}, "
            f"each microbatch in flight {format_bytes(stage.residual_bytes)} of residuals."
        )
    if not estimates.residents:
        return f"{format_bytes(estimates.peak_bytes)} at the peak; the plan does not say of what."
    kind, most = max(estimates.residents.items(), key=lambda item: item[1])
    of_peak = f"{format_bytes(most)} of {format_bytes(estimates.peak_bytes)} ({percent(most, estimates.peak_bytes)})"
    return f"{kind.replace('_', ' ').capitalize()}: {of_peak} at the peak, which is at {estimates.peak_at}."


def more_memory(plan: PlanValues) -> str:
    """What the plan does to save memory, which is all that more memory can win back."""
    estimates, cap = plan.estimates, plan.memory_bytes
    peak = estimates.compiled_peak_bytes or estimates.peak_bytes
    savings, won_s = _savings(plan)
    filled, tenth = percent(peak, cap), format_bytes(0.1 * cap)
    if peak < FULL * cap and not won_s:
        return f"Not needed: the plan fills {filled} of its cap, and spends no time to save memory."
    if not savings:
        return (
            f"The plan fills {filled} of its cap and spends no time to save memory: it recomputes nothing, keeps nothing "
            f"on the host, and takes the batch at once. 10% more ({tenth}) can win by other specs or another mesh alone."
        )
    most = f" What that takes of the step is {format_seconds(won_s)}; on this mesh, no more can be won back."
    spent = f"To fit its cap, the plan {_listed(savings)}; it fills {filled}."
    return f"{spent} 10% more is {tenth} a device.{most * bool(won_s)}"


def _savings(plan: PlanValues) -> tuple[list[str], float]:
    """What a plan does to save memory, and the seconds of a step that it takes as far as they are known."""
    estimates, said = plan.estimates, list[str]()
    if any("remat" in text for text in plan.retention.values()):
        again_s = estimates.recompute_s
        said.append("recomputes" + (f" for {format_seconds(again_s)}" if again_s else " cheap ops"))
    if estimates.host_bytes:
        copies = f", whose copies take {format_seconds(estimates.transfer_s)}" if estimates.transfer_s else ""
        said.append(f"keeps {format_bytes(estimates.host_bytes)} per device on the host{copies}")
    if plan.microbatches > 1 and not plan.is_pipeline:
        said.append(f"takes the batch in {plural(plan.microbatches, 'microbatch', 'es')}")
    return said, estimates.recompute_s + estimates.transfer_s


def _listed(words: list[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def percent(part: float, whole: float) -> str:
    """A share for people: `<1%`, `85%`."""
    if whole <= 0:
        return "-"
    return "<1%" if 0 < part < 0.005 * whole else f"{100 * part / whole:.0f}%"
