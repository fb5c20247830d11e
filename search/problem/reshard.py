"""The cost of resharding a value from one spec to another: the cheapest chain of collectives.

All specs of a value of rank r on a mesh of k axes number (r + 2)^k: per axis whole, partial, or one of the dimensions.
Between them, one step changes a set of axes in one way:

  =============  =======================  ===========================
  from           to                       by
  =============  =======================  ===========================
  split          whole                    all-gather
  split (d)      split (e)                all-to-all
  whole          split                    slice: nothing moves
  partial        whole                    all-reduce
  partial        split                    reduce-scatter
  =============  =======================  ===========================

A step may only add or take the minor-most axes of a dimension, since shards lie in axis order. It cuts a device's shard
into equal parts, or joins equal parts. Only a whole dimension may be padded to be sliced, and sheds its padding when it
is gathered whole. (XLA makes an uneven sum an all-reduce, and takes a slice of it; where a part is cut unevenly, it
exchanges the borders by a permute.) An all-to-all needs even splits of all dimensions. `num_bytes` of a step is the
larger of a device's bytes before and after it, padding included.

The cheapest chains between all pairs are found for each size of value once. No step makes a value partial, so the
chains among specs without partial axes are shortest paths of their own (Floyd 1962). A partial spec then takes its best
reduction, those with fewer partial axes first. Each pair keeps the first move of its chain, and a chain is read from
these. A move in a narrower type is a chain by itself, beside these.

XLA:GPU's collective for each step was measured (`tests/gpu/test_collectives.py`): with every step's spec imposed in
turn, it is the collective named here, to the byte. Two things it does not do, and there are no such steps: a partial
value does not move before it is reduced; and a sum of terms that are partial over several axes is reduced over all of
them at once (`at_once`).
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations, product
from math import prod
from typing import Any

import numpy as np

from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Value
from autoshard.search.ir.sharding import ReshardPath, ReshardStep
from autoshard.search.ir.spec import MAX_PADDING, PARTIAL, WHOLE, Spec

SLICE = "slice"
REDUCTIONS = ("all-reduce", "reduce-scatter")


@dataclass(frozen=True, slots=True)
class Handling:
    """The compiler's handling of the collectives of a value.

    Attributes:
      at_once: for sums of partial terms: XLA reduces them over all their axes in one collective.
      combined_bytes: size of the collectives into which XLA joins small ones with others; zero if it does not.
      term_itemsize: bytes of an element of the terms of a loop's sum before they were converted; zero if they were not.
        XLA reduces the sum in the terms' type. It makes no reduce-scatter of that, because it converts the sum before
        it takes a part.
      narrow_dtype: a narrower type from which or to which the value is converted; None if there is none. XLA moves the
        value in that type, if the chain is one step and sums nothing (ops between several steps hide the conversion).
    """

    at_once: bool = False
    combined_bytes: float = 0.0
    term_itemsize: int = 0
    narrow_dtype: Any = None

    @property
    def narrow_itemsize(self) -> int:
        """Bytes of an element in the narrower type; zero if there is none."""
        return 0 if self.narrow_dtype is None else np.dtype(self.narrow_dtype).itemsize


ALONE = Handling()


@dataclass(frozen=True, slots=True)
class _Moves:
    """The steps possible between specs of one rank, before any sizes: parallel arrays.

    `may_pad` marks the moves that slice a dimension that is whole, or gather one whole.
    """

    specs: tuple[Spec, ...]
    source: np.ndarray
    target: np.ndarray
    kinds: tuple[tuple[str, tuple[int, ...]], ...]
    kind: np.ndarray
    may_pad: np.ndarray

    def are(self, kind: str) -> np.ndarray:
        """[moves]: whether they are of a kind."""
        return np.array([k == kind for k, _ in self.kinds])[self.kind]


_Sized = tuple[tuple[int, ...], int]
"""A value's shape, and bytes of an element."""


@dataclass(frozen=True, slots=True, eq=False)
class _Splits:
    """The shards of values under specs: [values, specs] the elements that a device holds, padding included; whether
    every dimension splits evenly, or nearly so with padding; and whether evenly."""

    held: np.ndarray
    fits: np.ndarray
    is_even: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _ReshardTable:
    """The cost of resharding one size of value.

    Attributes:
      num_bytes: [moves] per device.
      best_s: [specs, specs] seconds of the best chain.
      first: [specs, specs] the first move of the best chain among those without a narrowed move.
      is_narrowed: [moves] whether the move, narrowed, is the best chain between its ends.
    """

    num_bytes: np.ndarray
    best_s: np.ndarray
    first: np.ndarray
    is_narrowed: np.ndarray


