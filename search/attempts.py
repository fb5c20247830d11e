"""Candidates for recomputation, built as steps and searched, the most promising first.

Each attempt teaches the search how to judge later candidates:

* If a step misses the cap, candidates that save little more are postponed. If all others are slower or miss the cap
  too, the most promising postponed ones are built after all.
* If a step that is not memory-bound is slower than its estimate, the error is added to later estimates on that mesh.
* A candidate that lost on one mesh is not tried on another mesh.
* A candidate whose strategies missed the cap on a mesh is not built for it again, when nothing else fits.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.units import format_mesh
from autoshard.search.ir.graph import Site
from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import UNKNOWN, Known, MeshProblem, StepProblem
from autoshard.search.recomputation import Candidate
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.trials import Rewritten, Trials, progress_prefix
from autoshard.search.warm_starts import for_rewritten_step

ATTEMPT_SHARE = 0.4
"""Share of the time left that one step may take. Source: a choice of ours."""

LEAST_ATTEMPT_S = 2.0
"""Seconds that one step may take in any case. Source: a choice of ours."""

MISSED_SHARE = 0.1
"""Share of the cap that the next candidate must save in addition, after a step missed the cap. Source: a choice of
ours."""

MAX_FAILED = 3
"""Steps in a row that may fail to improve the best plan before the attempts end. Source: a choice of ours; neighbouring
estimates differ by less than their error."""

POSTPONED_MARGIN = 0.03
"""A postponed candidate is built only if the best plan is slower than its estimate by more than this share. Source: a
choice of ours; estimates err by 2%."""

LOOPS_MARGIN = 0.03
"""Largest relative error of a loop's recomputation estimate. Source: an LSTM whose estimates are 2 to 3% too high."""

STACKING_PASSES = 5
"""Largest number of passes through memory that stacking a loop's residual takes. Source: `search.memory.passes`."""


