"""What may be recomputed, from nothing to all that can be: the choices that are cheapest at some price of a kept byte.

A choice takes some seconds to recompute and leaves some bytes to keep. Together, at a price, that is a line over prices; the
cheapest choices make the lower envelope of all lines, and which one it is changes at a *breakpoint*. The envelope is found
without trying prices one by one (Eisner & Severance 1976, "Mathematical techniques for efficient record segmentation in
large shared databases"): of two neighbours found so far the lines cross at one price. What is cheapest there is one of the
two, and nothing lies between them, or a third choice between both, and the same is done on either side of it.

The widest gap is closed first, and those are left in which hardly any bytes would be saved.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from autoshard.search.ir.graph import Site

HIGHEST_S_PER_BYTE = 1e-6
"""A price at which all is recomputed that can be. An H100 makes a byte of a product's result in 1e-12 s and more."""

LEAST_SHARE = 0.02
"""Of all that is kept where nothing is recomputed: narrower gaps are left. Source: a choice of ours."""

MAX_CUTS = 20
"""Source: a choice of ours; of models of language and images there were 10 to 15 choices that far apart (measured)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What is cheapest to recompute at a price.

    Attributes:
      price_s_per_byte: the price of a kept byte.
      sites: what is recomputed.
      seconds: what that takes.
      kept_bytes: what is kept then.
    """

    price_s_per_byte: float
    sites: frozenset[Site]
    seconds: float
    kept_bytes: float


def trade_offs(cheapest: Callable[[float], Choice], all_bytes: float) -> list[Choice]:
    """The choices that are cheapest at some price, the one that keeps most first.

    Args:
      cheapest: what it is at a price, in seconds per byte.
      all_bytes: what is kept where nothing is recomputed.
    """
    first, last = cheapest(0.0), cheapest(HIGHEST_S_PER_BYTE)
    found = [first, last] if last.kept_bytes < first.kept_bytes else [first]
    gaps = [(last.kept_bytes - first.kept_bytes, 0, first, last)]
    for n in range(1, MAX_CUTS - 1):
        width_bytes, _, above, below = heapq.heappop(gaps) if gaps else (0.0, 0, first, last)
        if -width_bytes <= LEAST_SHARE * all_bytes:
            break
        between = cheapest((below.seconds - above.seconds) / (above.kept_bytes - below.kept_bytes))
        if above.kept_bytes > between.kept_bytes > below.kept_bytes:
            found.append(between)
            heapq.heappush(gaps, (between.kept_bytes - above.kept_bytes, 2 * n, above, between))
            heapq.heappush(gaps, (below.kept_bytes - between.kept_bytes, 2 * n + 1, between, below))
    return sorted(found, key=lambda choice: -choice.kept_bytes)
