"""The beginning of every search on one problem, independent of memory rows, cutoff and time limit.

The first sweeps of messages use no rows, and nor do the descents from their best assignment and from the assignments that
rules propose. A second search on the problem under another cap starts from these results: an estimate for each of many
choices of recomputation, or a new search under a lower limit. It also starts from the assignments met before. Some may fit
the new cap, and together they show the price of memory.

Before rows have prices, further sweeps and eliminations raise a bound that does not depend on rows either. It is at most
the cost of every assignment, fitting or not. Once it meets the cheapest assignment, in this search or an earlier one, only
prices can raise it further.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.contraction import SWEEPS, Contraction
from autoshard.search.solver.flat import Flat, flat, flat_cost_s
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.pbqp import Labels, Problem, merged
from autoshard.search.solver.trws import Trws

START_RANGE = 1.5
"""Starting assignments that cost less than this multiple of the cheapest one are improved: their order may change then (an
encoder and decoder over Ethernet: from 350 ms to 346, from 376 to 326)."""


class Opening:
    """The beginning for one problem. Each part is computed on its first use and never changed. Results of searches that do
    not depend on rows are kept.

    Attributes:
      problem: merged.
      clock: counts the time spent.
      bound_s: a lower bound on every assignment's cost.
      met_s: the cost of each assignment met so far.
    """

    def __init__(
        self,
        problem: Problem,
        starts: Callable[[], Iterable[Labels]] = tuple,
        clock: SearchClock = PROCESSOR,
    ) -> None:
        """Args:
        problem: nodes, labels, costs.
        starts: returns the starting assignments.
        clock: counts the time spent.
        """
        self.problem, self.clock = merged(problem), clock
        self._starts = starts
        self.bound_s = -np.inf
        self.met_s: dict[Labels, float] = {}
        self._contraction: Contraction | None = None
        self._below: dict[Labels, Labels] = {}

    def contraction(self, worth_s: float) -> Contraction:
        """The contraction of earlier searches, if it still holds all assignments that cost less than `worth_s`; else a new
        one."""
        if self._contraction is None or self._contraction.worth_s < worth_s:
            self._contraction = Contraction(self.swept[0], self.clock)
        return self._contraction

    def bounded(self, bound_s: float) -> None:
        """Records a lower bound on every assignment's cost."""
        self.bound_s = max(self.bound_s, bound_s)

    @property
    def cheapest(self) -> Labels | None:
        """The cheapest assignment met so far."""
        return min(self.met_s, key=self.met_s.__getitem__, default=None)

    @property
    def least_s(self) -> float:
        """The cost of the cheapest assignment met so far; +inf before the first."""
        return min(self.met_s.values(), default=np.inf)

    def settled(self, relative_gap: float, known_s: float = -np.inf) -> Labels | None:
        """The cheapest assignment met, if its cost is within the gap of the bound without rows or of `known_s`, a known
        bound on fitting assignments. None if the search without rows has to go on."""
        is_known = max(self.bound_s, known_s) >= self.least_s - relative_gap * abs(self.least_s)
        return self.cheapest if is_known else None

    @cached_property
    def flat(self) -> Flat:
        """The problem as flat arrays."""
        return flat(self.problem)

    @cached_property
    def consistent(self) -> Trws:
        """The problem without labels that a neighbour forbids, before the first sweep; callers copy it."""
        trws = Trws(self.problem, self.clock)
        trws.make_consistent()
        return trws

    @cached_property
    def swept(self) -> tuple[Trws, tuple[tuple[float, Labels], ...]]:
        """The consistent problem after the first sweeps, for callers to copy; and each sweep's bound and assignment."""
        trws = self.consistent.copy()
        return trws, tuple(trws.sweep() for _ in range(SWEEPS))

    @property
    def promised_s(self) -> float:
        """A lower bound on every assignment's cost, to choose which of several problems to solve first."""
        return max(bound for bound, _ in self.swept[1]) if self.consistent.is_feasible else np.inf

    @cached_property
    def descended(self) -> Labels:
        """The local optimum below the best assignment of the first sweeps."""
        trws, sweeps = self.swept
        best = min((labels for _, labels in sweeps), key=partial(flat_cost_s, self.flat))
        return trws.original(descend(trws.flat, (), np.inf, 0.0, trws.renumbered(best), self.clock))

    @cached_property
    def given(self) -> tuple[Labels, ...]:
        """The starting assignments, the cheapest first."""
        return tuple(sorted(self._given_s, key=self._given_s.__getitem__))

    @cached_property
    def _given_s(self) -> dict[Labels, float]:
        """The cost of each starting assignment."""
        return {labels: flat_cost_s(self.flat, labels) for labels in self._starts()}

    @property
    def starts(self) -> Iterator[Labels]:
        """The cheaper starting assignments (`START_RANGE`), the cheapest first."""
        most_s = START_RANGE * min(self._given_s.values(), default=np.inf)
        return (labels for labels in self.given if self._given_s[labels] < most_s)

    def below(self, start: Labels) -> Labels:
        """The local optimum below a starting assignment."""
        if start not in self._below:
            self._below[start] = descend(self.flat, (), np.inf, 0.0, start, self.clock)
        return self._below[start]
