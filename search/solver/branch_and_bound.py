"""The intra-op search's core: the cheapest assignment of labels whose memory fits at every program point.

Minimise a PBQP's cost (`search.solver.pbqp`) under one memory row for each program point. There are thousands of
points and few of them bind, so rows are added on demand: the search asks which points a good assignment overflows, and
keeps the worst of them as rows from then on. Rows are linear, and may be lower bounds on the memory of their points; then
one point may have several. Descents also use a row's expansion, which is exact near their assignment.

A bound and an incumbent approach each other in four stages, and most problems end before the last:

  1. `_begin` (`search.solver.opening`): message sweeps (`search.solver.trws`) without memory rows, then descents by pair
     moves (`search.solver.local_search`) from their best assignment and from the assignments that rules propose.
     `_unpriced`: more sweeps alternate with contractions of the problem (`search.solver.contraction`), until its cheapest
     assignment is known. Moves of nearly all nodes at once (`search.solver.neighbourhoods`) find it on the way. This stage
     uses no rows, so a second search on the problem starts from its results and from the assignments met before. If the
     cheapest assignment overflows, it is repaired: it saves the missing bytes where they cost the least time.
  2. `_price`: memory rows become prices (`search.solver.lagrangian`), raised until no price gives a better bound. Each
     pricing's assignment is repaired if it overflows, and offered as the incumbent; some are improved by both kinds of
     moves first. `_finish` contracts the problem at the final prices.
  3. `_fit`, if no assignment fits yet: the smallest peak (`search.solver.min_peak`) fits, or proves that no assignment
     does. If prices rise out of all proportion, this check runs during stage 2.
  4. `_branch`: best first, on the node about whose memory good assignments disagree most. Every part is priced like the
     whole problem, and a small part is solved as an integer program (`search.solver.milp`).

Without rows the bound is exact in the end, or nearly. After stage 2 the open question is which of a few large blocks of
memory to spend; stage 4 branches on it. All along, `_drop` removes labels that no assignment better than the incumbent (by
more than the requested gap) can have: of some thousand labels a few hundred remain. `floor_s` is a lower bound on the cost
of every dropped assignment.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, Deadline, SearchClock
from autoshard.search.solver.contraction import Contraction
from autoshard.search.solver.flat import flat
from autoshard.search.solver.lagrangian import CuttingPlanes, Relaxation
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.milp import solve_milp
from autoshard.search.solver.min_peak import SmallestPeak, minimise_peak, smallest_peak
from autoshard.search.solver.neighbourhoods import reoptimised
from autoshard.search.solver.opening import Opening
from autoshard.search.solver.pbqp import Edge, Labels, MemoryConstraint, Problem, near, restricted_row
from autoshard.search.solver.separation import ROWS_PER_ROUND, NoFitError, Violated, separation_oracle

__all__ = [
    "Edge",
    "Labels",
    "MemoryConstraint",
    "NoFitError",
    "Opening",
    "Problem",
    "Search",
    "SmallestPeak",
    "Solution",
    "Stats",
    "minimise_peak",
    "solve",
]

RELATIVE_GAP = 1e-4
"""Relative gap within which a plan counts as optimal: costs are not known any better."""
ROUNDING = 1e-9
"""Relative; two sums of equal costs in different orders differ by less."""
SWEEPS_PER_PRICING = 6
MAX_PRICINGS = 40
MAX_STALLED_PRICINGS = 5
MAX_REPAIRS = 12
"""Most repairs of one assignment; each either multiplies the price of memory by four or adds rows."""
STALLED = 0.75
"""A repair ends if an expansion's result overflows more than this share of what the last one's did. Source: of 231 steps
under 40 or 65% of their memory (`benchmarks.unseen_models`, 2 s each), 118 have a plan, and 115 if repairs go on."""
LEAST_REPAIR = 1 / 64
"""First price of memory in a repair before rows have prices: memory as large as the limit costs this share of the cheapest
assignment. Source: a choice of ours; if plans fit, their prices are of this order."""
PRICINGS_PER_BRANCH = 3
MAX_BRANCHES = 2000
FAR = 2.0
"""A bound above this multiple of the cheapest assignment without rows most often means that no assignment fits."""
DOUBT_SHARE = 0.25
"""Largest share of the time left for the check that an assignment fits at all; it takes a hundredth as a rule."""
PROHIBITIVE_S = 1.0
"""Seconds a byte over the limit: a price so high that no row overflows."""
MAX_PROGRAM_LABELS = 300
"""Labels beyond one a node; a part with at most so many is cheaper to solve as an integer program than to branch on."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of a search.

    Attributes:
      search_s: seconds by the search's clock.
      num_pricings: prices tried, in stages 2 and 4.
      num_branches: parts that stage 4 created.
      num_programs: mixed-integer programs that stage 4 solved for its small parts.
      num_rows: memory rows that the search added.
      num_labels: labels left at the end, over all nodes.
    """

    search_s: float
    num_pricings: int
    num_branches: int
    num_programs: int
    num_rows: int
    num_labels: int


@dataclass(frozen=True, slots=True)
class Solution:
    """A feasible assignment, its cost and a lower bound on every feasible assignment's cost."""

    labels: Labels
    cost_s: float
    bound_s: float
    stats: Stats

    @property
    def gap(self) -> float:
        """Largest distance of the cost from the optimum, relative to the cost."""
        return max(self.cost_s - self.bound_s, 0.0) / max(abs(self.cost_s), 1e-30)


