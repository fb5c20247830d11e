"""The strategies of each node on one mesh.

A group's strategy says for each mesh axis which of the group's factors it splits, or none. A copy's strategy is
a spec and a way to get there. Strategies that do not divide evenly, or whose values no `PartitionSpec` could
describe (a compound dimension split in its minor part), are left out.

A factor along which windows slide is split evenly, into parts that are no shorter than their halos. It is not split where
the examples divide over all devices: any plan that splits rows over an axis could split examples over it instead, with
the same arithmetic, the same partial sums, the same memory and no halo.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise, product
from math import prod

import numpy as np

from autoshard.search.ir.factors.rule import Dims
from autoshard.search.ir.spec import PARTIAL, WHOLE, Spec, may_split
from autoshard.search.problem.op_groups import OpGroup
from autoshard.search.problem.reshard import Resharder
from autoshard.search.problem.strategy_graph import STUCK, Copy, Port, StrategyGraph

NONE = -1
"""In an assignment: the axis splits no factor; devices along it repeat the computation."""
ALL_PARTIAL = -2
"""In an assignment of a sum group: all its values are partial over the axis."""

MAX_LABELS = 130
"""Strategies per node; above it, the factors of smallest extent are split over neighbouring axes together only. Three axes
with four factors have 125."""

REMEMBERED = 4096
"""Size of the memos for nodes and ports with equal factors; many of a training step's have. Source: a choice of ours; a
step has some hundred."""


class CopySource(StrEnum):
    """The source of a copy, under a strategy."""

    SAME = "same"
    """It is the source's own array."""
    FRESH = "fresh"
    """It is resharded from the source where it is first needed."""
    KEPT = "kept"
    """It is the forward phase's copy, kept until now."""


@dataclass(frozen=True, slots=True, eq=False)
class Strategies:
    """The strategies of one node.

    Attributes:
      assignment: [strategies, axes]: per mesh axis, the factor that it splits, NONE or ALL_PARTIAL; for a copy, a
        spec.
      copy_sources: per strategy, for a copy; empty for a group.
    """

    assignment: np.ndarray
    copy_sources: tuple[CopySource, ...] = ()

    def __len__(self) -> int:
        return len(self.assignment)

    def index(self, assignment: np.ndarray, source: CopySource | None = None) -> int:
        """The number of a strategy."""
        is_alike = (self.assignment == assignment).all(axis=1)
        if source is not None:
            is_alike &= np.array([one is source for one in self.copy_sources])
        return int(np.flatnonzero(is_alike)[0])

    def only(self, kept: np.ndarray) -> "Strategies":
        """The kept ones of the strategies."""
        return Strategies(
            self.assignment[kept], tuple(self.copy_sources[k] for k in kept if self.copy_sources)
        )


MostParts = tuple[tuple[int, int], ...]
"""Factors along which windows slide, each with the largest number of parts into which it may be split."""


def group_strategies(
    group: OpGroup,
    ports: tuple[Port, ...],
    mesh_shape: tuple[int, ...],
    must_divide: bool,
    most_parts: MostParts = (),
) -> Strategies:
    """All strategies of a group whose values enter and leave at `ports`.

    Arguments and results of the step must divide evenly (JAX requires it), and so must the operands of kernels and
    factors that are only a part of some dimension; other factors may be padded. An axis of size one has one choice,
    because it splits nothing.
    """
    minor = frozenset(f for p in ports for dim in p.dims for f in dim[1:])
    even = frozenset(dim[0] for p in ports for dim in p.dims if len(dim) > 1)
    return _of_factors(group.sizes, group.is_sum, minor, even, mesh_shape, must_divide, most_parts)


@lru_cache(maxsize=REMEMBERED)
def _of_factors(
    sizes: tuple[int, ...],
    is_sum: bool,
    minor: frozenset[int],
    even: frozenset[int],
    mesh_shape: tuple[int, ...],
    must_divide: bool,
    most_parts: MostParts,
) -> Strategies:
    most = dict(most_parts)

    def may_split_into(factor: int, parts: int) -> bool:
        size = sizes[factor]
        if must_divide or factor in even or factor in most:
            return size % parts == 0 and parts <= most.get(factor, parts)
        return may_split(size, parts)

    factors = [f for f, size in enumerate(sizes) if f not in minor and most.get(f, size) > 1]
    places = [NONE, *([ALL_PARTIAL] if is_sum else [])]
    largest = sorted(factors, key=lambda f: (-sizes[f], f))
    splitting = [axis for axis, n in enumerate(mesh_shape) if n > 1]
    while largest and (len(largest) + len(places)) ** len(splitting) > MAX_LABELS:
        largest.pop()
    alone = {*places, *largest}

    def is_tried(strategy: tuple[int, ...]) -> bool:
        """Whether a strategy splits only the largest factors, or gives neighbouring axes one choice, as a mesh of fewer
        axes does."""
        return alone.issuperset(strategy) or any(strategy[a] == strategy[b] for a, b in pairwise(splitting))

    choices = (*places, *factors)
    strategies = [
        strategy
        for strategy in product(*(choices if n > 1 else (NONE,) for n in mesh_shape))
        if is_tried(strategy)
        and all(may_split_into(f, _parts(strategy, f, mesh_shape)) for f in set(strategy) if f >= 0)
    ]
    return Strategies(np.array(strategies, np.int64).reshape(len(strategies), len(mesh_shape)))


def _parts(strategy: tuple[int, ...], factor: int, mesh_shape: tuple[int, ...]) -> int:
    return prod(n for f, n in zip(strategy, mesh_shape, strict=True) if f == factor)


