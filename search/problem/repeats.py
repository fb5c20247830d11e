"""Lifetimes of arrays that stand for many: in a step that was shortened, one array of each of several equal blocks.

Some of the arrays of equal blocks are freed before the next block but one makes its own: a layer's temporaries, and the
value that it passes to the next one. For any number of blocks, such an array is in memory once. Others are kept for the
backward phase or the update, and pile up: residuals, gradients, arguments. From the time when the next block makes its
own, such an array counts for all the blocks for which its block stands.
"""

from collections.abc import Sequence


def piled_up_from(starts: Sequence[int], ends: Sequence[int]) -> list[int | None]:
    """The positions from which corresponding arrays are held for all blocks of their runs; None where they do not pile
    up.

    Args:
      starts: first positions of the arrays, ascending.
      ends: last positions of the arrays.
    """
    if len(starts) < 2:
        return [None] * len(starts)
    period = starts[-1] - starts[-2]
    coming = (*starts[1:], starts[-1] + period, starts[-1] + 2 * period)
    return [coming[n] if end >= coming[n + 1] else None for n, end in enumerate(ends)]
