"""The orders in which a device may run its kernels: as written, as XLA saves memory, and as it hides communication.

XLA puts kernels in the order that takes the least memory, of a few that it tries
(`xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc`). Its list scheduler nearly always wins: of the kernels that
could come next, the one that frees most does.

On Hopper and later it starts over from there, and lists the kernels from the last to the first
(`xla/service/latency_hiding_scheduler.cc`): a collective's end goes right before its first reader, then kernels are put
between its end and its start until they take as long as it does, those that lie deepest among collectives first. One
collective is under way at a time. Whatever is only needed late, weight gradients above all, is thus put off into the
windows of later collectives, and what it reads stays in memory meanwhile.

An order lists kernel numbers; a collective appears twice, as `k` where it starts and as `~k` where it ends.
"""

import heapq
from collections.abc import Sequence
from enum import Enum

from search.device.lowering import Loops, Lowered


class Ties(Enum):
    """Which of two kernels that lie equally deep is listed first; XLA's own choice depends on details of no meaning."""

    LATEST = -1
    """The later one in program order: a schedule as it was written."""
    EARLIEST = 1
    """The earlier one."""


class Clock(Enum):
    """By which of its times a kernel fills a window: XLA knows some kernels and collectives, and guesses others."""

    XLA = "scheduled_s"
    OURS = "apart_s"


def program_order(lowered: Lowered) -> tuple[int, ...]:
    """Kernels as they were written; collectives end where they start."""
    pairs = ((k,) if kernel.collective is None else (k, ~k) for k, kernel in enumerate(lowered.kernels))
    return tuple(k for pair in pairs for k in pair)


def memory_saving(lowered: Lowered) -> Lowered:
    """The program with its kernels in the order in which the next one is always one that frees most."""
    region = _Region(lowered, range(len(lowered.kernels)), ())
    return lowered.reordered([k for unit in _ListScheduler(region).run() for k in region.units[unit]])


def latency_hiding(lowered: Lowered, ties: Ties, clock: Clock = Clock.XLA) -> tuple[int, ...]:
    """Kernels put off into the windows of collectives."""
    time_s = [getattr(kernel.time, clock.value) for kernel in lowered.kernels]
    return _Region(lowered, range(len(lowered.kernels)), (), ties, time_s).order()


class _Region:
    """The kernels of one loop's body, or of the step. An inner loop is one *unit*, as is any other kernel."""

    def __init__(
        self,
        lowered: Lowered,
        members: Sequence[int],
        loops: Loops,
        ties: Ties = Ties.LATEST,
        time_s: Sequence[float] = (),
    ) -> None:
        self.kernels, self.lowered, self.ties, self.time_s = lowered.kernels, lowered, ties, time_s
        self.units: list[list[int]] = []
        self.loops_of: dict[int, Loops] = {}
        unit_of: dict[int, int] = {}
        for k in members:
            unit_of[k] = self._unit(k, loops)
            self.units[unit_of[k]].append(k)
        made_by = {b: k for k in members for b in self.kernels[k].makes}
        self.before: list[dict[int, None]] = [{} for _ in self.units]
        for k in members:
            kernel = self.kernels[k]
            needed = [made_by[b] for b in kernel.reads if b in made_by]
            needed += [n for n in kernel.after if n in unit_of]
            self.before[unit_of[k]] |= dict.fromkeys(unit_of[n] for n in needed if unit_of[n] != unit_of[k])

    def _unit(self, k: int, loops: Loops) -> int:
        """The unit that a kernel belongs to, made where it is the first."""
        own = self.kernels[k].loops
        if len(own) > len(loops):
            inner = own[len(own) - len(loops) - 1 :]
            last = len(self.units) - 1
            if self.loops_of.get(last) == inner:
                return last
            self.loops_of[len(self.units)] = inner
        self.units.append([])
        return len(self.units) - 1

    def order(self) -> tuple[int, ...]:
        found: list[int] = []
        for unit, is_end in reversed(_LatencyHidingScheduler(self).run()):
            if unit in self.loops_of:
                body = _Region(self.lowered, self.units[unit], self.loops_of[unit], self.ties, self.time_s)
                found += body.order()
            else:
                (k,) = self.units[unit]
                found.append(~k if is_end else k)
        return tuple(found)

    def is_collective(self, unit: int) -> bool:
        return unit not in self.loops_of and self.kernels[self.units[unit][0]].collective is not None

    def seconds(self, unit: int) -> float:
        return sum(self.time_s[k] for k in self.units[unit])


