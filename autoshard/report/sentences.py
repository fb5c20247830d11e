"""The sentences at the top of a report: the limit of the step, the content of the memory, the worth of more memory.

Each follows from the plan's estimates by a rule that is written here; none is a guess.
"""

from collections.abc import Sequence

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.worker_memory import held
from autoshard.search.pipeline.timeline import simulated
from autoshard.search.plan.text_table import percent, plural
from autoshard.search.plan.values import PlanValues, StageEstimates

SMALL = 0.2
"""Of the step: visible communication, or a bubble, up to this share does not limit it."""

FULL = 0.9
"""Of the cap: a plan that holds less has room for a tenth more as it is."""


# --- the limit of the step


def limit(plan: PlanValues) -> str:
    """The limit of the step: computation, communication, or the slowest stage and the bubble, with their times."""
    return _limit_of_pipeline(plan) if plan.is_pipeline else _limit_of_program(plan)


def _limit_of_pipeline(plan: PlanValues) -> str:
    estimates = plan.estimates
    waits = f"Workers wait {percent(estimates.bubble)} of the step for one another."
    parts = [waits, _slowest(estimates.stages)]
    if estimates.bubble < SMALL:
        parts.reverse()
    if estimates.between_s:
        parts.append(f"Ops between the loops over layers take {format_seconds(estimates.between_s)} a step.")
    return " ".join(parts)


def _slowest(stages: Sequence[StageEstimates]) -> str:
    seconds = [stage.forward_s + stage.backward_s + stage.weight_gradient_s for stage in stages]
    most_s = max(seconds)
    which = "each stage" if min(seconds) == most_s else f"stage {seconds.index(most_s)}, the slowest one"
    return f"A microbatch takes {format_seconds(most_s)} on {which}."


def _limit_of_program(plan: PlanValues) -> str:
    estimates = plan.estimates
    step, computing = format_seconds(estimates.step_s), format_seconds(estimates.compute_s)
    visible_s = max(0.0, estimates.step_s - estimates.compute_s)
    visible = format_seconds(visible_s)
    if visible_s + estimates.hidden_s == 0:
        return f"Computation alone: {computing} of {step}. The plan communicates nothing."
    if visible_s <= SMALL * estimates.step_s:
        return f"Computation: {computing} of {step}. {_hidden(plan, visible_s)}; {visible} are visible.{_remat(plan)}"
    if visible_s <= estimates.compute_s:
        both = f"computation takes {computing}, {visible} of {step} are visible communication"
        return f"Computation and communication: {both}.{_most(plan)}{_remat(plan)}"
    return f"Communication: {visible} of {step} are visible; computation takes {computing}.{_most(plan)}{_remat(plan)}"


def _hidden(plan: PlanValues, visible_s: float) -> str:
    hidden_s = plan.estimates.hidden_s
    return f"Of {format_seconds(visible_s + hidden_s)} of communication, {format_seconds(hidden_s)} run behind it"


def _most(plan: PlanValues) -> str:
    """The collectives, or the copies, that take most."""
    moving = [(one.seconds, f"{one.kind} over {', '.join(one.axes)}") for one in plan.estimates.collectives]
    seconds, words = max([*moving, (plan.estimates.transfer_s, "copies to and from the host")])
    return f" Most of it is {words}, {format_seconds(seconds)}."


def _remat(plan: PlanValues) -> str:
    recompute_s = plan.estimates.recompute_s
    return f" Recomputation takes {format_seconds(recompute_s)} of the step." if recompute_s else ""


# --- the content of the memory


def filling(plan: PlanValues) -> str:
    """The kinds of arrays at the peak of memory."""
    estimates, peak_bytes = plan.estimates, plan.estimates.peak_bytes
    if plan.is_pipeline:
        return _fullest(plan)
    if not estimates.residents:
        return f"{format_bytes(peak_bytes)} at the peak; the plan does not say which arrays."
    kind, most = max(estimates.residents.items(), key=lambda item: item[1])
    share = f"{format_bytes(most)} of {format_bytes(peak_bytes)} ({percent(most, peak_bytes)})"
    return f"{kind.replace('_', ' ').capitalize()}: {share} at the peak, which is at {estimates.peak_at}."


def _fullest(plan: PlanValues) -> str:
    """The worker that holds most, and what fills it."""
    simulation, stages = simulated(plan), plan.estimates.stages
    n = max(range(len(stages)), key=lambda n: stages[n].peak_bytes)
    worker = next(w for w in range(len(simulation.workers)) if n in simulation.schedule.stages_of(w))
    state, residuals, workspace = map(max, held(plan, simulation, worker))
    working = f", and {format_bytes(workspace)} while a task runs" if workspace else ""
    is_more = stages[n].peak_bytes > state + residuals + workspace
    rest = " The rest are values that wait for a reader, or the update." * is_more
    return (
        f"Worker {worker} holds most: {format_bytes(stages[n].peak_bytes)} a device. Its state takes {format_bytes(state)}, "
        f"the residuals of microbatches in flight at most {format_bytes(residuals)}{working}.{rest}"
    )


# --- the worth of more memory


def more_memory(plan: PlanValues) -> str:
    """The time that the plan spends to save memory. On its mesh, more memory can win back no more than that."""
    estimates, cap_bytes = plan.estimates, plan.memory_bytes
    peak_bytes = estimates.compiled_peak_bytes or estimates.peak_bytes
    spent_s = estimates.recompute_s + estimates.transfer_s
    filled = f"{percent(peak_bytes, cap_bytes)} of its cap"
    tenth = f"10% more is {format_bytes(0.1 * cap_bytes)} a device"
    is_whole = plan.microbatches == 1 or plan.is_pipeline
    if peak_bytes < FULL * cap_bytes and is_whole and not spent_s:
        return f"Not needed: the plan fills {filled}, and spends no time to save memory."
    if not (savings := _savings(plan)):
        return (
            f"The plan fills {filled} and spends no time to save memory: it recomputes nothing, keeps nothing on the host, "
            f"and takes the batch at once. {tenth}, which can win by other specs or another mesh alone."
        )
    won = f" The savings take {format_seconds(spent_s)} of the step; on this mesh, no more can be won back."
    return f"The plan fills {filled}. To save memory it {_listed(savings)}. {tenth}.{won * bool(spent_s)}"


def _savings(plan: PlanValues) -> list[str]:
    """The means by which a plan saves memory."""
    estimates, sentences = plan.estimates, list[str]()
    if any("remat" in text for text in plan.retention.values()):
        seconds = format_seconds(estimates.recompute_s)
        sentences.append(f"recomputes for {seconds}" if estimates.recompute_s else "recomputes cheap ops")
    if estimates.host_bytes:
        copies = f", whose copies take {format_seconds(estimates.transfer_s)}" * bool(estimates.transfer_s)
        sentences.append(f"keeps {format_bytes(estimates.host_bytes)} per device on the host{copies}")
    if plan.microbatches > 1 and not plan.is_pipeline:
        sentences.append(f"takes the batch in {plural(plan.microbatches, 'microbatch', 'es')}")
    return sentences


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
