"""Memory on one mesh: the rows that the solver must respect, and the peak of a plan.

Every program point is a row: the bytes per device of everything in memory there, a linear function of the strategies.
The solver asks for rows as it needs them (`rows_over`); there are thousands of points and few of them bind.

A value that is resharded for a reader is one more array, if its spec differs from its source's. That condition is no
linear function. The difference of the two sizes is one, and a lower bound: zero where the specs are equal. So a row
counts the difference for all values that are larger under the strategies that it is made for, and of several readers
that of the largest array. An `expansion` of a row is no bound, but exact near some strategies.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce

import numpy as np

from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Phase
from autoshard.search.ir.spec import Spec
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.live_ranges import ARGUMENTS, LiveRange, Resident
from autoshard.search.problem.strategies import port_specs
from autoshard.search.problem.strategy_graph import Port
from autoshard.search.solver.pbqp import MemoryConstraint


@dataclass(frozen=True, slots=True)
class Origin:
    """The value of an array.

    Attributes:
      port: the value's port, whose node's strategy decides a device's part.
      source: if the value was resharded for an operand, the spec that it comes from; in this spec there is no such array.
    """

    port: Port
    source: Spec | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a device holds, and where.

    Attributes:
      num_bytes: bytes per device.
      position: the op at which it occurs.
      residents: bytes per device there, by kind of array; kinds without bytes are left out.
      held: the arrays in memory there that have an origin, with their bytes per device.
    """

    num_bytes: float
    position: int
    residents: tuple[tuple[Resident, float], ...]
    held: tuple[tuple[Origin, float], ...] = ()


