"""Memory rows on demand: which program points does an assignment overflow?

There are thousands of program points, neighbours hold nearly the same, and few ever bind. So nobody writes
all the rows down: whoever has an assignment worth looking at asks for the rows that it overflows and reckons
with the worst of them from then on.
"""

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.search.solver.pbqp import Labels, MemoryConstraint

ROWS_PER_ROUND = 3
"""Of the rows that an assignment overflows, this many of the worst are added."""

Violated = Callable[[Labels], Sequence[MemoryConstraint]]
"""A full assignment -> rows that it overflows, the worst among them; empty where it fits."""


class NoFitError(Exception):
    """No assignment that satisfies the rows and beats the cutoff was found.

    For whoever poses the problem, who knows what its rows and labels mean, to turn into a user's error.

    Attributes:
      bound_s: none that satisfies the rows costs less; it says nothing of those that do not. +inf where there is none.
      num_rows: memory rows that had to be reckoned with; None where that is not known.
    """

    def __init__(self, message: str, *, bound_s: float, num_rows: int | None = None) -> None:
        super().__init__(message)
        self.bound_s, self.num_rows = bound_s, num_rows

    @property
    def is_proven(self) -> bool:
        """Whether no assignment satisfies the rows, rather than none was found in time or beats the cutoff."""
        return self.bound_s == np.inf


def separation_oracle(
    rows: Sequence[MemoryConstraint], violated: Violated | None, limit_bytes: float
) -> Violated:
    """One callback for rows known beforehand and rows made on demand; the worst come first."""

    def overflowed(labels: Labels) -> list[MemoryConstraint]:
        known = [row for row in rows if row.total_bytes(labels) > limit_bytes]
        over = known + list(violated(labels) if violated else ())
        return sorted(over, key=lambda row: (-row.total_bytes(labels), row.name))

    return overflowed
