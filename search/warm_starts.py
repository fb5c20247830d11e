"""Strategies of one step handed over to another: of one that stands for a deeper one to that, or to a rewritten one.

The whole step's program is folded as the shorter one's (`search.problem.likes`), so nearly all nodes are the same decisions.
What the whole one has besides (a layer in the middle hands its result to its like, where few layers stand for many it does
not) is solved for, with all else as it is. Where layers that stand for others are decided otherwise than one another, it is
not known beforehand that this can be done.
"""

from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np

from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.likes import blocks, places
from autoshard.search.problem.strategies import port_specs
from autoshard.search.problem.strategy_graph import Maker, Port, StrategyGraph
from autoshard.search.solver.pbqp import Labels


def for_whole_step(short: MeshProblem, chosen: Labels, whole: MeshProblem) -> Labels:
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
    return whole.completed(kept)


def for_rewritten_step(before: MeshProblem, chosen: Labels, after: MeshProblem) -> Labels:
    """The strategies of a step, for what it was rewritten to: ops that both have do alike, what is new what suits them best.

    Raises:
      NoFitError: they do not go together there.
    """
    place = {what: spec for what, spec in _specs(before, chosen)}
    masks = [np.ones(len(own), bool) for own in after.memory.costed.strategies]
    for node, what, specs in _possible(after):
        if what in place:
            alike = masks[node] & (specs == place[what]).all(axis=1)
            masks[node] = alike if alike.any() else masks[node]
    return after.suited([np.flatnonzero(mask) for mask in masks])


def for_finer_mesh(before: MeshProblem, chosen: Labels, after: MeshProblem) -> Labels:
    """The same strategies of the same step on a mesh that splits axes: both parts of an axis do what it did."""
    joined = _joined(before.shape, after.shape)
    found = list[int]()
    for coarse, own, fine in zip(
        before.memory.costed.strategies, chosen, after.memory.costed.strategies, strict=True
    ):
        found.append(fine.index(coarse.assignment[own][joined], *coarse.copy_sources[own : own + 1]))
    return tuple(found)


def _joined(coarse: tuple[int, ...], fine: tuple[int, ...]) -> list[int]:
    """Per axis of a mesh, that of another one of which it is a part.

    Example:
      >>> _joined((8, 8), (2, 4, 8))
      [0, 0, 1]
    """
    found, left = list[int](), list(coarse)
    for size in fine:
        axis = next(axis for axis, part in enumerate(left) if part > 1 or size == 1)
        assert left[axis] % size == 0, f"{fine} does not split axes of {coarse}"
        left[axis] //= size
        found.append(axis)
    return found


def _possible(on_mesh: MeshProblem) -> Iterator[tuple[int, Hashable, np.ndarray]]:
    """Of what is read and made: the node that decides of it, what it is called in all steps made of one, and by strategy its
    spec."""
    costed, seen = on_mesh.memory.costed, Counter[Hashable]()
    graph, strategies = costed.graph, costed.strategies
    for (op_class, i, is_result), port in graph.ports.items():
        op = graph.folded.op(op_class)
        called = op.number if op.op is None else op.op.outputs
        what = op.name, op.phase, called, op.count, i, is_result
        yield port.node, (*what, seen[what]), port_specs(port, strategies[port.node])
        seen[what] += 1  # the slices of what a loop goes through are called alike


def _specs(on_mesh: MeshProblem, chosen: Labels) -> Iterator[tuple[Hashable, np.ndarray]]:
    """What it is called, and the spec that it has."""
    for node, what, specs in _possible(on_mesh):
        yield what, specs[chosen[node]]


def unlike_neighbours(short: FoldedProgram) -> frozenset[int]:
    """The blocks that stand for others and are decided as none next to them that does: what one hands to its likes is not in
    the short step. The others hand to their likes what they hand to those next to them."""
    program, stacks = short.program, dict[int, dict[int, dict[Hashable, int]]]()
    for op, place, op_class in zip(program.ops, places(program), short.class_of, strict=True):
        likes = op.op.likes if op.op is not None else None
        if likes is not None and likes.repeats > 1 and likes.place is not None:
            stack, _ = likes.place
            stacks.setdefault(stack, {}).setdefault(likes.block, {})[place] = op_class
    found = set[int]()
    for decided in stacks.values():
        blocks = sorted(decided)
        for n, block in enumerate(blocks):
            next_to_it = [*blocks[max(n - 1, 0) : n], *blocks[n + 1 : n + 2]]
            if all(decided[block] != decided[other] for other in next_to_it):
                found.add(block)
    return frozenset(found)


def passed_between_layers(short: MeshProblem, chosen: Labels) -> frozenset[int]:
    """Of blocks that are decided as none next to them, those that do not hand things on as they are handed them. What one
    of the others hands to its likes lies as what it gets from its neighbours in the short step, and hands to them."""
    entering, leaving = dict[int, dict[Hashable, Hashable]](), dict[int, dict[Hashable, Hashable]]()
    for maker, reader, where, how in _passed_on(short, chosen):
        leaving.setdefault(maker, {})[where] = how
        entering.setdefault(reader, {})[where] = how
    unlike = unlike_neighbours(short.memory.costed.graph.folded)
    return frozenset(b for b in unlike if entering.get(b) != leaving.get(b))


def _passed_on(on_mesh: MeshProblem, chosen: Labels) -> Iterator[tuple[int, int, Hashable, Hashable]]:
    """What one block makes and another reads: both blocks, at which of their places, and how it lies until then."""
    costed, copies = on_mesh.memory.costed, dict[Maker, list[Hashable]]()
    graph, program, class_of = costed.graph, costed.graph.folded.program, costed.graph.folded.class_of
    block, place = blocks(program), places(program)

    def spec(port: Port) -> Hashable:
        return tuple(port_specs(port, costed.strategies[port.node])[chosen[port.node]].tolist())

    for copy in graph.copies:
        source = costed.strategies[copy.node].copy_sources[chosen[copy.node]]
        copies.setdefault(copy.maker, []).append((copy.phase, source, spec(Port(copy.node, ()))))
    for reader, op in enumerate(program.ops):
        for operand, v in enumerate(op.operands):
            maker, result = program.maker[v]
            source, target = block[maker], block[reader]
            if source is not None and target is not None and source != target:
                made, read = (class_of[maker], result), (class_of[reader], operand)
                lies = spec(graph.ports[*made, True]), copies.get(made), spec(graph.ports[*read, False])
                yield source, target, (place[maker], result, place[reader], operand), lies


def _decided(graph: StrategyGraph) -> list[Hashable]:
    """Per node, what it decides."""
    return [
        *(group.op_classes for group in graph.groups),
        *((copy.maker, copy.phase) for copy in graph.copies),
    ]
