"""The memory and time of one device in a step, under a full assignment: the plan's peak and its exposed communication.

The kernels (`lowering`, `siblings`, `combiner`) are put in the order that takes the least memory (`kernel_order`). From
there XLA's latency-hiding scheduler (`latency_hiding`) moves kernels into the windows of collectives, which takes more
memory. Its budget is a goal that it overshoots: of 14 plans whose orders held more than their caps by our outline of
it, ten did as compiled, by 3 to 193%; the others held 3 to 6% less. So the scheduler's order has to fit too, besides
the order of least memory, and the predicted peak is that of the scheduler's order. It has a margin for the differences
between our outline and the compiler, as far as the cap leaves room for it. If only the order of least memory fits, the
scheduler may get a share of its budget (`Prediction.overlap`), so that it hides less; at 0 it is off, and nothing is
hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cost_model.xla.gpu_targets import budget_bytes, is_hopper_or_later
from autoshard.search.device.combiner import combined
from autoshard.search.device.kernel_order import memory_saving, program_order
from autoshard.search.device.kernel_sizes import sized
from autoshard.search.device.kernel_times import KernelTime
from autoshard.search.device.latency_hiding import latency_hiding
from autoshard.search.device.lowering import TRANSFERS, Kernel, Lowered, lower
from autoshard.search.device.siblings import merged
from autoshard.search.device.timeline import Occupancy, peak, seconds, timetable
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.live_ranges import ARGUMENTS, LiveRanges, Resident
from autoshard.search.problem.memory_rows import Peak

MARGIN = 0.03
"""Share of the bytes that a step makes, as a margin for the differences between our outline and the compiler. Source:
the spread of predicted against compiled peaks (`benchmarks.truth`)."""

NUM_SHARES = 10
"""A plan's share of the scheduler's budget is a multiple of one over this. Source: a choice of ours. Each bisection costs a
simulation of the scheduler."""

SMALL_PART = 2
"""If the order of least memory holds less than the cap divided by this, the scheduler's order is not computed. Source:
a choice of ours; up to 1.6 times as much has been seen."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A place of a schedule in time: a kernel's run, a collective's, or the wait for a collective.

    Attributes:
      kernel: the kernel.
      start_s: seconds from the start of the step.
      end_s: seconds from the start of the step.
      is_wait: whether the device waits for the collective's end.
    """

    kernel: Kernel
    start_s: float
    end_s: float
    is_wait: bool


@dataclass(frozen=True, eq=False)
class Prediction:
    """A step on one device; each property is simulated when it is first read.

    Attributes:
      lowered: its kernels.
      limit_bytes: the cap, from which the scheduler's budget follows.
      has_scheduler: whether the compiler has a scheduler that moves kernels for overlap.
      apart: its kernels before any were joined.
      overlap: the plan's share of the scheduler's budget. At 0, the scheduler is off: collectives and copies run one after
        another.
    """

    lowered: Lowered
    limit_bytes: float
    has_scheduler: bool
    apart: Lowered
    overlap: float = 1.0

    def with_overlap(self, share: float) -> "Prediction":
        """The step with another share of the scheduler's budget."""
        return replace(self, overlap=share)

    @property
    def within_limit(self) -> "Prediction":
        """The step with the largest share of the scheduler's budget that keeps to the cap, found by bisection; without
        overlap if none does."""
        if self.needed_bytes <= self.limit_bytes:
            return self
        found, fits, fails = self.with_overlap(0.0), 0, NUM_SHARES
        while found.needed_bytes <= self.limit_bytes and fits + 1 < fails:
            share = (fits + fails) // 2
            latest = self.with_overlap(share / NUM_SHARES)
            if latest.needed_bytes <= self.limit_bytes:
                found, fits = latest, share
            else:
                fails = share
        return found

    @cached_property
    def least(self) -> Peak:
        """The peak if the scheduler spends no memory on overlap."""
        return _with_margin(self._occupancy.peak(program_order(self._plain)))

    @cached_property
    def needed_bytes(self) -> float:
        """The bytes that must fit under the cap: the least, or the scheduler's order if that is more. The latter counts
        only where the least fits and is no small part of the cap."""
        least_bytes = self.least.num_bytes
        if not self.limit_bytes / SMALL_PART < least_bytes <= self.limit_bytes:
            return least_bytes
        return max(least_bytes, self._scheduled.num_bytes)

    def over(self, limit_bytes: float) -> tuple[Peak, ...]:
        """The moments at which the order of least memory holds more than a limit: the highest one of each stretch."""
        found = self._occupancy.peaks(program_order(self._plain), limit_bytes / (1 + MARGIN))
        return tuple(one for one in map(_with_margin, found) if one.num_bytes > limit_bytes)

    @cached_property
    def peak(self) -> Peak:
        """The peak of device memory."""
        allowed_bytes, scheduled = max(self.limit_bytes, self.needed_bytes), _with_margin(self._scheduled)
        if self._is_fetching and scheduled.num_bytes < self.least.num_bytes:
            return scheduled
        num_bytes = min(scheduled.num_bytes, allowed_bytes)
        if num_bytes <= self.least.num_bytes:
            return self.least
        return _grown(self.least, num_bytes - self.least.num_bytes)

    @property
    def order(self) -> tuple[int, ...]:
        """The kernels in the compiler's order, or in that of least memory if it takes more after all."""
        if self._is_fetching:
            return self._overlapped
        return max(
            (self._overlapped, program_order(self._plain)),
            key=lambda order: self._occupancy.peak(order).num_bytes,
        )

    def course(self) -> tuple[tuple[Moment, ...], dict[Resident, np.ndarray]]:
        """The places of the order in time, each with its kernel; and the bytes held there by kind of resident."""
        order, kernels = self.order, self._plain.kernels
        times = zip(order, timetable(self._plain, order), strict=True)
        moments = tuple(Moment(kernels[k if k >= 0 else ~k], *when, k < 0) for k, when in times)
        return moments, self._occupancy.course(order)

    @cached_property
    def transfer_s(self) -> float:
        """Seconds of the copies to the host and from it, one after the other."""
        return sum((k.time.seconds for k in self.lowered.kernels if _is_transfer(k)), 0.0)

    @property
    def _is_fetching(self) -> bool:
        """Whether the compiler's scheduler moves transfers. The order of least memory has them where the step says; the
        scheduler starts a third one later, and the step may hold less."""
        return self._is_rescheduled and self.transfer_s > 0

    @property
    def _is_rescheduled(self) -> bool:
        return self.has_scheduler and self.overlap > 0

    @cached_property
    def waited_s(self) -> float:
        """Seconds of the transfers that nothing hides."""
        if not self.transfer_s or not self.overlap:
            return self.transfer_s
        return self._fastest_s(self._plain) - self._seconds_beside_transfers

    @cached_property
    def lost_overlap_s(self) -> float:
        """Seconds of communication that the scheduler would hide if it had all of its budget."""
        if self.overlap in (0.0, 1.0) or not self.has_scheduler:
            return 0.0
        return max(0.0, self._seconds_beside_transfers - self.with_overlap(1.0)._seconds_beside_transfers)

    @cached_property
    def _seconds_beside_transfers(self) -> float:
        """Seconds of the step if its transfers took no time."""
        free = KernelTime(0.0, 0.0)
        kernels = tuple(replace(k, time=free) if _is_transfer(k) else k for k in self._plain.kernels)
        return self._fastest_s(replace(self._plain, kernels=kernels))

    def _fastest_s(self, lowered: Lowered) -> float:
        orders = (program_order(self._plain), self._overlapped)
        return min(seconds(lowered, order) for order in orders)

    @cached_property
    def _plain(self) -> Lowered:
        return in_least_order(self.lowered)

    @cached_property
    def _occupancy(self) -> Occupancy:
        return Occupancy(self._plain)

    @cached_property
    def _scheduled(self) -> Peak:
        """The highest point of the scheduler's order."""
        return self._occupancy.peak(self._overlapped)

    @cached_property
    def _overlapped(self) -> tuple[int, ...]:
        """The kernels in the compiler's order; in the order of least memory where it moves none."""
        if not self._is_rescheduled:
            return program_order(self._plain)
        piled_up = self._occupancy.piled_up(program_order(self._plain))
        resting_bytes = sum(buffer.num_bytes for buffer in piled_up.buffers if buffer.is_argument)
        return latency_hiding(piled_up, budget_bytes(self.limit_bytes, resting_bytes, self.overlap))


