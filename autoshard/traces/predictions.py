"""The plan's side of the table: seconds of a step by the classes that a trace can tell apart."""

from dataclasses import dataclass

from autoshard.search.plan.plan_meshes import collectives
from autoshard.search.plan.values import PlanValues
from autoshard.traces.kernel_names import HOST_COPIES

COMPUTATION, EXPOSED, BUSY, IDLE = "computation", "communication not hidden", "busy", "idle"


@dataclass(frozen=True, slots=True)
class Time:
    """Kernels of one kind on one device.

    Attributes:
      seconds: per step.
      runs: per step; 0 if unknown.
      over: mesh axes, if they are known.
    """

    seconds: float
    runs: float = 0
    over: str = ""


def parts(plan: PlanValues) -> dict[str, float]:
    """The parts of a step that follow one another; all work of a pipeline's worker is one of them."""
    estimates = plan.estimates
    if plan.is_pipeline:
        idle_s = estimates.bubble * estimates.step_s
        return {BUSY: estimates.step_s - idle_s, IDLE: idle_s}
    moved_s = estimates.transfer_s + sum(one.seconds for one in estimates.collectives)
    return {COMPUTATION: estimates.compute_s, EXPOSED: moved_s - estimates.hidden_s, IDLE: 0.0}


def kinds(plan: PlanValues) -> dict[str, Time]:
    """Kernels that compute, by class if the plan's file has them; collectives by kind; copies to the host and back."""
    profile = plan.estimates.profile
    found = {} if profile is None else {n: Time(t.seconds, t.runs) for n, t in profile.kernels.items()}
    if plan.estimates.transfer_s:
        found[HOST_COPIES] = Time(plan.estimates.transfer_s)
    return found | _by_kind(plan)


def _by_kind(plan: PlanValues) -> dict[str, Time]:
    """Collectives; of a pipeline, the mean of its devices."""
    found = dict[str, Time]()
    shares = ((share, one) for share, _, moved in collectives(plan) for one in moved)
    for share, one in shares:
        so_far = found.get(one.kind, Time(0.0))
        over = dict.fromkeys(filter(None, (*so_far.over.split("; "), ", ".join(one.axes))))
        runs = so_far.runs + share * one.count
        found[one.kind] = Time(so_far.seconds + share * one.seconds, runs, "; ".join(over))
    return found
