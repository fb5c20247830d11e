"""Cuts a device's kernels into steps.

GPU kernels do not say to which run of their program they belong. So a step begins at its *marker*: the first of the kernels
that run least often. A loop's kernels run often, the kernels around it once a step. The trace may begin or end inside a
step. So a step lasts from a marker to the next one, with the pause before that, and the last marker only ends one. A trace
with one marker is one step, from its first kernel to its last.
"""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.traces.kernel import TracedKernel


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A step on one device.

    Attributes:
      start_s: on the profiler's clock.
      end_s: where the next step begins.
      kernels: those that begin in it, in time.
    """

    start_s: float
    end_s: float
    kernels: tuple[TracedKernel, ...]

    @property
    def seconds(self) -> float:
        """Its length."""
        return self.end_s - self.start_s


def steps(kernels: Sequence[TracedKernel], own: Sequence[TracedKernel]) -> tuple[TracedStep, ...]:
    """The steps of one device, in time.

    Args:
      kernels: all kernels of the device.
      own: those of the step's program, by which steps are told apart; at least one.
    """
    ordered = sorted(kernels, key=lambda kernel: (kernel.start_s, kernel.end_s))
    begins = _begins(sorted(own, key=lambda kernel: (kernel.start_s, kernel.end_s)))
    if len(begins) == 1:
        begins = [min(k.start_s for k in own), math.nextafter(max(k.end_s for k in own), math.inf)]
    times = [kernel.start_s for kernel in ordered]
    spans = (
        (begin, end, bisect_left(times, begin), bisect_left(times, end)) for begin, end in pairwise(begins)
    )
    return tuple(TracedStep(begin, end, tuple(ordered[first:last])) for begin, end, first, last in spans)


def _begins(own: Sequence[TracedKernel]) -> list[float]:
    """The times of the marker, one in each step."""
    counts = Counter(kernel.key for kernel in own)
    least = min(counts.values())
    marker = next(key for key in counts if counts[key] == least)
    return [kernel.start_s for kernel in own if kernel.key == marker]
