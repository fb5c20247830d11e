"""Strategies of a step that stands for a deeper one, handed over to that.

The whole step's program is folded as the shorter one's (`search.problem.likes`), so nearly all nodes are the same decisions.
What the whole one has besides (a layer in the middle hands its result to its like, where few layers stand for many it does
not) is solved for, with all else as it is.
"""

from collections.abc import Hashable
from contextlib import suppress

import numpy as np

from search.mesh_problem import MeshProblem
from search.options import DEFAULT_TIME_LIMIT_S
from search.problem.strategy_graph import StrategyGraph
from search.recomputation import NO_CAP
from search.solver.branch_and_bound import NoFitError
from search.solver.pbqp import Labels


def handed_over(short: MeshProblem, chosen: Labels, whole: MeshProblem) -> Labels:
    """The strategies of the whole step where those of the one that stands for it are chosen so."""
    strategies, others = whole.memory.costed.strategies, short.memory.costed.strategies
    place = {what: node for node, what in enumerate(_decided(short.memory.costed.graph))}
    given: dict[int, int] = {}
    for node, what in enumerate(_decided(whole.memory.costed.graph)):
        like = place.get(what)
        if like is not None and len(strategies[node]) == len(others[like]):
            given[node] = chosen[like]
    num_groups = len(whole.memory.costed.graph.groups)
    of_groups = {node: label for node, label in given.items() if node < num_groups}
    for known in (given, of_groups, {}):
        kept = tuple(
            np.array([known[node]]) if node in known else np.arange(len(one))
            for node, one in enumerate(strategies)
        )
        with suppress(NoFitError):
            return whole.solve(kept, NO_CAP, DEFAULT_TIME_LIMIT_S).labels
    raise AssertionError("what one op does, all can for which it stands")


def _decided(graph: StrategyGraph) -> list[Hashable]:
    """Per node, what it decides."""
    return [
        *(group.op_classes for group in graph.groups),
        *((copy.maker, copy.phase) for copy in graph.copies),
    ]
