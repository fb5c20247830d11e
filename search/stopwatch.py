"""A stopwatch: what each part of a search or a verification took."""

from time import perf_counter


class Stopwatch:
    """Seconds by part, of one part after another; mutable.

    Attributes:
      seconds: by part; of a part that comes again, all together.
    """

    def __init__(self, trace_s: float) -> None:
        self.seconds = {"trace": trace_s}
        self._last_s = perf_counter()

    def lap(self, part: str) -> None:
        """What has passed since the last lap was this part's."""
        now_s = perf_counter()
        self.seconds[part] = self.seconds.get(part, 0.0) + now_s - self._last_s
        self._last_s = now_s
