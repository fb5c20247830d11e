"""How long arrays are there of which one stands for many: in a step that was shortened, one of each of the blocks alike.

Of the arrays that equal blocks make, some are gone before the next block but one makes its own: what a layer computes with,
what it hands to the next one. However many blocks there are, such an array is there once. Others wait, for the backward
phase or the update, and pile up: residuals, gradients, arguments. Such an array is there for all of its block's likes from
when the next block makes its own.
"""

from collections.abc import Sequence


def piled_up_from(starts: Sequence[int], ends: Sequence[int]) -> list[int | None]:
    """From where on each of some arrays alike is there for all of its likes; None where they do not pile up.

    Args:
      starts: where they begin to be there, ascending.
      ends: where they are there last.
    """
    if len(starts) < 2:
        return [None] * len(starts)
    period = starts[-1] - starts[-2]
    coming = (*starts[1:], starts[-1] + period, starts[-1] + 2 * period)
    return [coming[n] if end >= coming[n + 1] else None for n, end in enumerate(ends)]
