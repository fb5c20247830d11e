"""A device's memory and time over a schedule of its kernels.

Memory: a buffer is held from the kernel that makes it to its last reader. A buffer from outside of a loop that the loop
reads is held to the loop's end; one that a loop stacks, from the loop's start. Time: there are four streams. Kernels
run one after another; collectives, copies to the host and copies from it run beside them, one at a time of each. A
reader of a collective's or a copy's result starts after it. A loop ends when the copies of its iterations have ended.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.search.device.lowering import TRANSFERS, Kernel, Loops, Lowered
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.problem.repeats import piled_up_from


def peak(lowered: Lowered, order: Sequence[int]) -> Peak:
    """The highest point of a schedule, as `search.device.kernel_order` gives it."""
    return Occupancy(lowered).peak(order)


class Occupancy:
    """The buffers that a device holds, in any order of its kernels; their makers and readers are tabulated once.

    Attributes:
      lowered: the kernels.
      made: [(kernel, buffer that it makes); kernel, buffer, loop]. The loop is the outermost one between a kernel and a
        buffer from further out, by number, or -1.
      used: [(kernel, buffer that it reads or makes); kernel, buffer, loop], with the loop as in `made`.
      members: [(kernel, loop that it is in); kernel, loop].
    """

    def __init__(self, lowered: Lowered) -> None:
        self.lowered, kernels = lowered, lowered.kernels
        self._loops: dict[tuple[int, int], int] = {}
        self.made = self._table((k, kernel.makes) for k, kernel in enumerate(kernels))
        self.used = self._table((k, (*kernel.reads, *kernel.makes)) for k, kernel in enumerate(kernels))
        inside = [(k, self._number(loop)) for k, kernel in enumerate(kernels) for loop in kernel.loops]
        self.members = np.array(inside, np.int64).reshape(-1, 2)
        self._num_bytes = np.array([buffer.num_bytes for buffer in lowered.buffers])
        self._is_argument = np.array([buffer.is_argument for buffer in lowered.buffers], bool)
        self._workspace_bytes = np.array([kernel.workspace_bytes for kernel in kernels])
        overwritten = (sum(lowered.buffers[b].num_bytes for b in _in_place(kernel)) for kernel in kernels)
        self._in_place_bytes = np.array(list(overwritten), float)
        alike: dict[Hashable, list[int]] = {}
        for b, buffer in enumerate(lowered.buffers):
            if buffer.alike is not None:
                alike.setdefault(buffer.alike, []).append(b)
        self._alike = [bs for bs in alike.values() if any(lowered.buffers[b].repeats > 1 for b in bs)]

    def _table(self, touched: Iterable[tuple[int, Sequence[int]]]) -> np.ndarray:
        kernels, buffers = self.lowered.kernels, self.lowered.buffers
        rows = [(k, b, self._left(kernels[k].loops, buffers[b].loops)) for k, bs in touched for b in bs]
        return np.array(rows, np.int64).reshape(-1, 3)

    def _left(self, inside: Loops, outside: Loops) -> int:
        """The outermost loop between a kernel and a buffer from further out."""
        num_left = len(inside) - len(outside)
        return self._number(inside[num_left - 1]) if num_left > 0 else -1

    def _number(self, loop: tuple[int, int]) -> int:
        return self._loops.setdefault(loop, len(self._loops))

    def peak(self, order: Sequence[int]) -> Peak:
        """The highest point of a schedule."""
        return self.peaks(order)[0]

    def peaks(self, order: Sequence[int], over_bytes: float = np.inf) -> tuple[Peak, ...]:
        """The highest point of a schedule, and those of the other stretches that hold more than a limit."""
        run, buffer, num_bytes, start, dies = self._held(order)
        held = _over_places(len(run), start, dies[buffer], num_bytes)
        total = held + self._workspace_bytes[run] - self._in_place_bytes[run]
        found = list[Peak]()
        for where in _highest(total, over_bytes):
            alive = np.flatnonzero((start <= where) & (where <= dies[buffer]))
            held_there = list(zip(buffer[alive].tolist(), num_bytes[alive].tolist(), strict=True))
            found.append(self._peak(float(total[where]), self.lowered.kernels[run[where]], held_there))
        return tuple(found)

    def course(self, order: Sequence[int]) -> dict[Resident, np.ndarray]:
        """Bytes by kind of resident at each place of a schedule; kinds that are never there are left out."""
        run, buffer, num_bytes, start, dies = self._held(order)
        kinds = [*Resident]
        kind = np.array([kinds.index(one.resident) for one in self.lowered.buffers], np.int64)
        course = {}
        for k, resident in enumerate(kinds):
            own = kind[buffer] == k
            course[resident] = _over_places(len(run), start[own], dies[buffer[own]], num_bytes[own])
        course[Resident.TEMPORARIES] = course[Resident.TEMPORARIES] + self._workspace_bytes[run]
        for place, k in enumerate(run.tolist()):
            for b in _in_place(self.lowered.kernels[k]):
                course[self.lowered.buffers[b].resident][place] -= self.lowered.buffers[b].num_bytes
        return {resident: held for resident, held in course.items() if held.any()}

    def _held(self, order: Sequence[int]) -> tuple[np.ndarray, ...]:
        """Over a schedule: the kernel at each place; and of what is held the buffer, its bytes and its first place; and
        each buffer's last place."""
        run = np.array([k if k >= 0 else ~k for k in order], np.int64)
        born, dies = self._stretches(np.array(order, np.int64) >= 0, run)
        there = np.flatnonzero(dies >= born)
        buffer, others, start = self._likes(there, born, dies)
        buffer, start = np.concatenate([there, buffer]), np.concatenate([born[there], start])
        num_bytes = self._num_bytes[buffer] * np.concatenate([np.ones(len(there)), others])
        return run, buffer, num_bytes, start, dies

    def piled_up(self, order: Sequence[int]) -> Lowered:
        """The kernels, each buffer enlarged by those buffers for which it stands and that a schedule holds together
        with it."""
        run = np.array([k if k >= 0 else ~k for k in order], np.int64)
        born, dies = self._stretches(np.array(order, np.int64) >= 0, run)
        buffers = list(self.lowered.buffers)
        for b, others, _ in zip(*self._likes(np.flatnonzero(dies >= born), born, dies), strict=True):
            buffers[b] = replace(buffers[b], num_bytes=(1 + others) * buffers[b].num_bytes)
        return replace(self.lowered, buffers=tuple(buffers))

    def _likes(
        self, there: np.ndarray, born: np.ndarray, dies: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Buffers that stand for others held at the same time (`search.problem.repeats`): which, for how many, and from
        which place of the schedule on."""
        rows: list[tuple[int, int, int]] = []
        is_there = set(there.tolist()) if self._alike else set[int]()
        for bs in self._alike:
            ordered = sorted((b for b in bs if b in is_there), key=lambda b: int(born[b]))
            starts = piled_up_from(born[ordered].tolist(), dies[ordered].tolist())
            found = zip(ordered, starts, strict=True)
            rows += [
                (b, self.lowered.buffers[b].repeats - 1, start) for b, start in found if start is not None
            ]
        buffer, others, start = np.array(rows, np.int64).reshape(-1, 3).T
        return buffer, others, start

    def _peak(self, num_bytes: float, kernel: Kernel, alive: Iterable[tuple[int, float]]) -> Peak:
        """The peak while a kernel runs, by kind of resident.

        Args:
          num_bytes: bytes of all buffers together.
          kernel: the kernel that runs.
          alive: buffers, each with its bytes.
        """
        residents, buffers = dict.fromkeys(Resident, 0.0), self.lowered.buffers
        alive = list(alive)
        for b, held_bytes in alive:
            if b not in _in_place(kernel):
                residents[buffers[b].resident] += held_bytes
        residents[Resident.TEMPORARIES] += kernel.workspace_bytes
        there = tuple((r, num_bytes) for r, num_bytes in residents.items() if num_bytes > 0)
        held = tuple(
            (origin, held_bytes)
            for b, held_bytes in alive
            if held_bytes and b not in _in_place(kernel) and (origin := buffers[b].origin)
        )
        return Peak(num_bytes, kernel.position, there, held)

    def _stretches(self, is_start: np.ndarray, run: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Per buffer: the first and the last place in the schedule at which it is held."""
        num_kernels, places = len(self.lowered.kernels), np.arange(len(run))
        first, last = np.zeros(num_kernels, np.int64), np.zeros(num_kernels, np.int64)
        first[run[is_start]] = places[is_start]
        last[run] = places  # of two, the later one
        starts, ends = np.full(len(self._loops), len(run)), np.full(len(self._loops), -1)
        np.minimum.at(starts, self.members[:, 1], first[self.members[:, 0]])
        np.maximum.at(ends, self.members[:, 1], last[self.members[:, 0]])
        born, dies = np.zeros(len(self._num_bytes), np.int64), np.where(self._is_argument, len(run) - 1, -1)
        kernel, buffer, loop = self.made.T
        born[buffer] = _unless_inside(loop, starts, first[kernel])
        kernel, buffer, loop = self.used.T
        np.maximum.at(dies, buffer, _unless_inside(loop, ends, last[kernel]))
        return born, dies


def _highest(total: np.ndarray, over: float) -> list[int]:
    """The highest place, and those of the other stretches of places that are above a limit; the highest first."""
    is_over = np.flatnonzero(total > over)
    stretches = np.split(is_over, np.flatnonzero(np.diff(is_over) > 1) + 1) if len(is_over) else []
    found = {int(one[np.argmax(total[one])]) for one in stretches} | {int(np.argmax(total))}
    return sorted(found, key=lambda at: (-total[at], at))


def seconds(lowered: Lowered, order: Sequence[int]) -> float:
    """Seconds that a schedule takes."""
    return max((end_s for _, end_s in timetable(lowered, order)), default=0.0)


def timetable(lowered: Lowered, order: Sequence[int]) -> Iterator[tuple[float, float]]:
    """Seconds from the start of the step at which each place of a schedule begins and ends. A place that ends a collective
    is the wait for it."""
    now, free = 0.0, dict[str, float]()
    done: dict[int, float] = {}
    in_loops: dict[int, tuple[int, int]] = {}
    for k in order:
        kernel = lowered.kernels[k if k >= 0 else ~k]
        for copy in [copy for copy, loop in in_loops.items() if loop not in kernel.loops]:
            now = max(now, done[copy])
            del in_loops[copy]
        start_s = now
        if kernel.collective is None:
            end_s = now = now + kernel.time.seconds
        elif k >= 0:
            stream = kernel.collective.stream
            start_s = max(now, free.get(stream, 0.0))
            end_s = free[stream] = done[k] = start_s + kernel.time.seconds
            if kernel.loops and kernel.collective.kind in TRANSFERS:
                in_loops[k] = kernel.loops[0]
        else:
            end_s = now = max(now, done[~k])
        yield start_s, end_s


def _over_places(count: int, start: np.ndarray, last: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """Bytes at each of so many places, of stretches from a first place to a last one."""
    at = np.stack([start, last + 1], axis=1).ravel()
    changes = np.stack([num_bytes, -num_bytes], axis=1).ravel()
    return np.cumsum(np.bincount(at, changes, count + 1)[:count])


def _unless_inside(loop: np.ndarray, of_loops: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Places in a schedule; a place inside a loop is replaced by the loop's own."""
    return np.where(loop < 0, places, of_loops[loop]) if len(of_loops) else places


def _in_place(kernel: Kernel) -> tuple[int, ...]:
    """Buffers that a kernel writes over its operands: an all-reduce does, but several joined ones write to one flat
    array."""
    is_all_reduce = kernel.collective is not None and kernel.collective.kind == "all-reduce"
    return kernel.makes if is_all_reduce and len(kernel.makes) == 1 else ()
