"""The clock of a search: it counts either the work done or the processor's time.

A search under a limit of real seconds stops earlier on a slow machine than on a fast one, and finds another plan. Unless the
user asks for real seconds, the clock therefore counts work. After each long operation, the code adds the operation's time on
a reference machine (`spend`); nothing else moves the clock. Equal inputs then end a search at the same point on every
machine, and the plans are equal byte for byte. Such *nominal* seconds are still close to the time that a user waits.

The reference machine is one core of a fourth-generation EPYC at 2.6 GHz. The times of operations there are constants that
end in `_S`, beside the code of the operation. `benchmarks/nominal_seconds.py` measures them, and how well their sum follows
the processor. They need no precision, but must not change lightly: a plan that ran out of time depends on them.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import thread_time
from typing import ClassVar


class SearchClock(ABC):
    """The clock of a search.

    Attributes:
      counts_work: whether only `spend` moves the clock. If so, no solver may get a limit in real seconds.
    """

    counts_work: ClassVar[bool]

    @property
    @abstractmethod
    def now_s(self) -> float:
        """Seconds since an arbitrary start."""

    @abstractmethod
    def spend(self, nominal_s: float) -> None:
        """Adds the time of a finished operation on the reference machine."""


class WorkClock(SearchClock):
    """Counts the nominal seconds that are spent; mutable, one for each search."""

    counts_work = True

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def spend(self, nominal_s: float) -> None:
        self._now_s += nominal_s


class ProcessorClock(SearchClock):
    """This thread's processor time, so that a busy machine finds the same plan as an idle one."""

    counts_work = False

    @property
    def now_s(self) -> float:
        return thread_time()

    def spend(self, nominal_s: float) -> None:
        pass


PROCESSOR = ProcessorClock()
"""The default clock of the solvers."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by a clock. A part of a search gets a share of the time left, never seconds of its own."""

    clock: SearchClock
    end_s: float

    @classmethod
    def after(cls, seconds: float, clock: SearchClock) -> "Deadline":
        """The deadline this many seconds from now."""
        return cls(clock, clock.now_s + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, never less than zero."""
        return max(0.0, self.end_s - self.clock.now_s)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left_s == 0.0

    def share(self, part: float) -> "Deadline":
        """The deadline at which this part (0 to 1) of the time left will have passed."""
        return Deadline.after(part * self.left_s, self.clock)


NEVER = Deadline(PROCESSOR, math.inf)