@dataclass(frozen=True)
class Resharder:
    """Resharding costs on one mesh; keeps the results for every size of value and every chain."""

    mesh: MeshModel
    _tables: dict = field(default_factory=dict)
    _found: dict = field(default_factory=dict)

    @property
    def num_axes(self) -> int:
        """Axes of the mesh."""
        return len(self.mesh.shape)

    def index(self, spec: Spec, rank: int) -> int:
        """A spec's row and column in the tables of its rank."""
        index = 0
        for d in spec:
            index = index * (rank + 2) + d + 2
        return index

    def indices(self, specs: np.ndarray, rank: int) -> np.ndarray:
        """The indices of many specs: [specs, axes] to [specs]."""
        return (specs + 2) @ (rank + 2) ** np.arange(self.num_axes)[::-1]

    def specs(self, rank: int) -> tuple[Spec, ...]:
        """All specs of a rank, by index."""
        return _moves(rank, self.num_axes).specs

    def seconds(self, value: Value, how: Handling = ALONE) -> np.ndarray:
        """Seconds from every spec (row) to every other (column); infinite where no chain exists."""
        return self._table(value.shape, value.itemsize, how).best_s

    def gathered_s(self, value: Value, how: Handling = ALONE) -> np.ndarray:
        """Seconds to gather a value that is split over all axes to a spec, for every spec."""
        return self._gathered_s(value.shape, value.itemsize, how.combined_bytes)

    @memo
    def _gathered_s(self, shape: tuple[int, ...], itemsize: int, combined_bytes: float) -> np.ndarray:
        specs = self.specs(len(shape))
        held = itemsize * self._splits(len(shape), ((shape, itemsize),)).held[0]
        over = [tuple(a for a, d in enumerate(s) if d < 0) for s in specs]
        found = np.zeros(len(specs))
        for axes in dict.fromkeys(over):
            at = [i for i, one in enumerate(over) if one == axes]
            found[at] = self.mesh.time_s("all-gather", axes, held[at], combined_bytes)
        return found

    def once[Found](self, key: Hashable, find: Callable[[], Found]) -> Found:
        """The result for a key on this mesh, computed once for all steps in which it occurs."""
        if key not in self._found:
            self._found[key] = find()
        return self._found[key]

    def chain(self, value: Value, source: Spec, target: Spec, how: Handling = ALONE) -> ReshardPath:
        """The steps of the cheapest chain."""
        return self._chain(value.shape, value.itemsize, how, source, target)

    @memo
    def _chain(
        self, shape: tuple[int, ...], itemsize: int, how: Handling, source: Spec, target: Spec
    ) -> ReshardPath:
        table = self._table(shape, itemsize, how)
        moves, rank = _moves(len(shape), self.num_axes, how.at_once), len(shape)
        here, goal = self.index(source, rank), self.index(target, rank)
        assert np.isfinite(table.best_s[here, goal]), f"no way from {source} to {target} for {shape}"
        for move in np.flatnonzero((moves.source == here) & (moves.target == goal) & table.is_narrowed):
            kind, axes = moves.kinds[moves.kind[move]]
            num_bytes = float(table.num_bytes[move]) * how.narrow_itemsize / itemsize
            return (ReshardStep(kind, axes, num_bytes, target, how.narrow_dtype),)
        steps = []
        while here != goal:
            move = table.first[here, goal]
            here = int(moves.target[move])
            kind, axes = moves.kinds[moves.kind[move]]
            steps.append(ReshardStep(kind, axes, float(table.num_bytes[move]), moves.specs[here]))
            assert len(steps) < len(moves.specs), f"from {source} to {target} for {shape} goes round"
        return tuple(steps)

    def learn(self, wanted: Iterable[tuple[Value, Handling]]) -> None:
        """Finds the tables of many values at once: those of one rank and one handling take little longer than one."""
        alike = defaultdict[tuple[int, Handling], dict[_Sized, None]](dict)
        for value, how in wanted:
            if (value.shape, value.itemsize, how) not in self._tables:
                alike[len(value.shape), how][value.shape, value.itemsize] = None
        for (rank, how), sized in alike.items():
            self._solve(rank, tuple(sized), how)

    def _table(self, shape: tuple[int, ...], itemsize: int, how: Handling) -> _ReshardTable:
        if (shape, itemsize, how) not in self._tables:
            self._solve(len(shape), ((shape, itemsize),), how)
        return self._tables[shape, itemsize, how]

    def _solve(self, rank: int, sized: Sequence[_Sized], how: Handling) -> None:
        """Finds the tables of values of one rank; all arrays have a row for each."""
        moves = _moves(rank, self.num_axes, how.at_once)
        splits = self._splits(rank, sized)
        itemsizes = np.array([[itemsize] for _, itemsize in sized])
        moved, fits = self._moved(moves, splits, itemsizes, how), splits.fits
        direct = self._moves_s(moves, moved, how)
        is_possible = fits[:, moves.source] & fits[:, moves.target] & self._are_made(moves, splits)
        if how.term_itemsize:
            is_possible &= ~moves.are("reduce-scatter")
        direct[~is_possible] = np.inf
        best, first = _chains(moves, rank, self.num_axes, direct, fits, scatters=not how.at_once)
        is_narrowed = np.zeros_like(is_possible)
        if how.narrow_itemsize:
            can_narrow = is_possible & ~moves.are(SLICE) & ~self._are_reductions(moves)
            narrow_s = self._moves_s(moves, moved * (how.narrow_itemsize / itemsizes), how)
            ends = moves.source, moves.target
            is_narrowed = can_narrow & (narrow_s <= best[:, *ends])
            best[:, *ends] = np.where(is_narrowed, narrow_s, best[:, *ends])
        for key, *table in zip(sized, moved, best, first, is_narrowed, strict=True):
            self._tables[*key, how] = _ReshardTable(*table)

    def _moves_s(self, moves: _Moves, moved: np.ndarray, how: Handling) -> np.ndarray:
        """[values, moves]: seconds of each move of `moved` bytes."""
        seconds = np.full(moved.shape, SLICE_S)
        for i, (kind, axes) in enumerate(moves.kinds):
            if kind != SLICE:
                of_kind = moves.kind == i
                taken_s = self.mesh.time_s(kind, axes, moved[:, of_kind], how.combined_bytes)
                seconds[:, of_kind] = np.maximum(taken_s, SLICE_S)
        return seconds

    def _splits(self, rank: int, sized: Sequence[_Sized]) -> _Splits:
        """The shards of each value under each spec."""
        specs = np.array(self.specs(rank)).reshape(-1, 1, self.num_axes)
        parts = np.where(specs == np.arange(rank)[:, None], self.mesh.shape, 1).prod(axis=2)
        sizes = np.array([shape for shape, _ in sized], np.int64).reshape(len(sized), 1, rank)
        return _Splits(
            held=(-(-sizes // parts)).prod(axis=2),
            fits=(-sizes % parts <= MAX_PADDING * sizes).all(axis=2),
            is_even=(sizes % parts == 0).all(axis=2),
        )

    def _moved(self, moves: _Moves, splits: _Splits, itemsize: np.ndarray, how: Handling) -> np.ndarray:
        """[values, moves]: bytes per device, the larger of those before and after."""
        held = splits.held[:, moves.source]
        sent = np.where(self._are_reductions(moves), how.term_itemsize or itemsize, itemsize)
        return sent * np.where(moves.are("all-gather"), held * self._parts(moves), held)

    def _are_reductions(self, moves: _Moves) -> np.ndarray:
        """[moves]: whether they sum."""
        return np.logical_or.reduce([moves.are(kind) for kind in REDUCTIONS])

    def _are_made(self, moves: _Moves, splits: _Splits) -> np.ndarray:
        """[values, moves]: whether the compiler makes each move of such a value in one step."""
        before, after, parts = splits.held[:, moves.source], splits.held[:, moves.target], self._parts(moves)
        cuts_evenly = (before == parts * after) | (before == after) | (parts * before == after)
        exchanges_evenly = splits.is_even[:, moves.source] & splits.is_even[:, moves.target]
        return np.where(moves.are("all-to-all"), exchanges_evenly, cuts_evenly | moves.may_pad)

    def _parts(self, moves: _Moves) -> np.ndarray:
        """[moves]: the number of devices that take part in each."""
        return np.array([prod(self.mesh.shape[a] for a in axes) for _, axes in moves.kinds])[moves.kind]


def _chains(
    moves: _Moves, rank: int, num_axes: int, direct: np.ndarray, fits: np.ndarray, *, scatters: bool
) -> tuple[np.ndarray, np.ndarray]:
    """[values, specs, specs]: seconds of the best chains, and their first moves.

    If it `scatters`, a sum is scattered over every axis that the target splits, where that is possible. The compiler
    makes an all-reduce of which only a slice is needed a reduce-scatter, at any cost.
    """
    num_values, num_specs = fits.shape
    best = np.full((num_values, num_specs, num_specs), np.inf)
    best[:, range(num_specs), range(num_specs)] = np.where(fits, 0.0, np.inf)
    best[:, moves.source, moves.target] = direct
    first = np.full(best.shape, -1, np.int32)
    first[:, moves.source, moves.target] = np.arange(len(moves.source))
    is_summed = (np.array(moves.specs).reshape(-1, num_axes) != PARTIAL).all(axis=1)
    summed = np.ix_(range(num_values), np.flatnonzero(is_summed), np.flatnonzero(is_summed))
    best[summed], first[summed] = _shortest(best[summed], first[summed], fits[:, is_summed].any(axis=0))
    for here, leaving, is_scattered in _reductions(rank, num_axes, not scatters):
        totals = direct[:, leaving, None] + best[:, moves.target[leaving]]
        if scatters:
            scattered = np.where(is_scattered, totals, np.inf)
            totals = np.where(np.isfinite(scattered.min(axis=1, keepdims=True)), scattered, totals)
        chosen, is_elsewhere = totals.argmin(axis=1), np.arange(num_specs) != here
        best[:, here, is_elsewhere] = totals.min(axis=1)[:, is_elsewhere]
        first[:, here] = leaving[chosen]
    return best, first


def _shortest(best: np.ndarray, first: np.ndarray, is_via: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Shortest paths by Floyd's rule: [values, specs, specs] seconds and first moves."""
    for via in np.flatnonzero(is_via):
        through = best[:, :, via, None] + best[:, via, None, :]
        is_shorter = through < best
        np.copyto(best, through, where=is_shorter)
        np.copyto(first, first[:, :, via, None], where=is_shorter)
    return best, first


@lru_cache(maxsize=64)
def _reductions(rank: int, num_axes: int, at_once: bool) -> tuple[tuple[int, np.ndarray, np.ndarray], ...]:
    """For each spec that is partial, the moves that leave it, and [moves, targets] whether such a move leaves no axis
    whole that was partial and that the target splits.

    Specs that are partial over fewer axes come first, since every move that leaves a partial spec reduces some of them.
    """
    moves = _moves(rank, num_axes, at_once)
    specs = np.array(moves.specs).reshape(-1, num_axes)
    partial, found = (specs == PARTIAL).sum(axis=1), []
    for here in sorted(np.flatnonzero(partial), key=partial.__getitem__):
        leaving = np.flatnonzero(moves.source == here)
        is_left_whole = (specs[here] == PARTIAL) & (specs[moves.target[leaving]] == WHOLE)
        is_scattered = ~(is_left_whole[:, None, :] & (specs >= 0)[None, :, :]).any(axis=2)
        found.append((int(here), leaving, is_scattered))
    return tuple(found)


SLICE_S = 1e-9
"""Seconds; a slice is a local view or a cheap copy. No step takes less, not even an empty array's, or chains would be
cyclic."""


@lru_cache(maxsize=64)
def _moves(rank: int, num_axes: int, at_once: bool = False) -> _Moves:
    places = (PARTIAL, WHOLE, *range(rank))
    specs = tuple(product(places, repeat=num_axes))
    index = {s: i for i, s in enumerate(specs)}
    kinds: dict[tuple[str, tuple[int, ...]], int] = {}
    rows = []
    for spec in specs:
        for axes, kind, after in _steps_from(spec, places):
            leaves_partial = PARTIAL in after and (at_once or kind != "reduce-scatter")
            if leaves_partial:
                continue
            number = kinds.setdefault((kind, axes), len(kinds))
            rows.append((index[spec], index[after], number, _may_pad(kind, spec, after, axes[0])))
    table = np.array(rows, np.int64).reshape(-1, 4)
    return _Moves(specs, table[:, 0], table[:, 1], tuple(kinds), table[:, 2], table[:, 3].astype(bool))


def _may_pad(kind: str, before: Spec, after: Spec, axis: int) -> bool:
    """Whether a step slices a dimension that is whole, or gathers one whole."""
    slices_whole = kind == SLICE and after[axis] not in before
    return slices_whole or (kind == "all-gather" and before[axis] not in after)


def _steps_from(spec: Spec, places: tuple[int, ...]):
    for size in range(1, len(spec) + 1):
        for axes in combinations(range(len(spec)), size):
            before = {spec[a] for a in axes}
            if len(before) > 1:
                continue
            (here,) = before
            for place in places:
                kind = _kind(here, place)
                if kind is None or place == here:
                    continue
                after = tuple(place if a in axes else d for a, d in enumerate(spec))
                if _is_minor(spec, axes, here) and _is_minor(after, axes, place):
                    yield axes, kind, after


def _kind(here: int, there: int) -> str | None:
    if there == PARTIAL:
        return None
    if here == PARTIAL:
        return "all-reduce" if there == WHOLE else "reduce-scatter"
    if here == WHOLE:
        return SLICE
    return "all-gather" if there == WHOLE else "all-to-all"


def _is_minor(spec: Spec, axes: tuple[int, ...], place: int) -> bool:
    """Whether these axes are the minor-most of those that split the dimension `place`."""
    return place < 0 or all(a in axes for a, d in enumerate(spec) if d == place and a > min(axes))
