"""Where a chain of forward ops is cut into segments that are recomputed one by one.

Recomputing a whole forward phase from its arguments saves nothing: all its values are in memory at once when the backward
phase begins. So the values that cross from one segment to the next are kept. When the backward phase reaches a segment, the
segment is recomputed from them (Chen et al. 2016). The cuts are where the fewest bytes cross: between layers, if a model has
any. Long segments keep less and hold more while they are recomputed. Of several lengths, the one with the smallest sum of
both is taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MOST_SEGMENTS = 512
"""The shortest segments make all bytes divided by this number. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class Segments:
    """A cut of positions into runs.

    Attributes:
      ends: the last position of each segment.
      kept_bytes: of the values that cross.
      working_bytes: the most that one segment makes.
    """

    ends: tuple[int, ...]
    kept_bytes: float
    working_bytes: float

    def of(self, position: int) -> int:
        """The segment of a position."""
        return int(np.searchsorted(self.ends, position))


def segments(
    num_bytes: Sequence[float],
    last_use: Sequence[int],
    maker: Sequence[int],
    num_positions: int,
    repeats: Sequence[int] | int = 1,
) -> Segments:
    """The cut that takes the least memory.

    Args:
      num_bytes: [values] bytes of each.
      last_use: [values] the last position that reads each.
      maker: [values] the position that makes each.
      num_positions: number of ops.
      repeats: [values] how many values each represents: all of these are kept, and one at a time is recomputed.
    """
    size, last, made_at = np.asarray(num_bytes, float), np.asarray(last_use), np.asarray(maker)
    order = np.argsort(made_at, kind="stable")
    kept = (size * repeats)[order]
    size, last, made_at = size[order], last[order], made_at[order]
    total, found = float(size.sum()), []
    parts = 1
    while parts <= MOST_SEGMENTS:
        found.append(_narrowest(size, kept, last, made_at, num_positions, total / parts))
        parts *= 2
    return min(found, key=lambda s: s.kept_bytes + s.working_bytes)


def _narrowest(
    size: np.ndarray,
    kept: np.ndarray,
    last: np.ndarray,
    made_at: np.ndarray,
    num_positions: int,
    most_bytes: float,
) -> Segments:
    """The segments with the fewest crossing bytes, none of which makes more than `most_bytes` unless it is a single op.

    By dynamic programming over the ends of segments: a value that crosses an end is charged to the segment that makes it.
    """
    first = np.searchsorted(made_at, np.arange(num_positions + 1))
    before = np.concatenate([[0.0], np.cumsum(size)])[first]
    starts = np.searchsorted(before, before - most_bytes * (1 + 1e-9))
    best = np.full(num_positions + 1, np.inf)
    best[0] = 0.0
    start_of = np.zeros(num_positions + 1, np.int64)
    for end in range(1, num_positions + 1):
        start = min(int(starts[end]), end - 1)
        inside = slice(first[start], first[end])
        crossing = np.where(last[inside] >= end, kept[inside], 0.0)
        behind = np.concatenate([np.cumsum(crossing[::-1])[::-1], [0.0]])
        costs = best[start:end] + behind[first[start:end] - first[start]]
        at = int(np.argmin(costs))
        best[end], start_of[end] = costs[at], start + at
    ends = [num_positions]
    while start_of[ends[-1]] > 0:
        ends.append(int(start_of[ends[-1]]))
    ends.reverse()
    made = np.diff(before[[0, *ends]])
    return Segments(tuple(e - 1 for e in ends), float(best[num_positions]), float(made.max(initial=0.0)))
