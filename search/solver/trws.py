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
from itertools import pairwise

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.flat import Flat, flat, places, tables
from autoshard.search.solver.ordering import cuthill_mckee
from autoshard.search.solver.pbqp import Edge, Labels, Problem

EDGE_S = 1e-7
"""Nominal seconds of a sweep for each edge, besides its entries. Source: `benchmarks/nominal_seconds.py`, for all below."""
ENTRY_S = 2e-9
"""Nominal seconds of a sweep for each entry of an edge."""
BOUNDS_SWEEPS = 3.3
"""Time of the label bounds, in sweeps."""
KEEP_SWEEPS = 5.0
"""Time to drop labels, in sweeps."""
START_SWEEPS = 3.5
"""Time to set up, in sweeps, besides the order of the visits."""
ORDER_S = 7e-6
"""Nominal seconds to set up for each edge: the order of the visits."""


class Trws:
    """A merged problem under reparametrisation; mutable, in place.

    Attributes:
      kept: per node, the labels not dropped yet; empty for some node if no assignment is feasible.
      flat: `rest` as flat arrays.
    """

    def __init__(self, problem: Problem, clock: SearchClock = PROCESSOR) -> None:
        self._clock, self.flat = clock, flat(problem)
        self._ends = [(edge.u, edge.v) for edge in problem.edges]
        self._order = np.array(cuthill_mckee(len(problem.node_cost_s), self._ends), int)
        self._rank = np.argsort(self._order)
        self._is_forward = True
        self._cost, self._messages = self.flat.nodes_s.copy(), np.zeros(self.flat.places.messages[-1])
        self._kept = np.concatenate([*map(np.arange, problem.num_labels), np.zeros(0, int)])
        self.kept = self._split(self._kept)
        self._spend(START_SWEEPS)
        clock.spend(ORDER_S * len(self._ends))
        self.keep(self._split(np.isfinite(self._cost)))

    def copy(self) -> "Trws":
        """An independent copy, which shares the arrays that are never written to."""
        new = object.__new__(Trws)
        new.__dict__.update(self.__dict__)
        new._cost, new._messages = self._cost.copy(), self._messages.copy()
        return new

    @property
    def is_feasible(self) -> bool:
        """False once some node has no label left."""
        return all(len(labels) for labels in self.kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def sweep(self, picks: bool = True) -> tuple[float, Labels]:
        """One pass over the nodes, in the direction opposite to the last: a lower bound and an assignment. The assignment is
        empty unless it `picks` one, which takes nearly a third of the pass."""
        order, rank = (self._order, self._rank) if self._is_forward else (self._order[::-1], -self._rank)
        self._is_forward = not self._is_forward
        picked = np.zeros(len(order) if picks else 0, int)
        bound_s = _loops().sweep(self.flat, order.copy(), rank, self._cost, self._messages, picked)
        self._spend(1.0)
        return bound_s, tuple(self._kept[self.flat.places.labels[:-1] + picked].tolist()) if picks else ()

    def rest(self) -> Problem:
        """The problem as it was given, on the kept labels, renumbered from 0."""
        return self._problem(self.flat.nodes_s, self.flat.entries_s)

    def reparametrised(self) -> Problem:
        """`rest` with the reparametrised costs: every assignment costs the same, plus the costs that `add` added."""
        return self._problem(self._cost.copy(), self._left())

    def keeps(self, labels: Labels) -> bool:
        """True if all of an assignment's labels are kept."""
        return all(label in kept for label, kept in zip(labels, self.kept, strict=True))

    def renumbered(self, labels: Labels) -> Labels:
        """An assignment of kept labels, from the original label numbers to those of `rest`."""
        return tuple(int(np.searchsorted(kept, label)) for kept, label in zip(self.kept, labels, strict=True))

    def original(self, labels: Labels) -> Labels:
        """An assignment of kept labels, from the label numbers of `rest` to the original ones."""
        return tuple(self._kept[self.flat.places.labels[:-1] + np.array(labels, int)].tolist())

    def add(self, node: int, cost: np.ndarray) -> None:
        """Adds a cost to a node: [original labels], seconds."""
        begin, end = self.flat.places.labels[node : node + 2]
        self._cost[begin:end] += cost[self.kept[node]]

    def label_bounds(self) -> list[np.ndarray]:
        """Per node, per kept label: a lower bound on every assignment that uses it."""
        self._spend(BOUNDS_SWEEPS)
        bounds_s, _ = self._label_bounds(self._least(self._left()))
        return self._split(bounds_s)

    def pair_bounds(self) -> list[np.ndarray]:
        """Per edge, [kept labels of u, kept labels of v]: a lower bound on every assignment that uses both."""
        left_s = self._left()
        least_s = self._least(left_s)
        bounds_s, total_s = self._label_bounds(least_s)
        self._spend(2 * BOUNDS_SWEEPS)
        pairs_s = _loops().pair_bounds(self.flat, left_s, least_s, bounds_s, total_s)
        return tables(self.flat, pairs_s)

    def _label_bounds(self, least_s: np.ndarray) -> tuple[np.ndarray, float]:
        return _loops().label_bounds(self.flat, self._cost, least_s)

    def _least(self, left_s: np.ndarray) -> np.ndarray:
        return _loops().side_minima(self.flat, left_s)

    def _left(self) -> np.ndarray:
        """[entries]: each edge's costs less the cost that messages have moved to its nodes."""
        return _loops().moved(self.flat, self._messages)

    def keep(self, masks: Sequence[np.ndarray]) -> None:
        """Drops the kept labels whose mask is False, then those left without an allowed neighbour."""
        is_kept = np.concatenate((*masks, np.zeros(0, bool)))
        if is_kept.all():
            return
        topology, is_touched = self.flat.topology, np.array([not mask.all() for mask in masks])
        is_pending = np.zeros(len(masks), bool)
        is_pending[topology.other[is_touched[topology.node]]] = True
        self._restrict(is_kept, is_pending)

    def make_consistent(self) -> None:
        """Drops every label that is forbidden with all labels of some neighbour."""
        self._restrict(np.ones(len(self._kept), bool), np.ones(len(self.kept), bool))

    def _restrict(self, is_kept: np.ndarray, is_pending: np.ndarray) -> None:
        """Drops labels, and at pending nodes and around every change those left without an allowed neighbour."""
        self._spend(KEEP_SWEEPS)
        _loops().drop_unsupported(self.flat, is_kept, is_pending)
        if is_kept.all():
            return
        before, of_nodes = self.flat, self._split(is_kept)
        sides: list[int] = before.topology.node.tolist()
        self.flat = Flat(
            before.topology,
            places(before.topology, np.array([mask.sum() for mask in of_nodes], int)),
            before.nodes_s[is_kept],
            before.entries_s[_loops().pairs_of(before, is_kept)],
        )
        self._messages = self._messages[np.concatenate((*(of_nodes[n] for n in sides), np.zeros(0, bool)))]
        self._cost, self._kept = self._cost[is_kept], self._kept[is_kept]
        self.kept = self._split(self._kept)

    def _split(self, of_labels: np.ndarray) -> list[np.ndarray]:
        """An array over all kept labels, by node."""
        return [of_labels[begin:end] for begin, end in pairwise(self.flat.places.labels.tolist())]

    def _problem(self, cost_s: np.ndarray, entries: np.ndarray) -> Problem:
        costs = tables(self.flat, entries)
        edges = (Edge(u, v, cost) for (u, v), cost in zip(self._ends, costs, strict=True))
        return Problem(tuple(self._split(cost_s)), tuple(edges))

    def _spend(self, sweeps: float) -> None:
        self._clock.spend(sweeps * (EDGE_S * len(self._ends) + ENTRY_S * len(self.flat.entries_s)))


def _loops():
    """The module of the compiled loops."""
    from autoshard.search.solver import messages  # it imports Numba, which takes a while

    return messages
