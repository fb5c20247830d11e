"""The memory of a pipeline's worker over the time of a step, in slices of equal time."""

from autoshard.search.pipeline.simulator import Simulation
from autoshard.search.plan.schedule import TaskKind
from autoshard.search.plan.values import PlanValues

NUM_SLICES = 60
"""Slices of a step, also of a schedule whose tasks are not drawn."""

Slices = tuple[float, ...]


def held(plan: PlanValues, simulation: Simulation, worker: int) -> tuple[Slices, Slices, Slices]:
    """State, residuals and workspace of a worker, each at its most in each slice of the step."""
    estimates, whole_s = plan.estimates.stages, simulation.makespan_s
    state = sum(estimates[stage].state_bytes for stage in simulation.schedule.stages_of(worker))
    residuals, workspace = [0.0] * NUM_SLICES, [0.0] * NUM_SLICES
    until = 0
    for run in simulation.workers[worker]:
        own = estimates[run.task.stage]
        before = run.held_bytes - (own.residual_bytes if run.task.kind is TaskKind.FORWARD else 0)
        first, last = (
            min(int(NUM_SLICES * at_s / whole_s), NUM_SLICES - 1) for at_s in (run.start_s, run.end_s)
        )
        for n in range(until, first):
            residuals[n] = max(residuals[n], before)
        for n in range(first, last + 1):
            residuals[n] = max(residuals[n], run.held_bytes)
            workspace[n] = max(workspace[n], own.workspace_bytes)
        until = last + 1
    return (float(state),) * NUM_SLICES, tuple(residuals), tuple(workspace)
