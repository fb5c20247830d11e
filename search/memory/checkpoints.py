"""The best checkpoints of a chain of steps that is run backwards, by dynamic programming.

Step n takes state n - 1 to state n, as an iteration of a loop takes a carry to the next. A backward phase reads the states,
last to first. Some are *stored* on the way; the others are computed again from the nearest stored state before them. State 0
is there in any case. Let C(i, j, m) be the least cost of serving the reads of states j, j - 1, ..., i if state i is stored
and m more bytes may be. A *sweep* computes states i + 1 to k. Then either k < j is stored until all reads from it on are
served, or k = j is read:

    C(i, j, m) = min over i < k < j with size[k] <= m of  cost(i+1..k) + C(k, j, m - size[k]) + C(i, k-1, m),
                          and of                          cost(i+1..j)                        + C(i, j-1, m),
    C(i, i, m) = 0

The state that a sweep has reached is not counted: a loop holds one carry however it is run. If all sizes are equal, this is
the recursion of Griewank and Walther (2000, "Revolve", section 2), and no schedule whatsoever costs less. If they differ, it
is that of Beaumont et al. (2019) for persistent checkpoints.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd

import numpy as np

MAX_UNITS = 64
"""Most parts into which the budget is divided; sizes are rounded up to whole parts. A limit of the time."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """States computed one after the other, from a stored one.

    Attributes:
      start: the stored state; it is dropped when it has been read, which is when `end` is the same.
      end: the last state of the sweep.
      is_stored: True if `end` is stored; else it is read, and the step after it reversed.
    """

    start: int
    end: int
    is_stored: bool


def checkpointed(costs: Sequence[float], sizes: Sequence[int], budget: int) -> tuple[Sweep, ...]:
    """The cheapest sweeps that serve all reads, last state first.

    Args:
      costs: of each state from the one before; that of state 0 is not used.
      sizes: of each state, in bytes or any unit.
      budget: the most that stored states may take beside state 0.

    Example:
      >>> for sweep in checkpointed([0, 1, 1, 1], [1, 1, 1, 1], 1):
      ...     print(sweep.start, sweep.end, "store" if sweep.is_stored else "read")
      0 1 store
      1 3 read
      1 2 read
      1 1 read
      0 0 read
    """
    unit = gcd(*sizes) or 1
    unit *= -(-budget // (unit * MAX_UNITS)) or 1
    chain = _Chain(costs, [-(-size // unit) for size in sizes], budget // unit)
    return tuple(chain.sweeps())


class _Chain:
    """The costs C(i, j, m) and the choices k behind them, for all m at once."""

    def __init__(self, costs: Sequence[float], sizes: Sequence[int], budget: int) -> None:
        self._sizes, self._budget = sizes, budget
        self._until = list(accumulate(costs))
        self._cost: dict[tuple[int, int], np.ndarray] = {}
        self._choice: dict[tuple[int, int], np.ndarray] = {}
        for width in range(len(sizes)):
            for i in range(len(sizes) - width):
                self._solve(i, i + width)

    def _solve(self, i: int, j: int) -> None:
        best, choice = np.zeros(self._budget + 1), np.full(self._budget + 1, j)
        if i < j:
            best = self._until[j] - self._until[i] + self._cost[i, j - 1]
        for k in range(i + 1, j):
            size = self._sizes[k]
            cost = np.full(len(best), np.inf)
            cost[size:] = self._until[k] - self._until[i] + self._cost[i, k - 1][size:]
            cost[size:] += self._cost[k, j][: max(0, len(best) - size)]
            choice[cost < best] = k
            best = np.minimum(best, cost)
        self._cost[i, j], self._choice[i, j] = best, choice

    def sweeps(self) -> Iterator[Sweep]:
        waiting = [(0, len(self._sizes) - 1, self._budget)]
        while waiting:
            i, j, free = waiting.pop()
            k = int(self._choice[i, j][free])
            yield Sweep(i, k, k < j)
            waiting += [(i, k - 1, free)] if k > i else []
            waiting += [(k, j, free - self._sizes[k])] if k < j else []
