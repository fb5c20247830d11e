"""The plan of the smallest peak, if the queue found none: of the step as it is written, or of the step that needs least."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.memory_floor import floor_bytes
from autoshard.search.solver.clock import Deadline
from autoshard.search.space import infeasible
from autoshard.search.space.candidates import OfRewrite
from autoshard.search.space.found import Found
from autoshard.search.space.rewrites import ESTIMATE_GAP, Estimates, without_cap
from autoshard.search.space.trials import Baseline, Trials
from autoshard.search.step_problem import StepProblem


@dataclass(frozen=True, eq=False)
class Misfit:
    """A variant of which nothing can fit, on all meshes."""

    step_problem: StepProblem
    on_meshes: Sequence[MeshProblem]


@dataclass(frozen=True, eq=False)
class Unfitting:
    """A search for one form of the step that found no plan.

    Attributes:
      trials: the trials of the search.
      first: the step as it is written.
      misfits: the variants of which nothing can fit.
      rewrites: the rewrites that were estimated.
      is_all: whether all candidates were tried.
      also_tried: a sentence on variants that were tried.
    """

    trials: Trials
    first: Baseline
    misfits: Sequence[Misfit]
    rewrites: Sequence[OfRewrite]
    is_all: bool
    also_tried: str

    def plan_of_smallest_peak(self, search: Callable[[Trials], Found | None], deadline: Deadline) -> Found:
        """The plan of the smallest peak, if it fits after all: of the baseline, of the smallest step, or of all strategies
        that the search met.

        Args:
          search: the best plan of other trials, if they find one.
          deadline: the end of all trials.

        Raises:
          InfeasibleError: it does not fit. The message says how the cap or the request could change.
        """
        trials, first = self.trials, self.first.step_problem
        trials.progress("no plan so far; looking for the smallest peak")
        options, peaks = trials.options, dict[StepProblem, infeasible.Smallest]()
        least = self._smallest_step(deadline)
        nearest = trials.nearest or self._fastest
        for one in dict.fromkeys((least, first)):
            if (peaks or nearest) and deadline.is_over:
                break
            if smallest := infeasible.smallest_peak(trials.on_all_meshes(one), options, deadline):
                peaks[one] = smallest
        best = min(peaks, key=lambda one: peaks[one].peak.num_bytes, default=least)
        smallest = peaks.get(best)
        if fitting := _fitting(trials, peaks):
            trials.takes(fitting)
            trials.watch.lap("solve")
            return fitting
        proven_s = trials.proven_s(best)
        is_of_first = self.is_all and least is first
        is_proven = is_of_first and all(proven_s.get(shape) == math.inf for shape in trials.shapes)
        if nearest and (smallest is None or nearest.peak.num_bytes < smallest.peak.num_bytes):
            best, smallest = nearest.step_problem, infeasible.Smallest.of(nearest, smallest)
        explain = partial(infeasible.explain, best, trials.cluster, options, smallest, is_proven, deadline)
        forbidden_s = _forbidden_s(trials, search, deadline.share(1 / 2))
        raise explain(forbidden_s=forbidden_s, also_tried=self.also_tried)

    @property
    def _fastest(self) -> Found | None:
        """The fastest strategies of the step as it is written, without a cap."""
        step_problem, cap_bytes = self.first.step_problem, self.trials.options.memory_bytes
        uncapped = next(iter(self.first.uncapped), None)
        return uncapped and Found(step_problem, uncapped.on_mesh, uncapped.labels, cap_bytes)

    def _smallest_step(self, deadline: Deadline) -> StepProblem:
        """The step whose strategies came nearest to the cap. If there are none, the rewrite that seems to need least memory;
        or else the smallest variant of which nothing can fit (or the step as it is written), with the most
        recomputation."""
        trials = self.trials
        if trials.nearest:
            return trials.nearest.step_problem
        if self.rewrites:
            return min(self.rewrites, key=lambda one: one.least_bytes).problem[0]
        misfits = self.misfits or [Misfit(self.first.step_problem, self.first.on_meshes)]

        def least_bytes(on_mesh: MeshProblem) -> float:
            return floor_bytes(on_mesh.memory, on_mesh.pinned(trials.pins))

        misfit = min(misfits, key=lambda one: min(map(least_bytes, one.on_meshes)))
        on_mesh, baseline = min(misfit.on_meshes, key=least_bytes), misfit.step_problem
        if not trials.options.may_recompute:
            return baseline
        uncapped = without_cap(on_mesh, trials.pins, math.inf, deadline.left_s)
        if uncapped is None:
            return baseline
        limit_bytes = trials.options.memory_bytes
        curve = on_mesh.cap_curve(on_mesh.pinned(trials.pins), ESTIMATE_GAP)
        again = Estimates(baseline, uncapped, trials.pins, limit_bytes, curve, deadline).recomputing()
        most = max(again, key=lambda rewrite: rewrite.saved_bytes, default=None)
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


def _forbidden_s(
    trials: Trials, search: Callable[[Trials], Found | None], deadline: Deadline
) -> float | None:
    """Seconds per step of a plan that recomputes, if recomputation is forbidden and would fit."""
    if trials.options.may_recompute:
        return None
    left = trials.options.until(deadline)
    options = replace(left, remat=None, time_limit_s=left.limit_s)
    allowed = Trials(trials.step, trials.marks, trials.cluster, options, trials.progress, trials.clock)
    found = search(allowed)
    return found.cost_s if found else None
