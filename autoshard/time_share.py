"""The time of the searches for one cap: one clock for all of them.

If the compiler finds that a plan exceeds its cap, the step is searched again under a lower limit
(`autoshard.compiled_peaks`). Unless the user gives a limit in seconds, these searches share nominal seconds of work, so that
all of them end within a quarter more than the time of one, however often the compiler objects.
"""

from dataclasses import replace

from autoshard.search.options import LATEST, LEAST_SHARE
from autoshard.search.options import Options as SearchOptions

MAX_ROUNDS = 6
"""Largest number of searches for one cap. Source: derived in `tests/autoshard/test_limits.py`. If all plans are compiled to
36% of the cap more than predicted (`PEAK_BAND`), the fifth fits at the latest. One is left to go half way back."""


class TimeShare:
    """The options of the searches for one cap, which share one clock.

    The first search has the time of the options. Under a user's time limit, each later search has the seconds that are left.
    Without one, all searches share nominal seconds, `LATEST` times those of the first one: `LEAST_SHARE` is kept for each of
    `MAX_ROUNDS`, and a later search has half of the others that are left besides.
    """

    def __init__(self, options: SearchOptions) -> None:
        self.first, self.clock = options, options.new_clock()
        self.began_s, self.num_later = self.clock.now_s, MAX_ROUNDS

    def options(self, limit_bytes: int, limit_s: float | None) -> SearchOptions:
        """The options of the next search, under a limit in bytes and in seconds."""
        nominal_s = self.first.nominal_s if self.num_later == MAX_ROUNDS else self._later_s
        self.num_later -= 1
        return replace(
            self.first, memory_bytes=limit_bytes, time_limit_s=limit_s, nominal_s=nominal_s, clock=self.clock
        )

    @property
    def _later_s(self) -> float:
        """Nominal seconds of a later search."""
        whole_s, least_s = self.first.nominal_s, LEAST_SHARE * self.first.nominal_s
        left_s = LATEST * whole_s - (self.clock.now_s - self.began_s)
        return least_s + max(left_s - self.num_later * least_s, 0.0) / 2
