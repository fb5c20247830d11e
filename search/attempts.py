"""Steps that recompute, built and searched one after the other, the most promising first.

Each tells something of those after it:

  * what missed the cap, that little more saved will miss, too: it is passed over. Should all that saves more be slower, or
    miss as well, the few of these that promise most are built after all;
  * what is slower than it promised on a mesh, memory or no memory, by how much others will be at least, there;
  * what is no better than the best plan for that, that it is not on other meshes, where it promised no more.
"""

import math
from collections.abc import Callable, Iterable
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
from autoshard.search.trials import Trials, progress_prefix
from autoshard.search.warm_starts import for_rewritten_step

ATTEMPT_SHARE = 0.4
"""Of the time left, what a step may take to be searched. Source: a choice of ours."""

LEAST_ATTEMPT_S = 2.0
"""Seconds that it may take at least, as long as there is no plan. Source: a choice of ours."""

MISSED_SHARE = 0.1
"""Of the cap: where a step did not fit, what the next one has to save besides. Source: a choice of ours."""

MAX_FAILED = 3
"""Steps that are no better than the best plan, in a row, before no more are built. Source: a choice of ours; estimates of
what comes next to one another differ by less than they are wrong."""

POSTPONED_MARGIN = 0.03
"""By how much the best plan may be slower than a step that was passed over promises to be, before that is built. Source: a
choice of ours; estimates are wrong by 2%."""

LOOPS_MARGIN = 0.03
"""Of the best plan, by how much less than it is estimated to a step may take that recomputes in loops. Source: an LSTM whose
estimates are 2 to 3% too high."""

STACKING_PASSES = 5
"""Through memory, what an array takes at most for being stacked up. Source: `search.memory.passes`."""


class Attempts:
    """At steps that recompute, made of one that does not.

    Attributes:
      trials: what is tried of the step.
      baseline: the step that does not.
      known: what is known of a step's plans on a mesh.
      deadline: when they are over; where there is no plan, it may take as long again, with what saves more than all that was
        built.
      built: what was built and searched, in turn.
      postponed: what was not, at first, as it saves hardly more than what missed the cap.
      num_failed: how many of those built last made no better plan.
      least_saved_bytes: by mesh, what the next one has to save.
      error_s: by mesh, by how much steps are slower than estimated, at least.
      slower: what is recomputed, and waits on the host, in steps that are slower than the best plan.
    """

    def __init__(
        self,
        trials: Trials,
        baseline: StepProblem,
        known: Callable[[StepProblem, tuple[int, ...]], Known],
        deadline: Deadline,
    ) -> None:
        self.trials, self.baseline, self.known, self.deadline = trials, baseline, known, deadline
        self.last = Deadline(deadline.clock, deadline.end_s + deadline.left_s)
        self.built: list[Candidate] = []
        self.postponed: list[Candidate] = []
        self.num_failed = 0
        self.least_saved_bytes: dict[tuple[int, ...], float] = {}
        self.error_s: dict[tuple[int, ...], float] = {}
        self.slower: set[tuple[frozenset[Site], frozenset[Site]]] = set()

    def make(self, found: Iterable[Candidate]) -> list[Candidate]:
        """Builds and searches what promises better plans than the best one; says what."""
        for candidate in chain(found, self.postponed):
            if self._is_over:
                break
            if self._is_promising(candidate):
                self._build(candidate)
        return self.built

    @property
    def _is_over(self) -> bool:
        """Whether no more are built, whatever they promise."""
        has_plan = self.trials.best is not None
        is_late = self.deadline.is_over and (has_plan or self.baseline.traced.num_microbatches > 1)
        return is_late or (has_plan and self.num_failed == MAX_FAILED)

    def _is_promising(self, candidate: Candidate) -> bool:
        """Whether to build something, by what is known of it so far."""
        if self.last.is_over and any(candidate.saved_bytes <= one.saved_bytes for one in self.built):
            return False
        if self._is_postponed(candidate) or (candidate.sites, candidate.offloaded_sites) in self.slower:
            return False
        has_plan, enough_s = self.trials.best is not None, (1 - candidate.margin) * self.trials.cutoff_s
        return not has_plan or self._expected_s(candidate) < enough_s

    def _is_postponed(self, candidate: Candidate) -> bool:
        """Whether it saves too little to be likely to fit, and is not worth building in spite of that."""
        if candidate.saved_bytes >= self.least_saved_bytes.get(candidate.shape, 0.0):
            return False
        if candidate in self.postponed:
            return self.trials.cutoff_s <= (1 + POSTPONED_MARGIN) * candidate.cost_s
        if len(self.postponed) < MAX_FAILED:
            self.postponed.append(candidate)
        return True

    def _expected_s(self, candidate: Candidate) -> float:
        """Seconds per step, by the estimate and by what estimates were wrong."""
        expected_s = candidate.cost_s
        if not candidate.offloaded_sites:
            expected_s += self.error_s.get(candidate.shape, 0.0)
        if has_loops(self.baseline.traced):  # at most by what stacking takes may it be too high
            stacking_s = STACKING_PASSES * pass_s_per_byte(self.trials.cluster.device) * candidate.saved_bytes
            expected_s -= min(LOOPS_MARGIN * self.trials.cutoff_s, stacking_s)
        return expected_s

    def _build(self, candidate: Candidate) -> None:
        """Builds and searches a step, and learns from that."""
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
        if is_memory_bound:
            missed_bytes = MISSED_SHARE * trials.options.memory_bytes
            self.least_saved_bytes[candidate.shape] = candidate.saved_bytes + missed_bytes
        if trials.cutoff_s <= bound_s < math.inf:
            self.slower.add((candidate.sites, candidate.offloaded_sites))

    def _known(self, step_problem: StepProblem, candidate: Candidate, on_mesh: MeshProblem) -> Known:
        """Of a step: the strategies by which it was estimated, and the bound on all plans on its mesh, but where it is
        estimated to be faster for recomputing: how much is not proven."""
        gain_s = self.trials.gains_s[step_problem]
        known = UNKNOWN if gain_s else self.known(step_problem, candidate.shape)
        with suppress(NoFitError):
            return replace(
                known,
                start=for_rewritten_step(candidate.uncapped.on_mesh, candidate.uncapped.labels, on_mesh),
            )
        return known
