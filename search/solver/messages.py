"""The loops of message passing (`search.solver.trws`) over a flat problem (`search.solver.flat`).

Arrays over the sides' labels (`Places.messages`) hold one number for each label of a side's node: `messages` the cost that
was moved from the edge to the node. `cost_s` are the nodes' costs, with all that was moved to them.
"""

import numpy as np

from autoshard.search.solver.compiled import compiled
from autoshard.search.solver.flat import Flat


@compiled
def table(problem: Flat, side: int) -> tuple[int, int, int, int]:
    """An edge's table as one of its sides sees it: the place of its first entry, the steps from a label of the side's node
    and from a label of the other node to the next, and the number of the other node's labels."""
    topology, places = problem.topology, problem.places
    start, other = int(places.entries[topology.edge[side]]), topology.other[side]
    num_other = int(places.labels[other + 1] - places.labels[other])
    if topology.is_u[side]:
        return start, num_other, 1, num_other
    return start, 1, int(places.messages[side + 1] - places.messages[side]), num_other


@compiled
def sweep(
    problem: Flat,
    order: np.ndarray,
    rank: np.ndarray,
    cost_s: np.ndarray,
    messages: np.ndarray,
    picked: np.ndarray,
) -> float:
    """Visits the nodes in an order: the sum of the nodes' smallest costs, a lower bound.

    Args:
      order: [nodes], the nodes as they are visited.
      rank: [nodes], each node's place in the order.
      picked: [nodes], filled with the best label given the labels picked before; empty if none are wanted.
    """
    topology, places = problem.topology, problem.places
    bound_s = 0.0
    for node in order:
        first, last, num_earlier = topology.first[node], topology.first[node + 1], 0
        for side in range(first, last):
            if rank[topology.other[side]] < rank[node]:
                num_earlier += 1
                _pull(problem, cost_s, messages, node, side)
        if len(picked):
            picked[node] = _best(problem, rank, cost_s, messages, node, picked)
        num_later = last - first - num_earlier
        least_s = np.inf
        for label in range(places.labels[node], places.labels[node + 1]):
            share_s = cost_s[label] / max(num_earlier, num_later, 1)
            for side in range(first, last):
                if rank[topology.other[side]] > rank[node]:
                    messages[places.messages[side] + label - places.labels[node]] -= share_s
                    cost_s[label] -= share_s
            least_s = min(least_s, cost_s[label])
        bound_s += least_s
    return bound_s


@compiled
def _pull(problem: Flat, cost_s: np.ndarray, messages: np.ndarray, node: int, side: int) -> None:
    """Moves from an edge to a node all cost that the node's labels can carry."""
    topology, places = problem.topology, problem.places
    start, step, step_other, num_other = table(problem, side)
    theirs = places.messages[topology.mate[side]]
    for label in range(places.labels[node + 1] - places.labels[node]):
        least_s = np.inf
        for other in range(num_other):
            here_s = problem.entries_s[start + label * step + other * step_other] - messages[theirs + other]
            least_s = min(least_s, here_s)
        cost_s[places.labels[node] + label] += least_s - messages[places.messages[side] + label]
        messages[places.messages[side] + label] = least_s


@compiled
def _best(
    problem: Flat,
    rank: np.ndarray,
    cost_s: np.ndarray,
    messages: np.ndarray,
    node: int,
    picked: np.ndarray,
) -> int:
    """A node's best label, given the labels picked at earlier nodes."""
    topology, places = problem.topology, problem.places
    best, best_s = 0, np.inf
    for label in range(places.labels[node + 1] - places.labels[node]):
        total_s = cost_s[places.labels[node] + label]
        for side in range(topology.first[node], topology.first[node + 1]):
            if rank[topology.other[side]] < rank[node]:
                start, step, step_other, _ = table(problem, side)
                other = picked[topology.other[side]]
                theirs_s = messages[places.messages[topology.mate[side]] + other]
                own_s = messages[places.messages[side] + label]
                total_s += problem.entries_s[start + label * step + other * step_other] - own_s - theirs_s
        if total_s < best_s:
            best, best_s = label, total_s
    return best


@compiled
def moved(problem: Flat, messages: np.ndarray) -> np.ndarray:
    """[entries]: the edges' costs less the cost that messages have moved to their nodes."""
    topology, places = problem.topology, problem.places
    left_s = problem.entries_s.copy()
    for side in topology.at_u:
        start, step, _, num_other = table(problem, side)
        ours, theirs = places.messages[side], places.messages[topology.mate[side]]
        for label in range(places.messages[side + 1] - ours):
            for other in range(num_other):
                left_s[start + label * step + other] -= messages[ours + label] + messages[theirs + other]
    return left_s


@compiled
def side_minima(problem: Flat, left_s: np.ndarray) -> np.ndarray:
    """[sides x labels]: the smallest entry of an edge for each label of its node."""
    topology, places = problem.topology, problem.places
    least_s = np.empty(places.messages[-1])
    for side in range(len(topology.edge)):
        start, step, step_other, num_other = table(problem, side)
        for label in range(places.messages[side + 1] - places.messages[side]):
            edge_s = np.inf
            for other in range(num_other):
                edge_s = min(edge_s, left_s[start + label * step + other * step_other])
            least_s[places.messages[side] + label] = edge_s
    return least_s


