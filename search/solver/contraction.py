"""A PBQP made smaller and smaller, until its minimum shows.

Messages (`search.solver.trws`) raise a bound to that of the pairwise relaxation, slowly where they have far to go, and what
cycles of the problem forbid they never see. Two steps that leave every minimum as it is help with both:

  - A node with no more than two neighbours is eliminated: what it costs at least goes to them, or to the edge between them
    (reductions RI and RII of Scholz and Eckstein, "Register allocation for irregular architectures", 2002).
  - Two neighbours become one node, whose labels are the pairs of theirs that may occur in an assignment worth having: the
    clusters that tighten a relaxation (Sontag, Meltzer, Globerson, Jaakkola and Weiss, "Tightening LP relaxations for MAP
    using message passing", 2008), but made for good. An edge mostly ties labels to one another, and what messages say of
    labels they say of pairs as well: few pairs are left as a rule, and the cycles through both nodes are one edge shorter.

So they take turns. Sweeps say which labels and pairs are hopeless, both steps are done wherever they make the problem no
larger, or not by much, and the next sweeps go faster, reach further and say more. In a dozen turns most problems end in a
single node, and an assignment of the least cost is read off backwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from operator import itemgetter

import numpy as np

from autoshard.search.solver.clock import NEVER, PROCESSOR, Deadline, SearchClock
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.neighbourhoods import reoptimised
from autoshard.search.solver.pbqp import Edge, Labels, Problem
from autoshard.search.solver.trws import Trws

SWEEPS = 10
"""Of messages, before labels are dropped. Source: a choice of ours."""
BATCHES = 4
"""Of sweeps, in a turn. Source: a choice of ours; with half as many, turns are worth less than what they take besides."""
ENTRIES = 2e5
"""Of all edges: up to so many, nodes are joined though that makes more. Source: a choice of ours; sweeps take a millisecond
for so many, as they do for none."""
GROWTH = 1.35
"""By how much there may be more entries after a turn, where there are more. Source: a choice of ours."""
MAX_TABLE = 1e7
"""Entries over a node and two neighbours; one that has more is not eliminated."""
NODE_S = 1e-4
"""Of eliminating a node, besides its table's entries. Source: `benchmarks/nominal_seconds.py`, as all that follow."""
JOIN_S = 2e-3
"""Of joining two, besides the entries that are written."""
ENTRY_S = 4e-9
"""For an entry."""


Chosen = dict[int, int]
"""By node: its label."""


@dataclass(frozen=True, slots=True, eq=False)
class _Dropped:
    """Labels were dropped: per node, those that were kept."""

    kept: Mapping[int, np.ndarray]

    def undo(self, labels: Chosen) -> None:
        labels.update({node: kept[labels[node]] for node, kept in self.kept.items()})


@dataclass(frozen=True, slots=True, eq=False)
class _Eliminated:
    """A node went: what its labels cost, and towards each neighbour, [its labels, the node's]."""

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
    """A node took in another: of each label, what the two had."""

    node: int
    other: int
    own: np.ndarray
    others: np.ndarray

    def undo(self, labels: Chosen) -> None:
        label = labels[self.node]
        labels[self.node], labels[self.other] = self.own[label], self.others[label]


