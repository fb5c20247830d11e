"""In how many microbatches a step may pay to be split: n of them hold an n-th of what belongs to examples."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.search.problem.live_ranges import Resident
from autoshard.search.recomputation import UncappedSolution

OF_A_BATCH = frozenset({Resident.RESIDUALS, Resident.TEMPORARIES})
"""What is less, the fewer examples there are."""

FEWEST = 2.0
"""Microbatches of a step that is split."""

SLOPE_SHARE = 1 / 3
"""Of what each of few microbatches adds to a step, what each of more is taken to add at least. Source: each of 8
adds 0.39 to 1.1 times as much as the second one, of twelve models on 8 H100s and on 2 V100s (`benchmarks.experts`) and a
Llama of 16B parameters."""


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """As many microbatches as make the fastest strategies fit.

    Attributes:
      fewest: where as much is recomputed as may be.
      enough: where nothing is; infinite where they hold too much besides.
    """

    fewest: float
    enough: float

    @classmethod
    def of(
        cls, uncapped: UncappedSolution, limit_bytes: float, most_saved_bytes: float
    ) -> "MicrobatchCounts":
        """For the fastest strategies without a cap, and what may be kept no longer of the whole batch."""
        peak = uncapped.on_mesh.predicted(uncapped.labels, math.inf).least
        held_bytes = sum(num_bytes for resident, num_bytes in peak.residents if resident in OF_A_BATCH)
        room_bytes = limit_bytes - (peak.num_bytes - held_bytes)
        if room_bytes <= 0:
            return cls(FEWEST, math.inf)
        fewest = max(FEWEST, (held_bytes - most_saved_bytes) / room_bytes)
        return cls(fewest, max(FEWEST, held_bytes / room_bytes))


def least_s(count: int, whole_s: float, tried_s: Mapping[int, float]) -> float:
    """What a step in so many microbatches is taken to last at least, without a cap.

    Args:
      count: of microbatches.
      whole_s: what it lasts in one.
      tried_s: by their number, what it lasts at least in those that were tried, the first one first.
    """
    if not tried_s:
        return whole_s
    few, few_s = next(iter(tried_s.items()))
    return whole_s + SLOPE_SHARE * (count - 1) * max(few_s - whole_s, 0.0) / (few - 1)
