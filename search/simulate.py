"""A device's memory over a schedule."""

from collections.abc import Sequence
from dataclasses import dataclass

from search.lowered import Lowered
from search.liveness import Resident


@dataclass(frozen=True, slots=True)
class Peak:
    """The most memory that a device holds, and where.

    Attributes:
      num_bytes: per device.
      position: the op at which it occurs.
      residents: bytes per device there, by what they are; only what is there.
    """

    num_bytes: float
    position: int
    residents: tuple[tuple[Resident, float], ...]


def peak(lowered: Lowered, order: Sequence[int]) -> Peak:
    """The highest point of a schedule."""
    buffers, kernels = lowered.buffers, lowered.kernels
    loop_end: dict = {}
    for at, k in enumerate(order):
        for loop in kernels[k if k >= 0 else ~k].loops:
            loop_end[loop] = at
    loop_start: dict = {}
    for at, k in reversed(list(enumerate(order))):
        for loop in kernels[k if k >= 0 else ~k].loops:
            loop_start[loop] = at
    born = [0] * len(buffers)
    dies = [-1] * len(buffers)
    for b, buffer in enumerate(buffers):
        if buffer.is_argument:
            dies[b] = len(order) - 1
    for at, k in enumerate(order):
        kernel = kernels[k if k >= 0 else ~k]
        if k >= 0:
            for b in kernel.makes:
                outside = [loop for loop in kernel.loops if loop not in buffers[b].loops]
                born[b] = loop_start[outside[-1]] if outside else at
                dies[b] = max(dies[b], at)
        for b in (*kernel.reads, *kernel.makes):
            outside = [loop for loop in kernel.loops if loop not in buffers[b].loops]
            dies[b] = max(dies[b], loop_end[outside[-1]] if outside else at)
    change = [0.0] * (len(order) + 1)
    for b, buffer in enumerate(buffers):
        if dies[b] >= 0:
            change[born[b]] += buffer.num_bytes
            change[dies[b] + 1] -= buffer.num_bytes
    held, highest, where = 0.0, -1.0, 0
    for at, k in enumerate(order):
        held += change[at]
        kernel = kernels[k if k >= 0 else ~k]
        total = held + kernel.workspace_bytes
        if kernel.collective is not None and kernel.collective[0] == "all-reduce" and k >= 0:
            total -= _reused(kernel, buffers, dies, born, at)
        if total > highest:
            highest, where = total, at
    residents: dict[Resident, float] = {}
    for b, buffer in enumerate(buffers):
        if born[b] <= where <= dies[b]:
            residents[buffer.resident] = residents.get(buffer.resident, 0.0) + buffer.num_bytes
    k = order[where]
    position = kernels[k if k >= 0 else ~k].position
    ordered = tuple((r, residents[r]) for r in Resident if residents.get(r, 0.0) > 0.0)
    return Peak(highest, position, ordered)


def _reused(kernel, buffers, dies, born, at: int) -> float:
    """What a light kernel saves by writing where it reads for the last time."""
    dying = sorted(buffers[b].num_bytes for b in kernel.reads if dies[b] == at and not buffers[b].is_argument)
    saved = 0.0
    for b in kernel.makes:
        if buffers[b].num_bytes in dying:
            dying.remove(buffers[b].num_bytes)
            saved += buffers[b].num_bytes
    return saved
