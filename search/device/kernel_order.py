"""The orders in which a device may run its kernels: as written, and as XLA saves memory.

XLA tries a few orders and takes the one that needs the least memory
(`xla/hlo/transforms/simplifiers/hlo_memory_scheduler.cc`). Its list scheduler nearly always wins: of the kernels that
could come next, it takes the one that frees most.

An order lists kernel numbers; a collective appears twice, as `k` where it starts and as `~k` where it ends.
"""

import heapq

from autoshard.search.device.lowering import Lowered
from autoshard.search.device.regions import Region


def program_order(lowered: Lowered) -> tuple[int, ...]:
    """Kernels as they were written; collectives end where they start."""
    pairs = ((k,) if kernel.collective is None else (k, ~k) for k, kernel in enumerate(lowered.kernels))
    return tuple(k for pair in pairs for k in pair)


def memory_saving(lowered: Lowered) -> Lowered:
    """The program with its kernels in the list scheduler's order: the next kernel is always one that frees most."""
    region = Region(lowered, range(len(lowered.kernels)), ())
    return lowered.reordered([k for unit in _ListScheduler(region).run() for k in region.units[unit]])


class _ListScheduler:
    """One pass from the first unit to the last; an inner loop keeps its own order."""

    def __init__(self, region: Region) -> None:
        self.buffers = region.lowered.buffers
        self.makes = [region.makes(unit) for unit in range(len(region.units))]
        self.reads = [region.reads(unit) for unit in range(len(region.units))]
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
