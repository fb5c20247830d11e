"""Memory rows on demand: which program points does an assignment overflow?

There are thousands of program points, neighbours hold nearly equal bytes, and few points ever bind. So the
rows are not all built: a solver with a good assignment asks for the rows that it overflows, and keeps the worst
of them from then on.
"""

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.search.solver.pbqp import Labels, MemoryConstraint

ROWS_PER_ROUND = 3
"""Number of the worst overflowed rows that are added for one assignment."""

Violated = Callable[[Labels], Sequence[MemoryConstraint]]
"""A full assignment -> rows that it overflows, the worst among them; empty where it fits."""


class NoFitError(Exception):
    """No assignment that satisfies the rows and beats the cutoff was found.

    The caller, who knows the meaning of rows and labels, turns it into a user's error.

    Attributes:
      bound_s: a lower bound on assignments that satisfy the rows (others may cost less); +inf if there is none.
      num_rows: memory rows that the search added; None if unknown.
    """

    def __init__(self, message: str, *, bound_s: float, num_rows: int | None = None) -> None:
        super().__init__(message)
        self.bound_s, self.num_rows = bound_s, num_rows

    @property
    def is_proven(self) -> bool:
        """True if no assignment satisfies the rows; False if none was found in time or beats the cutoff."""
        return self.bound_s == np.inf


def separation_oracle(
    rows: Sequence[MemoryConstraint], violated: Violated | None, limit_bytes: float
) -> Violated:
    """One callback for rows known beforehand and rows on demand; the worst come first."""

    def overflowed(labels: Labels) -> list[MemoryConstraint]:
        known = [row for row in rows if row.total_bytes(labels) > limit_bytes]
        over = known + list(violated(labels) if violated else ())
        return sorted(over, key=lambda row: (-row.total_bytes(labels), row.name))

    return overflowed
