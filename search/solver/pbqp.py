"""The search as a graph problem: one label a node, a cost for every node and every pair of joined nodes.

A partitioned Boolean quadratic problem (PBQP; a pairwise Markov random field, in other words) is a graph
whose nodes choose one label each. A node is an op or a stored value, a label a strategy or a spec, a node's
cost its time under that label, an edge's cost the reshard between two labels. Costs are seconds; +inf
forbids. Memory comes as rows: at one point of the program the chosen labels' bytes must not exceed a
limit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

Labels = tuple[int, ...]
"""A full assignment: the label of every node."""


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """The cost of choosing label i at node u and label j at node v.

    Attributes:
      u: one node.
      v: the other node, not u.
      cost_s: [labels of u, labels of v], seconds; +inf = forbidden.
    """

    u: int
    v: int
    cost_s: np.ndarray

    def __post_init__(self) -> None:
        assert self.u != self.v, f"edge from node {self.u} to itself"

    def transposed(self) -> "Edge":
        """This edge seen from v."""
        return Edge(self.v, self.u, self.cost_s.T)


@dataclass(frozen=True, slots=True, eq=False)
class MemoryConstraint:
    """The memory in use at one point of the program: fixed_bytes + the chosen labels' bytes.

    All rows share one limit. A row with a limit of its own (the host's memory, say) adds the difference of the two
    limits to its `fixed_bytes`.

    Where memory is no linear function of the labels, a row is a lower bound on it. Descents use its expansions instead.

    Attributes:
      name: the program point, for messages.
      bytes: (node, [labels of node] bytes), sorted by node.
      fixed_bytes: bytes in use under every choice of labels.
      expansion: makes the memory at this point near an assignment: exact for it, and for all that differ in two joined
        nodes. None if the row itself is exact.
      pairs: (u, v, [labels of u, labels of v] bytes); of expansions only.
    """

    name: str
    bytes: tuple[tuple[int, np.ndarray], ...]
    fixed_bytes: float
    expansion: "Expansion | None" = None
    pairs: tuple[tuple[int, int, np.ndarray], ...] = ()

    def __post_init__(self) -> None:
        nodes = [node for node, _ in self.bytes]
        assert nodes == sorted(set(nodes)), f"row {self.name}: nodes not sorted or not distinct"

    def scaled(self, factor: float) -> "MemoryConstraint":
        """This row for a limit of `factor` times its own."""
        scaled = tuple((node, factor * per_label) for node, per_label in self.bytes)
        expansion = partial(_scaled, self.expansion, factor) if self.expansion else None
        pairs = tuple((u, v, factor * num_bytes) for u, v, num_bytes in self.pairs)
        return MemoryConstraint(f"{self.name}, scaled", scaled, factor * self.fixed_bytes, expansion, pairs)

    def under(self, own_bytes: float, limit_bytes: float) -> "MemoryConstraint":
        """The row with its own limit in bytes, written as a row under another limit."""
        return replace(self, fixed_bytes=self.fixed_bytes + limit_bytes - own_bytes)

    def total_bytes(self, labels: Sequence[int]) -> float:
        """The row's value under a full assignment."""
        of_pairs = sum(float(num_bytes[labels[u], labels[v]]) for u, v, num_bytes in self.pairs)
        return (
            self.fixed_bytes
            + sum(float(per_label[labels[node]]) for node, per_label in self.bytes)
            + of_pairs
        )

    @property
    def least_bytes(self) -> float:
        """A lower bound on the row's value under all assignments."""
        of_pairs = sum(float(num_bytes.min()) for _, _, num_bytes in self.pairs)
        return self.fixed_bytes + sum(float(per_label.min()) for _, per_label in self.bytes) + of_pairs


Expansion = Callable[[Labels], MemoryConstraint]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Minimise the sum of node costs and edge costs.

    Attributes:
      node_cost_s: per node, [labels], seconds; +inf = forbidden.
      edges: in any order and direction; several may join the same pair.
    """

    node_cost_s: tuple[np.ndarray, ...]
    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        for edge in self.edges:
            want = (len(self.node_cost_s[edge.u]), len(self.node_cost_s[edge.v]))
            assert edge.cost_s.shape == want, (
                f"edge {edge.u}-{edge.v}: {edge.cost_s.shape} costs for {want} labels"
            )

    @property
    def num_labels(self) -> Labels:
        return tuple(len(cost) for cost in self.node_cost_s)

    def cost_s(self, labels: Sequence[int]) -> float:
        """The cost of a full assignment, +inf if it has a forbidden label or pair."""
        nodes = sum(float(cost[label]) for cost, label in zip(self.node_cost_s, labels, strict=True))
        return nodes + sum(float(edge.cost_s[labels[edge.u], labels[edge.v]]) for edge in self.edges)


def merged(problem: Problem) -> Problem:
    """An equal problem with one edge a pair, u < v, sorted by (u, v)."""
    costs: dict[tuple[int, int], np.ndarray] = {}
    for edge in problem.edges:
        edge = edge if edge.u < edge.v else edge.transposed()
        pair = edge.u, edge.v
        costs[pair] = costs[pair] + edge.cost_s if pair in costs else np.asarray(edge.cost_s, float)
    edges = tuple(Edge(u, v, costs[u, v]) for u, v in sorted(costs))
    return Problem(tuple(np.asarray(cost, float) for cost in problem.node_cost_s), edges)


def restricted_row(row: MemoryConstraint, kept: Sequence[np.ndarray]) -> MemoryConstraint:
    """A row on some of each node's labels, renumbered from 0."""
    per_label = tuple((node, num_bytes[kept[node]]) for node, num_bytes in row.bytes)
    expansion = partial(_restricted, row.expansion, kept) if row.expansion else None
    pairs = tuple((u, v, num_bytes[np.ix_(kept[u], kept[v])]) for u, v, num_bytes in row.pairs)
    return MemoryConstraint(row.name, per_label, row.fixed_bytes, expansion, pairs)


def _scaled(expansion: Expansion, factor: float, labels: Labels) -> MemoryConstraint:
    return expansion(labels).scaled(factor)


def _restricted(expansion: Expansion, kept: Sequence[np.ndarray], labels: Labels) -> MemoryConstraint:
    return restricted_row(expansion(original(kept, labels)), kept)


def near(rows: Iterable[MemoryConstraint], labels: Labels) -> list[MemoryConstraint]:
    """The memory at the rows' program points near an assignment. One expansion replaces all rows of a point."""
    points = {row.name: row for row in rows}.values()
    return [row.expansion(labels) if row.expansion else row for row in points]


def original(kept: Sequence[np.ndarray], labels: Labels) -> Labels:
    """An assignment of kept labels, from their numbers among these to the original ones."""
    return tuple(int(k[label]) for k, label in zip(kept, labels, strict=True))
