"""Improves an assignment by changing the labels of two joined nodes at a time.

Each move lowers the cost plus a price on every overflowing byte of a row. From an assignment that fits, a high enough
price allows only moves that fit; from one that does not, it saves the missing bytes where they cost the least time.
Single-node moves are among the pairs. The descent ends with the first pass that changes nothing.
"""

from collections.abc import Sequence
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
ROW_S = 5e-6
"""Nominal seconds of a move for each row that contains one of its nodes."""
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
    """The current assignment, with each row's overflow in bytes and each node's rows and neighbours."""

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
        self.over = [row.total_bytes(start) - limit_bytes for row in rows]
        self.bytes: list[dict[int, np.ndarray]] = [{} for _ in problem.node_cost_s]
        for index, row in enumerate(rows):
            for node, per_label in row.bytes:
                if np.ptp(per_label):
                    self.bytes[node][index] = per_label
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
            self._spend(edge, 0)
            return set()
        old = self.labels[u], self.labels[v]
        cost = edge.cost_s + self._cost(u, v)[:, None] + self._cost(v, u)
        changes = {
            row: (self._change(u, row), self._change(v, row)) for row in (self.bytes[u] | self.bytes[v])
        }
        self._spend(edge, len(changes))
        for row, (by_u, by_v) in changes.items():
            if self.over[row] + by_u.max() + by_v.max() > 0:
                cost += self.price_s * np.maximum(self.over[row] + by_u[:, None] + by_v, 0.0)
        best = divmod(int(cost.argmin()), cost.shape[1])
        if not cost[best] < _worth_s(float(cost[old])):
            return set()
        self.labels[u], self.labels[v] = best
        for row, (by_u, by_v) in changes.items():
            self.over[row] += float(by_u[best[0] % len(by_u)] + by_v[best[1] % len(by_v)])
        return {node for node, new, before in zip((u, v), best, old, strict=True) if new != before}

    def _spend(self, edge: Edge, num_rows: int) -> None:
        num_terms = len(self.neighbours[edge.u]) + len(self.neighbours[edge.v])
        self.clock.spend(MOVE_S + TERM_S * num_terms + ROW_S * num_rows + ENTRY_S * edge.cost_s.size)

    def _change(self, node: int, row: int) -> np.ndarray:
        """Bytes that each label adds to a row, against the present label; a single 0 if the row lacks the node."""
        per_label = self.bytes[node].get(row)
        return np.zeros(1) if per_label is None else per_label - per_label[self.labels[node]]

    def _cost(self, node: int, without: int) -> np.ndarray:
        """A node's cost per label: its own and its edges to all neighbours but one."""
        cost = self.problem.node_cost_s[node]
        for other, between in self.neighbours[node]:
            if other != without:
                cost = cost + between[self.labels[other]]
        return cost


def _worth_s(cost_s: float) -> float:
    """The cost that a changed assignment must stay below to count as better."""
    return cost_s - ROUNDING * abs(cost_s) if isfinite(cost_s) else cost_s
