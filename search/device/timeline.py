"""A device's memory and time over a schedule of its kernels.

Memory: a buffer is there from the kernel that makes it to the last one that reads it; one from outside of a loop that
the loop reads, to the loop's end; one that a loop stacks, from the loop's start. Four streams take the time: kernels run
one after another, collectives beside them, one at a time, and so do copies to the host, and copies from it; what reads a
collective's or a copy's result waits for it.
"""

from collections.abc import Sequence

from search.device.lowering import Kernel, Loops, Lowered
from search.problem.live_ranges import Resident
from search.problem.memory_rows import Peak


def peak(lowered: Lowered, order: Sequence[int]) -> Peak:
    """The highest point of a schedule, as `search.device.kernel_order` gives it."""
    run = [lowered.kernels[k if k >= 0 else ~k] for k in order]
    stretches = _stretches(lowered, order, run)
    change = [0.0] * (len(order) + 1)
    for buffer, (born, dies) in zip(lowered.buffers, stretches, strict=True):
        if dies >= born:
            change[born] += buffer.num_bytes
            change[dies + 1] -= buffer.num_bytes
    held, highest, where = 0.0, -1.0, 0
    for at, kernel in enumerate(run):
        held += change[at]
        in_place_bytes = sum(lowered.buffers[b].num_bytes for b in _in_place(kernel))
        total = held + kernel.workspace_bytes - in_place_bytes
        if total > highest:
            highest, where = total, at
    residents = dict.fromkeys(Resident, 0.0)
    for b, (born, dies) in enumerate(stretches):
        if born <= where <= dies and b not in _in_place(run[where]):
            residents[lowered.buffers[b].resident] += lowered.buffers[b].num_bytes
    residents[Resident.TEMPORARIES] += run[where].workspace_bytes
    there = tuple((r, num_bytes) for r, num_bytes in residents.items() if num_bytes > 0)
    arrivals = tuple(
        buffer.arrival
        for buffer, (born, dies) in zip(lowered.buffers, stretches, strict=True)
        if buffer.arrival is not None and born <= where <= dies
    )
    return Peak(highest, run[where].position, there, arrivals)


def seconds(lowered: Lowered, order: Sequence[int]) -> float:
    """How long a schedule takes."""
    now, free = 0.0, dict[str, float]()
    done: dict[int, float] = {}
    for k in order:
        kernel = lowered.kernels[k if k >= 0 else ~k]
        if kernel.collective is None:
            now += kernel.time.seconds
        elif k >= 0:
            stream = kernel.collective.stream
            free[stream] = done[k] = max(now, free.get(stream, 0.0)) + kernel.time.seconds
        else:
            now = max(now, done[~k])
    return max(now, *free.values()) if free else now


def _stretches(lowered: Lowered, order: Sequence[int], run: Sequence[Kernel]) -> list[tuple[int, int]]:
    """Per buffer: the first and the last place in the schedule at which it is there."""
    starts: dict[tuple[int, int], int] = {}
    ends: dict[tuple[int, int], int] = {}
    for at, kernel in enumerate(run):
        for loop in kernel.loops:
            starts.setdefault(loop, at)
            ends[loop] = at
    found = [(0, len(run) - 1 if buffer.is_argument else -1) for buffer in lowered.buffers]
    for at, (k, kernel) in enumerate(zip(order, run, strict=True)):
        for b in kernel.makes if k >= 0 else ():
            outermost = _left(kernel.loops, lowered.buffers[b].loops)
            found[b] = (at if outermost is None else starts[outermost], found[b][1])
        for b in (*kernel.reads, *kernel.makes):
            outermost = _left(kernel.loops, lowered.buffers[b].loops)
            found[b] = (found[b][0], max(found[b][1], at if outermost is None else ends[outermost]))
    return found


def _left(inside: Loops, outside: Loops) -> tuple[int, int] | None:
    """The outermost loop between a kernel and a buffer from further out."""
    return inside[len(inside) - len(outside) - 1] if len(inside) > len(outside) else None


def _in_place(kernel: Kernel) -> tuple[int, ...]:
    """An all-reduce writes where it reads; several that are joined write to one flat array."""
    is_all_reduce = kernel.collective is not None and kernel.collective.kind == "all-reduce"
    return kernel.makes if is_all_reduce and len(kernel.makes) == 1 else ()