def _is_transfer(kernel: Kernel) -> bool:
    return kernel.collective is not None and kernel.collective.kind in TRANSFERS


def in_least_order(lowered: Lowered) -> Lowered:
    """The program in its own order or the list scheduler's, whichever takes less memory."""
    orders = (lowered, memory_saving(lowered))
    return min(orders, key=lambda order: peak(order, program_order(order)).num_bytes)


def _with_margin(found: Peak) -> Peak:
    own = sum(num_bytes for resident, num_bytes in found.residents if resident not in ARGUMENTS)
    return _grown(found, MARGIN * own)


def _grown(found: Peak, num_bytes: float) -> Peak:
    """A peak with `num_bytes` more of temporaries."""
    residents = dict(found.residents)
    residents[Resident.TEMPORARIES] = residents.get(Resident.TEMPORARIES, 0.0) + num_bytes
    return replace(found, num_bytes=found.num_bytes + num_bytes, residents=tuple(residents.items()))


def predict(
    costed: CostedGraph,
    live_ranges: LiveRanges,
    chosen: Sequence[int],
    limit_bytes: float,
    is_one_program: bool = True,
) -> Prediction:
    """Predicts the step of one device under an assignment.

    Args:
      limit_bytes: the cap, from which the scheduler's budget follows.
      is_one_program: whether one program runs them all, or one for each task of a pipeline's stages.
    """
    mesh = costed.resharder.mesh
    device = mesh.cluster.device
    apart = lower(costed, live_ranges, chosen, is_one_program)
    lowered = combined(merged(apart), mesh)
    has_scheduler = device.platform == "cuda"
    if has_scheduler and not is_hopper_or_later(device.name):
        lowered = sized(lowered)
    return Prediction(lowered, limit_bytes, has_scheduler, apart)
