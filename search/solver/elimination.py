"""Exact minimisation of a PBQP by eliminating one node after another.

To eliminate a node, add up the tables that it appears in, minimise over its labels, and keep the result as
one table over its neighbours (bucket elimination; Dechter 1999). Nodes of degree one or two vanish for almost
nothing: chains and trees of parameters, gradients and updates collapse; what grows is the tables around the
residual stream. The order is greedy: always the node whose table is smallest. Labels that cost the same
towards each other table's labels are merged first, and the merging is repeated on every new table: a table's
dimension is a node's *classes*, not its labels.

Widths are small for training steps, so tables fit once hopeless labels are dropped; `eliminate` gives up
where they do not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from search.solver.pbqp import Labels, Problem


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
    """What a node's label was minimised over."""

    node: int
    tables: tuple[_Table, ...]


def eliminate(problem: Problem, max_entries: float) -> tuple[float, Labels] | None:
    """The minimum of a merged problem, and where it is; None where a table would exceed `max_entries`."""
    tables = [
        _compressed((edge.u, edge.v), tuple(map(np.arange, edge.cost_s.shape)), edge.cost_s)
        for edge in problem.edges
    ]
    tables_of: list[list[_Table]] = [[] for _ in problem.node_cost_s]
    for table in tables:
        for node in table.nodes:
            tables_of[node].append(table)
    sizes = {node: _size(node, mine, problem) for node, mine in enumerate(tables_of)}
    total = 0.0
    buckets: list[_Bucket] = []
    while sizes:
        node = min(sizes, key=sizes.__getitem__)
        if sizes.pop(node) > max_entries:
            return None
        mine = tuple(tables_of[node])
        buckets.append(_Bucket(node, mine))
        new = _minimised(node, problem.node_cost_s[node], mine)
        for other in new.nodes:
            tables_of[other] = [table for table in tables_of[other] if node not in table.nodes] + [new]
            sizes[other] = _size(other, tables_of[other], problem)
        total += 0.0 if new.nodes else float(new.cost)
    return total, _picked(buckets, problem)


def _size(node: int, tables: Sequence[_Table], problem: Problem) -> float:
    """Entries of the table that eliminating a node would make from those that it is in, before merging."""
    sizes: dict[int, int] = {node: len(problem.node_cost_s[node])}
    for table in tables:
        for other, num in zip(table.nodes, table.cost.shape, strict=True):
            sizes[other] = max(sizes.get(other, 1), num)
    return prod(map(float, sizes.values()))


def _minimised(node: int, cost: np.ndarray, tables: Sequence[_Table]) -> _Table:
    """The table over a node's neighbours: the smallest sum over the node's labels."""
    nodes = tuple(sorted({other for table in tables for other in table.nodes} - {node}))
    if not tables:
        return _Table((), (), cost.min())
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
    return _compressed(nodes, tuple(joint[other][0] for other in nodes), total.min(0))


def _joint(partitions: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The coarsest partition finer than all: [labels] classes, and [classes] a label of each."""
    _, firsts, classes = np.unique(np.stack(partitions), axis=1, return_index=True, return_inverse=True)
    return classes.reshape(-1), firsts


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
    """The table with equal slices merged, dimension by dimension."""
    merged: list[np.ndarray] = []
    for dim, label_classes in enumerate(classes):
        slices = np.ascontiguousarray(np.moveaxis(cost, dim, 0)).reshape(cost.shape[dim], -1)
        seen: dict[bytes, int] = {}
        index = np.array([seen.setdefault(part.tobytes(), len(seen)) for part in slices])
        firsts = np.unique(index, return_index=True)[1]
        cost = cost.take(firsts, axis=dim)
        merged.append(index[label_classes])
    return _Table(nodes, tuple(merged), cost)


def _picked(buckets: Sequence[_Bucket], problem: Problem) -> Labels:
    """Each node's best label, last eliminated first."""
    labels = [-1] * len(problem.node_cost_s)
    for bucket in reversed(buckets):
        cost = problem.node_cost_s[bucket.node]
        for table in bucket.tables:
            at = tuple(
                classes if node == bucket.node else classes[labels[node]]
                for node, classes in zip(table.nodes, table.classes, strict=True)
            )
            cost = cost + table.cost[at]
        labels[bucket.node] = int(cost.argmin())
    return tuple(labels)