class _ListScheduler:
    """One pass from the first unit to the last; an inner loop stays as it is."""

    def __init__(self, region: _Region) -> None:
        self.buffers = region.lowered.buffers
        self.makes = [
            dict.fromkeys(b for k in unit for b in region.kernels[k].makes) for unit in region.units
        ]
        self.reads = [
            dict.fromkeys(b for k in unit for b in region.kernels[k].reads if b not in makes)
            for unit, makes in zip(region.units, self.makes, strict=True)
        ]
        self.readers: dict[int, list[int]] = {}
        for unit, reads in enumerate(self.reads):
            for b in reads:
                self.readers.setdefault(b, []).append(unit)
        self.unread = {b: len(units) for b, units in self.readers.items()}
        self.missing = [len(needed) for needed in region.before]
        self.after: list[list[int]] = [[] for _ in region.units]
        for unit, needed in enumerate(region.before):
            for n in needed:
                self.after[n].append(unit)
        self.ready: list[tuple[float, int]] = []
        self.rank: dict[int, float] = {}

    def run(self) -> list[int]:
        """Units in their order."""
        for unit, count in enumerate(self.missing):
            if not count:
                self._offer(unit)
        found: list[int] = []
        while self.ready:
            rank, unit = heapq.heappop(self.ready)
            if self.rank.get(unit) == rank:  # else it has been offered at another rank since
                del self.rank[unit]
                found.append(unit)
                self._done(unit)
        return found

    def _offer(self, unit: int) -> None:
        freed = sum(
            self.buffers[b].num_bytes
            for b in self.reads[unit]
            if self.unread[b] == 1 and not self.buffers[b].is_argument
        )
        self.rank[unit] = sum(self.buffers[b].num_bytes for b in self.makes[unit]) - freed
        heapq.heappush(self.ready, (self.rank[unit], unit))

    def _done(self, unit: int) -> None:
        for b in self.reads[unit]:
            self.unread[b] -= 1
            if self.unread[b] == 1:
                for reader in [u for u in self.readers[b] if u in self.rank]:
                    self._offer(reader)
        for follower in self.after[unit]:
            self.missing[follower] -= 1
            if not self.missing[follower]:
                self._offer(follower)


class _LatencyHidingScheduler:
    """One pass from the last unit to the first."""

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.after = [0] * len(region.units)
        self.depth = [0] * len(region.units)
        for unit, needed in enumerate(region.before):
            self.depth[unit] = max((self.depth[n] for n in needed), default=0) + region.is_collective(unit)
            for n in needed:
                self.after[n] += 1
        self.ready: list[tuple[int, int]] = []
        self.ends: list[tuple[int, int]] = []
        self.listed: list[tuple[int, bool]] = []

    def run(self) -> list[tuple[int, bool]]:
        """From the last to the first: (unit, whether it is a collective's end)."""
        for unit, count in enumerate(self.after):
            if not count:
                self._free(unit)
        while self.ready or self.ends:
            if self.ends:
                self._window(self._take(self.ends))
            else:
                self._list(self._take(self.ready))
        return self.listed

    def _window(self, collective: int) -> None:
        """A collective, and what hides it."""
        self.listed.append((collective, True))
        left_s = self.region.seconds(collective)
        while left_s > 0 and self.ready:
            unit = self._take(self.ready)
            left_s -= self.region.seconds(unit)
            self._list(unit)
        self._list(collective)

    def _list(self, unit: int) -> None:
        self.listed.append((unit, False))
        for n in self.region.before[unit]:
            self.after[n] -= 1
            if not self.after[n]:
                self._free(n)

    def _free(self, unit: int) -> None:
        waiting = self.ends if self.region.is_collective(unit) else self.ready
        heapq.heappush(waiting, (-self.depth[unit], self.region.ties.value * unit))

    def _take(self, waiting: list[tuple[int, int]]) -> int:
        return self.region.ties.value * heapq.heappop(waiting)[1]
