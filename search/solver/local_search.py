"""Improves an assignment by changing the labels of two joined nodes at a time.

Each move lowers the cost plus a price on every overflowing byte of a row. From an assignment that fits, a high enough
price allows only moves that fit; from one that does not, it saves the missing bytes where they cost the least time.
Single-node moves are among the pairs. The descent ends with the first pass that changes nothing.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.pbqp import Edge, Labels, MemoryConstraint, Problem

ROUNDING = 1e-12
"""Relative; a smaller gain does not count."""
MAX_PASSES = 20
"""A safety limit; a handful of passes is usual."""
MOVE_S = 1e-5
"""Nominal seconds of one edge's move, besides the parts below. Source: `benchmarks/nominal_seconds.py`, for all of them."""
TERM_S = 6e-7
"""Nominal seconds of a move for each neighbour of its nodes."""
ROWS_S = 1.5e-5
"""Nominal seconds of a move, if rows contain one of its nodes."""
ROW_S = 5e-7
"""Nominal seconds of such a move for each row."""
PAIR_S = 2e-6
"""Nominal seconds of such a move for each pair of one of its nodes in a row."""
ENTRY_S = 3e-9
"""Nominal seconds of a move for each entry of its edge."""


def descend(
    problem: Problem,
    rows: Sequence[MemoryConstraint],
    limit_bytes: float,
    price_s: float,
    start: Labels,
    clock: SearchClock = PROCESSOR,
) -> Labels:
    """A pairwise local optimum of cost + price_s * overflowing bytes, no worse than `start`.

    Args:
      problem: merged.
      rows: the memory rows to consider.
      limit_bytes: the limit of each row.
      price_s: seconds a byte over the limit.
      start: the first assignment; it may overflow.
      clock: counts the time spent.
    """
    return _Descent(problem, rows, limit_bytes, price_s, start, clock).run()


