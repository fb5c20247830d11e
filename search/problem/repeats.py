"""Lifetimes of arrays that stand for many: in a step that was shortened, one array of each of several equal blocks.

Some of the arrays of equal blocks are freed before the next block but one makes its own: a layer's temporaries, and the
value that it passes to the next one. For any number of blocks, such an array is in memory once. Others are kept for the
backward phase or the update, and pile up: residuals, gradients, arguments. From the time when the next block would make its
own, such an array counts for all the blocks for which its block stands.

An array piles up if it is held for longer than the next block takes. A scheduler may put a stretch of other work between two
blocks, such as the gradients of all weights, and the arrays that wait for this work are freed there. So the time of a block
is the median of the times from one block to the next.
"""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median_low


def piled_up_from(starts: Sequence[int], ends: Sequence[int]) -> list[int | None]:
    """The positions from which corresponding arrays are held for all blocks of their runs; None where they do not pile
    up.

    Args:
      starts: first positions of the arrays, ascending.
      ends: last positions of the arrays.
    """
    if len(starts) < 2:
        return [None] * len(starts)
    period = median_low(later - earlier for earlier, later in pairwise(starts))
    return [
        start + period if end >= start + 2 * period else None for start, end in zip(starts, ends, strict=True)
    ]
