"""The smallest peak: the proof that a search is infeasible, and the number in its message to the user.

Without costs, only memory and forbidden labels and pairs remain: minimise the largest row (`search.solver.milp.solve_peak`).
Few edges forbid anything, so the program is small. If its time runs out, its assignment may still be far from the optimum;
pair moves improve it (`search.solver.local_search`). Rows are added on demand: solve, ask which points overflow, add the
worst.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.solver.clock import NEVER, Deadline
from autoshard.search.solver.flat import flat
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.milp import MilpResult, free_of_cost, solve_peak
from autoshard.search.solver.pbqp import Labels, MemoryConstraint, Problem, merged, near, restricted_row
from autoshard.search.solver.separation import ROWS_PER_ROUND, NoFitError, Violated, separation_oracle
from autoshard.search.solver.trws import Trws

RELATIVE_GAP = 1e-3
"""Relative gap of the smallest peak, which is for messages."""


MAX_DESCENTS = 10
"""Most descents after each integer program; each one sees the rows that the last one made overflow."""


@dataclass(frozen=True, slots=True)
class SmallestPeak:
    """An assignment with a small largest row, the row's value, and a lower bound on every assignment's largest row.

    Peaks below the limit are not distinguished: there the value and the bound are the limit.
    """

    labels: Labels
    peak_bytes: float
    bound_bytes: float


def minimise_peak(
    problem: Problem,
    *,
    limit_bytes: float,
    rows: Sequence[MemoryConstraint] = (),
    violated: Violated | None = None,
    deadline: Deadline = NEVER,
) -> SmallestPeak:
    """The assignment with the smallest largest row, or any assignment that fits `limit_bytes`.

    Args:
      problem: only its forbidden labels and pairs matter, not its finite costs.
      limit_bytes: the limit that `violated` reports overflows of.
      rows: rows known beforehand.
      violated: gives the rows that an assignment overflows.
      deadline: after it, the best assignment so far is returned, with its bound.

    Raises:
      NoFitError: the problem forbids every assignment, or none was found in time.
    """
    overflowed = separation_oracle(rows, violated, limit_bytes)
    free = free_of_cost(merged(problem))
    flat_free, trws = flat(free), Trws(free, deadline.clock)
    trws.make_consistent()
    known: dict[str, MemoryConstraint] = {}
    best: Labels = ()
    best_bytes, bound_bytes = np.inf, -np.inf
    while best_bytes > max(bound_bytes, limit_bytes) * (1 + RELATIVE_GAP):
        is_late = deadline.is_over
        answer = smallest_peak(trws, tuple(known.values()), limit_bytes, deadline)
        bound_bytes = max(bound_bytes, answer.bound)
        if answer.labels is None:
            break
        labels, num_known = answer.labels, len(known)
        for _ in range(1 + MAX_DESCENTS):
            over = overflowed(labels)
            peak_bytes = over[0].total_bytes(labels) if over else limit_bytes
            if peak_bytes < best_bytes:
                best, best_bytes = labels, peak_bytes
            known |= {row.name: row for row in over[:ROWS_PER_ROUND]}
            before = labels
            rows_near = near(known.values(), before)
            labels = descend(flat_free, rows_near, limit_bytes, 1.0, before, deadline.clock)
            if labels == before:
                break
        if len(known) == num_known or is_late:
            break
    if best_bytes == np.inf:
        bound_s = np.inf if bound_bytes == np.inf else -np.inf
        raise NoFitError("no assignment of strategies is allowed", bound_s=bound_s)
    return SmallestPeak(best, best_bytes, min(bound_bytes, best_bytes))


def smallest_peak(
    trws: Trws, rows: Sequence[MemoryConstraint], unit_bytes: float, deadline: Deadline
) -> MilpResult:
    """The assignment of kept labels with the smallest maximum over the given rows; the bound is in bytes."""
    if not trws.is_feasible:
        return MilpResult(None, np.inf)
    rest_rows = [restricted_row(row, trws.kept) for row in rows]
    gap = RELATIVE_GAP / 2
    answer = solve_peak(trws.rest(), rest_rows, unit_bytes, deadline=deadline, relative_gap=gap)
    return MilpResult(None if answer.labels is None else trws.original(answer.labels), answer.bound)
