"""The numbers of microbatches worth trying. With n microbatches, activations take an n-th of their bytes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.search.problem.live_ranges import Resident
from autoshard.search.recomputation import UncappedSolution

OF_A_BATCH = frozenset({Resident.RESIDUALS, Resident.TEMPORARIES})
"""Residents of memory that shrink with the number of examples."""

FEWEST = 2.0
"""Smallest number of microbatches of a step that is split."""

SLOPE_SHARE = 1 / 3
"""Each of many microbatches is taken to add at least this share of the seconds that each of few adds. Source: each of 8
adds 0.39 to 1.1 times as much as the second one, of twelve models on 8 H100s and on 2 V100s (`benchmarks.experts`) and
a Llama of 16B parameters."""


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """Numbers of microbatches that make the fastest strategies fit.

    Attributes:
      fewest: the number that is enough with the most recomputation.
      enough: the number that is enough without recomputation; infinite if the rest of the step is too large.
    """

    fewest: float
    enough: float

    @classmethod
    def of(
        cls, uncapped: UncappedSolution, limit_bytes: float, most_saved_bytes: float
    ) -> "MicrobatchCounts":
        """The counts for the fastest uncapped strategies and the most bytes that recomputation of the whole batch
        saves."""
        peak = uncapped.on_mesh.predicted(uncapped.labels, math.inf).least
        held_bytes = sum(num_bytes for resident, num_bytes in peak.residents if resident in OF_A_BATCH)
        room_bytes = limit_bytes - (peak.num_bytes - held_bytes)
        if room_bytes <= 0:
            return cls(FEWEST, math.inf)
        fewest = max(FEWEST, (held_bytes - most_saved_bytes) / room_bytes)
        return cls(fewest, max(FEWEST, held_bytes / room_bytes))


def least_s(count: int, whole_s: float, tried_s: Mapping[int, float]) -> float:
    """A lower estimate of a step's seconds in so many microbatches, without a cap.

    Args:
      count: number of microbatches.
      whole_s: seconds of the undivided step.
      tried_s: lower bounds by the numbers of microbatches that were tried, the first one first.
    """
    if not tried_s:
        return whole_s
    few, few_s = next(iter(tried_s.items()))
    return whole_s + SLOPE_SHARE * (count - 1) * max(few_s - whole_s, 0.0) / (few - 1)
