"""How every search for the best labels of a problem begins, whatever its memory rows, its cutoff and its time.

The first sweeps of messages know nothing of rows, nor does what descends from their best assignment or from those that rules
propose. Who solves a problem again under another cap (an estimate for each of many choices of what to recompute, a plan that
is searched again under a lower limit) begins where this ended; and with the assignments that were met on the way, of which
some may fit that cap, and which tell together what memory is worth.

Nor does the bound know of rows that all further sweeps and eliminations raise, before rows have prices. No such bound is
above what any assignment costs, whether it fits or not: where the two have met, in this search or an earlier one, only
prices tell more.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.contraction import Contraction
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.pbqp import Labels, Problem, merged
from autoshard.search.solver.trws import Trws

SWEEPS = 10
"""Of messages, before assignments are looked at. Source: a choice of ours."""
START_RANGE = 1.5
"""Of the assignments to begin with, those that cost up to so many times the cheapest are improved: which is best then, their
costs do not tell (an encoder and decoder over Ethernet: from 350 ms to 346, from 376 to 326)."""


class Opening:
    """The beginning for one problem; each part is made when it is first asked for, and never changed. What searches find
    out of the problem without rows is remembered.

    Attributes:
      problem: merged.
      clock: what is spent on it.
      bound_s: a lower bound on every assignment's cost.
      met_s: what the assignments cost that were met so far.
    """

    def __init__(
        self,
        problem: Problem,
        starts: Callable[[], Iterable[Labels]] = tuple,
        clock: SearchClock = PROCESSOR,
    ) -> None:
        """Args:
        problem: nodes, labels, costs.
        starts: gives assignments to begin with.
        clock: what is spent on it.
        """
        self.problem, self.clock = merged(problem), clock
        self._starts = starts
        self.bound_s = -np.inf
        self.met_s: dict[Labels, float] = {}
        self._contraction: Contraction | None = None

    def contraction(self, worth_s: float) -> Contraction:
        """The problem as small as earlier searches have made it, for whoever wants assignments that cost less."""
        if self._contraction is None or self._contraction.worth_s < worth_s:
            self._contraction = Contraction(self.swept[0], self.clock)
        return self._contraction

    def bounded(self, bound_s: float) -> None:
        """Remembers a lower bound on every assignment's cost."""
        self.bound_s = max(self.bound_s, bound_s)

    @property
    def cheapest(self) -> Labels | None:
        """The cheapest assignment met so far."""
        return min(self.met_s, key=self.met_s.__getitem__, default=None)

    @property
    def least_s(self) -> float:
        """What that costs."""
        return min(self.met_s.values(), default=np.inf)

    def settled(self, relative_gap: float, known_s: float = -np.inf) -> Labels | None:
        """The cheapest assignment without rows, if it is known so closely, or comes so near to a bound that is known of all
        that fit: what is left is for prices to tell."""
        is_known = max(self.bound_s, known_s) >= self.least_s - relative_gap * abs(self.least_s)
        return self.cheapest if is_known else None

    @cached_property
    def consistent(self) -> Trws:
        """The problem without labels that a neighbour forbids, before the first sweep; for others to copy."""
        trws = Trws(self.problem, self.clock)
        trws.make_consistent()
        return trws

    @cached_property
    def swept(self) -> tuple[Trws, tuple[tuple[float, Labels], ...]]:
        """The same after the first sweeps, for others to copy; and the bound and the assignment of each of these."""
        trws = self.consistent.copy()
        return trws, tuple(trws.sweep() for _ in range(SWEEPS))

    @property
    def promised_s(self) -> float:
        """A lower bound on every assignment's cost: says which of several problems to solve first."""
        return max(bound for bound, _ in self.swept[1]) if self.consistent.is_feasible else np.inf

    @cached_property
    def descended(self) -> Labels:
        """What descends from the best assignment of the first sweeps."""
        trws, sweeps = self.swept
        best = min((labels for _, labels in sweeps), key=self.problem.cost_s)
        return trws.original(descend(trws.rest(), (), np.inf, 0.0, trws.renumbered(best), self.clock))

    @cached_property
    def given(self) -> tuple[Labels, ...]:
        """The assignments to begin with, the cheapest first."""
        return tuple(sorted(self._starts(), key=self.problem.cost_s))

    @cached_property
    def starts(self) -> tuple[Labels, ...]:
        """What descends from the cheaper ones of them, the cheapest first."""
        cost_s = {labels: self.problem.cost_s(labels) for labels in self.given}
        most_s, found = START_RANGE * min(cost_s.values(), default=np.inf), dict[Labels, float]()
        for labels in (labels for labels in cost_s if cost_s[labels] < most_s):
            better = descend(self.problem, (), np.inf, 0.0, labels, self.clock)
            found[better] = self.problem.cost_s(better)
        return tuple(sorted(found, key=found.__getitem__))
