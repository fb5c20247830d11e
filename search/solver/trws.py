"""Lower bounds, good assignments and hopeless labels of a PBQP, by passing messages along its edges.

Cost can be moved between a node and its edges without changing any assignment's total. Moved well, the sum of
every node's and every edge's smallest cost, a lower bound on every assignment, rises to the value of the
pairwise linear relaxation. This is sequential reweighted message passing (Kolmogorov, "A new look at
reweighted message passing", TPAMI 2015), which equals TRW-S on pairwise costs. A sweep visits the nodes in order. Each
node *pulls* from its edges to earlier nodes all cost that its own labels can carry, then *pushes* equal shares of its
cost onto its edges to later nodes. The next sweep goes backwards. A sweep is linear in the edges' entries; two or three
dozen sweeps replace a simplex that takes seconds.

The order of the visits is `search.solver.ordering`'s: it decides how far one sweep carries a message.

On the way, `sweep` also picks for each node the best label given the labels picked before. `label_bounds` gives for each
label a lower bound on every assignment with it. A label whose bound exceeds a known assignment's cost can be dropped
(`keep`), which makes the next sweeps faster and tighter. `pair_bounds` gives the bounds for pairs of labels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.ordering import cuthill_mckee
from autoshard.search.solver.pbqp import Edge, Labels, Problem

EDGE_S = 9e-6
"""Nominal seconds of a sweep for each edge, besides its entries. Source: `benchmarks/nominal_seconds.py`, for all below."""
ENTRY_S = 2.5e-9
"""Nominal seconds of a sweep for each entry of an edge."""
BOUNDS_SWEEPS = 1.3
"""Time of the label bounds, in sweeps."""
KEEP_SWEEPS = 0.4
"""Time to drop labels, in sweeps."""
START_SWEEPS = 4.0
"""Time to set up, from the problem's construction on, in sweeps."""


@dataclass(frozen=True, slots=True)
class _Side:
    """One edge, seen from one of its nodes."""

    edge: int
    other: int
    is_u: bool