class _Descent:
    """The current assignment, with each row's overflow in bytes, and each node's bytes and neighbours."""

    def __init__(
        self,
        problem: Problem,
        rows: Sequence[MemoryConstraint],
        limit_bytes: float,
        price_s: float,
        start: Labels,
        clock: SearchClock,
    ):
        self.clock = clock
        self.problem, self.price_s, self.labels = problem, price_s, list(start)
        self.over = np.array([row.total_bytes(start) for row in rows]) - limit_bytes
        self.bytes = _dense(problem, rows)
        self.pairs: list[list[tuple[int, int, np.ndarray]]] = [[] for _ in problem.node_cost_s]
        self.between: dict[tuple[int, int], dict[int, np.ndarray]] = {}
        for number, row in enumerate(rows):
            for u, v, num_bytes in row.pairs:
                self.pairs[u].append((number, v, num_bytes.T))
                self.pairs[v].append((number, u, num_bytes))
                ends, oriented = ((u, v), num_bytes) if u < v else ((v, u), num_bytes.T)
                of_ends = self.between.setdefault(ends, {})
                of_ends[number] = of_ends[number] + oriented if number in of_ends else oriented
        both = zip(self.bytes, self.pairs, strict=True)
        self.has_rows = [bool(pairs) or bool(np.ptp(of_node, axis=1).any()) for of_node, pairs in both]
        self.neighbours: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.node_cost_s]
        for edge in problem.edges:
            self.neighbours[edge.u].append((edge.v, edge.cost_s.T))
            self.neighbours[edge.v].append((edge.u, edge.cost_s))

    def run(self) -> Labels:
        """Passes over the edges; after the first pass, only over edges at or beside a changed node."""
        changed = set(range(len(self.labels)))
        for _ in range(MAX_PASSES):
            around = changed | {other for node in sorted(changed) for other, _ in self.neighbours[node]}
            changed = set[int]()
            for edge in self.problem.edges:
                if edge.u in around or edge.v in around:
                    changed |= self._move(edge)
            if not changed:
                break
        return tuple(self.labels)

    def _move(self, edge: Edge) -> set[int]:
        """Gives an edge's two nodes their best labels while all others stay; returns the nodes that changed."""
        u, v = edge.u, edge.v
        if edge.cost_s.size == 1:
            self._spend(edge, False)
            return set()
        old = self.labels[u], self.labels[v]
        cost = edge.cost_s + self._cost(u, v)[:, None] + self._cost(v, u)
        has_rows = self.has_rows[u] or self.has_rows[v]
        self._spend(edge, has_rows)
        if has_rows:
            cost += self._overflow_s(u, v)
        best = divmod(int(cost.argmin()), cost.shape[1])
        if not cost[best] < _worth_s(float(cost[old])):
            return set()
        if has_rows:
            self.over += self._added(u, v, best)
        self.labels[u], self.labels[v] = best
        return {node for node, new, before in zip((u, v), best, old, strict=True) if new != before}

    def _overflow_s(self, u: int, v: int) -> np.ndarray | float:
        """[labels of u, labels of v]: the price of the bytes by which rows overflow."""
        by_u, by_v, by_both = self._changes(u, v), self._changes(v, u), self._changes_of_both(u, v)
        most, total = self.over + by_u.max(axis=1) + by_v.max(axis=1), 0.0
        for row, change in by_both.items():
            most[row] += change.max()
        for row in np.flatnonzero(most > 0).tolist():
            after = self.over[row] + by_u[row][:, None] + by_v[row] + by_both.get(row, 0.0)
            total = total + np.maximum(after, 0.0)
        return self.price_s * total

    def _added(self, u: int, v: int, labels: tuple[int, int]) -> np.ndarray:
        """[rows]: bytes that two nodes add with other labels."""
        added = self._changes(u, v)[:, labels[0]] + self._changes(v, u)[:, labels[1]]
        for row, change in self._changes_of_both(u, v).items():
            added[row] += change[labels]
        return added

    def _changes(self, node: int, without: int) -> np.ndarray:
        """[rows, labels]: bytes that each label of a node adds, against the present label; without those of its pairs with
        another node."""
        num_bytes = self.bytes[node]
        changes = num_bytes - num_bytes[:, self.labels[node], None]
        for row, other, of_pair in self.pairs[node]:
            if other != without:
                per_label = of_pair[self.labels[other]]
                changes[row] += per_label - per_label[self.labels[node]]
        return changes

    def _changes_of_both(self, u: int, v: int) -> dict[int, np.ndarray]:
        """By row, [labels of u, labels of v]: bytes that the pair of two nodes adds, against the present labels."""
        now = self.labels[u], self.labels[v]
        return {row: of_pair - of_pair[now] for row, of_pair in self.between.get((u, v), {}).items()}

    def _spend(self, edge: Edge, has_rows: bool) -> None:
        num_terms = len(self.neighbours[edge.u]) + len(self.neighbours[edge.v])
        num_pairs = len(self.pairs[edge.u]) + len(self.pairs[edge.v])
        rows_s = ROWS_S + ROW_S * len(self.over) + PAIR_S * num_pairs if has_rows else 0.0
        self.clock.spend(MOVE_S + TERM_S * num_terms + rows_s + ENTRY_S * edge.cost_s.size)

    def _cost(self, node: int, without: int) -> np.ndarray:
        """A node's cost per label: its own and its edges to all neighbours but one."""
        cost = self.problem.node_cost_s[node]
        for other, between in self.neighbours[node]:
            if other != without:
                cost = cost + between[self.labels[other]]
        return cost


def _dense(problem: Problem, rows: Sequence[MemoryConstraint]) -> list[np.ndarray]:
    """Each node's bytes, by row and label."""
    stops = list(accumulate((len(cost_s) for cost_s in problem.node_cost_s), initial=0))
    columns = [slice(*ends) for ends in pairwise(stops)]
    whole = np.zeros((len(rows), stops[-1]))
    for row, into in zip(rows, whole, strict=True):
        for node, per_label in row.bytes:
            into[columns[node]] = per_label
    return [whole[:, of_node] for of_node in columns]


def _worth_s(cost_s: float) -> float:
    """The cost that a changed assignment must stay below to count as better."""
    return cost_s - ROUNDING * abs(cost_s) if isfinite(cost_s) else cost_s
