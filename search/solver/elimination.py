"""Exact minimisation of a PBQP by eliminating one node after another.

To eliminate a node, add up the tables that it appears in, minimise over its labels, and keep the result as
one table over its neighbours (bucket elimination; Dechter 1999). Nodes of degree one or two vanish for almost
nothing: chains and trees of parameters, gradients and updates collapse. Only the tables around the residual
stream grow. The order is greedy: the node with the smallest table is next. Labels with equal slices of a table
are merged first, and in every new table: a table's dimension is a node's *classes*, not its labels.

Widths are small for training steps, so most tables fit. If one does not, a caller with an assignment may fix the label of a
node in that table and continue (`search.solver.neighbourhoods`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.pbqp import Labels, Problem

NODE_S = 1.6e-4
"""Nominal seconds of an elimination, besides its table's entries. Source: `benchmarks/nominal_seconds.py`."""
ENTRY_S = 6e-9
"""Nominal seconds of an elimination for each entry of its table."""


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Costs over some nodes' classes of labels.

    Attributes:
      nodes: the table's dimensions, ascending.
      classes: per node, [labels] the class of each label.
      cost: [classes of each node].
    """

    nodes: tuple[int, ...]
    classes: tuple[np.ndarray, ...]
    cost: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Bucket:
    """The costs and tables over which a node's label was minimised."""

    node: int
    cost: np.ndarray
    tables: tuple[_Table, ...]


class Elimination:
    """A merged problem under elimination; mutable.

    Attributes:
      total: the cost already settled: minima of nodes without tables left, and costs of fixed labels.
    """

    def __init__(self, problem: Problem, clock: SearchClock = PROCESSOR) -> None:
        self._clock = clock
        self.total = 0.0
        self._cost = list(problem.node_cost_s)
        self._buckets: list[_Bucket] = []
        self._fixed: dict[int, int] = {}
        self._tables_of: list[list[_Table]] = [[] for _ in problem.node_cost_s]
        for edge in problem.edges:
            self._add(_compressed((edge.u, edge.v), tuple(map(np.arange, edge.cost_s.shape)), edge.cost_s))
        self._sizes: dict[int, float] = {}
        self._degrees = [0] * len(self._cost)
        for node in range(len(self._cost)):
            self._measure(node)

    def copy(self) -> "Elimination":
        """An independent copy; tables are shared, because they are replaced and never written to."""
        new = object.__new__(Elimination)
        new._clock = self._clock
        new.total = self.total
        new._cost, new._tables_of = list(self._cost), list(self._tables_of)
        new._buckets, new._fixed, new._sizes = list(self._buckets), dict(self._fixed), dict(self._sizes)
        new._degrees = list(self._degrees)
        return new

    @property
    def left(self) -> tuple[int, ...]:
        """The nodes that are neither eliminated nor fixed."""
        return tuple(self._sizes)

    def degree(self, node: int) -> int:
        """Number of other nodes that share a table with a node."""
        return self._degrees[node]

    def run(self, max_entries: float) -> None:
        """Eliminates nodes, the smallest table first, while that table has at most `max_entries`."""
        while self._sizes:
            node = min(self._sizes, key=self._sizes.__getitem__)
            if self._sizes[node] > max_entries:
                return
            size = self._sizes.pop(node)
            bucket = _Bucket(node, self._cost[node], tuple(self._tables_of[node]))
            self._buckets.append(bucket)
            self._replace(bucket.tables, [_minimised(bucket)])
            self._clock.spend(NODE_S + ENTRY_S * size)

    def fix(self, node: int, label: int) -> None:
        """Fixes a node's label."""
        del self._sizes[node]
        self._fixed[node] = label
        self.total += float(self._cost[node][label])
        old = tuple(self._tables_of[node])
        self._replace(old, [_sliced(table, node, label) for table in old])

    def labels(self) -> Labels:
        """The best labels, read off from the last eliminated node to the first; no node may be left."""
        labels = [self._fixed.get(node, -1) for node in range(len(self._cost))]
        for bucket in reversed(self._buckets):
            cost = bucket.cost
            for table in bucket.tables:
                at = tuple(
                    classes if node == bucket.node else classes[labels[node]]
                    for node, classes in zip(table.nodes, table.classes, strict=True)
                )
                cost = cost + table.cost[at]
            labels[bucket.node] = int(cost.argmin())
        return tuple(labels)

    def _replace(self, old: Sequence[_Table], new: Sequence[_Table]) -> None:
        touched = sorted({node for table in (*old, *new) for node in table.nodes} & self._sizes.keys())
        for node in touched:
            self._tables_of[node] = [table for table in self._tables_of[node] if table not in old]
        for table in new:
            self._add(table)
        for node in touched:
            self._measure(node)

    def _add(self, table: _Table) -> None:
        """Adds a table; over one node it becomes that node's cost, over none a constant."""
        if not table.nodes:
            self.total += float(table.cost)
        elif len(table.nodes) == 1:
            (node,), (classes,) = table.nodes, table.classes
            self._cost[node] = self._cost[node] + table.cost[classes]
        else:
            for node in table.nodes:
                self._tables_of[node].append(table)

    def _measure(self, node: int) -> None:
        """Counts neighbours, and entries of the table that eliminating a node would make, before merging."""
        sizes: dict[int, int] = {node: len(self._cost[node])}
        for table in self._tables_of[node]:
            for other, num in zip(table.nodes, table.cost.shape, strict=True):
                sizes[other] = max(sizes.get(other, 1), num)
        self._sizes[node], self._degrees[node] = prod(map(float, sizes.values())), len(sizes) - 1


