"""The order in which XLA hides communication.

On Hopper and later, and where a program asks for it, XLA starts over from the order that takes the least memory. It
lists the kernels from the last to the first (`xla/service/latency_hiding_scheduler.cc`, with the overrides of
`xla/service/gpu/gpu_latency_hiding_scheduler.cc`). A clock runs backwards meanwhile: each kernel moves it by its time.
A kernel is a candidate once all its dependents are listed. The next candidate comes first by these rules; each breaks
the ties of those before it:

1. Once memory exceeds the budget, the candidate that adds least to it. Once memory exceeds half of the budget, a
   candidate that does not bring it above the budget.
2. The end of a collective, if no other collective is under way; the end of a transfer between the device and its host,
   if at most one other is.
3. The candidate that is ready soonest. The start of a collective is ready when the clock has moved by the collective's
   time since its end was listed. Any other kernel is ready `EDGE_S` after its reader.
4. If the end of another collective is a candidate, the start of the one that is under way; otherwise, any kernel but
   the start of a collective that depends on no other. Of transfers likewise, if two are under way.
5. The candidate at the end of the longest chain of collectives.
6. The candidate whose time is closest to the time until another one is ready.
7. A reader of a collective's result, because the collective's end can be listed next.
8. The last reader of most arrays, because their makers can be listed next.
9. Once memory exceeds half of the budget, a candidate that frees some.
10. The last candidate in the order that takes the least memory. There, collectives end right before their first reader
   and start right behind the makers of their operands.

Kernels whose results are only needed late, weight gradients above all, thus move into the windows of later collectives.
Their operands stay in memory meanwhile. Where there is no collective, in a loop's body or in the step outside of loops,
the order does not change. A loop takes no time in the scheduler; one that communicates inside is never put beside a
collective.

A kernel with several results, or with a workspace, returns a tuple. Taking a result out of it is a step of its own that
is listed at once, so the kernel is ready `EDGE_S` later than others.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial, reduce
from math import inf

from autoshard.search.device.lowering import Kernel, Loops, Lowered
from autoshard.search.device.regions import Region

EDGE_S = 1e-6
"""The scheduler's latency of a result from one kernel to the next. Source: XLA, `kLowLatency`, in microseconds as in
`SolLatencyEstimator`."""

LAUNCH_S = 1e-6
"""The scheduler's time for the start of a collective, and for its end, besides the collective. Source: XLA, `kLowCost`."""

MOST_UNDER_WAY = {"collectives": 1, "transfers": 2}
"""Collectives, and transfers between a device and its host, that the scheduler puts beside one another. Source: XLA,
`parallel_collective_overlap_limit` and `parallel_async_compute_limit`."""

LOOP_S = 1e-8
"""The scheduler's time for a loop. Source: XLA, a hundredth of `kLowCost`."""


def latency_hiding(lowered: Lowered, budget_bytes: float = inf) -> tuple[int, ...]:
    """An order of kernels for overlap, from the order that takes the least memory (see `search.device.kernel_order`).

    Args:
      lowered: the kernels, in the order that takes the least memory.
      budget_bytes: the memory that the scheduler may use besides arguments and results. It counts the arguments too,
        nevertheless.
    """
    return _ordered(lowered, range(len(lowered.kernels)), (), budget_bytes, 0.0)


def _ordered(
    lowered: Lowered, members: Sequence[int], loops: Loops, budget_bytes: float, held_bytes: float
) -> tuple[int, ...]:
    region = Region(lowered, members, loops)
    scheduler = _Scheduler(region, budget_bytes, held_bytes)
    found: list[int] = []
    for node in reversed(scheduler.run()):
        if node.unit in region.loops_of:
            body, held_bytes = region.units[node.unit], scheduler.held_beside.get(node.unit, 0.0)
            found += _ordered(lowered, body, region.loops_of[node.unit], budget_bytes, held_bytes)
        else:
            (k,) = region.units[node.unit]
            found.append(~k if node.is_end else k)
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class _Node:
    """One entry of the list: a kernel, a loop, the start of a collective, or its end.

    Attributes:
      unit: its unit in the region.
      seconds: the time by which it moves the clock.
      depth_s: time of the longest chain of collectives that leads to it.
      place: place in the order that takes the least memory.
      ready_s: clock time when it is ready.
      is_start: whether it is the start of a collective.
      is_end: whether it is the end of a collective.
    """

    unit: int
    seconds: float
    depth_s: float
    place: float
    ready_s: float
    is_start: bool = False
    is_end: bool = False


