"""Contracts a PBQP step by step until its minimum is known.

Messages (`search.solver.trws`) raise a bound to that of the pairwise relaxation. They are slow over long distances and
cannot see constraints of cycles. Two steps, which keep every minimum, help with both:

  - A node with at most two neighbours is eliminated: its minimum cost goes to them, or to the edge between them
    (reductions RI and RII of Scholz and Eckstein, "Register allocation for irregular architectures", 2002).
  - Two neighbours become one node. Its labels are their pairs of labels that may occur in an assignment worth having. These
    are the clusters that tighten a relaxation (Sontag, Meltzer, Globerson, Jaakkola and Weiss, "Tightening LP relaxations
    for MAP using message passing", 2008), but permanent. Few pairs are left as a rule: an edge mostly ties labels to one
    another, and messages bound pairs as well as labels. The cycles through both nodes become one edge shorter.

Sweeps and steps alternate. Sweeps find hopeless labels and pairs. Both steps are applied wherever they do not enlarge the
problem, or not by much. The next sweeps are then faster, reach further and give tighter bounds. In a dozen turns most
problems end in a single node, and an assignment of the least cost is read off backwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter

import numpy as np

from autoshard.search.solver.clock import NEVER, PROCESSOR, Deadline, SearchClock
from autoshard.search.solver.flat import flat
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.neighbourhoods import reoptimised
from autoshard.search.solver.pbqp import Edge, Labels, Problem
from autoshard.search.solver.trws import Trws

SWEEPS = 10
"""Message sweeps in a batch, before labels are dropped. Source: a choice of ours."""
BATCHES = 4
"""Batches of sweeps in a turn. Source: a choice of ours; with half as many, a turn gains less than its other steps cost."""
ENTRIES = 2e5
"""Entries of all edges up to which nodes are joined even if the entries grow. Source: a choice of ours; a sweep over so
many takes half a millisecond."""
GROWTH = 1.35
"""Beyond `ENTRIES`, joins may grow the entries of all edges by this factor in a turn. Source: a choice of ours."""
MAX_TABLE = 1e7
"""Entries of the table over a node and its two neighbours; a node with a larger table is not eliminated."""
NODE_S = 1e-4
"""Nominal seconds to eliminate a node, besides entries. Source: `benchmarks/nominal_seconds.py`, for all below."""
JOIN_S = 2e-3
"""Nominal seconds to join two nodes, besides the entries written."""
ENTRY_S = 4e-9
"""Nominal seconds for each entry."""


Chosen = dict[int, int]
"""The label of each node, by node."""


@dataclass(frozen=True, slots=True, eq=False)
class _Dropped:
    """A step that dropped labels: per node, the kept labels."""

    kept: Mapping[int, np.ndarray]

    def undo(self, labels: Chosen) -> None:
        labels.update({node: kept[labels[node]] for node, kept in self.kept.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Eliminated:
    """A step that eliminated a node: its label costs, and per neighbour the edge's, [neighbour's labels, node's labels]."""

    node: int
    cost_s: np.ndarray
    towards: Mapping[int, np.ndarray]

    def undo(self, labels: Chosen) -> None:
        cost_s = self.cost_s
        for node, towards_s in self.towards.items():
            cost_s = cost_s + towards_s[labels[node]]
        labels[self.node] = int(cost_s.argmin())


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """A step that joined another node into a node: for each new label, the old labels of both."""

    node: int
    other: int
    own: np.ndarray
    others: np.ndarray

    def undo(self, labels: Chosen) -> None:
        label = labels[self.node]
        labels[self.node], labels[self.other] = self.own[label], self.others[label]


