"""Contradictions between the decisions of a plan, and the decisions that give way.

A user who edits a plan changes one line and means it. Other lines may contradict it. Two decisions contradict each
other if the edge between them forbids the strategies that they leave: for instance, a copy must have an array's old
layout, and the array has another one now. Decisions also contradict each other if a node between them is left without a
strategy. Arc consistency finds that (Mackworth, "Consistency in networks of relations", 1977): strategies without a
partner at some neighbour are removed, until all have partners or a node has none left.

Then one of the decisions around that node gives way and is made anew: one that was not edited before one that was, and
an op or a copy before an argument. At the end, decisions that gave way without need are restored. If all decisions were
edited, none can give way, and the contradictory ones are named.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.solver.pbqp import Edge, Problem

Kept = tuple[np.ndarray, ...]
"""Per node, the labels that are left."""


class ContradictionError(Exception):
    """Edited decisions that contradict each other.

    Attributes:
      nodes: the nodes of these decisions.
    """

    def __init__(self, nodes: tuple[int, ...]) -> None:
        super().__init__(f"nodes {nodes} contradict one another")
        self.nodes = nodes


@dataclass(frozen=True, slots=True)
class Reconciled:
    """Decisions without contradictions.

    Attributes:
      kept: per node, its labels.
      anew: the nodes whose decisions gave way.
    """

    kept: Kept
    anew: tuple[int, ...]


def reconciled(problem: Problem, kept: Kept, firmness: Mapping[int, int], most: int) -> Reconciled:
    """Lets decisions give way until the others are consistent.

    Args:
      problem: the edges with their forbidden pairs.
      kept: per node, the labels that the decisions leave.
      firmness: per decided node, its firmness. The least firm give way first, and among these the last one.
      most: the firmness of decisions that never give way.

    Raises:
      ContradictionError: decisions that never give way contradict one another.
    """
    around, free = _around(problem), [np.arange(len(cost)) for cost in problem.node_cost_s]

    def stuck(decided: Collection[int]) -> int | None:
        is_free = firmness.keys() - set(decided)
        left = [free[node] if node in is_free else labels for node, labels in enumerate(kept)]
        return _without_label(problem, left, around)

    decided, anew = dict(firmness), list[int]()
    while (node := stuck(decided)) is not None:
        involved = _involved(node, decided, around)
        loosest = min(involved, key=lambda n: (firmness[n], -n), default=None)
        if loosest is None or firmness[loosest] == most:
            raise ContradictionError(_least(involved, lambda some: stuck(some) is not None))
        del decided[loosest]
        anew.append(loosest)
    for node in reversed(anew):
        if stuck((*decided, node)) is None:
            decided[node] = firmness[node]
    gave_way = sorted(firmness.keys() - decided.keys())
    return Reconciled(tuple(free[n] if n in gave_way else kept[n] for n in range(len(kept))), tuple(gave_way))


def _least(nodes: tuple[int, ...], contradict: Callable[[tuple[int, ...]], bool]) -> tuple[int, ...]:
    """Some of the contradictory nodes that still contradict one another if all other nodes are undecided."""
    for node in nodes:
        others = tuple(n for n in nodes if n != node)
        if contradict(others):
            nodes = others
    return tuple(sorted(nodes))


def _around(problem: Problem) -> list[list[Edge]]:
    """Per node, its edges as this node sees them."""
    around: list[list[Edge]] = [[] for _ in problem.node_cost_s]
    for edge in problem.edges:
        around[edge.u].append(edge)
        around[edge.v].append(edge.transposed())
    return around


def _without_label(
    problem: Problem, kept: Sequence[np.ndarray], around: Sequence[Sequence[Edge]]
) -> int | None:
    """A node without any label; None if every node has a label with partners at all neighbours."""
    left = [k[np.isfinite(cost[k])] for k, cost in zip(kept, problem.node_cost_s, strict=True)]
    waiting = dict.fromkeys(range(len(left)))
    while waiting:
        node = next(iter(waiting))
        del waiting[node]
        before = len(left[node])
        for edge in around[node]:
            has_partner = np.isfinite(edge.cost_s[np.ix_(left[node], left[edge.v])]).any(axis=1)
            left[node] = left[node][has_partner]
        if not len(left[node]):
            return node
        if len(left[node]) < before:
            waiting |= dict.fromkeys(edge.v for edge in around[node])
    return None


def _involved(stuck: int, decided: Mapping[int, int], around: Sequence[Sequence[Edge]]) -> tuple[int, ...]:
    """The decisions that meet at a node: its own, and the nearest ones in each direction."""
    found = dict.fromkeys([stuck] if stuck in decided else [])
    seen, waiting = {stuck}, [stuck]
    while waiting:
        for edge in around[waiting.pop()]:
            if edge.v not in seen and not np.isfinite(edge.cost_s).all():
                seen.add(edge.v)
                if edge.v in decided:
                    found[edge.v] = None
                else:
                    waiting.append(edge.v)
    return tuple(found)