def _sliced(table: _Table, node: int, label: int) -> _Table:
    """A table with the label of one of its nodes fixed."""
    dim = table.nodes.index(node)
    nodes = table.nodes[:dim] + table.nodes[dim + 1 :]
    classes = table.classes[:dim] + table.classes[dim + 1 :]
    return _compressed(nodes, classes, table.cost.take(table.classes[dim][label], axis=dim))


def _minimised(bucket: _Bucket) -> _Table:
    """The table over a node's neighbours: the smallest sum over the node's labels."""
    node, cost, tables = bucket.node, bucket.cost, bucket.tables
    if not tables:
        return _Table((), (), cost.min())
    joint, total = _sum(node, tables, cost)
    nodes = tuple(other for other in joint if other != node)
    return _compressed(nodes, tuple(joint[other][0] for other in nodes), total.min(0))


def _sum(
    node: int, tables: Sequence[_Table], cost: np.ndarray
) -> tuple[dict[int, tuple[np.ndarray, np.ndarray]], np.ndarray]:
    """The joint classes of a node and its neighbours, and the sum of a cost and of tables over them."""
    nodes = tuple(sorted({other for table in tables for other in table.nodes} - {node}))
    joint = {
        other: _joint([table.classes[table.nodes.index(other)] for table in tables if other in table.nodes])
        for other in (node, *nodes)
    }
    classes, firsts = joint[node]
    own = np.full(len(firsts), np.inf)
    np.minimum.at(own, classes, cost)
    total = own.reshape((-1,) + (1,) * len(nodes))
    for table in tables:
        total = total + _aligned(table, (node, *nodes), joint)
    return joint, total


def _joint(partitions: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The coarsest partition finer than all: [labels] classes, and [classes] a label of each."""
    key = partitions[0]
    for classes in partitions[1:]:
        key = key * (int(classes.max()) + 1) + classes
    _, firsts, classes = np.unique(key, return_index=True, return_inverse=True)
    return classes, firsts


def _aligned(
    table: _Table, nodes: tuple[int, ...], joint: Mapping[int, tuple[np.ndarray, np.ndarray]]
) -> np.ndarray:
    """A table's costs over the joint classes of `nodes`, broadcastable."""
    cost = table.cost
    for dim, (node, classes) in enumerate(zip(table.nodes, table.classes, strict=True)):
        cost = cost.take(classes[joint[node][1]], axis=dim)
    order = sorted(range(len(table.nodes)), key=lambda dim: nodes.index(table.nodes[dim]))
    shape = [cost.shape[table.nodes.index(node)] if node in table.nodes else 1 for node in nodes]
    return cost.transpose(order).reshape(shape)


def _compressed(nodes: tuple[int, ...], classes: tuple[np.ndarray, ...], cost: np.ndarray) -> _Table:
    """The table with equal slices merged, dimension by dimension; nodes whose labels are all alike are left out."""
    merged: dict[int, np.ndarray] = {}
    for dim, (node, label_classes) in enumerate(zip(nodes, classes, strict=True)):
        slices = np.ascontiguousarray(cost.swapaxes(0, dim)).reshape(cost.shape[dim], -1)
        seen: dict[bytes, int] = {}
        index = [seen.setdefault(part.tobytes(), len(seen)) for part in slices]
        if len(seen) < len(index):
            cost = cost.take([index.index(number) for number in range(len(seen))], axis=dim)
        if len(seen) > 1:
            merged[node] = np.array(index)[label_classes]
    return _Table(tuple(merged), tuple(merged.values()), cost.squeeze())