def port_specs(port: Port, strategies: Strategies) -> np.ndarray:
    """[strategies, axes]: the spec of the value at a port, per strategy."""
    if strategies.copy_sources:
        return strategies.assignment
    return _specs(port.dims, port.partial_over, strategies)


@lru_cache(maxsize=REMEMBERED)
def _specs(dims: Dims, partial_over: tuple[int, ...], strategies: Strategies) -> np.ndarray:
    place = {NONE: WHOLE, ALL_PARTIAL: PARTIAL} | dict.fromkeys(partial_over, PARTIAL)
    place |= {dim[0]: d for d, dim in enumerate(dims) if dim and dim[0] != STUCK}
    assignment = strategies.assignment
    table = np.array([place.get(f, WHOLE) for f in range(ALL_PARTIAL, int(assignment.max()) + 1)])
    return table[assignment - ALL_PARTIAL]


def port_shares(
    port: Port, strategies: Strategies, extents: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> np.ndarray:
    """[strategies]: the share of a value of these extents at a port that one device holds, padding included."""
    return _shares(port.dims, port.partial_over, strategies, extents, mesh_shape)


@lru_cache(maxsize=REMEMBERED)
def _shares(
    dims: Dims,
    partial_over: tuple[int, ...],
    strategies: Strategies,
    extents: tuple[int, ...],
    mesh_shape: tuple[int, ...],
) -> np.ndarray:
    specs, share = port_specs(Port(0, dims, partial_over), strategies), np.ones(len(strategies))
    for d, size in enumerate(extents):
        parts = np.where(specs == d, np.array(mesh_shape), 1).prod(axis=1)
        share = share * np.where(parts > 1, np.ceil(size / parts) / max(size, 1), 1.0)
    return share


def splits(factors: Iterable[int], assignment: np.ndarray) -> np.ndarray:
    """[strategies, axes]: whether an axis splits one of the factors. (A table is several times as fast as `np.isin`.)"""
    is_among = np.zeros(int(assignment.max(initial=0)) + 1 - ALL_PARTIAL, bool)
    is_among[[f - ALL_PARTIAL for f in factors if f - ALL_PARTIAL < len(is_among)]] = True
    return is_among[assignment - ALL_PARTIAL]


@lru_cache(maxsize=REMEMBERED)
def split_over(
    factors: tuple[int, ...], strategies: Strategies
) -> tuple[tuple[tuple[int, ...], np.ndarray], ...]:
    """The sets of axes that split some of the factors, and the strategies where these do."""
    split = splits(factors, strategies.assignment)
    found = ((tuple(np.flatnonzero(row).tolist()), row) for row in np.unique(split, axis=0) if row.any())
    return tuple((axes, np.flatnonzero((split == row).all(axis=1))) for axes, row in found)


def shards_over(factors: frozenset[int], strategies: Strategies, mesh_shape: tuple[int, ...]) -> np.ndarray:
    """[strategies]: the number of parts into which a loop nest over these factors is cut."""
    split = splits(factors, strategies.assignment)
    return np.where(split, np.array(mesh_shape), 1).prod(axis=1)


def all_strategies(graph: StrategyGraph, resharder: Resharder) -> tuple[Strategies, ...]:
    """The strategies of every node of a strategy graph, on one mesh."""
    shape, made = resharder.mesh.shape, list[Strategies]()
    for node, group in enumerate(graph.groups):
        first = graph.folded.op(group.op_classes[0])
        is_named = any(window.is_named for window in first.rule.windows)
        must_divide = first.name in ("input", "output") or first.rule.is_on_shards or is_named
        most_parts = _most_parts(graph, group, prod(shape))
        made.append(group_strategies(group, graph.ports_of[node], shape, must_divide, most_parts))
    for copy in graph.copies:
        made.append(_copy_strategies(copy, made))
    return tuple(made)


def _most_parts(graph: StrategyGraph, group: OpGroup, num_devices: int) -> MostParts:
    """The factors along which windows slide; an op with windows is a group of its own."""
    op_class = group.op_classes[0]
    op, factor_of = graph.folded.op(op_class), group.factor_of
    examples = factor_of.get((op_class, op.rule.examples)) if op.rule.examples is not None else None
    are_enough = examples is not None and group.sizes[examples] % num_devices == 0
    found = dict[int, int]()
    for window in op.rule.windows:
        rows = graph.folded.program.values[op.operands[window.operand]].shape[window.dim]
        most = 1 if are_enough else rows // max(1, window.before, window.after)
        found[factor_of[op_class, window.factor]] = most
    return tuple(found.items())


def _copy_strategies(copy: Copy, made: list[Strategies]) -> Strategies:
    def specs(ports: tuple[Port, ...]) -> frozenset[Spec]:
        found = (s for p in ports for s in map(tuple, port_specs(p, made[p.node]).tolist()))
        return frozenset(s for s in found if PARTIAL not in s)

    num_axes = made[copy.source.node].assignment.shape[1]
    return _of_specs(specs((copy.source,)), specs(copy.targets), specs(copy.kept_from), num_axes)


@lru_cache(maxsize=REMEMBERED)
def _of_specs(
    offered: frozenset[Spec], wanted: frozenset[Spec], kept: frozenset[Spec], num_axes: int
) -> Strategies:
    rows = [(s, CopySource.SAME) for s in sorted(offered)]
    rows += [(s, CopySource.FRESH) for s in sorted(offered | wanted)]
    rows += [(s, CopySource.KEPT) for s in sorted(kept)]
    return Strategies(np.array([s for s, _ in rows]).reshape(len(rows), num_axes), tuple(w for _, w in rows))