class Trws:
    """A merged problem under reparametrisation; mutable, in place.

    Attributes:
      kept: per node, the labels not dropped yet; empty for some node if no assignment is feasible.
    """

    def __init__(self, problem: Problem, clock: SearchClock = PROCESSOR) -> None:
        self._clock = clock
        self._given = [np.array(cost, float) for cost in problem.node_cost_s]
        self._node = list(self._given)
        self._edge = [np.array(edge.cost_s, float) for edge in problem.edges]
        self._at_u = [np.zeros(len(cost)) for cost in self._edge]
        self._at_v = [np.zeros(cost.shape[1]) for cost in self._edge]
        self._ends = [(edge.u, edge.v) for edge in problem.edges]
        self._sides: list[list[_Side]] = [[] for _ in self._node]
        for index, (u, v) in enumerate(self._ends):
            self._sides[u].append(_Side(index, v, True))
            self._sides[v].append(_Side(index, u, False))
        self._order = cuthill_mckee(len(self._node), self._ends)
        rank = {node: at for at, node in enumerate(self._order)}
        self._before = [[s for s in sides if rank[s.other] < rank[n]] for n, sides in enumerate(self._sides)]
        self._behind = [[s for s in sides if rank[s.other] > rank[n]] for n, sides in enumerate(self._sides)]
        self._is_forward = True
        self.kept = [np.arange(len(cost)) for cost in self._node]
        self._spend(START_SWEEPS)
        self.keep([np.isfinite(cost) for cost in self._node])

    def copy(self) -> "Trws":
        """An independent copy; arrays are shared, because they are replaced and never written to."""
        new = object.__new__(Trws)
        new._clock = self._clock
        new._given = list(self._given)
        new._node, new._edge = list(self._node), list(self._edge)
        new._at_u, new._at_v = list(self._at_u), list(self._at_v)
        new._ends, new._sides, new._is_forward = self._ends, self._sides, self._is_forward
        new._order, new._before, new._behind = self._order, self._before, self._behind
        new.kept = list(self.kept)
        return new

    @property
    def is_feasible(self) -> bool:
        """False once some node has no label left."""
        return all(len(labels) for labels in self.kept)

    @property
    def num_kept(self) -> int:
        return sum(len(labels) for labels in self.kept)

    def sweep(self, picks: bool = True) -> tuple[float, Labels]:
        """One pass over the nodes, in the direction opposite to the last: a lower bound and an assignment. The assignment is
        empty unless it `picks` one, which takes nearly a third of the pass."""
        ahead, back = (
            (self._order, self._before, self._behind),
            (self._order[::-1], self._behind, self._before),
        )
        order, before, behind = ahead if self._is_forward else back
        self._is_forward = not self._is_forward
        bound, picked = 0.0, [0] * len(self._node)
        for node in order:
            earlier, later = before[node], behind[node]
            for side in earlier:
                self._pull(node, side)
            if picks:
                picked[node] = self._pick(node, earlier, picked)
            if later:
                share = self._node[node] / max(len(earlier), len(later))
                for side in later:
                    self._push(node, side, share)
            bound += self._node[node].min()
        self._spend(1.0)
        return float(bound), self.original(tuple(picked)) if picks else ()

    def rest(self) -> Problem:
        """The problem as it was given, on the kept labels, renumbered from 0."""
        edges = (Edge(u, v, cost) for (u, v), cost in zip(self._ends, self._edge, strict=True))
        return Problem(tuple(self._given), tuple(edges))

    def reparametrised(self) -> Problem:
        """`rest` with the reparametrised costs: every assignment costs the same, plus the costs that `add` added."""
        edges = (Edge(u, v, cost) for (u, v), cost in zip(self._ends, self._left(), strict=True))
        return Problem(tuple(self._node), tuple(edges))

    def keeps(self, labels: Labels) -> bool:
        """True if all of an assignment's labels are kept."""
        return all(label in kept for label, kept in zip(labels, self.kept, strict=True))

    def renumbered(self, labels: Labels) -> Labels:
        """An assignment of kept labels, from the original label numbers to those of `rest`."""
        return tuple(int(np.searchsorted(kept, label)) for kept, label in zip(self.kept, labels, strict=True))

    def original(self, labels: Labels) -> Labels:
        """An assignment of kept labels, from the label numbers of `rest` to the original ones."""
        return tuple(int(kept[index]) for kept, index in zip(self.kept, labels, strict=True))

    def add(self, node: int, cost: np.ndarray) -> None:
        """Adds a cost to a node: [original labels], seconds."""
        self._node[node] = self._node[node] + cost[self.kept[node]]

    def label_bounds(self) -> list[np.ndarray]:
        """Per node, per kept label: a lower bound on every assignment that uses it."""
        return self._label_bounds(self._left())

    def _label_bounds(self, left: Sequence[np.ndarray]) -> list[np.ndarray]:
        by_u, by_v = [cost.min(1) for cost in left], [cost.min(0) for cost in left]
        of_edges = [float(cost.min()) for cost in by_u]
        of_nodes = [float(cost.min()) for cost in self._node]
        total = sum((*of_nodes, *of_edges))
        bounds: list[np.ndarray] = []
        for cost, least, sides in zip(self._node, of_nodes, self._sides, strict=True):
            bound = total + cost - least
            for side in sides:
                bound += (by_u if side.is_u else by_v)[side.edge] - of_edges[side.edge]
            bounds.append(bound)
        self._spend(BOUNDS_SWEEPS)
        return bounds

    def pair_bounds(self) -> list[np.ndarray]:
        """Per edge, [kept labels of u, kept labels of v]: a lower bound on every assignment that uses both."""
        left, found = self._left(), list[np.ndarray]()
        bounds, total = self._label_bounds(left), self._total(left)
        for (u, v), cost in zip(self._ends, left, strict=True):
            at_u, at_v = bounds[u] - cost.min(1), bounds[v] - cost.min(0)
            found.append(at_u[:, None] + at_v + (cost + (cost.min() - total)))
        self._spend(BOUNDS_SWEEPS)
        return found

    def _total(self, left: Sequence[np.ndarray]) -> float:
        """The lower bound of the present costs: the sum of every node's and every edge's minimum."""
        return sum(float(cost.min()) for cost in (*self._node, *left))

    def _left(self) -> list[np.ndarray]:
        """Per edge: its costs less the cost that messages have moved to its nodes."""
        messages = zip(self._edge, self._at_u, self._at_v, strict=True)
        return [cost - at_u[:, None] - at_v for cost, at_u, at_v in messages]

    def keep(self, masks: list[np.ndarray]) -> None:
        """Drops the kept labels whose mask is False, then those left without an allowed neighbour."""
        pending = dict(enumerate(masks))
        while pending:
            touched = [node for node, mask in sorted(pending.items()) if not mask.all()]
            for node in touched:
                self._restrict(node, pending[node])
            around = sorted({side.other for node in touched for side in self._sides[node]})
            pending = {node: self._is_supported(node) for node in around}
            pending = {node: mask for node, mask in pending.items() if not mask.all()}
        self._spend(KEEP_SWEEPS)

    def make_consistent(self) -> None:
        """Drops every label that is forbidden with all labels of some neighbour."""
        self.keep([self._is_supported(node) for node in range(len(self._node))])

    def _spend(self, sweeps: float) -> None:
        num_entries = sum(cost.size for cost in self._edge)
        self._clock.spend(sweeps * (EDGE_S * len(self._edge) + ENTRY_S * num_entries))

    def _pull(self, node: int, side: _Side) -> None:
        edge = side.edge
        if side.is_u:
            message = (self._edge[edge] - self._at_v[edge]).min(1)
            self._node[node] = self._node[node] + (message - self._at_u[edge])
            self._at_u[edge] = message
        else:
            message = (self._edge[edge] - self._at_u[edge][:, None]).min(0)
            self._node[node] = self._node[node] + (message - self._at_v[edge])
            self._at_v[edge] = message

    def _push(self, node: int, side: _Side, share: np.ndarray) -> None:
        at = self._at_u if side.is_u else self._at_v
        at[side.edge] = at[side.edge] - share
        self._node[node] = self._node[node] - share

    def _pick(self, node: int, earlier: list[_Side], picked: list[int]) -> int:
        cost = self._node[node]
        for side in earlier:
            edge, other = side.edge, picked[side.other]
            if side.is_u:
                cost = cost + (self._edge[edge][:, other] - self._at_u[edge] - self._at_v[edge][other])
            else:
                cost = cost + (self._edge[edge][other] - self._at_u[edge][other] - self._at_v[edge])
        return int(cost.argmin())

    def _restrict(self, node: int, mask: np.ndarray) -> None:
        self.kept[node] = self.kept[node][mask]
        self._given[node], self._node[node] = self._given[node][mask], self._node[node][mask]
        for side in self._sides[node]:
            edge = side.edge
            if side.is_u:
                self._edge[edge], self._at_u[edge] = self._edge[edge][mask], self._at_u[edge][mask]
            else:
                self._edge[edge] = np.ascontiguousarray(self._edge[edge][:, mask])
                self._at_v[edge] = self._at_v[edge][mask]

    def _is_supported(self, node: int) -> np.ndarray:
        mask = np.ones(len(self.kept[node]), bool)
        for side in self._sides[node]:
            mask &= np.isfinite(self._edge[side.edge]).any(1 if side.is_u else 0)
        return mask
