"""The least cost as a function of the memory limit, from below and for little work.

Prices of memory bound the cost of every assignment that fits (`search.solver.lagrangian`). They bound it under every other
limit, too: as a function of the limit, each pricing is a falling line. The highest lines are a convex curve. Between
two limits whose prices were looked for, the curve lies below the chord. If the lines are near the chord, there is nothing
left to look for.

A few prices give a good bound. A good assignment that fits takes ten times as long, and is not looked for here.
"""

from collections.abc import Callable
from functools import cached_property

import numpy as np

from autoshard.search.solver.branch_and_bound import FAR, MAX_STALLED_PRICINGS, SWEEPS_PER_PRICING
from autoshard.search.solver.clock import Deadline
from autoshard.search.solver.lagrangian import CuttingPlanes, Relaxation
from autoshard.search.solver.opening import Opening
from autoshard.search.solver.pbqp import Labels
from autoshard.search.solver.separation import ROWS_PER_ROUND, Violated


class CapCurve:
    """Lower bounds on one problem under all limits.

    Attributes:
      opening: the beginning of the searches on the problem.
      violated: for a limit, gives the rows that an assignment overflows.
      least_bytes: nothing keeps to a lower limit.
      relative_gap: the error that is good enough.
    """

    def __init__(
        self,
        opening: Opening,
        violated: Callable[[float], Violated],
        least_bytes: float,
        relative_gap: float,
    ) -> None:
        self.opening, self.violated, self.least_bytes = opening, violated, least_bytes
        self.relative_gap = relative_gap
        self._known_s: dict[float, float] = {}  # by limit whose prices were looked for

    def at(self, limit_bytes: float) -> float:
        """A lower bound on the cost of assignments that keep to a limit: the highest line; infinite if none does."""
        if limit_bytes < self.least_bytes:
            return np.inf
        return max(cost_s - price_s * limit_bytes for cost_s, price_s in self._lines)

    def is_far(self, limit_bytes: float) -> bool:
        """True if the bound under a limit is so high that most often no assignment keeps to it."""
        return self.at(limit_bytes) > FAR * self.opening.least_s

    def refine(self, limit_bytes: float, deadline: Deadline) -> None:
        """Looks for the prices that give the highest bound under a limit."""
        least_s = self.at(limit_bytes)
        if least_s == np.inf or least_s >= (1 - self.relative_gap) * self._chord_s(limit_bytes):
            return
        part, labels, num_stalled = self._under(limit_bytes), self._last[1], 0
        while num_stalled < MAX_STALLED_PRICINGS and not deadline.is_over and not self.is_far(limit_bytes):
            for row in self.violated(limit_bytes)(labels)[:ROWS_PER_ROUND]:
                part.planes.add_row(row)
            if not part.planes.rows:
                break
            before_s = part.best_bound_s
            part.set_prices(part.next_prices())
            bound_s, labels = part.run(SWEEPS_PER_PRICING)
            price_s = float(part.prices_s.sum())
            self._lines.append((bound_s + price_s * limit_bytes, price_s))
            part.planes.of(labels)
            num_stalled += part.best_bound_s <= before_s + self.relative_gap * abs(before_s)
        self._last = part, labels
        self._known_s[limit_bytes] = self.at(limit_bytes)

    @cached_property
    def _lines(self) -> list[tuple[float, float]]:
        """The bound of each pricing under a limit of nothing, and the price of a byte."""
        return [(self.opening.promised_s, 0.0)]

    @cached_property
    def _last(self) -> tuple[Relaxation, Labels]:
        """The problem under the last limit, and the last assignment met; without prices in the beginning."""
        planes = CuttingPlanes(self.opening.flat, np.inf, self.opening.clock)
        for labels, cost_s in self.opening.met_s.items():
            planes.of(labels, cost_s)
        part = Relaxation(planes, self.opening.swept[0].copy())
        part.take_note(self.opening.swept[1])
        return part, self.opening.descended

    def _under(self, limit_bytes: float) -> Relaxation:
        """The problem under a limit, with the rows, assignments and prices of the last one."""
        before, labels = self._last
        planes = CuttingPlanes(self.opening.flat, limit_bytes, self.opening.clock)
        for row in before.planes.rows:
            planes.add_row(row)
        for met, (cost_s, _) in before.planes.seen.items():
            planes.of(met, cost_s)
        planes.of(labels)
        prices_s = before.prices_s
        return Relaxation(planes, before.trws, prices_s, prices_s, self.at(limit_bytes))

    def _chord_s(self, limit_bytes: float) -> float:
        """An upper bound on the curve, from the limits whose prices were looked for."""
        below = max((one for one in self._known_s if one <= limit_bytes), default=None)
        above = min((one for one in self._known_s if one >= limit_bytes), default=None)
        if below is None or above is None:
            return np.inf
        share = (limit_bytes - below) / (above - below) if above > below else 0.0
        return (1 - share) * self._known_s[below] + share * self._known_s[above]
