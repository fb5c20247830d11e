"""Warm starts: strategies of one step, carried to another step or to another mesh.

A search of a deep model solves a shortened step, whose representative layers stand for many
(`search.problem.shortening`). The whole step's program is folded as the shortened one's (`search.problem.equivalence`), so
nearly all nodes are shared decisions. The other nodes are solved with all shared ones fixed: in the whole step, for
instance, a represented layer hands its result to another represented layer. If representative layers differ in their
decisions, this may fail.
"""

from collections import Counter
from collections.abc import Hashable, Iterator

import numpy as np

from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.equivalence import blocks, places
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.strategies import port_specs
from autoshard.search.problem.strategy_graph import Maker, Port, StrategyGraph
from autoshard.search.solver.pbqp import Labels


def for_whole_step(short: MeshProblem, chosen: Labels, whole: MeshProblem) -> Labels:
    """The strategies of the whole step, given those of the shortened step.

    Raises:
      NoFitError: they contradict each other in the whole step.
    """
    strategies, others = whole.memory.costed.strategies, short.memory.costed.strategies
    place = {key: node for node, key in enumerate(_decided(short.memory.costed.graph))}
    kept: list[np.ndarray] = []
    for own, key in zip(strategies, _decided(whole.memory.costed.graph), strict=True):
        like = place.get(key, -1)
        is_known = like >= 0 and len(own) == len(others[like])
        kept.append(np.array([chosen[like]]) if is_known else np.arange(len(own)))
    return whole.completed(kept)


def for_rewritten_step(before: MeshProblem, chosen: Labels, after: MeshProblem) -> Labels:
    """The strategies of a rewritten step, given those of the step before. Ops of both steps keep their specs; new ops
    take the cheapest ones.

    Raises:
      NoFitError: they contradict each other in the rewritten step.
    """
    place = {key: spec for key, spec in _specs(before, chosen)}
    masks = [np.ones(len(own), bool) for own in after.memory.costed.strategies]
    for node, key, specs in _possible(after):
        if key in place:
            alike = masks[node] & (specs == place[key]).all(axis=1)
            masks[node] = alike if alike.any() else masks[node]
    return after.suited([np.flatnonzero(mask) for mask in masks])


def for_finer_mesh(before: MeshProblem, chosen: Labels, after: MeshProblem) -> Labels:
    """The strategies of a step on a mesh that splits axes. Both parts of a split axis do key the axis did."""
    joined = _joined(before.shape, after.shape)
    found = list[int]()
    for coarse, own, fine in zip(
        before.memory.costed.strategies, chosen, after.memory.costed.strategies, strict=True
    ):
        found.append(fine.index(coarse.assignment[own][joined], *coarse.copy_sources[own : own + 1]))
    return tuple(found)


def _joined(coarse: tuple[int, ...], fine: tuple[int, ...]) -> list[int]:
    """Per axis of the finer mesh, the axis of the coarser mesh that it is a part of.

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
    """Per operand and result: its node, a key that is equal in all steps made from one traced step, and its spec by
    strategy."""
    costed, seen = on_mesh.memory.costed, Counter[Hashable]()
    graph, strategies = costed.graph, costed.strategies
    for (op_class, i, is_result), port in graph.ports.items():
        op = graph.folded.op(op_class)
        called = op.number if op.op is None else op.op.outputs
        key = op.name, op.phase, called, op.count, i, is_result
        yield port.node, (*key, seen[key]), port_specs(port, strategies[port.node])
        seen[key] += 1  # slices of one array that a loop goes through share a key


def _specs(on_mesh: MeshProblem, chosen: Labels) -> Iterator[tuple[Hashable, np.ndarray]]:
    """Per operand and result, its key and its spec."""
    for node, key, specs in _possible(on_mesh):
        yield key, specs[chosen[node]]


def unlike_neighbours(short: FoldedProgram) -> frozenset[int]:
    """Representative blocks whose decisions differ from those of both neighbours. The shortened step does not show the
    values that blocks of such a run pass to each other."""
    program, stacks = short.program, dict[int, dict[int, dict[Hashable, int]]]()
    for op, place, op_class in zip(program.ops, places(program), short.class_of, strict=True):
        equivalence = op.op.equivalence if op.op is not None else None
        if equivalence is not None and equivalence.repeats > 1 and equivalence.place is not None:
            stack, _ = equivalence.place
            stacks.setdefault(stack, {}).setdefault(equivalence.block, {})[place] = op_class
    found = set[int]()
    for decided in stacks.values():
        blocks = sorted(decided)
        for n, block in enumerate(blocks):
            next_to_it = [*blocks[max(n - 1, 0) : n], *blocks[n + 1 : n + 2]]
            if all(decided[block] != decided[other] for other in next_to_it):
                found.add(block)
    return frozenset(found)


def passed_between_layers(short: MeshProblem, chosen: Labels) -> frozenset[int]:
    """Blocks that differ from both neighbours, and whose outgoing values have other layouts than their
    incoming ones.

    The other blocks pass values between layers in the layouts that the shortened step already shows.
    """
    entering, leaving = dict[int, dict[Hashable, Hashable]](), dict[int, dict[Hashable, Hashable]]()
    for maker, reader, where, how in _passed_on(short, chosen):
        leaving.setdefault(maker, {})[where] = how
        entering.setdefault(reader, {})[where] = how
    unlike = unlike_neighbours(short.memory.costed.graph.folded)
    return frozenset(b for b in unlike if entering.get(b) != leaving.get(b))


def _passed_on(on_mesh: MeshProblem, chosen: Labels) -> Iterator[tuple[int, int, Hashable, Hashable]]:
    """Per value that passes from one block to another: both blocks, its place in each, and its layouts on the way."""
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
    """Per node, a key of its decision."""
    return [
        *(group.op_classes for group in graph.groups),
        *((copy.maker, copy.phase) for copy in graph.copies),
    ]
