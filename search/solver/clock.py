"""The clock that a search goes by: the work that it has done, or the processor's time.

A search that stops when its time is up stops elsewhere on a slow machine than on a fast one, and finds another plan. So
where nobody asked for real seconds, the clock counts work: whoever does something long says afterwards what it takes on one
known machine (`spend`), and nothing else moves the clock. The same inputs then end a search at the same point of the same
work everywhere, and its plan is the same, byte for byte. A limit in such *nominal* seconds still is about what one waits.

The known machine is one core of a fourth-generation EPYC at 2.6 GHz. What things take there stands beside whatever does
them, as constants that end in `_S`; `benchmarks/nominal_seconds.py` measures them, and how well their sum follows the
processor. They need no precision, but that they are never changed lightly: a plan that ran out of time depends on them.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import thread_time
from typing import ClassVar


class SearchClock(ABC):
    """What a search goes by.

    Attributes:
      counts_work: whether only `spend` moves it: then nothing may be given a limit in real seconds.
    """

    counts_work: ClassVar[bool]

    @property
    @abstractmethod
    def now_s(self) -> float:
        """Seconds since some beginning."""

    @abstractmethod
    def spend(self, nominal_s: float) -> None:
        """Says that something was done, and what that takes on the known machine."""


class WorkClock(SearchClock):
    """Counts what it is told of; mutable, one for each search."""

    counts_work = True

    def __init__(self) -> None:
        self._now_s = 0.0

    @property
    def now_s(self) -> float:
        return self._now_s

    def spend(self, nominal_s: float) -> None:
        self._now_s += nominal_s


class ProcessorClock(SearchClock):
    """What the processor spends on this thread, so that a busy machine finds the plan that it finds when idle."""

    counts_work = False

    @property
    def now_s(self) -> float:
        return thread_time()

    def spend(self, nominal_s: float) -> None:
        pass


PROCESSOR = ProcessorClock()
"""For those who have no clock of their own."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment by a clock. Parts get shares of what is left, never seconds of their own."""

    clock: SearchClock
    end_s: float

    @classmethod
    def after(cls, seconds: float, clock: SearchClock) -> "Deadline":
        """So many seconds from now."""
        return cls(clock, clock.now_s + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, never less than zero."""
        return max(0.0, self.end_s - self.clock.now_s)

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left_s == 0.0

    def share(self, part: float) -> "Deadline":
        """The moment when a part of what is left will have passed."""
        return Deadline.after(part * self.left_s, self.clock)


NEVER = Deadline(PROCESSOR, math.inf)
