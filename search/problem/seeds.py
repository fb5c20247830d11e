"""Plans as experts write them, by rule: the points where a search begins.

A rule says over which mesh axes the batch is split, and the specs of state: whole (data parallelism), split over all
axes (ZeRO-3, FSDP) or some (hybrid sharding), parameters whole and optimizer state split (ZeRO-1), or as its readers
need it. Where a network is so slow that fewer devices would do, a frugal rule repeats the computation over some axes
and splits state over all. Devices along these axes share the memory, and have each gradient without communication.
Everything else follows. Every op that has a loop over examples splits this one over the batch's axes. Then each node in
turn, in program order, takes the strategy that is cheapest for its neighbours' strategies so far. Where the batch
leaves an axis free, that gives Megatron's columns and rows, sequence or expert parallelism, because computation that is
not split costs more than the collectives.

Rules know roles and sizes, and no model.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, permutations

import numpy as np

from autoshard.search.ir.graph import Role
from autoshard.search.ir.spec import WHOLE
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.strategies import NONE, REMEMBERED, Strategies, port_specs
from autoshard.search.problem.strategy_graph import StrategyGraph
from autoshard.search.solver.pbqp import Labels, Problem

Axes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SeedRule:
    """The mesh axes over which arguments are split, by role; None for those that take the spec that their readers need.

    If it is frugal, ops with a loop over examples are not split over the axes that the batch leaves free.
    """

    batch: Axes
    parameters: Axes | None
    others: Axes | None
    splits_storage_only: bool = False

    @property
    def places(self) -> tuple[bool, bool]:
        """Whether it says where parameters lie, and where all others but the batch do."""
        return self.parameters is not None, self.others is not None

    def axes(self, role: Role) -> Axes | None:
        """The axes over which an argument of that role is split."""
        if role is Role.BATCH:
            return self.batch
        return self.parameters if role in (Role.PARAMETER, Role.FROZEN) else self.others


def rules(num_devices: tuple[int, ...]) -> Iterator[SeedRule]:
    """The rules for a mesh of these sizes."""
    every = tuple(axis for axis, size in enumerate(num_devices) if size > 1)
    some = [axes for n in range(len(every), 0, -1) for axes in combinations(every, n)]
    for batch in some:
        yield SeedRule(batch, (), ())
        yield SeedRule(batch, (), every)
        yield from (SeedRule(batch, axes, axes) for axes in some)
        yield SeedRule(batch, None, None)
        if batch != every:
            yield SeedRule(batch, every, every, splits_storage_only=True)


def seeds(costed: CostedGraph, problem: Problem, kept: Sequence[np.ndarray]) -> Iterator[Labels]:
    """A full assignment by each rule, of the kept strategies; its cost may be infinite."""
    propagation, found = _Propagation(costed, problem, kept), dict[SeedRule, Labels]()
    every = tuple(rules(costed.resharder.mesh.shape))
    for places in dict.fromkeys(rule.places for rule in every):
        alike = [rule for rule in every if rule.places == places]
        found |= zip(alike, propagation.run(alike), strict=True)
    yield from (found[rule] for rule in every)


@dataclass(frozen=True, eq=False)
class _Propagation:
    """Gives each node in program order the cheapest strategy for its neighbours' strategies so far; many rules at once."""

    costed: CostedGraph
    problem: Problem
    kept: Sequence[np.ndarray]

    def run(self, rules: Sequence[SeedRule]) -> list[Labels]:
        """The full assignments that follow from rules that place arguments of the same roles."""
        labels, following = self._placed(rules), defaultdict[tuple[Axes, bool], list[int]](list)
        for i, rule in enumerate(rules):
            following[rule.batch, rule.splits_storage_only].append(i)
        for node in (node for node in self._order if node not in labels):
            cost_s = np.broadcast_to(
                self.problem.node_cost_s[node], (len(rules), len(self.costed.strategies[node]))
            )
            for other, between_s in self._neighbours[node]:
                if other in labels:
                    cost_s = cost_s + between_s[labels[other]]
            labels[node] = self._cheapest(node, cost_s, following)
        return [*zip(*(labels[node].tolist() for node in range(len(labels))), strict=True)]

    def _placed(self, rules: Sequence[SeedRule]) -> dict[int, np.ndarray]:
        """By node, [rules]: the strategies of the arguments that rules place: the largest dimension that can be is split."""
        labels = dict[int, np.ndarray]()
        for (node, role), (specs, dims) in self._arguments.items():
            apart = [rule.splits_storage_only and role is not Role.BATCH for rule in rules]
            over = [axes for rule in rules if (axes := rule.axes(role)) is not None]
            if over and node not in labels:
                how = [*zip(over, apart, strict=True)]
                at = {one: _placed_at(specs, dims, *one) for one in dict.fromkeys(how)}
                labels[node] = self.kept[node][[at[one] for one in how]]
        return labels

    def _cheapest(
        self, node: int, cost_s: np.ndarray, following: Mapping[tuple[Axes, bool], Sequence[int]]
    ) -> np.ndarray:
        """[rules]: a node's cheapest strategy of those that follow a rule.

        Args:
          node: the node.
          cost_s: [rules, strategies] their costs.
          following: the rules, by the axes of their batches and whether they are frugal.
        """
        if node not in self._batch_factors:
            return self.kept[node][cost_s[:, self.kept[node]].argmin(axis=1)]
        found = np.zeros(len(cost_s), int)
        for how, some in following.items():
            kept = self._following(node, *how)
            found[some] = kept[cost_s[np.ix_(some, kept)].argmin(axis=1)]
        return found

    @cached_property
    def _arguments(self) -> dict[tuple[int, Role], tuple[np.ndarray, list[int]]]:
        """By node and role of arguments: [kept strategies, axes] their specs, and their dimensions in the order in which
        rules split them."""
        graph, found = self.costed.graph, dict[tuple[int, Role], tuple[np.ndarray, list[int]]]()
        for i, argument in enumerate(graph.folded.program.step.arguments):
            port = graph.ports[graph.folded.class_of[i], 0, True]
            if (port.node, argument.role) not in found:
                largest_first = np.argsort([-size for size in graph.extents(port)], kind="stable").tolist()
                dims = [0] if argument.role is Role.BATCH else largest_first
                specs = port_specs(port, self.costed.strategies[port.node])[self.kept[port.node]]
                found[port.node, argument.role] = specs, dims
        return found

    def _following(self, node: int, batch: Axes, splits_storage_only: bool) -> np.ndarray:
        """The strategies that split the loop over examples over the batch's axes and no others, and under a frugal rule
        no other loop; all where none does."""
        kept, factor = self.kept[node], self._batch_factors[node]
        follows = _follows(self.costed.strategies[node], factor, batch, splits_storage_only)
        following = kept[follows[kept]]
        return following if len(following) else kept

    @cached_property
    def _neighbours(self) -> list[list[tuple[int, np.ndarray]]]:
        """By node: its neighbours, and the costs between them, the neighbour's strategies first."""
        found: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.problem.node_cost_s]
        for edge in self.problem.edges:
            found[edge.u].append((edge.v, edge.cost_s.T))
            found[edge.v].append((edge.u, edge.cost_s))
        return found

    @cached_property
    def _order(self) -> list[int]:
        """Nodes in program order; copies behind their source, or their only reader; arguments last."""
        graph = self.costed.graph
        first = [min(graph.folded.members[k][0] for k in group.op_classes) for group in graph.groups]
        rank = {node: (self._is_input(node), float(at)) for node, at in enumerate(first)}
        for copy in graph.copies:
            behind = copy.targets[0].node if len(copy.targets) == 1 else copy.source.node
            rank[copy.node] = (False, rank[behind][1] + 0.5)
        return sorted(rank, key=lambda node: (*rank[node], node))

    def _is_input(self, node: int) -> bool:
        return self.costed.graph.folded.op(self.costed.graph.groups[node].op_classes[0]).name == "input"

    @cached_property
    def _batch_factors(self) -> dict[int, int]:
        return batch_factors(self.costed.graph)


