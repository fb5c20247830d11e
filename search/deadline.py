"""One clock for all that must be done in some time: parts get shares of what is left, never seconds of their own."""

from dataclasses import dataclass
from time import monotonic


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment; `end_s` is in seconds of the monotonic clock."""

    end_s: float

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """So many seconds from now."""
        return cls(monotonic() + seconds)

    @property
    def left_s(self) -> float:
        """Seconds until then, never less than zero."""
        return max(0.0, self.end_s - monotonic())

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.left_s == 0.0
