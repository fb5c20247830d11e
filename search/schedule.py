"""The order in which a device runs its kernels: XLA's latency-hiding scheduler, in outline.

Program order is not what runs. XLA lists the kernels from the last to the first (`latency_hiding_scheduler.cc`): a
collective's end goes right before its first reader, then as many kernels as hide its latency are put between its end and
its start, the deepest first. Whatever is only needed late (weight gradients, above all) is thus put off into the
windows of later collectives, and what it reads stays in memory meanwhile. Over its memory budget, the scheduler takes
the kernel that adds least.

Costs are those that XLA uses where it has measured nothing: every kernel counts alike, and a collective wants
`WINDOW` kernels beside it. One collective is under way at a time.
"""

import heapq
from collections.abc import Sequence

from search.lowered import Lowered

WINDOW = 5
"""Kernels that hide a collective. Source: XLA, kHighLatency / kMediumCost of its approximate estimator."""


def latency_hiding(lowered: Lowered, tie=(-1, -1)) -> tuple[int, ...]:
    """Kernel numbers in the order in which they start; collectives appear twice: `k` for the start, `~k` for the end."""
    return _Region(lowered, list(range(len(lowered.kernels))), (), tie).order()


class _Region:
    """The kernels of one loop's body, or of the step; an inner loop is one kernel."""

    def __init__(self, lowered: Lowered, members: Sequence[int], loops, tie) -> None:
        self.lowered = lowered
        self.tie = tie
        depth = len(loops)
        self.units: list[list[int]] = []
        unit_of: dict[int, int] = {}
        inner: dict = {}
        for k in members:
            own = lowered.kernels[k].loops
            key = own[len(own) - depth - 1] if len(own) > depth else None
            if key is None or key not in inner:
                if key is not None:
                    inner[key] = len(self.units)
                self.units.append([])
            at = inner[key] if key is not None else len(self.units) - 1
            self.units[at].append(k)
            unit_of[k] = at
        self.loop_of = {at: (key, *loops) for key, at in inner.items()}
        made_by = {b: k for k in members for b in lowered.kernels[k].makes}
        self.before: list[dict[int, None]] = [{} for _ in self.units]
        for k in members:
            kernel = lowered.kernels[k]
            needed = [made_by[b] for b in kernel.reads if b in made_by]
            needed += [a for a in kernel.after if a in unit_of]
            for n in needed:
                if unit_of[n] != unit_of[k]:
                    self.before[unit_of[k]][unit_of[n]] = None

    def is_collective(self, unit: int) -> bool:
        return unit not in self.loop_of and self.lowered.kernels[self.units[unit][0]].collective is not None

    def cost(self, unit: int) -> float:
        """Seconds of a unit."""
        return sum(self.lowered.kernels[k].seconds for k in self.units[unit])

    def order(self) -> tuple[int, ...]:
        backward = self._listed()
        found: list[int] = []
        for unit, is_end in reversed(backward):
            if unit in self.loop_of:
                found += _Region(self.lowered, self.units[unit], self.loop_of[unit], self.tie).order()
            else:
                k = self.units[unit][0]
                found.append(~k if is_end else k)
        return tuple(found)

    def _listed(self) -> list[tuple[int, bool]]:
        """From the last to the first: (unit, whether it is a collective's end)."""
        after = [0] * len(self.units)
        for needed in self.before:
            for n in needed:
                after[n] += 1
        depth = [0] * len(self.units)
        for unit, needed in enumerate(self.before):  # program order
            below = max((depth[n] for n in needed), default=0)
            depth[unit] = below + self.is_collective(unit)
        ready: list[tuple[int, int]] = []
        ends: list[tuple[int, int]] = []

        def free(unit: int) -> None:
            if self.is_collective(unit):
                heapq.heappush(ends, (-depth[unit], self.tie[0] * unit))
            else:
                heapq.heappush(ready, (-depth[unit], self.tie[1] * unit))

        for unit, count in enumerate(after):
            if count == 0:
                free(unit)
        listed: list[tuple[int, bool]] = []
        under_way, left = None, 0.0
        while ready or ends or under_way is not None:
            if under_way is None and ends:
                under_way = self.tie[0] * heapq.heappop(ends)[1]
                left = self.cost(under_way)
                listed.append((under_way, True))
                continue
            if under_way is not None and (left <= 0 or not ready):
                unit, under_way = under_way, None
            else:
                unit = self.tie[1] * heapq.heappop(ready)[1]
                left -= self.cost(unit)
            listed.append((unit, False))
            for n in self.before[unit]:
                after[n] -= 1
                if after[n] == 0:
                    free(n)
        return listed