@lru_cache(maxsize=REMEMBERED)
def _follows(strategies: Strategies, factor: int, batch: Axes, splits_storage_only: bool) -> np.ndarray:
    """[strategies]: whether they split a factor over these axes and no others, and, if frugal, nothing else."""
    is_batch = strategies.assignment == factor
    is_split = strategies.assignment != NONE if splits_storage_only else is_batch
    wanted = np.isin(np.arange(is_batch.shape[1]), batch)
    return ((is_split == wanted) & (is_batch == wanted)).all(axis=1)


def batch_factors(graph: StrategyGraph) -> dict[int, int]:
    """By group, for those that have one: the factor that loops over examples, followed through the step from the first
    dimensions of its batch."""
    found: dict[int, int] = {}
    for i, argument in enumerate(graph.folded.program.step.arguments):
        port = graph.ports[graph.folded.class_of[i], 0, True]
        if argument.role is Role.BATCH and port.dims and port.dims[0]:
            found[port.node] = port.dims[0][0]
    for dependency in graph.folded.dependencies:
        made = graph.ports[dependency.producer, dependency.result, True]
        read = graph.ports[dependency.consumer, dependency.operand, False]
        if made.node in found and read.node not in found:
            for out, into in zip(made.dims, read.dims, strict=True):
                if out and into and out[0] == found[made.node]:
                    found[read.node] = into[0]
    return found


def _placed_at(specs: np.ndarray, dims: Sequence[int], axes: Axes, apart: bool) -> int:
    """The strategy of an argument that is split over these axes, if `apart` over two dimensions where it can be."""
    at = _split_apart(specs, dims, axes) if apart else None
    return _split_over(specs, dims, axes) if at is None else at


def _split_apart(specs: np.ndarray, dims: Sequence[int], axes: Axes) -> int | None:
    """The strategy that splits one dimension over the innermost of these axes and another over the rest, if there is one."""
    for inner, outer in permutations(dims, 2):
        wanted = np.full(specs.shape[1], WHOLE)
        wanted[list(axes)] = outer
        wanted[axes[-1]] = inner
        if (at := (specs == wanted).all(axis=1)).any():
            return int(at.argmax())
    return None


def _split_over(specs: np.ndarray, dims: Sequence[int], axes: Axes) -> int:
    """The strategy that splits the first of some dimensions that can be over these axes and no others; or nothing."""
    for dim in (*dims, WHOLE):
        wanted = np.full(specs.shape[1], WHOLE)
        wanted[list(axes)] = dim
        if (at := (specs == wanted).all(axis=1)).any():
            return int(at.argmax())
    return 0