def solve(
    problem: Problem | Opening,
    *,
    limit_bytes: float = np.inf,
    rows: Sequence[MemoryConstraint] = (),
    violated: Violated | None = None,
    time_limit_s: float = 10.0,
    relative_gap: float = RELATIVE_GAP,
    cutoff_s: float = np.inf,
    known_s: float = -np.inf,
    num_runs: float | None = None,
    clock: SearchClock = PROCESSOR,
) -> Solution:
    """The cheapest assignment whose every row is at most `limit_bytes`.

    Args:
      problem: nodes, labels, costs; or the shared opening of several searches on one problem.
      limit_bytes: the limit of every row.
      rows: rows known beforehand.
      violated: gives the rows that an assignment overflows; called only for assignments better than the incumbent.
      time_limit_s: after it, the incumbent is returned with its gap. The first sweeps run in any case, and starting
        assignments are tried until one fits: an answer needs a bound.
      relative_gap: stop when the gap is at most this.
      cutoff_s: a cost that the answer must beat by more than the gap; hopeless problems end early.
      known_s: a known lower bound on every fitting assignment's cost; an assignment within the gap of it is enough.
      num_runs: number of times that the solution's cost will be paid. The search takes no longer than it can still save
        over these runs; None, the default, sets no such limit.
      clock: counts the time; an opening brings its own.

    Raises:
      NoFitError: no assignment fits and beats the cutoff, or none was found in time.

    Example:
      >>> a, b = np.array([1.0, 2.0]), np.array([0.0, 5.0])
      >>> reshard = Edge(0, 1, np.array([[3.0, 0.0], [0.0, 3.0]]))
      >>> solve(Problem((a, b), (reshard,))).labels
      (1, 0)
    """
    search = Search(
        problem if isinstance(problem, Opening) else Opening(problem, clock=clock),
        limit_bytes,
        separation_oracle(rows, violated, limit_bytes),
        relative_gap,
        num_runs,
    )
    return search.run(time_limit_s, cutoff_s, known_s)