@dataclass(frozen=True, eq=False)
class Memory:
    """The memory of a costed strategy graph, under any strategies.

    Attributes:
      costed: the graph.
      items: its arrays.
      workspaces: bytes that ops need besides, by position.
      margin: all bytes but those of the step's arguments count for this share more.
    """

    costed: CostedGraph
    items: tuple[LiveRange, ...]
    workspaces: Mapping[int, float] = field(default_factory=dict[int, float])
    margin: float = 0.0

    @cached_property
    def _shares(self) -> tuple[np.ndarray, ...]:
        """Per live range, [strategies of its node]: the share of the value that a device holds, zero under strategies
        for which the range does not count."""
        memo: dict = {}
        for item in self.items:
            key = (item.port, item.copy_source)
            if key not in memo:
                memo[key] = self._share(*key)
        return tuple(memo[item.port, item.copy_source] for item in self.items)

    def _share(self, port, copy_source) -> np.ndarray:
        share, copy_sources = self.costed.shares(port), self.costed.strategies[port.node].copy_sources
        return share if copy_source is None else share * np.array([w is copy_source for w in copy_sources])

    @cached_property
    def _arriving(self) -> np.ndarray:
        """The live ranges of which only the bytes beyond their sources' count."""
        return np.array([n for n, item in enumerate(self.items) if item.source is not None], np.int64)

    @cached_property
    def _sources(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The nodes of these ranges' sources, all the sources' shares in one array, and the offset of each."""
        ports = [item.source for item in self.items if item.source is not None]
        flat, offsets = _in_one([self.costed.shares(port) for port in ports])
        return np.array([port.node for port in ports], np.int64), flat, offsets

    @cached_property
    def _others(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The ranges with several readers, once for each reader besides the first; the readers' nodes; their shares in one
        array, and the offset of each."""
        pairs = [(n, port) for n, item in enumerate(self.items) for port in item.others]
        flat, offsets = _in_one([self.costed.shares(port) for _, port in pairs])
        table = np.array([(n, port.node) for n, port in pairs], np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1], flat, offsets

    @cached_property
    def _stretches(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Start, end, node and bytes of every live range."""
        table = np.array([(i.start, i.end, i.port.node) for i in self.items], np.int64).reshape(-1, 3)
        return table[:, 0], table[:, 1], table[:, 2], np.array([self._bytes_of(i) for i in self.items])

    def _bytes_of(self, item: LiveRange) -> float:
        """Bytes of the whole value of a live range, with the margin."""
        return item.num_bytes if item.resident in ARGUMENTS else (1 + self.margin) * item.num_bytes

    def _workspace_at(self, at: int) -> float:
        """Workspace bytes at one program point, with the margin."""
        return (1 + self.margin) * self.workspaces.get(at, 0.0)

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        """All live ranges' shares in one array, and the offset of each."""
        return _in_one(self._shares)

    def held(self, chosen: Sequence[int]) -> np.ndarray:
        """Per live range: bytes per device under these strategies."""
        _, _, nodes, num_bytes = self._stretches
        flat, offsets = self._flat
        shares = flat[offsets + np.asarray(chosen)[nodes]]
        ranges, others, flat, offsets = self._others
        np.maximum.at(shares, ranges, flat[offsets + np.asarray(chosen)[others]])
        others, flat, offsets = self._sources
        larger = shares[self._arriving] - flat[offsets + np.asarray(chosen)[others]]
        shares[self._arriving] = np.maximum(larger, 0.0)
        return num_bytes * shares

    def profile(self, chosen: Sequence[int]) -> np.ndarray:
        """Bytes per device at every program point."""
        return self._profile(self.held(chosen))

    def _profile(self, held: np.ndarray) -> np.ndarray:
        start, end, _, _ = self._stretches
        num_points = len(self.costed.graph.folded.program.ops)
        change = np.bincount(start, held, num_points + 1) - np.bincount(end + 1, held, num_points + 1)
        return np.cumsum(change)[:num_points] + self._workspace

    @cached_property
    def _workspace(self) -> np.ndarray:
        """Workspace bytes at every program point."""
        found = np.zeros(len(self.costed.graph.folded.program.ops))
        found[list(self.workspaces)] = [self._workspace_at(at) for at in self.workspaces]
        return found

    def least_bytes(self, kept: Sequence[np.ndarray]) -> float:
        """A lower bound on the peak under all of the kept strategies: at one point each node takes the strategy that
        holds least there.

        The point is the highest one where every value is split into as many parts as possible. The bound costs nothing
        beside a search.
        """
        _, _, nodes, num_bytes = self._stretches
        if not len(nodes) or not all(map(len, kept)):
            return 0.0 if all(map(len, kept)) else np.inf
        flat, offsets = self._flat
        is_kept = [np.zeros(len(s), bool) for s in self.costed.strategies]
        for mask, labels in zip(is_kept, kept, strict=True):
            mask[labels] = True
        shares = np.where(np.concatenate([is_kept[node] for node in nodes]), flat, np.inf)
        held = num_bytes * np.minimum.reduceat(shares, offsets)
        held[self._arriving] = 0.0
        row = self.row(int(np.argmax(self._profile(held))))
        return float(sum(per_label[kept[node]].min() for node, per_label in row.bytes)) + row.fixed_bytes

    def peak(self, chosen: Sequence[int]) -> Peak:
        """The highest point of the profile."""
        profile = self.profile(chosen)
        at = int(np.argmax(profile))
        start, end, _, _ = self._stretches
        held = self.held(chosen)
        residents: dict[Resident, float] = {}
        for i in np.flatnonzero((start <= at) & (at <= end)):
            resident = self.items[i].resident
            residents[resident] = residents.get(resident, 0.0) + float(held[i])
        if workspace_bytes := self._workspace_at(at):
            residents[Resident.TEMPORARIES] = residents.get(Resident.TEMPORARIES, 0.0) + workspace_bytes
        ordered = tuple((r, residents[r]) for r in Resident if residents.get(r, 0.0) > 0.0)
        return Peak(float(profile[at]), at, ordered)

    def rows_over(self, chosen: Sequence[int], limit_bytes: float) -> tuple[MemoryConstraint, ...]:
        """The rows of the highest point in each phase, where it exceeds the limit."""
        held = self.held(chosen)
        profile, ops = self._profile(held), self.costed.graph.folded.program.ops
        highest: dict[Phase, int] = {}
        for i in np.flatnonzero(profile > limit_bytes).tolist():
            phase = ops[i].phase
            if phase not in highest or profile[i] > profile[highest[phase]]:
                highest[phase] = i
        return tuple(self.row(i, chosen) for i in highest.values())

    def row(self, at: int, chosen: Sequence[int] | None = None) -> MemoryConstraint:
        """The memory in use at one program point.

        Args:
          at: the point.
          chosen: the strategies that it is made for: it counts the resharded values that are larger than their sources
            under these. None to count none of them.
        """
        total = _Bytes()
        for i in self._alive(at):
            item = self.items[i]
            if item.source is None:
                total.add(item.port.node, self._bytes_of(item) * self._shares[i])
            elif chosen is not None:
                shares, source = {p: self.costed.shares(p) for p in (item.port, *item.others)}, item.source
                largest = max(shares, key=lambda port: shares[port][chosen[port.node]])
                more = shares[largest][chosen[largest.node]] - self.costed.shares(source)[chosen[source.node]]
                if more > 0:
                    total.add(largest.node, self._bytes_of(item) * shares[largest])
                    total.add(source.node, -self._bytes_of(item) * self.costed.shares(source))
        row = f"op {at}", total.in_order, self._workspace_at(at)
        return MemoryConstraint(*row, partial(self.expansion, at))

    def expansion(self, at: int, chosen: Sequence[int]) -> MemoryConstraint:
        """The memory in use at one program point near some strategies: exact for them, and for all that differ in one
        node, or in a value's source and one of its readers."""
        base, of_several = self._at(at)
        total, pairs = _Bytes(base.bytes), {(u, v): m for u, v, m in base.pairs}
        fixed_bytes = base.fixed_bytes
        for item, source in of_several:
            readers = item.port, *item.others
            shares = {port: self._bytes_of(item) * self.costed.shares(port) for port in (*readers, source)}
            here = {port: share[chosen[port.node]] for port, share in shares.items()}
            held = partial(_beyond_source, shares, here, source)
            now, of_source = held(()), held((source.node,))
            total.add(source.node, of_source - now)
            fixed_bytes += float(now)
            for node in dict.fromkeys(port.node for port in readers):
                own, both, key = held((node,)), held((node, source.node)), (node, source.node)
                total.add(node, own - now)
                more = both - own[:, None] - of_source + now
                pairs[key] = pairs[key] + more if key in pairs else more
        in_order = tuple((u, v, num_bytes) for (u, v), num_bytes in pairs.items())
        return MemoryConstraint(f"op {at}", total.in_order, fixed_bytes, pairs=in_order)

    @memo
    def _at(self, at: int) -> tuple[MemoryConstraint, tuple[tuple[LiveRange, Port], ...]]:
        """The memory at one program point that nodes and pairs of nodes decide, and the other values, with their sources:
        those that several readers share."""
        total, pairs = _Bytes(), dict[tuple[int, int], np.ndarray]()
        of_several = list[tuple[LiveRange, Port]]()
        for i in self._alive(at):
            item, source = self.items[i], self.items[i].source
            if source is None:
                total.add(item.port.node, self._bytes_of(item) * self._shares[i])
            elif item.others:
                of_several.append((item, source))
            else:
                more = self._shares[i][:, None] - self.costed.shares(source)
                key, num_bytes = (item.port.node, source.node), self._bytes_of(item) * np.maximum(more, 0.0)
                pairs[key] = pairs[key] + num_bytes if key in pairs else num_bytes
        in_order = tuple((u, v, num_bytes) for (u, v), num_bytes in pairs.items() if num_bytes.any())
        return MemoryConstraint("", total.in_order, self._workspace_at(at), pairs=in_order), tuple(of_several)

    def _alive(self, at: int) -> list[int]:
        """The live ranges that contain a program point."""
        start, end, _, _ = self._stretches
        return np.flatnonzero((start <= at) & (at <= end)).tolist()

    def row_of(self, peak: Peak, chosen: Sequence[int]) -> MemoryConstraint:
        """The memory at a peak of a device's kernels, exact under the strategies that made it.

        Under other strategies each array has the part that they give it; the rest is a constant. The row is no lower bound
        for them: it also counts arrays that they would not hold at that moment.

        Args:
          peak: the peak.
          chosen: the strategies that made it.
        """
        total = _Bytes()
        for origin, num_bytes in peak.held:
            part = self._part(origin)
            if here := part[chosen[origin.port.node]]:
                total.add(origin.port.node, num_bytes / here * part)
        known_bytes = sum(float(per_label[chosen[node]]) for node, per_label in total.in_order)
        name = f"kernels at op {peak.position}, {len(peak.held)} arrays, {peak.num_bytes:.0f} bytes"
        return MemoryConstraint(name, total.in_order, max(0.0, peak.num_bytes - known_bytes))

    def _part(self, origin: Origin) -> np.ndarray:
        """[strategies of its node]: the share of the value that a device holds in an array."""
        share = self.costed.shares(origin.port)
        if origin.source is None:
            return share
        specs = port_specs(origin.port, self.costed.strategies[origin.port.node])
        return np.where((specs != np.array(origin.source)).any(axis=1), share, 0.0)


class _Bytes:
    """Sums of bytes, by node and strategy."""

    def __init__(self, total: Iterable[tuple[int, np.ndarray]] = ()) -> None:
        self._total = dict(total)

    def add(self, node: int, num_bytes: np.ndarray) -> None:
        total = self._total.get(node)
        self._total[node] = num_bytes if total is None else total + num_bytes

    @property
    def in_order(self) -> tuple[tuple[int, np.ndarray], ...]:
        """The bytes of each node, sorted by node."""
        return tuple(sorted(self._total.items(), key=lambda one: one[0]))


def _beyond_source(
    shares: Mapping[Port, np.ndarray], here: Mapping[Port, float], source: Port, free: tuple[int, ...]
) -> np.ndarray:
    """The bytes by which the largest of a value's arrays is larger than its source: [labels of the free nodes].

    Args:
      shares: the bytes of each array, by the labels of its node; the source's, too.
      here: the bytes of each under the labels of the nodes that are not free.
      source: the source.
      free: no node, one, or two.
    """
    near = {p: _along(share, p.node, free) if p.node in free else here[p] for p, share in shares.items()}
    largest = reduce(np.maximum, (num_bytes for port, num_bytes in near.items() if port != source))
    return np.maximum(np.asarray(largest - near[source]), 0.0)


def _along(per_label: np.ndarray, node: int, nodes: Sequence[int]) -> np.ndarray:
    """A node's numbers along its own axis of an array over the labels of one or two nodes."""
    return per_label if len(nodes) == 1 or nodes[1] == node else per_label[:, None]


def _in_one(arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Arrays end to end, and where each one begins."""
    lengths = np.array([len(one) for one in arrays], np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64) if len(lengths) else lengths
    return (np.concatenate(arrays) if len(lengths) else np.zeros(0)), offsets