class Contraction:
    """A problem under contraction; mutable.

    Attributes:
      fixed_s: the cost of every assignment besides the remaining nodes and edges.
      worth_s: assignments that cost as much or more are left out.
    """

    def __init__(self, trws: Trws, clock: SearchClock = PROCESSOR) -> None:
        """Args:
        trws: the reparametrised problem, with its present costs and labels.
        clock: counts the time spent.
        """
        self._clock, problem = clock, trws.reparametrised()
        self.fixed_s, self.worth_s = 0.0, np.inf
        self._steps: list[_Dropped | _Eliminated | _Joined] = [_Dropped(dict(enumerate(trws.kept)))]
        self._take(dict(enumerate(problem.node_cost_s)), {(e.u, e.v): e.cost_s for e in problem.edges})
        self._eliminate()

    @property
    def num_nodes(self) -> int:
        """Number of remaining nodes."""
        return len(self._cost_s)

    @property
    def is_done(self) -> bool:
        """True if no node is left: then `fixed_s` is the least cost of the assignments that were worth having."""
        return not self._cost_s

    def turn(self, worth_s: float, deadline: Deadline = NEVER) -> tuple[float, Labels | None]:
        """Contracts the remaining problem by one turn.

        Args:
          worth_s: only assignments that cost less are worth having.
          deadline: after it assignments are improved no further.

        Returns:
          A lower bound on every assignment's cost (`worth_s` if none costs less), and a good assignment, if one was met.
        """
        assert worth_s <= self.worth_s, "assignments that are asked for were left out"
        self.worth_s = worth_s
        bound_s, labels = self._sweep(worth_s)
        best, best_s = None, np.inf
        if labels is not None:
            problem = self.problem
            labels = descend(flat(problem), (), np.inf, 0.0, labels, self._clock)
            labels, is_least = reoptimised(problem, labels, deadline)
            best, best_s = self._original(labels), self.fixed_s + problem.cost_s(labels)
            if is_least:
                self._end(best_s)
        self._eliminate()
        self._join()
        if not self.is_done:
            return bound_s, best
        if self.fixed_s < best_s:
            best = self._original(())
        return min(worth_s, self.fixed_s), best

    def _sweep(self, worth_s: float) -> tuple[float, Labels | None]:
        """Drops labels and pairs whose bound is not below `worth_s`; the bound and the best remaining assignment met."""
        nodes, pairs, problem = sorted(self._cost_s), sorted(self._edges), self.problem
        fixed_s = self.fixed_s
        worth_s -= fixed_s
        trws = Trws(problem, self._clock)
        trws.make_consistent()
        if trws.is_feasible:
            trws.keep([bound < worth_s for bound in trws.label_bounds()])
        bound_s, met = -np.inf, list[Labels]()
        for batch in range(1, BATCHES + 1):
            if trws.is_feasible:
                swept = [trws.sweep(picks=batch == BATCHES) for _ in range(SWEEPS)]
                bound_s = max(bound_s, *(bound for bound, _ in swept))
                met = [labels for _, labels in swept]  # only those of the last batch are wanted
                trws.keep([bound < worth_s for bound in trws.label_bounds()])
        if not trws.is_feasible:
            self._end(np.inf)
            return worth_s + fixed_s, None
        hopeless = [bound >= worth_s for bound in trws.pair_bounds()]
        rest = trws.reparametrised()
        self._steps.append(_Dropped(dict(zip(nodes, trws.kept, strict=True))))
        self._take(
            dict(zip(nodes, rest.node_cost_s, strict=True)),
            {
                pair: np.where(is_hopeless, np.inf, edge.cost_s)
                for pair, edge, is_hopeless in zip(pairs, rest.edges, hopeless, strict=True)
            },
        )
        left = [labels for labels in met if trws.keeps(labels)]
        best = min(left, key=problem.cost_s) if left else None
        return min(worth_s, bound_s) + fixed_s, best and trws.renumbered(best)

    def _take(self, cost_s: dict[int, np.ndarray], edges: Mapping[tuple[int, int], np.ndarray]) -> None:
        self._cost_s = cost_s
        self._edges: dict[tuple[int, int], np.ndarray] = {}
        self._counted: dict[tuple[int, int], int] = {}
        self._around: dict[int, set[int]] = {node: set() for node in cost_s}
        for (u, v), cost in edges.items():
            self._add(u, v, cost)

    @property
    def problem(self) -> Problem:
        """The remaining problem, nodes numbered from 0; edges sorted by pair."""
        nodes = sorted(self._cost_s)
        at = {node: index for index, node in enumerate(nodes)}
        edges = tuple(
            Edge(at[u], at[v], cost) for (u, v), cost in sorted(self._edges.items(), key=itemgetter(0))
        )
        return Problem(tuple(self._cost_s[node] for node in nodes), edges)

    def _original(self, labels: Labels) -> Labels:
        """The assignment of all original nodes that follows from one of the remaining nodes."""
        labels_of: Chosen = dict(zip(sorted(self._cost_s), labels, strict=True))
        for step in reversed(self._steps):
            step.undo(labels_of)
        return tuple(int(labels_of[node]) for node in sorted(labels_of))

    def _eliminate(self) -> None:
        """Eliminates nodes with few neighbours until none is left."""
        pending = sorted(self._cost_s)
        while pending:
            touched = set[int]()
            for node in pending:
                if node in self._cost_s and self._is_easy(node):
                    touched |= self._around[node]
                    self._take_out(node)
            pending = sorted(touched & self._cost_s.keys())

    def _is_easy(self, node: int) -> bool:
        degree = len(self._around[node])
        return degree < 2 or (degree == 2 and self._table(node) <= MAX_TABLE)

    def _table(self, node: int) -> float:
        """Entries of the table over a node and its neighbours."""
        return prod(float(len(self._cost_s[n])) for n in (node, *self._around[node]))

    def _take_out(self, node: int) -> None:
        self._clock.spend(NODE_S + ENTRY_S * self._table(node))
        around = sorted(self._around.pop(node))
        cost_s = self._cost_s.pop(node)
        towards = {n: self._remove(n, node) for n in around}
        self._steps.append(_Eliminated(node, cost_s, towards))
        if not around:
            self.fixed_s += float(cost_s.min())
        elif len(around) == 1:
            self._cost_s[around[0]] = self._cost_s[around[0]] + (towards[around[0]] + cost_s).min(1)
        else:
            u, v = around
            self._add(u, v, ((towards[u] + cost_s)[:, None, :] + towards[v]).min(2))

    def _join(self) -> None:
        """Joins neighbours, the pair with the least growth first, until the problem would become too large."""
        num_entries = float(sum(cost.size for cost in self._edges.values()))
        most = max(ENTRIES, GROWTH * num_entries)
        growth: dict[tuple[int, int], float] = {pair: self._growth(*pair) for pair in self._edges}
        while growth:
            pair = min(growth, key=lambda pair: (growth[pair], pair))
            num_entries += growth[pair]
            if growth[pair] > 0 and num_entries > most:
                break
            touched = {*pair, *self._around[pair[0]], *self._around[pair[1]]}
            self._take_in(*pair)
            if self.is_done:
                return
            growth = {p: g for p, g in growth.items() if touched.isdisjoint(p)}
            changed = {_pair(n, other) for n in touched & self._cost_s.keys() for other in self._around[n]}
            growth.update({pair: self._growth(*pair) for pair in sorted(changed)})
        self._eliminate()

    def _growth(self, u: int, v: int) -> float:
        """Entries that joining two neighbours would add."""
        num_pairs = self._num_pairs(u, v)
        num = {node: len(self._cost_s[node]) for node in (u, v)}
        grown = -float(num[u] * num[v])
        for n in (self._around[u] | self._around[v]) - {u, v}:
            before = sum(num[node] for node in (u, v) if n in self._around[node])
            grown += len(self._cost_s[n]) * (num_pairs - before)
        return grown

    def _num_pairs(self, u: int, v: int) -> int:
        """Number of allowed label pairs of two neighbours, u < v."""
        if (u, v) not in self._counted:
            self._counted[u, v] = int(np.isfinite(self._edges[u, v]).sum())
        return self._counted[u, v]

    def _take_in(self, u: int, v: int) -> None:
        """Joins two neighbours, v into u."""
        between = self._remove(u, v)
        own, others = np.nonzero(np.isfinite(between))
        if not len(own):
            self._end(np.inf)
            return
        around_u, around_v = tuple(self._around[u]), tuple(self._around[v])
        edges = [(n, self._remove(n, u)[:, own]) for n in sorted(around_u)]
        edges += [(n, self._remove(n, v)[:, others]) for n in sorted(around_v)]
        self._cost_s[u] = self._cost_s[u][own] + self._cost_s.pop(v)[others] + between[own, others]
        del self._around[v]
        for n, cost in edges:
            self._add(n, u, cost)
        self._steps.append(_Joined(u, v, own, others))
        self._clock.spend(JOIN_S + ENTRY_S * sum(cost.size for _, cost in edges))

    def _end(self, least_s: float) -> None:
        """Removes all remaining nodes: no assignment of them costs less than `least_s`."""
        self.fixed_s = least_s
        self._take({}, {})

    def _add(self, u: int, v: int, cost_s: np.ndarray) -> None:
        pair = _pair(u, v)
        cost_s = cost_s if pair == (u, v) else cost_s.T
        self._edges[pair] = self._edges[pair] + cost_s if pair in self._edges else cost_s
        self._counted.pop(pair, None)
        self._around[u].add(v)
        self._around[v].add(u)

    def _remove(self, u: int, v: int) -> np.ndarray:
        """Removes an edge and returns its costs, [labels of u, labels of v]."""
        pair = _pair(u, v)
        cost_s = self._edges.pop(pair)
        self._counted.pop(pair, None)
        for node, other in ((u, v), (v, u)):
            if node in self._around:
                self._around[node].discard(other)
        return cost_s if pair == (u, v) else cost_s.T


def _pair(u: int, v: int) -> tuple[int, int]:
    return (u, v) if u < v else (v, u)