@compiled
def _minimum(values: np.ndarray, begin: int, end: int) -> float:
    """The least of some successive values; +inf for none."""
    least = np.inf
    for place in range(begin, end):
        least = min(least, values[place])
    return least


@compiled
def label_bounds(problem: Flat, cost_s: np.ndarray, least_s: np.ndarray) -> tuple[np.ndarray, float]:
    """[labels of all nodes]: a lower bound on every assignment that uses a label; and a lower bound on every assignment.

    Args:
      cost_s: the nodes' costs.
      least_s: `side_minima`.
    """
    topology, places = problem.topology, problem.places
    bounds_s, total_s = cost_s.copy(), 0.0
    for node in range(len(places.labels) - 1):
        begin, end = int(places.labels[node]), int(places.labels[node + 1])
        node_s = _minimum(cost_s, begin, end)
        total_s += node_s
        for label in range(begin, end):
            bounds_s[label] -= node_s
        for side in range(topology.first[node], topology.first[node + 1]):
            at = int(places.messages[side])
            edge_s = _minimum(least_s, at, int(places.messages[side + 1]))
            total_s += edge_s if topology.is_u[side] else 0.0
            for label in range(begin, end):
                bounds_s[label] += least_s[at + label - begin] - edge_s
    for label in range(len(bounds_s)):
        bounds_s[label] += total_s
    return bounds_s, total_s


@compiled
def pair_bounds(
    problem: Flat,
    left_s: np.ndarray,
    least_s: np.ndarray,
    bounds_s: np.ndarray,
    total_s: float,
) -> np.ndarray:
    """[entries]: a lower bound on every assignment that uses a pair of labels.

    Args:
      left_s: `moved`.
      least_s: `side_minima`.
      bounds_s: `label_bounds`.
      total_s: the bound on every assignment.
    """
    topology, places = problem.topology, problem.places
    pairs_s = left_s.copy()
    for side in topology.at_u:
        start, step, _, num_other = table(problem, side)
        ours, theirs = places.messages[side], places.messages[topology.mate[side]]
        at_u, at_v = places.labels[topology.node[side]], places.labels[topology.other[side]]
        edge_s = _minimum(least_s, int(ours), int(places.messages[side + 1]))
        for label in range(places.messages[side + 1] - ours):
            own_s = bounds_s[at_u + label] - least_s[ours + label] + edge_s - total_s
            for other in range(num_other):
                their_s = bounds_s[at_v + other] - least_s[theirs + other]
                pairs_s[start + label * step + other] += own_s + their_s
    return pairs_s


@compiled
def drop_unsupported(problem: Flat, is_kept: np.ndarray, is_pending: np.ndarray) -> None:
    """Drops the labels without an allowed neighbour: at pending nodes, then around every node that has lost labels.

    Args:
      is_kept: [labels of all nodes]; changed in place.
      is_pending: [nodes]; changed in place.
    """
    topology = problem.topology
    has_dropped = True
    while has_dropped:
        has_dropped = False
        for node in range(len(is_pending)):
            if is_pending[node]:
                is_pending[node] = False
                if _drop(problem, is_kept, node):
                    has_dropped = True
                    for side in range(topology.first[node], topology.first[node + 1]):
                        is_pending[topology.other[side]] = True


@compiled
def _drop(problem: Flat, is_kept: np.ndarray, node: int) -> bool:
    """Drops a node's labels that some edge forbids with all labels of its other node; true if it had one."""
    topology, places = problem.topology, problem.places
    has_dropped = False
    for side in range(topology.first[node], topology.first[node + 1]):
        start, step, step_other, num_other = table(problem, side)
        theirs = places.labels[topology.other[side]]
        for label in range(places.labels[node + 1] - places.labels[node]):
            is_supported = not is_kept[places.labels[node] + label]
            for other in range(num_other):
                is_finite = np.isfinite(problem.entries_s[start + label * step + other * step_other])
                is_supported |= is_finite and is_kept[theirs + other]
            if not is_supported:
                is_kept[places.labels[node] + label] = False
                has_dropped = True
    return has_dropped


@compiled
def pairs_of(problem: Flat, is_kept: np.ndarray) -> np.ndarray:
    """[entries]: true if both labels are kept."""
    topology, places = problem.topology, problem.places
    are_kept = np.empty(places.entries[-1], np.bool_)
    for side in topology.at_u:
        start, step, _, num_other = table(problem, side)
        node, other = topology.node[side], topology.other[side]
        for label in range(places.labels[node + 1] - places.labels[node]):
            for theirs in range(num_other):
                is_pair = is_kept[places.labels[node] + label] and is_kept[places.labels[other] + theirs]
                are_kept[start + label * step + theirs] = is_pair
    return are_kept