class _Scheduler:
    """One pass from the last unit to the first.

    Attributes:
      now_s: the clock.
      ready: nodes whose dependents are all listed.
      listed: nodes, from the last to the first.
      under_way: by kind of resource, the collectives or transfers whose ends are listed and whose starts are not yet.
      held_bytes: bytes in memory.
      held_beside: by loop, the bytes in memory when it is listed.
      adds_bytes: by unit, the bytes that it reads and that are not in memory.
      frees_bytes: by unit, the bytes that it makes and that are in memory.
      reads_ended: by unit, whether it reads the result of a collective.
      num_last: by unit, how many of the arrays that it reads have no other reader left.
    """

    def __init__(self, region: Region, budget_bytes: float, held_bytes: float) -> None:
        self.region, self.budget_bytes, self.held_bytes = region, budget_bytes, held_bytes
        self.buffers = region.lowered.buffers
        units = range(len(region.units))
        self.reads, self.makes = ([tuple(of(unit)) for unit in units] for of in (region.reads, region.makes))
        self.unread = Counter(b for reads in self.reads for b in reads)
        self.outer = frozenset(self.unread).difference(*self.makes)
        ended = frozenset(b for unit in units for b in self._made_by_end(unit))
        self.reads_ended = [not ended.isdisjoint(reads) for reads in self.reads]
        self.num_last = [sum(self.unread[b] == 1 for b in reads) for reads in self.reads]
        self.occupies = [region.occupies(unit) for unit in units]
        self.num_readers, self.first_reader = [0] * len(units), [inf] * len(units)
        self.depth_s, self.wanted_s = [0.0] * len(units), [0.0] * len(units)
        for unit, needed in enumerate(region.before):
            self.depth_s[unit] = max(map(self._depth_behind_s, needed), default=0.0)
            for n in needed:
                self.num_readers[n] += 1
                self.first_reader[n] = min(self.first_reader[n], unit)
        self.now_s, self.under_way = 0.0, Counter[str]()
        self.ready: list[_Node] = []
        self.listed: list[_Node] = []
        self.live: set[int] = set()
        self.held_beside: dict[int, float] = {}
        self.adds_bytes = [float(sum(self.buffers[b].num_bytes for b in reads)) for reads in self.reads]
        self.frees_bytes = [0.0] * len(units)
        self.maker = {b: unit for unit in units for b in self.makes[unit]}
        self.readers: dict[int, list[int]] = {}
        for unit in units:
            for b in self.reads[unit]:
                self.readers.setdefault(b, []).append(unit)

    def run(self) -> list[_Node]:
        """The nodes, from the last to the first."""
        if not any(self._collective(unit) for unit in range(len(self.reads))):
            return [_Node(unit, 0.0, 0.0, unit, 0.0) for unit in reversed(range(len(self.reads)))]
        for unit in [unit for unit, count in enumerate(self.num_readers) if not count]:
            self._free(unit)
        while self.ready:
            self._list(self._best())
        return self.listed

    # --- the properties of a unit

    def _collective(self, unit: int) -> Kernel | None:
        kernel = self.region.kernel(unit)
        return None if kernel is None or kernel.collective is None else kernel

    def _made_by_end(self, unit: int) -> tuple[int, ...]:
        """The result of a collective that has only one, which needs no tuple."""
        kernel = self._collective(unit)
        return () if kernel is None or len(kernel.makes) > 1 else kernel.makes

    def _seconds(self, unit: int) -> float:
        kernel = self.region.kernel(unit)
        return LOOP_S if kernel is None else kernel.time.scheduled_s

    def _depth_behind_s(self, unit: int) -> float:
        return self.depth_s[unit] + (self._seconds(unit) if self._collective(unit) is not None else 0.0)

    def _makes_tuple(self, unit: int) -> bool:
        kernel = self.region.kernel(unit)
        return kernel is None or len(kernel.makes) > 1 or kernel.workspace_bytes > 0

    # --- listing

    def _free(self, unit: int) -> None:
        """Makes a unit whose dependents are all listed a candidate."""
        ready_s = max(self.now_s, self.wanted_s[unit])
        if self.listed and self._makes_tuple(unit):
            self.now_s = ready_s
            ready_s += EDGE_S
        if self._collective(unit) is None:
            self.ready.append(_Node(unit, self._seconds(unit), self.depth_s[unit], unit, ready_s))
        else:
            depth_s, place = self._depth_behind_s(unit), self.first_reader[unit] - 0.5
            self.ready.append(_Node(unit, LAUNCH_S, depth_s, place, ready_s, is_end=True))

    def _list(self, node: _Node) -> None:
        self.ready.remove(node)
        self.listed.append(node)
        unit, begun_s = node.unit, max(self.now_s, node.ready_s)
        self.now_s = begun_s + node.seconds
        if not node.is_start:
            self._hold(unit)
        if node.is_end:
            self.under_way.update(self.occupies[unit])
            place = max((n + 0.5 for n in self.region.before[unit]), default=-0.5)
            ready_s = max(self.now_s, begun_s + self._seconds(unit))
            self.ready.append(_Node(unit, LAUNCH_S, self.depth_s[unit], place, ready_s, is_start=True))
            return
        if node.is_start:
            self.under_way.subtract(self.occupies[unit])
        self._let_go(unit)
        for b in self.reads[unit]:
            self.unread[b] -= 1
            if self.unread[b] == 1:
                for reader in self.readers[b]:
                    self.num_last[reader] += 1
        if any(b in self.outer and not self.unread[b] for b in self.reads[unit]):
            self.now_s = max(self.now_s, begun_s + EDGE_S)  # an argument is listed at once
        for n in self.region.before[unit]:
            self.wanted_s[n] = max(self.wanted_s[n], begun_s + EDGE_S)
            self.num_readers[n] -= 1
            if not self.num_readers[n]:
                self._free(n)

    def _hold(self, unit: int) -> None:
        """Brings the operands of a unit into memory."""
        fresh = [b for b in self.reads[unit] if b not in self.live]
        self.live.update(fresh)
        for b in fresh:
            num_bytes = self.buffers[b].num_bytes
            self.held_bytes += num_bytes
            for reader in self.readers[b]:
                self.adds_bytes[reader] -= num_bytes
            if b in self.maker:
                self.frees_bytes[self.maker[b]] += num_bytes
        self.held_beside[unit] = self.held_bytes

    def _let_go(self, unit: int) -> None:
        """Frees the results of a unit, which do not exist before it."""
        made = self.live.intersection(self.makes[unit])
        self.live -= made
        self.held_bytes -= sum(self.buffers[b].num_bytes for b in made)

    # --- choosing

    def _best(self) -> _Node:
        """The node to list next. Each rule leaves some of the nodes that the rules before it left."""
        left = self._allowed()
        for rule in (self._smallest, _ends, self._soonest, self._waited_for, _deepest, self._closest):
            left = rule(left) if len(left) > 1 else left
        return self._most_useful(left)

    @property
    def _full(self) -> set[str]:
        """The kinds of resource of which no other end can be listed."""
        return {kind for kind, most in MOST_UNDER_WAY.items() if self.under_way[kind] >= most}

    def _allowed(self) -> list[_Node]:
        full = self._full
        return [node for node in self.ready if node.is_start or full.isdisjoint(self.occupies[node.unit])]

    @property
    def _is_tight(self) -> bool:
        """Whether memory exceeds half of the budget."""
        return 2 * self.held_bytes > self.budget_bytes

    def _smallest(self, nodes: list[_Node]) -> list[_Node]:
        """Rule 1."""
        if not self._is_tight:
            return nodes
        if self.held_bytes >= self.budget_bytes:
            nodes = _least(nodes, [self._growth_bytes(node) for node in nodes])
        room_bytes, held_bytes, adds_bytes = self.budget_bytes, self.held_bytes, self.adds_bytes
        return _least(nodes, [held_bytes + adds_bytes[node.unit] > room_bytes for node in nodes])

    def _growth_bytes(self, node: _Node) -> float:
        """Bytes that a node adds to memory. An end counts together with its start, which frees the result."""
        adds_bytes = 0.0 if node.is_end else self.adds_bytes[node.unit]
        return adds_bytes - self.frees_bytes[node.unit]

    def _soonest(self, nodes: list[_Node]) -> list[_Node]:
        """Rule 3."""
        now_s = self.now_s
        return [n for n in nodes if n.ready_s <= now_s] or _least(nodes, [n.ready_s for n in nodes])

    def _waited_for(self, nodes: list[_Node]) -> list[_Node]:
        """Rule 4."""
        if full := self._full:
            ending = {kind for node in self.ready if node.is_end for kind in self.occupies[node.unit]}
            wanted = full & ending
            starts = [n for n in nodes if n.is_start and not wanted.isdisjoint(self.occupies[n.unit])]
            nodes = starts or nodes
        return [n for n in nodes if n.depth_s or not n.is_start] or nodes

    def _closest(self, nodes: list[_Node]) -> list[_Node]:
        """Rule 6. The start of a collective never comes first by it. So the winner among others and a start depends on
        their order, and they are compared two by two."""
        until_s = self._until_next_s()
        if until_s is None:
            return nodes
        if any(node.is_start for node in nodes):
            return [reduce(partial(self._closer, until_s), nodes)]
        return _least(nodes, [abs(until_s - node.seconds) for node in nodes])

    def _until_next_s(self) -> float | None:
        """Seconds until another node is ready; None where all are."""
        now_s = self.now_s
        soonest_s = min([node.ready_s for node in self.ready if node.ready_s > now_s], default=None)
        return None if soonest_s is None else soonest_s - now_s

    def _closer(self, until_s: float, best: _Node, node: _Node) -> _Node:
        """The node of two that comes first by rules 6 to 10."""
        least_s, waste_s = (abs(until_s - n.seconds) for n in (best, node))
        if waste_s < least_s and not node.is_start:
            return node
        if least_s < waste_s and not best.is_start:
            return best
        return self._most_useful([best, node])

    def _most_useful(self, nodes: list[_Node]) -> _Node:
        """The first node by rules 7 to 10. An end reads nothing."""
        if len(nodes) > 1 and not nodes[0].is_end:
            nodes = [node for node in nodes if self.reads_ended[node.unit]] or nodes
            nodes = _least(nodes, [-self.num_last[node.unit] for node in nodes])
        if len(nodes) > 1 and self._is_tight:
            nodes = [node for node in nodes if self._growth_bytes(node) < 0] or nodes
        return max(nodes, key=lambda node: (node.place, node.unit))


def _ends(nodes: list[_Node]) -> list[_Node]:
    """Rule 2."""
    return [node for node in nodes if node.is_end] or nodes


def _deepest(nodes: list[_Node]) -> list[_Node]:
    """Rule 5."""
    return _least(nodes, [-node.depth_s for node in nodes])


def _least(nodes: list[_Node], keys: list[float]) -> list[_Node]:
    """The nodes with the smallest key."""
    least = min(keys)
    return [node for node, key in zip(nodes, keys, strict=True) if key == least]