class Contraction:
    """A problem while it is made smaller; mutable.

    Attributes:
      fixed_s: what all assignments cost besides the nodes and edges that are left.
      worth_s: assignments that cost as much or more are left out.
    """

    def __init__(self, trws: Trws, clock: SearchClock = PROCESSOR) -> None:
        """Args:
        trws: the problem as messages have left it, its present costs and labels.
        clock: what is spent on it.
        """
        self._clock, problem = clock, trws.reparametrised()
        self.fixed_s, self.worth_s = 0.0, np.inf
        self._steps: list[_Dropped | _Eliminated | _Joined] = [_Dropped(dict(enumerate(trws.kept)))]
        self._take(dict(enumerate(problem.node_cost_s)), {(e.u, e.v): e.cost_s for e in problem.edges})
        self._eliminate()

    @property
    def num_nodes(self) -> int:
        """How many are left."""
        return len(self._cost_s)

    @property
    def is_done(self) -> bool:
        """Whether no node is left: then `fixed_s` is the least that assignments cost, of those that were worth having."""
        return not self._cost_s

    def turn(self, worth_s: float, deadline: Deadline = NEVER) -> tuple[float, Labels | None]:
        """Makes what is left smaller.

        Args:
          worth_s: only assignments that cost less are worth having.
          deadline: after it assignments are improved no further.

        Returns:
          A lower bound on the cost of assignments, `worth_s` where none costs less, and a good one, if any was met.
        """
        assert worth_s <= self.worth_s, "assignments that are asked for were left out"
        self.worth_s = worth_s
        bound_s, labels = self._sweep(worth_s)
        best, best_s = None, np.inf
        if labels is not None:
            problem = self.problem
            labels = descend(problem, (), np.inf, 0.0, labels, self._clock)
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
        """Drops what messages call hopeless; the bound, and the best assignment of what is left that they pick."""
        nodes, pairs, problem = sorted(self._cost_s), sorted(self._edges), self.problem
        fixed_s = self.fixed_s
        worth_s -= fixed_s
        trws = Trws(problem, self._clock)
        trws.make_consistent()
        if trws.is_feasible:
            trws.keep([bound < worth_s for bound in trws.label_bounds()])
        bound_s, met = -np.inf, list[Labels]()
        for _ in range(BATCHES):
            if trws.is_feasible:
                swept = [trws.sweep() for _ in range(SWEEPS)]
                bound_s = max(bound_s, *(bound for bound, _ in swept))
                met = [labels for _, labels in swept]
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
        """What is left, numbered from 0; edges by pair."""
        nodes = sorted(self._cost_s)
        at = {node: index for index, node in enumerate(nodes)}
        edges = tuple(
            Edge(at[u], at[v], cost) for (u, v), cost in sorted(self._edges.items(), key=itemgetter(0))
        )
        return Problem(tuple(self._cost_s[node] for node in nodes), edges)

    def _original(self, labels: Labels) -> Labels:
        """What an assignment of the nodes that are left says of all."""
        labels_of: Chosen = dict(zip(sorted(self._cost_s), labels, strict=True))
        for step in reversed(self._steps):
            step.undo(labels_of)
        return tuple(int(labels_of[node]) for node in sorted(labels_of))

    def _eliminate(self) -> None:
        """Eliminates nodes with few neighbours, until there are none."""
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
        """Entries over a node and its neighbours."""
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
        """Joins neighbours, those first that make the problem smallest, while it does not become too large."""
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
        """By how many entries there would be more, were two neighbours one."""
        num_pairs = self._num_pairs(u, v)
        num = {node: len(self._cost_s[node]) for node in (u, v)}
        grown = -float(num[u] * num[v])
        for n in (self._around[u] | self._around[v]) - {u, v}:
            before = sum(num[node] for node in (u, v) if n in self._around[node])
            grown += len(self._cost_s[n]) * (num_pairs - before)
        return grown

    def _num_pairs(self, u: int, v: int) -> int:
        """How many pairs of labels two neighbours, u < v, may have."""
        if (u, v) not in self._counted:
            self._counted[u, v] = int(np.isfinite(self._edges[u, v]).sum())
        return self._counted[u, v]

    def _take_in(self, u: int, v: int) -> None:
        """Makes two neighbours one."""
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
        """Nothing that is left costs less."""
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
        """Takes an edge out: [labels of u, labels of v]."""
        pair = _pair(u, v)
        cost_s = self._edges.pop(pair)
        self._counted.pop(pair, None)
        for node, other in ((u, v), (v, u)):
            if node in self._around:
                self._around[node].discard(other)
        return cost_s if pair == (u, v) else cost_s.T


def _pair(u: int, v: int) -> tuple[int, int]:
    return (u, v) if u < v else (v, u)
