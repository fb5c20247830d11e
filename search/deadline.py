"""One clock for all that must be done in some time: parts get shares of what is left, never seconds of their own.

It counts what the processor spends on this thread, so that a busy machine finds the plan that it finds when idle.
"""

from dataclasses import dataclass
from time import thread_time


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment; `end_s` is in seconds of the clock of the thread that made it."""

    end_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now."""
        return cls(thread_time() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, never less than zero."""
        return max(0.0, self.end_s - thread_time())

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left_s == 0.0