class Attempts:
    """Attempts at steps that recompute or offload, made from one baseline.

    Attributes:
      trials: the trials of the step.
      baseline: the step without extra recomputation.
      known: the bounds on a step's plans on a mesh.
      deadline: the end of the attempts. Without a plan they may take as long again, but only for candidates that save
        more than all that were built.
      last: the end of that extension.
      has_given_up: whether no candidate seems to fit.
      built: candidates that were built and searched, in order.
      postponed: candidates that save hardly more than one that missed the cap.
      num_failed: number of the latest attempts that made no better plan.
      least_saved_bytes: bytes that the next candidate must save, by mesh.
      error_s: lower bound on the seconds by which steps are slower than their estimates, by mesh.
      slower: recomputed and offloaded sites of steps that are slower than the best plan.
    """

    def __init__(
        self,
        trials: Trials,
        baseline: StepProblem,
        known: Callable[[StepProblem, tuple[int, ...]], Known],
        deadline: Deadline,
    ) -> None:
        self.trials, self.baseline, self.known, self.clock = trials, baseline, known, deadline.clock
        self.limit_s = deadline.left_s
        self.has_given_up = False
        self._begin()
        self.built: list[Candidate] = []
        self.postponed: list[Candidate] = []
        self.num_failed = 0
        self.least_saved_bytes: dict[tuple[int, ...], float] = {}
        self.error_s: dict[tuple[int, ...], float] = {}
        self.slower: set[tuple[frozenset[Site], frozenset[Site]]] = set()

    def make(
        self, found: Iterable[Candidate], smallest: Callable[[], Sequence[Candidate]] | None = None
    ) -> list[Candidate]:
        """Builds and searches the candidates that may be better than the best plan, and returns them.

        Args:
          found: the candidates, in order.
          smallest: makes the candidates that need the least memory, the smallest last. If there is no plan and another
            candidate misses the cap, the smallest is built next. If it misses too, the attempts end.
        """
        for candidate in chain(found, self.postponed):
            self.has_given_up = smallest is not None and not self._is_over and self._seems_too_large(smallest)
            if self._is_over or self.has_given_up:
                break
            if self._is_promising(candidate):
                self._build(candidate)
        return self.built

    def _seems_too_large(self, smallest: Callable[[], Sequence[Candidate]]) -> bool:
        """True if there is no plan and no candidate seems to fit.

        Before the first attempt, the smallest peak of the baseline tells, if its strategies missed the cap: the smallest
        candidate must save the difference. After an attempt, the smallest candidate is built.
        """
        if self.trials.best is not None:
            return False
        if not self.built:
            needed_bytes = self.trials.needed_bytes(self.baseline)
            has_missed = needed_bytes < math.inf
            return has_missed and needed_bytes - smallest()[-1].saved_bytes > self.trials.options.memory_bytes
        self._build(smallest()[-1])
        self._begin()  # attempts at better plans have all of the time
        return self.trials.best is None

    def _begin(self) -> None:
        """Sets the deadlines, from now on."""
        self.deadline = Deadline.after(self.limit_s, self.clock)
        self.last = Deadline.after(2 * self.limit_s, self.clock)

    @property
    def _is_over(self) -> bool:
        """True if no more steps are built, whatever their estimates."""
        has_plan = self.trials.best is not None
        is_late = self.deadline.is_over and (has_plan or self.baseline.traced.num_microbatches > 1)
        return is_late or self.trials.is_over or (has_plan and self.num_failed == MAX_FAILED)

    def _is_promising(self, candidate: Candidate) -> bool:
        """True if a candidate is worth building, by the results so far."""
        if self.last.is_over and any(candidate.saved_bytes <= one.saved_bytes for one in self.built):
            return False
        if self._named(candidate) in self.trials.too_large or self._is_postponed(candidate):
            return False
        if (candidate.sites, candidate.offloaded_sites) in self.slower:
            return False
        has_plan, enough_s = self.trials.best is not None, (1 - candidate.margin) * self.trials.cutoff_s
        return not has_plan or self._expected_s(candidate) < enough_s

    def _is_postponed(self, candidate: Candidate) -> bool:
        """True if a candidate probably misses the cap and is not worth a try in spite of that."""
        if candidate.saved_bytes >= self.least_saved_bytes.get(candidate.shape, 0.0):
            return False
        if candidate in self.postponed:
            return self.trials.cutoff_s <= (1 + POSTPONED_MARGIN) * candidate.cost_s
        if len(self.postponed) < MAX_FAILED:
            self.postponed.append(candidate)
        return True

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds per step: the estimate, corrected by the error of earlier estimates."""
        expected_s = candidate.cost_s
        if not candidate.offloaded_sites:
            expected_s += self.error_s.get(candidate.shape, 0.0)
        if has_loops(self.baseline.traced):  # the estimate may be too high by the time of stacking, at most
            stacking_s = STACKING_PASSES * pass_s_per_byte(self.trials.cluster.device) * candidate.saved_bytes
            expected_s -= min(LOOPS_MARGIN * self.trials.cutoff_s, stacking_s)
        return expected_s

    def _build(self, candidate: Candidate) -> None:
        """Builds and searches a step, and learns from the result."""
        trials, before = self.trials, self.trials.best
        waits = (
            f"{len(candidate.offloaded_sites)} residuals on the host, " if candidate.offloaded_sites else ""
        )
        recomputes = f"recomputing {len(candidate.sites)} ops on mesh {format_mesh(candidate.shape)}"
        trials.progress(f"{progress_prefix(self.baseline.traced)}{waits}{recomputes}")
        self.built.append(candidate)
        step_problem = trials.recomputing(self.baseline, candidate.sites, candidate.offloaded_sites)
        on_mesh = trials.put_on(step_problem, candidate.shape)
        gain_s = max(-candidate.more_s, trials.gains_s.get(step_problem, 0.0))
        trials.gains_s[step_problem] = gain_s
        time_limit_s = max(ATTEMPT_SHARE * self.deadline.left_s, LEAST_ATTEMPT_S)
        known = self._known(step_problem, candidate, on_mesh)
        bound_s, is_memory_bound = trials.improve(step_problem, on_mesh, time_limit_s, known=known)
        if not is_memory_bound and not candidate.offloaded_sites and bound_s < math.inf:
            error_s = bound_s - candidate.cost_s
            self.error_s[candidate.shape] = max(error_s, self.error_s.get(candidate.shape, 0.0))
        if trials.best is not before:
            self.num_failed = 0
            return
        self.num_failed += 1
        if trials.needed_bytes(step_problem) < math.inf:
            trials.too_large.add(self._named(candidate))
        if is_memory_bound:
            missed_bytes = MISSED_SHARE * trials.options.memory_bytes
            self.least_saved_bytes[candidate.shape] = candidate.saved_bytes + missed_bytes
        if trials.cutoff_s <= bound_s < math.inf:
            self.slower.add((candidate.sites, candidate.offloaded_sites))

    def _named(self, candidate: Candidate) -> Rewritten:
        return self.baseline, candidate.shape, candidate.sites, candidate.offloaded_sites

    def _known(self, step_problem: StepProblem, candidate: Candidate, on_mesh: MeshProblem) -> Known:
        """A warm start for a step from the strategies of its estimate, and a bound on its plans on this mesh. There is
        no bound if recomputation is estimated to make the step faster, because the gain is not proven."""
        gain_s = self.trials.gains_s[step_problem]
        known = UNKNOWN if gain_s else self.known(step_problem, candidate.shape)
        with suppress(NoFitError):
            return replace(
                known,
                start=for_rewritten_step(candidate.uncapped.on_mesh, candidate.uncapped.labels, on_mesh),
            )
        return known
