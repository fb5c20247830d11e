"""The intra-op search's core: the cheapest assignment of labels whose memory fits at every program point.

Minimise a PBQP's cost (`search.pbqp`) under one memory row for each program point. There are thousands of points and
few of them bind, so rows are made on demand: whenever an assignment looks good, ask which points it overflows, and from
then on reckon with the worst of those.

A bound and an incumbent close in on each other, in three stages, and most problems end before the third:

  1. `_relax`: sweeps of messages (`search.messages`) without any memory row. Their assignments, improved by pair moves
     (`search.local_search`), are often optimal and sometimes fit.
  2. `_price`: memory rows as prices (`search.lagrangian`), raised until no price gives a better bound. Each pricing's assignment
     is repaired where it overflows, improved, and offered as the incumbent.
  3. `_prove`: what is left, as a mixed-integer program (`search.milp`).

All along, `_drop` removes labels that no assignment better than the incumbent (by more than the gap asked for) can have:
of some thousand labels a few hundred reach stage 3, which is why it is fast. What was dropped is remembered in `floor_s`: no
dropped assignment costs less.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from time import monotonic

import numpy as np

from autoshard.errors import InfeasibleError
from search.lagrangian import Planes, Relaxation
from search.local_search import descend
from search.messages import Messages
from search.pbqp import Edge, Labels, Problem, Row, merged, restricted, restricted_row

__all__ = ["Edge", "Labels", "NoFitError", "Problem", "Row", "Solution", "Stats", "minimise_peak", "solve"]

RELATIVE_GAP = 1e-4
"""A plan within this of the optimum is called optimal: costs are not known any better."""
ROUNDING = 1e-9
"""Relative; sums of the same costs in another order differ by less."""
SWEEPS = 10
"""Between two droppings of labels in stage 1."""
MAX_SWEEPS = 60
"""In stage 1; bounds hardly move after."""
SWEEPS_PER_PRICING = 6
MAX_PRICINGS = 40
MAX_STALLED_PRICINGS = 5
MAX_REPAIRS = 12
"""Of one assignment; each either pays four times as much for memory or reckons with new rows."""
ROWS_PER_ROUND = 3
"""Of the rows that an assignment overflows, this many of the worst are added: neighbouring points hold nearly the same."""
MAX_BRANCHES = 2000

Violated = Callable[[Labels], Sequence[Row]]
"""A full assignment -> the rows that it overflows, empty where it fits."""


class NoFitError(InfeasibleError):
    """No assignment satisfies the rows; `is_proven` is False where time ran out before one was found."""

    def __init__(self, message: str, *, is_proven: bool) -> None:
        super().__init__(message)
        self.is_proven = is_proven


@dataclass(frozen=True, slots=True)
class Stats:
    """How an answer was found.

    Attributes:
      search_s: wall time.
      num_pricings: prices tried in stage 2.
      num_branches: mixed-integer programs solved in stage 3.
      num_rows: memory rows that had to be reckoned with.
      num_labels: labels in play at the end, over all nodes.
    """

    search_s: float
    num_pricings: int
    num_branches: int
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
        """How far from the optimum the cost may be, relative to the cost."""
        return max(self.cost_s - self.bound_s, 0.0) / max(abs(self.cost_s), 1e-30)


def solve(
    problem: Problem,
    *,
    limit_bytes: float = np.inf,
    rows: Sequence[Row] = (),
    violated: Violated | None = None,
    time_limit_s: float = 10.0,
    relative_gap: float = RELATIVE_GAP,
    progress: Callable[[str], None] | None = None,
) -> Solution:
    """The cheapest assignment whose every row is at most `limit_bytes`.

    Args:
      problem: nodes, labels, costs.
      limit_bytes: what each row may hold.
      rows: rows known beforehand.
      violated: gives the rows that an assignment overflows; called for assignments worth having only.
      time_limit_s: after it, the incumbent is returned with the gap that it has.
      relative_gap: stop when the gap is at most this.
      progress: called with one line a step.

    Raises:
      NoFitError: no assignment fits, or none was found in time.

    Example:
      >>> a, b = np.array([1.0, 2.0]), np.array([0.0, 5.0])
      >>> reshard = Edge(0, 1, np.array([[3.0, 0.0], [0.0, 3.0]]))
      >>> solve(Problem((a, b), (reshard,))).labels
      (1, 0)
    """
    search = _Search(merged(problem), limit_bytes, _oracle(rows, violated, limit_bytes), time_limit_s, relative_gap, progress)
    return search.run()


def _oracle(rows: Sequence[Row], violated: Violated | None, limit_bytes: float) -> Violated:
    def over(labels: Labels) -> list[Row]:
        known = [row for row in rows if row.total_bytes(labels) > limit_bytes]
        return known + list(violated(labels) if violated else ())

    return over


class _Search:
    """One run of `solve`: the incumbent, the bound, and what is left of the problem between them."""

    def __init__(self, problem: Problem, limit_bytes: float, violated: Violated, time_limit_s, relative_gap, progress):
        self.problem, self.limit_bytes, self.violated = problem, limit_bytes, violated
        self.start_s, self.time_limit_s = monotonic(), time_limit_s
        self.relative_gap = max(relative_gap, ROUNDING)
        self.progress = progress or (lambda line: None)
        self.planes = Planes(problem, limit_bytes)
        self.labels: Labels | None = None
        self.cost_s, self.bound_s, self.floor_s = np.inf, -np.inf, np.inf
        self.num_pricings = self.num_branches = 0

    def run(self) -> Solution:
        messages = Messages(self.problem)
        messages.make_consistent()
        whole = Relaxation(self.planes, messages)
        for stage in (self._relax, self._price, self._branch):
            if self._is_open(whole):
                stage(whole)
                name = stage.__name__.strip("_")
                self.progress(f"{name}: cost {self.cost_s:.6g} s, bound {self.bound_s:.6g} s, {whole.messages.num_kept} labels")
        if not whole.messages.is_feasible:
            self._raise_bound(np.inf)
        if self.labels is None:
            raise NoFitError("no assignment of strategies fits the memory limit", is_proven=self.bound_s == np.inf)
        return Solution(self.labels, self.cost_s, min(self.bound_s, self.cost_s), self._stats(whole))

    def _relax(self, whole: Relaxation) -> None:
        for _ in range(0, MAX_SWEEPS, SWEEPS):
            bound_s, labels = whole.run(SWEEPS)
            self._raise_bound(bound_s)
            if self._offer(self._descended(whole, labels, 0.0)):
                return
            self._drop(whole)
            if not self._is_open(whole):
                return

    def _price(self, whole: Relaxation) -> None:
        self._tighten(whole, MAX_PRICINGS, MAX_STALLED_PRICINGS)
        self._raise_bound(whole.best_bound_s)

    def _tighten(self, part: Relaxation, max_pricings: int, max_stalled: int) -> None:
        """Raises a part's bound by better prices, and looks for incumbents on the way."""
        stalled = 0
        for _ in range(max_pricings):
            if stalled >= max_stalled or not self._is_open(part):
                return
            self.num_pricings += 1
            before_s = part.best_bound_s
            part.set_prices(part.next_prices())
            _, labels = part.run(SWEEPS_PER_PRICING)
            self._repair(part, labels)
            self._drop(part)
            is_better = part.best_bound_s > before_s + 0.1 * self.relative_gap * abs(part.best_bound_s)
            stalled = 0 if is_better else stalled + 1

    def _branch(self, whole: Relaxation) -> None:
        parts = [(whole.best_bound_s, 0, whole)]
        while parts and self._left_s() > 0 and self.num_branches < MAX_BRANCHES:
            self._raise_bound(parts[0][0])
            _, _, part = heappop(parts)
            if not self._is_open(part):
                continue
            for child in self._children(part):
                self.num_branches += 1
                self._drop(child)
                self._tighten(child, 4, 2)
                if self._is_open(child):
                    heappush(parts, (child.best_bound_s, self.num_branches, child))
        self._raise_bound(parts[0][0] if parts else np.inf)

    def _children(self, part: Relaxation) -> list[Relaxation]:
        node, score = _disputed(part)
        mask = score <= np.mean([score.min(), score.max()])
        return [part.branch(node, mask), part.branch(node, ~mask)]

    def _repair(self, part: Relaxation, labels: Labels) -> None:
        """Offers what descends from an assignment, paying ever more for the bytes that it overflows."""
        price_s = 2.0 * float(part.prices_s.max(initial=0.0))
        for _ in range(MAX_REPAIRS):
            labels = self._descended(part, labels, price_s)
            if not self.planes.fits(labels):
                price_s = 4.0 * price_s
            elif not self._offer(labels):
                return

    def _descended(self, part: Relaxation, labels: Labels, price_s: float) -> Labels:
        kept = part.messages.kept
        start = tuple(int(np.searchsorted(kept[node], label)) for node, label in enumerate(labels))
        rows = [restricted_row(row, kept) for row in self.planes.rows]
        end = descend(restricted(self.problem, kept), rows, self.limit_bytes, price_s, start)
        return tuple(int(labels[index]) for labels, index in zip(kept, end, strict=True))

    def _offer(self, labels: Labels) -> bool:
        """Makes an assignment the incumbent if it is better and fits; whether it brought new rows to light."""
        cost_s = self.problem.cost_s(labels)
        if not cost_s < self.cost_s or not self.planes.fits(labels):
            return False
        over = sorted(self.violated(labels), key=lambda row: (-row.total_bytes(labels), row.name))
        for row in over[:ROWS_PER_ROUND]:
            self.planes.add_row(row)
        if not over:
            self.labels, self.cost_s = labels, cost_s
        return bool(over)

    def _drop(self, part: Relaxation) -> None:
        """Drops the labels that only assignments no better than the incumbent use."""
        if self.labels is None or not part.messages.is_feasible:
            return
        worth_s = self._worth_s()
        self.floor_s = min(self.floor_s, worth_s)
        part.messages.keep([bound < worth_s + ROUNDING * abs(worth_s) for bound in part.label_bounds()])

    def _worth_s(self) -> float:
        """What an assignment must cost less than to be worth looking for."""
        return self.cost_s - (self.relative_gap - ROUNDING) * abs(self.cost_s)

    def _raise_bound(self, bound_s: float) -> None:
        """Records a bound on what is left; what was dropped costs at least `floor_s`."""
        self.bound_s = max(self.bound_s, min(bound_s, self.floor_s))

    def _is_open(self, part: Relaxation) -> bool:
        """Whether a part may hold something better than the incumbent, and there is time to look."""
        if not part.messages.is_feasible or self._left_s() <= 0:
            return False
        if self.labels is None:
            return True
        is_hopeless = part.best_bound_s >= self._worth_s()
        self.floor_s = min(self.floor_s, part.best_bound_s) if is_hopeless else self.floor_s
        return not is_hopeless

    def _left_s(self) -> float:
        return self.time_limit_s - (monotonic() - self.start_s)

    def _stats(self, whole: Relaxation) -> Stats:
        rows, kept = len(self.planes.rows), whole.messages.num_kept
        return Stats(monotonic() - self.start_s, self.num_pricings, self.num_branches, rows, kept)


