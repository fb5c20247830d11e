"""Strategies of a step that stands for a deeper one, handed over to that.

The whole step's program is folded as the shorter one's (`search.problem.likes`), so nearly all nodes are the same decisions.
What the whole one has besides (a layer in the middle hands its result to its like, where few layers stand for many it does
not) is solved for, with all else as it is. Where layers that stand for others are decided otherwise than one another, it is
not known beforehand that this can be done.
"""

from collections.abc import Hashable

import numpy as np

from search.mesh_problem import MeshProblem
from search.options import DEFAULT_TIME_LIMIT_S
from search.problem.folding import FoldedProgram
from search.problem.likes import places
from search.problem.strategy_graph import StrategyGraph
from search.recomputation import NO_CAP
from search.solver.pbqp import Labels


def handed_over(short: MeshProblem, chosen: Labels, whole: MeshProblem) -> Labels:
    """The strategies of the whole step where those of the one that stands for it are chosen so.

    Raises:
      NoFitError: they do not go together there.
    """
    strategies, others = whole.memory.costed.strategies, short.memory.costed.strategies
    place = {what: node for node, what in enumerate(_decided(short.memory.costed.graph))}
    kept: list[np.ndarray] = []
    for own, what in zip(strategies, _decided(whole.memory.costed.graph), strict=True):
        like = place.get(what, -1)
        is_known = like >= 0 and len(own) == len(others[like])
        kept.append(np.array([chosen[like]]) if is_known else np.arange(len(own)))
    return whole.solve(kept, NO_CAP, DEFAULT_TIME_LIMIT_S).labels


def hands_on_alike(short: FoldedProgram) -> bool:
    """Whether all blocks alike that stand for others are decided alike: then what one hands to the next, each hands to its
    own likes, and the whole step has nothing besides."""
    program, classes = short.program, dict[Hashable, set[int]]()
    for op, place, op_class in zip(program.ops, places(program), short.class_of, strict=True):
        if op.repeats > 1:
            classes.setdefault(place, set()).add(op_class)
    return all(len(alike) == 1 for alike in classes.values())


def _decided(graph: StrategyGraph) -> list[Hashable]:
    """Per node, what it decides."""
    return [
        *(group.op_classes for group in graph.groups),
        *((copy.maker, copy.phase) for copy in graph.copies),
    ]
