"""The plan of the smallest peak, if the queue found none: of the step as it is written, or of the step that needs least."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.memory_floor import floor_bytes
from autoshard.search.solver.clock import Deadline
from autoshard.search.space import infeasible
from autoshard.search.space.found import Found
from autoshard.search.space.rewrites import ESTIMATE_GAP, Estimates, without_cap
from autoshard.search.space.trials import Baseline, Trials
from autoshard.search.step_problem import StepProblem

ESTIMATE_S = 2.0
"""Seconds for the estimates of a step that cannot fit. Source: a choice of ours."""


@dataclass(frozen=True, eq=False)
class Misfit:
    """A variant of which nothing can fit, on all meshes."""

    step_problem: StepProblem
    on_meshes: Sequence[MeshProblem]


def plan_of_smallest_peak(
    trials: Trials,
    first: Baseline,
    misfits: Sequence[Misfit],
    also_tried: str,
    search: Callable[[Trials], Found | None],
) -> Found:
    """The plan of the smallest peak, if it fits after all: of the baseline, of the smallest step, or of all strategies that
    the search met.

    Args:
      trials: the trials of the search.
      first: the step as it is written.
      misfits: the variants of which nothing can fit.
      also_tried: a sentence on variants that were tried.
      search: the best plan of other trials, if they find one.

    Raises:
      InfeasibleError: it does not fit. The message says how the cap or the request could change.
    """
    trials.progress("no plan so far; looking for the smallest peak")
    options, deadline = trials.options, Deadline.after(infeasible.limit_s(trials.options), trials.clock)
    least = _smallest_step(trials, first, misfits)
    tried = {first.step_problem: first.on_meshes}
    if least is not first.step_problem:
        tried[least] = trials.on_all_meshes(least)
    found = {one: infeasible.smallest_peak(tried[one], options, deadline) for one in tried}
    peaks = {one: smallest for one, smallest in found.items() if smallest}
    best = min(peaks, key=lambda one: peaks[one].peak.num_bytes, default=least)
    smallest, nearest = peaks.get(best), trials.nearest
    if fitting := _fitting(trials, peaks):
        trials.takes(fitting)
        trials.watch.lap("solve")
        return fitting
    proven_s = trials.proven_s(best)
    is_proven = least is first.step_problem and all(
        proven_s.get(shape) == math.inf for shape in trials.shapes
    )
    if nearest and (smallest is None or nearest.peak.num_bytes < smallest.peak.num_bytes):
        best, smallest = nearest.step_problem, infeasible.Smallest.of(nearest, smallest)
    explain = partial(infeasible.explain, best, trials.cluster, options, smallest, is_proven, deadline)
    raise explain(forbidden_s=_forbidden_s(trials, search), also_tried=also_tried)


def _smallest_step(trials: Trials, first: Baseline, misfits: Sequence[Misfit]) -> StepProblem:
    """The step whose strategies came nearest to the cap. If there are none, the smallest variant of which nothing can fit
    (or the step as it is written), with the most recomputation."""
    if trials.nearest:
        return trials.nearest.step_problem
    misfits = misfits or [Misfit(first.step_problem, first.on_meshes)]

    def least_bytes(on_mesh: MeshProblem) -> float:
        return floor_bytes(on_mesh.memory, on_mesh.pinned(trials.pins))

    misfit = min(misfits, key=lambda one: min(map(least_bytes, one.on_meshes)))
    on_mesh, baseline = min(misfit.on_meshes, key=least_bytes), misfit.step_problem
    deadline = Deadline.after(ESTIMATE_S, trials.clock)
    uncapped = without_cap(on_mesh, trials.pins, math.inf, ESTIMATE_S)
    if uncapped is None or not trials.options.may_recompute:
        return baseline
    limit_bytes = trials.options.memory_bytes
    curve = on_mesh.cap_curve(on_mesh.pinned(trials.pins), ESTIMATE_GAP)
    rewrites = Estimates(baseline, uncapped, trials.pins, limit_bytes, curve, deadline).recomputing()
    most = max(rewrites, key=lambda rewrite: rewrite.saved_bytes, default=None)
    if most is None:
        return baseline
    most = most.of_traced(baseline)
    return trials.recomputing(baseline, most.sites, frozenset())


def _fitting(trials: Trials, peaks: Mapping[StepProblem, infeasible.Smallest]) -> Found | None:
    """The plan of the smallest peak that keeps to the cap, None if there is none. Plans that keep to it with more
    overlap come first."""
    cap_bytes, nearest = trials.options.memory_bytes, trials.nearest
    kept = [
        Found(one, smallest.on_mesh, smallest.labels, cap_bytes)
        for one, smallest in peaks.items()
        if smallest.peak.num_bytes <= cap_bytes
    ]
    kept += [nearest] if nearest and nearest.peak.num_bytes <= cap_bytes else []
    fitting = [replace(one, asked=one.device.within_limit) for one in kept]
    return min(fitting, key=lambda one: (-one.device.overlap, one.peak.num_bytes), default=None)


def _forbidden_s(trials: Trials, search: Callable[[Trials], Found | None]) -> float | None:
    """Seconds per step of a plan that recomputes, if recomputation is forbidden and would fit."""
    if trials.options.may_recompute:
        return None
    options = replace(trials.options, remat=None, time_limit_s=infeasible.limit_s(trials.options))
    allowed = Trials(trials.step, trials.marks, trials.cluster, options, trials.progress, trials.clock)
    found = search(allowed)
    return found.cost_s if found else None
