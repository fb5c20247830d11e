"""In how many microbatches a step may pay to be split: n of them hold an n-th of what belongs to examples."""

import math
from dataclasses import dataclass

from search.problem.live_ranges import Resident
from search.recomputation import FreeSolution

OF_A_BATCH = frozenset({Resident.RESIDUALS, Resident.TEMPORARIES})
"""What is less, the fewer examples there are."""

FEWEST = 2.0
"""Microbatches of a step that is split."""


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """As many microbatches as make the fastest strategies fit.

    Attributes:
      fewest: where as much is recomputed as may be.
      enough: where nothing is.
    """

    fewest: float
    enough: float

    @classmethod
    def of(cls, free: FreeSolution, limit_bytes: float, most_saved_bytes: float) -> "MicrobatchCounts":
        """For the fastest strategies without a cap, and what may be kept no longer of the whole batch."""
        peak = free.on_mesh.predicted(free.labels, math.inf).least
        held_bytes = sum(num_bytes for resident, num_bytes in peak.residents if resident in OF_A_BATCH)
        room_bytes = limit_bytes - (peak.num_bytes - held_bytes)
        if room_bytes <= 0:
            return cls(FEWEST, FEWEST)
        fewest = max(FEWEST, (held_bytes - most_saved_bytes) / room_bytes)
        return cls(fewest, max(FEWEST, held_bytes / room_bytes))