def _disputed(part: Relaxation) -> tuple[int, np.ndarray]:
    """The node about whose priced bytes the mixture's assignments disagree most, and its labels' priced bytes."""
    kept = part.messages.kept
    bytes_s = [np.zeros(len(labels)) for labels in kept]
    for price, row in zip(part.best_prices_s, part.planes.rows, strict=False):
        if price:
            for node, per_label in row.bytes:
                bytes_s[node] = bytes_s[node] + price * per_label[kept[node]]
    mixture = [(w, [int(np.searchsorted(kept[n], label)) for n, label in enumerate(labels)]) for w, labels in part.mixture
               if all(label in kept[n] for n, label in enumerate(labels))]
    total = sum(w for w, _ in mixture) or 1.0
    best, best_node = -1.0, 0
    for node, score in enumerate(bytes_s):
        if len(score) < 2 or np.ptp(score) == 0:
            continue
        values = np.array([score[labels[node]] for _, labels in mixture])
        weights = np.array([w for w, _ in mixture]) / total
        mean = float(values @ weights) if len(values) else 0.0
        spread = float(weights @ (values - mean) ** 2) if len(values) else 0.0
        spread += 1e-6 * float(np.ptp(score)) ** 2
        if spread > best:
            best, best_node = spread, node
    if best < 0:
        best_node = max(range(len(kept)), key=lambda node: len(kept[node]))
        return best_node, np.arange(len(kept[best_node]), dtype=float)
    return best_node, bytes_s[best_node]


def minimise_peak(problem: Problem, **kwargs) -> Solution:
    raise NotImplementedError
