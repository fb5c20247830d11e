"""A PBQP as flat arrays, which compiled loops (`search.solver.messages`, `search.solver.moves`) read.

Each edge has two *sides*, one for each of its nodes. Sides are sorted by node, so that a node's sides are consecutive.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from autoshard.search.solver.pbqp import Labels, MemoryConstraint, Problem


class Topology(NamedTuple):
    """Which nodes the edges join.

    Attributes:
      first: [nodes + 1], the number of each node's first side.
      node: [sides], the side's node.
      edge: [sides], the edge.
      other: [sides], the node at the edge's other end.
      mate: [sides], the edge's other side.
      is_u: [sides], true at the edge's node u, whose labels are the rows of the edge's table.
      at_u: [edges], the side at node u.
    """

    first: np.ndarray
    node: np.ndarray
    edge: np.ndarray
    other: np.ndarray
    mate: np.ndarray
    is_u: np.ndarray
    at_u: np.ndarray


class Places(NamedTuple):
    """Where the numbers of a node, edge or side begin in a flat array; the last entry is the array's length.

    Attributes:
      labels: [nodes + 1], of a node's labels.
      entries: [edges + 1], of an edge's table, [labels of u, labels of v].
      messages: [sides + 1], of the labels of a side's node.
    """

    labels: np.ndarray
    entries: np.ndarray
    messages: np.ndarray


class Flat(NamedTuple):
    """A problem.

    Attributes:
      topology: which nodes the edges join.
      places: where a node's and an edge's costs begin.
      nodes_s: [labels of all nodes], seconds.
      entries_s: [entries of all edges], seconds.
    """

    topology: Topology
    places: Places
    nodes_s: np.ndarray
    entries_s: np.ndarray


class FlatRows(NamedTuple):
    """Memory rows near an assignment.

    Attributes:
      bytes: [labels of all nodes, rows].
      has_rows: [nodes], true if a row depends on the node's label.
      first_pair: [nodes + 1], the number of each node's first pair. Each pair of a row appears twice, once for each node.
      pair_row: [pairs], the pair's row.
      pair_other: [pairs], the pair's other node.
      pair_start: [pairs], where the pair's bytes begin, [labels of the node, labels of the other node].
      pair_bytes: [entries of all pairs].
    """

    bytes: np.ndarray
    has_rows: np.ndarray
    first_pair: np.ndarray
    pair_row: np.ndarray
    pair_other: np.ndarray
    pair_start: np.ndarray
    pair_bytes: np.ndarray


def flat(problem: Problem) -> Flat:
    """A problem as flat arrays."""
    topology = _topology(problem)
    return Flat(
        topology,
        places(topology, np.array(problem.num_labels, int)),
        np.concatenate((*problem.node_cost_s, np.zeros(0))),
        np.concatenate((*(edge.cost_s.ravel() for edge in problem.edges), np.zeros(0))),
    )


def flat_cost_s(problem: Flat, labels: Labels) -> float:
    """The cost of a full assignment, +inf if it has a forbidden label or pair. Python's sum hardly rounds, so that equal
    costs compare equal."""
    topology, places = problem.topology, problem.places
    chosen, num_labels = np.array(labels, int), np.diff(places.labels)
    u, v = topology.node[topology.at_u], topology.other[topology.at_u]
    pairs = places.entries[:-1] + chosen[u] * num_labels[v] + chosen[v]
    nodes_s, pairs_s = problem.nodes_s[places.labels[:-1] + chosen], problem.entries_s[pairs]
    return sum(nodes_s.tolist()) + sum(pairs_s.tolist())


def flat_bytes(row: MemoryConstraint, places: Places) -> np.ndarray:
    """[labels of all nodes]: the bytes of a row, without its fixed bytes and its pairs."""
    num_bytes = np.zeros(places.labels[-1])
    for node, per_label in row.bytes:
        num_bytes[places.labels[node] : places.labels[node + 1]] = per_label
    return num_bytes


def flat_rows(rows: Sequence[MemoryConstraint], places: Places) -> FlatRows:
    """Memory rows and expansions as flat arrays."""
    starts = places.labels
    dense = np.array([flat_bytes(row, places) for row in rows]).reshape(len(rows), starts[-1])
    sided = [
        one
        for number, row in enumerate(rows)
        for u, v, num_bytes in row.pairs
        for one in ((u, number, v, num_bytes), (v, number, u, num_bytes.T))
    ]
    sided.sort(key=lambda pair: pair[0])
    nodes = np.array([pair[0] for pair in sided], int)
    sizes = [pair[3].size for pair in sided]
    first = np.searchsorted(nodes, np.arange(len(starts)))
    least, most = (bound.reduceat(dense, starts[:-1], axis=1) for bound in (np.minimum, np.maximum))
    has_rows = (np.diff(first) > 0) | (most > least).any(axis=0)
    return FlatRows(
        np.ascontiguousarray(dense.T),
        has_rows,
        first,
        np.array([pair[1] for pair in sided], int),
        np.array([pair[2] for pair in sided], int),
        np.concatenate((np.zeros(1, int), np.cumsum(np.array(sizes, int))))[:-1],
        np.concatenate((*(pair[3].ravel() for pair in sided), np.zeros(0))),
    )


def _topology(problem: Problem) -> Topology:
    num_edges = len(problem.edges)
    nodes = np.array([node for edge in problem.edges for node in (edge.u, edge.v)], int)
    order = np.argsort(nodes, kind="stable")
    place = np.empty(2 * num_edges, int)
    place[order] = np.arange(2 * num_edges)
    first = np.searchsorted(nodes[order], np.arange(len(problem.node_cost_s) + 1))
    other, mate = nodes[order ^ 1], place[order ^ 1]
    return Topology(first, nodes[order], order // 2, other, mate, order % 2 == 0, place[::2].copy())


def places(topology: Topology, num_labels: np.ndarray) -> Places:
    """The places in flat arrays, for a number of labels: [nodes]."""
    at_u = topology.at_u
    of_sides = num_labels[topology.node]
    of_edges = of_sides[at_u] * of_sides[topology.mate[at_u]]
    return Places(_starts(num_labels), _starts(of_edges), _starts(of_sides))


def tables(problem: Flat, of_entries: np.ndarray) -> list[np.ndarray]:
    """An array over all entries, by edge: [labels of u, labels of v]."""
    topology, places = problem.topology, problem.places
    num_labels = np.diff(places.labels)[topology.node[topology.at_u]]
    parts = zip(pairwise(places.entries.tolist()), num_labels.tolist(), strict=True)
    return [of_entries[begin:end].reshape(num_u, -1 if num_u else 0) for (begin, end), num_u in parts]


def _starts(sizes: np.ndarray) -> np.ndarray:
    return np.concatenate((np.zeros(1, int), np.cumsum(sizes)))