class Search:
    """The search of `solve`, which can go on: the incumbent (a cutoff at first), the bound, and the rest of the problem
    between them."""

    def __init__(
        self,
        opening: Opening,
        limit_bytes: float,
        violated: Violated,
        relative_gap: float,
        num_runs: float | None = None,
    ) -> None:
        self.opening, self.problem, self.clock = opening, opening.problem, opening.clock
        self.limit_bytes, self.violated = limit_bytes, violated
        self.start_s = self.time_limit_s = 0.0
        self.relative_gap = max(relative_gap, ROUNDING)
        self.num_runs = num_runs
        self.planes = CuttingPlanes(opening.flat, limit_bytes, self.clock)
        self.labels: Labels | None = None
        self.cost_s, self.bound_s, self.known_s, self.floor_s = np.inf, -np.inf, -np.inf, np.inf
        self.num_pricings = self.num_branches = self.num_programs = 0
        self.whole = Relaxation(self.planes, opening.consistent)
        self.stages = deque([self._begin, self._unpriced, self._price, self._finish, self._fit, self._branch])
        self.parts: list[tuple[float, int, Relaxation]] = []

    def run(self, time_limit_s: float, cutoff_s: float = np.inf, known_s: float = -np.inf) -> Solution:
        """Searches for so many seconds, from where the last run ended.

        Raises:
          NoFitError: no assignment fits and beats the cutoff, or none was found in time.
        """
        whole, self.start_s, self.time_limit_s = self.whole, self.clock.now_s, time_limit_s
        self.known_s, self.bound_s = max(known_s, self.known_s), max(known_s, self.bound_s)
        if self.labels is None or cutoff_s < self.cost_s:
            self.labels, self.cost_s = None, cutoff_s
        while self.stages and (self._is_open(whole) or self._is_first(whole)):
            self.stages[0](whole)
            if self._left_s() > 0 or self.stages[0] == self._begin:
                self.stages.popleft()
        if not whole.trws.is_feasible:
            self._raise_bound(np.inf)
        if self.labels is None:
            what, num_rows = "no assignment of strategies fits the memory limit", len(self.planes.rows)
            raise NoFitError(what, bound_s=self.bound_s, num_rows=num_rows)
        return Solution(self.labels, self.cost_s, min(self.bound_s, self.cost_s), self._stats(whole))

    def _is_first(self, whole: Relaxation) -> bool:
        """True if nothing was done yet. The beginning has no time limit, because an answer needs a bound."""
        return self.stages[0] == self._begin and not self._is_closed(whole)

    def _begin(self, whole: Relaxation) -> None:
        """Takes over the opening's results under this search's rows and cutoff; and starting assignments, unless others can
        be found."""
        whole.trws = self.opening.swept[0].copy()
        whole.take_note(self.opening.swept[1])
        whole.close(self.opening.bound_s)
        self._raise_bound(whole.best_bound_s)
        self._offer(self.opening.descended)
        for labels, cost_s in sorted(self.opening.met_s.items(), key=itemgetter(1)):
            self.planes.of(labels, cost_s)
            self._offer(labels)
        self._drop(whole)
        if not self._is_closed(whole) and (self._settled is None or self._left_s() <= 0):
            self._start()
            self._drop(whole)

    @property
    def _settled(self) -> Labels | None:
        """The cheapest assignment without rows, if an earlier search has found it."""
        return self.opening.settled(self.relative_gap, self.known_s)

    def _unpriced(self, whole: Relaxation) -> None:
        """Contracts the problem without prices, unless an earlier search has found its minimum within the gap. In that case
        the starting assignments are tried only if repairing the minimum leaves the problem open."""
        if (settled := self._settled) is not None:
            self._offer(settled)
            whole.close(self.opening.bound_s)
            self._raise_bound(whole.best_bound_s)
        else:
            self._contract(whole, self.opening.contraction(self._wanted_s(whole)))
        cheapest = settled or self.opening.cheapest
        if cheapest is not None and whole.trws.keeps(cheapest) and not self.planes.fits(cheapest):
            self._repair(whole, cheapest)
        self._drop(whole)
        if settled is not None and self._is_open(whole):
            self._start()
            self._drop(whole)

    def _finish(self, part: Relaxation) -> None:
        """Contracts a part at its present prices and labels."""
        self._contract(part, Contraction(part.trws, self.clock))

    def _contract(self, part: Relaxation, contraction: Contraction) -> None:
        """Contracts a part at the present prices, until it is closed, its cheapest assignment is known, or a turn makes no
        progress."""
        state, before = (-np.inf, np.inf), None
        while state != before and not contraction.is_done and self._is_open(part):
            wanted_s = min(self._wanted_s(part), contraction.worth_s)  # more rows change the rounding
            bound_s, labels = contraction.turn(wanted_s, self._deadline())
            before, state = state, (bound_s, contraction.num_nodes)
            part.close(bound_s)
            if labels is not None:
                self.planes.of(labels)
                self._offer(labels)
                if part.trws.keeps(labels):
                    self._repair(part, labels)
            self._raise_bound(part.best_bound_s)

    def _wanted_s(self, part: Relaxation) -> float:
        """The priced cost, allowance included, that an assignment worth having must stay below. It must beat the incumbent
        and the cheapest priced assignment met in the part, fitting or not, by more than the gap."""
        return min(self._worth_s(), self._within_gap(part.least_priced_s())) + part.allowance_s

    def _start(self) -> None:
        """Offers the local optima below the starting assignments, while there is time. If none fits, offers the starting
        assignments themselves, and descends from the first that fits without leaving the limit."""
        has_fit = False
        for start in self.opening.starts:
            if self._is_enough:
                return
            labels = self.opening.below(start)
            has_fit |= not self._offer(labels) and self.planes.fits(labels)
        if has_fit:
            return
        for labels in self.opening.given:
            if not self._offer(labels) and self.planes.fits(labels):
                self._improve_within(labels)
                return

    def _improve_within(self, labels: Labels) -> None:
        """Descends from an assignment that fits and offers the local optimum; repeats while that overflows new rows."""
        for _ in range(MAX_REPAIRS):
            rows = near(self.planes.rows, labels)
            better = descend(self.opening.flat, rows, self.limit_bytes, PROHIBITIVE_S, labels, self.clock)
            if not self._offer(better):
                return

    def _reoptimised(self, part: Relaxation, labels: Labels) -> Labels:
        """The best priced assignment found around another; if it is the minimum of the part, its cost is a bound."""
        problem, trws = part.priced(), part.trws
        start = descend(flat(problem), (), np.inf, 0.0, trws.renumbered(labels), self.clock)
        found, is_best = reoptimised(problem, start, self._deadline())
        if is_best:
            part.close(problem.cost_s(found))
        return trws.original(found)

    def _price(self, whole: Relaxation) -> None:
        stalled, is_doubtful = 0, False
        while stalled < MAX_STALLED_PRICINGS and self.num_pricings < MAX_PRICINGS and self._is_open(whole):
            before_s = whole.best_bound_s
            labels = self._reprice(whole)
            is_worth_it = _is_due(self.num_pricings) and self._is_open(whole)
            self._repair(whole, self._reoptimised(whole, labels) if is_worth_it else labels)
            self._drop(whole)
            self._raise_bound(whole.best_bound_s)
            stalled = 0 if self._is_higher(whole.best_bound_s, before_s) else stalled + 1
            if not is_doubtful and self.cost_s == np.inf and whole.best_bound_s > FAR * self.opening.least_s:
                is_doubtful = True
                self._fit(whole, DOUBT_SHARE)

    def _fit(self, whole: Relaxation, share: float = 1.0) -> None:
        """If no assignment fits yet: the smallest peak fits, or proves that no assignment does; in a share of the time
        left."""
        has_new_rows, deadline = self.cost_s == np.inf, self._deadline().share(share)
        while has_new_rows and not deadline.is_over:
            answer = smallest_peak(whole.trws, self.planes.rows, self.limit_bytes, deadline)
            if answer.bound > self.limit_bytes * (1 + ROUNDING):
                whole.best_bound_s = np.inf
                self._raise_bound(np.inf)
            has_new_rows = answer.labels is not None and self._offer(answer.labels)

    def _branch(self, whole: Relaxation) -> None:
        self.parts = parts = self.parts or [(whole.best_bound_s, 0, whole)]
        while parts and self._left_s() > 0 and self.num_branches < MAX_BRANCHES:
            self._raise_bound(parts[0][0])
            part = heappop(parts)[2]
            for child in self._children(part):
                self.num_branches += 1
                if not self._is_closed(child):
                    heappush(parts, (child.best_bound_s, self.num_branches, child))
        self._raise_bound(parts[0][0] if parts else np.inf)

    def _children(self, part: Relaxation) -> list[Relaxation]:
        """The two branches of a part, tightened; none if the part is closed, e.g. solved outright."""
        self._finish(part)
        if part.trws.num_kept - len(part.trws.kept) <= MAX_PROGRAM_LABELS:
            self._settle(part)
        if self._is_closed(part):
            return []
        node, mask = part.branching_node()
        children = [part.branch(node, mask), part.branch(node, ~mask)]
        for child in children:
            self._tighten(child)
        return children

    def _tighten(self, part: Relaxation) -> None:
        """Raises a branch's bound by better prices, then tries once to find an incumbent."""
        self._drop(part)
        for _ in range(PRICINGS_PER_BRANCH):
            if not self._is_open(part):
                return
            before_s = part.best_bound_s
            self._reprice(part)
            self._drop(part)
            if not self._is_higher(part.best_bound_s, before_s):
                break
        if self._is_open(part):
            self._repair(part, part.run(1)[1])
            self._drop(part)

    def _reprice(self, part: Relaxation) -> Labels:
        """Sets the next prices and sweeps; the best priced assignment met."""
        self.num_pricings += 1
        part.set_prices(part.next_prices())
        return part.run(SWEEPS_PER_PRICING)[1]

    def _is_higher(self, bound_s: float, before_s: float) -> bool:
        """True if a bound rose enough to go on raising it."""
        return bound_s > before_s + 0.1 * self.relative_gap * abs(bound_s)

    def _settle(self, part: Relaxation) -> None:
        """Solves a small part outright, as an integer program."""
        has_new_rows = True
        while has_new_rows and self._is_open(part):
            self.num_programs += 1
            rows = [restricted_row(row, part.trws.kept) for row in self.planes.rows]
            gap, deadline = self.relative_gap / 2, self._deadline()
            answer = solve_milp(part.trws.rest(), rows, self.limit_bytes, deadline=deadline, relative_gap=gap)
            part.best_bound_s = max(part.best_bound_s, answer.bound)
            has_new_rows = answer.labels is not None and self._offer(part.trws.original(answer.labels))

    def _repair(self, part: Relaxation, labels: Labels) -> None:
        """Descends from an assignment at ever higher prices of overflowing bytes, and offers each result that fits. Ends
        once an assignment costs more than the incumbent: higher prices make it no cheaper.

        Once a result fits all known rows and overflows another row, rows and their expansions take turns. Expansions leave
        out no bytes. Rows leave out some, and so get past assignments in which several nodes must change at once. Ends as
        well if expansions hardly get nearer to the limit, or if time is over and there is an answer.
        """
        self._cut(labels)
        cheapest_s = self.opening.least_s if self.opening.least_s < np.inf else 0.0
        least_s = LEAST_REPAIR * abs(cheapest_s) / self.planes.unit_bytes
        price_s, by_rows, has_missed = max(2.0 * float(part.prices_s.max(initial=0.0)), least_s), True, False
        least_over_bytes = np.inf
        for _ in range(MAX_REPAIRS):
            rows = self.planes.rows if by_rows else near(self.planes.rows, labels)
            labels = self._descended(part, labels, rows, price_s)
            if self.planes.of(labels)[0] >= self.cost_s or self._is_enough:
                return
            if not self.planes.fits(labels):
                price_s = 4.0 * price_s
            elif self._offer(labels):
                has_missed = True
            else:
                return
            if not by_rows:
                over_bytes = max(self.planes.of(labels)[1])
                if over_bytes > STALLED * least_over_bytes:
                    return
                least_over_bytes = over_bytes
            by_rows = not (has_missed and by_rows)

    def _cut(self, labels: Labels) -> None:
        """Adds the rows of an assignment's worst points, where the known rows of these points hold less."""
        for row in self.violated(labels)[:ROWS_PER_ROUND]:
            known = (one.total_bytes(labels) for one in self.planes.rows if one.name == row.name)
            if row.total_bytes(labels) > (1 + ROUNDING) * max(known, default=-np.inf):
                self.planes.add_row(row)

    def _descended(
        self, part: Relaxation, labels: Labels, rows: Sequence[MemoryConstraint], price_s: float
    ) -> Labels:
        trws = part.trws
        rows = [restricted_row(row, trws.kept) for row in rows]
        start = trws.renumbered(labels)
        return trws.original(descend(trws.flat, rows, self.limit_bytes, price_s, start, self.clock))

    def _offer(self, labels: Labels) -> bool:
        """Makes an assignment the incumbent if it is better and fits; returns True if it overflowed new rows."""
        cost_s, _ = self.planes.of(labels)
        self.opening.met_s.setdefault(labels, cost_s)
        if not cost_s < self.cost_s or not self.planes.fits(labels):
            return False
        over = self.violated(labels)
        for row in over[:ROWS_PER_ROUND]:
            self.planes.add_row(row)
        if not over:
            self.labels, self.cost_s = labels, cost_s
        return bool(over)

    def _drop(self, part: Relaxation) -> None:
        """Drops labels whose every assignment is no better than the incumbent by more than the gap. A closed part holds no
        others."""
        if self.cost_s == np.inf or self._is_closed(part):
            return
        worth_s = self._worth_s()
        self.floor_s = min(self.floor_s, worth_s)
        part.trws.keep([bound < worth_s + ROUNDING * abs(worth_s) for bound in part.label_bounds()])

    def _worth_s(self) -> float:
        """The cost that an assignment worth searching for must stay below."""
        return self._within_gap(self.cost_s)

    def _within_gap(self, cost_s: float) -> float:
        """A cost less the gap; +inf stays +inf."""
        return cost_s - (self.relative_gap - ROUNDING) * abs(cost_s) if cost_s < np.inf else np.inf

    def _raise_bound(self, bound_s: float) -> None:
        """Records a bound on the remaining assignments; dropped ones cost at least `floor_s`."""
        self.bound_s = max(self.bound_s, min(bound_s, self.floor_s))
        if not self.num_pricings:
            self.opening.bounded(min(bound_s, self.floor_s))

    def _is_closed(self, part: Relaxation) -> bool:
        """True if a part holds no assignment better than the incumbent by more than the gap."""
        if not part.trws.is_feasible or part.best_bound_s == np.inf:
            return True
        bound_s = max(part.best_bound_s, self.known_s)
        is_hopeless = self.cost_s < np.inf and bound_s >= self._worth_s()
        self.floor_s = min(self.floor_s, bound_s) if is_hopeless else self.floor_s
        return is_hopeless

    def _is_open(self, part: Relaxation) -> bool:
        """True if a part may hold a better assignment and there is time to search it."""
        return self._left_s() > 0 and not self._is_closed(part)

    @property
    def _is_enough(self) -> bool:
        """True if time is over and there is an answer."""
        return self.labels is not None and self._left_s() <= 0

    def _left_s(self) -> float:
        """Seconds left of the time limit, or of the saving that is still possible over `num_runs`."""
        limit_s = self.time_limit_s
        if self.num_runs is not None and self.cost_s < np.inf:
            limit_s = min(limit_s, self.num_runs * (self.cost_s - self.bound_s))
        return limit_s - (self.clock.now_s - self.start_s)

    def _deadline(self) -> Deadline:
        """The moment at which the time left is over."""
        return Deadline.after(self._left_s(), self.clock)

    def _stats(self, whole: Relaxation) -> Stats:
        rows, kept = len(self.planes.rows), whole.trws.num_kept
        search_s = self.clock.now_s - self.start_s
        return Stats(search_s, self.num_pricings, self.num_branches, self.num_programs, rows, kept)


def _is_due(number: int) -> bool:
    """True at 2, 4, 8, 16, ...: the pricings after which the slow improvement runs."""
    return number > 1 and number & (number - 1) == 0
