"""The loops of descents by pair moves (`search.solver.local_search`) over a flat problem (`search.solver.flat`)."""

import numpy as np

from autoshard.search.solver.compiled import compiled
from autoshard.search.solver.flat import Flat, FlatRows, Places
from autoshard.search.solver.messages import table

ROUNDING = 1e-12
"""Relative; a smaller gain does not count."""


@compiled
def descend(
    problem: Flat, rows: FlatRows, price_s: float, labels: np.ndarray, over_bytes: np.ndarray, max_passes: int
) -> np.ndarray:
    """Passes over the edges until nothing changes; after the first pass, only over edges at or beside a changed node.

    Args:
      price_s: seconds a byte over a row's limit.
      labels: [nodes], the assignment; changed in place.
      over_bytes: [rows], bytes over the limit; changed in place.

    Returns:
      [edges], the number of moves of each edge.
    """
    topology = problem.topology
    num_moves = np.zeros(len(topology.at_u), np.int64)
    last_change = np.zeros(len(labels), np.int64)
    is_around = np.ones(len(labels), np.bool_)
    for number in range(1, max_passes + 1):
        has_changed = False
        for edge in range(len(num_moves)):
            side = topology.at_u[edge]
            u, v = int(topology.node[side]), int(topology.other[side])
            if is_around[u] or is_around[v]:
                num_moves[edge] += 1
                best_u, best_v = _best(problem, rows, price_s, labels, over_bytes, u, v, side)
                if best_u != labels[u] or best_v != labels[v]:
                    has_changed = True
                    last_change[u] = number if best_u != labels[u] else last_change[u]
                    last_change[v] = number if best_v != labels[v] else last_change[v]
                    _change(problem.places, rows, labels, over_bytes, u, best_u)
                    _change(problem.places, rows, labels, over_bytes, v, best_v)
        if not has_changed:
            break
        for node in range(len(labels)):
            is_around[node] = last_change[node] == number
            for side in range(topology.first[node], topology.first[node + 1]):
                is_around[node] |= last_change[topology.other[side]] == number
    return num_moves


@compiled
def _best(
    problem: Flat,
    rows: FlatRows,
    price_s: float,
    labels: np.ndarray,
    over_bytes: np.ndarray,
    u: int,
    v: int,
    side: int,
) -> tuple[int, int]:
    """The best labels of an edge's two nodes while all others stay; the present ones if no pair is better."""
    start, num_v, _, _ = table(problem, side)
    by_u, by_v = _cost(problem, labels, u, v), _cost(problem, labels, v, u)
    has_rows = rows.has_rows[u] or rows.has_rows[v]
    over = _overflow(problem.places, rows, labels, over_bytes, u, v) if has_rows else np.zeros(num_v)
    step = num_v if has_rows else 0
    best_s, best_u, best_v = np.inf, labels[u], labels[v]
    for label_u in range(len(by_u)):
        own_s, at, over_at = by_u[label_u], start + label_u * num_v, label_u * step
        for label_v in range(num_v):
            cost_s = (
                problem.entries_s[at + label_v] + own_s + by_v[label_v] + price_s * over[over_at + label_v]
            )
            if cost_s < best_s:
                best_s, best_u, best_v = cost_s, label_u, label_v
    now_s = problem.entries_s[start + labels[u] * num_v + labels[v]] + by_u[labels[u]] + by_v[labels[v]]
    now_s += price_s * over[labels[u] * step + labels[v]]
    if best_s < (now_s - ROUNDING * abs(now_s) if now_s < np.inf else now_s):
        return best_u, best_v
    return labels[u], labels[v]


@compiled
def _cost(problem: Flat, labels: np.ndarray, node: int, without: int) -> np.ndarray:
    """A node's cost per label: its own and its edges to all neighbours but one."""
    topology, begin = problem.topology, problem.places.labels[node]
    cost_s = np.empty(problem.places.labels[node + 1] - begin)
    for label in range(len(cost_s)):
        cost_s[label] = problem.nodes_s[begin + label]
    for side in range(topology.first[node], topology.first[node + 1]):
        if topology.other[side] != without:
            start, step, step_other, _ = table(problem, side)
            at = start + labels[topology.other[side]] * step_other
            for label in range(len(cost_s)):
                cost_s[label] += problem.entries_s[at + label * step]
    return cost_s


@compiled
def _overflow(
    places: Places, rows: FlatRows, labels: np.ndarray, over_bytes: np.ndarray, u: int, v: int
) -> np.ndarray:
    """[labels of u x labels of v]: the bytes by which rows overflow."""
    by_u, by_v = _added(places, rows, labels, u, v), _added(places, rows, labels, v, u)
    num_v = len(by_v)
    total, after = np.zeros(len(by_u) * num_v), np.empty(len(by_u) * num_v)
    for row in range(len(over_bytes)):
        for label_u in range(len(by_u)):
            for label_v in range(num_v):
                added = by_u[label_u, row] + by_v[label_v, row]
                after[label_u * num_v + label_v] = over_bytes[row] + added
        for pair in range(rows.first_pair[u], rows.first_pair[u + 1]):
            if rows.pair_row[pair] == row and rows.pair_other[pair] == v:
                at = rows.pair_start[pair]
                now = rows.pair_bytes[at + labels[u] * num_v + labels[v]]
                for place in range(len(after)):
                    after[place] += rows.pair_bytes[at + place] - now
        for place in range(len(after)):
            total[place] += max(after[place], 0.0)
    return total


@compiled
def _added(places: Places, rows: FlatRows, labels: np.ndarray, node: int, without: int) -> np.ndarray:
    """[labels, rows]: bytes that each label of a node adds, against the present label; without those of its pairs with
    another node."""
    begin, num_rows = places.labels[node], rows.bytes.shape[1]
    added = np.empty((places.labels[node + 1] - begin, num_rows))
    for label in range(len(added)):
        for row in range(num_rows):
            added[label, row] = rows.bytes[begin + label, row] - rows.bytes[begin + labels[node], row]
    for pair in range(rows.first_pair[node], rows.first_pair[node + 1]):
        other = rows.pair_other[pair]
        if other != without:
            num_other = places.labels[other + 1] - places.labels[other]
            at = rows.pair_start[pair] + labels[other]
            now = rows.pair_bytes[at + labels[node] * num_other]
            for label in range(len(added)):
                added[label, rows.pair_row[pair]] += rows.pair_bytes[at + label * num_other] - now
    return added


@compiled
def _change(
    places: Places, rows: FlatRows, labels: np.ndarray, over_bytes: np.ndarray, node: int, label: int
) -> None:
    """Gives a node another label."""
    if rows.has_rows[node]:
        added = _added(places, rows, labels, node, node)
        for row in range(len(over_bytes)):
            over_bytes[row] += added[label, row]
    labels[node] = label
