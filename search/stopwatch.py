"""A stopwatch for the parts of a search or a verification."""

from time import perf_counter


class Stopwatch:
    """Seconds by part, for parts that follow one another; mutable.

    Attributes:
      seconds: by part; a part that comes again adds to its seconds.
    """

    def __init__(self, trace_s: float) -> None:
        self.seconds = {"trace": trace_s}
        self._last_s = perf_counter()

    def lap(self, part: str) -> None:
        """Adds the time since the last lap to this part."""
        now_s = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s
