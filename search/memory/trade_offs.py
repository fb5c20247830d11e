"""Choices of recomputation, from none to all: those that are cheapest at some price of a kept byte.

A choice takes some seconds to recompute and leaves some bytes to keep. Its cost is a line over the price of a byte. The
cheapest choices make the lower envelope of all lines, which changes from one to the next at a *breakpoint*. The envelope is
found without trying prices one by one (Eisner & Severance 1976, "Mathematical techniques for efficient record segmentation
in large shared databases"). The lines of two neighbours found so far cross at one price. If one of the two is cheapest
there, no choice lies between them. Otherwise a third choice is cheapest, and the search continues on both sides of it.

The widest gap is searched first. Gaps in which hardly any bytes would be saved are left.
"""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from autoshard.search.ir.graph import Site

HIGHEST_S_PER_BYTE = 1e-6
"""A price at which everything is recomputed that can be. An H100 makes a byte of a product's result in 1e-12 s and more."""

LEAST_SHARE = 0.02
"""Narrower gaps are left, as a share of the bytes kept without recomputation. Source: a choice of ours."""

MAX_CUTS = 20
"""Largest number of choices. Source: a choice of ours; models of language and images had 10 to 15 choices that far
apart (measured)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cheapest choice of recomputation at a price.

    Attributes:
      price_s_per_byte: the price of a kept byte.
      sites: the ops to recompute.
      seconds: the time that the choice costs.
      kept_bytes: the bytes that it keeps.
    """

    price_s_per_byte: float
    sites: frozenset[Site]
    seconds: float
    kept_bytes: float


def trade_offs(cheapest: Callable[[float], Choice], all_bytes: float) -> list[Choice]:
    """The choices that are cheapest at some price, in descending order of kept bytes.

    Args:
      cheapest: the cheapest choice at a price in seconds per byte.
      all_bytes: bytes kept without recomputation.
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
