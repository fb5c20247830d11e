"""Improves an assignment by changing the labels of two joined nodes at a time.

Each move lowers the cost plus a price on every overflowing byte of a row. From an assignment that fits, a high enough
price allows only moves that fit; from one that does not, it saves the missing bytes where they cost the least time.
Single-node moves are among the pairs. The descent ends with the first pass that changes nothing.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.flat import Flat, FlatRows, flat_rows
from autoshard.search.solver.pbqp import Labels, MemoryConstraint

MAX_PASSES = 20
"""A safety limit; a handful of passes is usual."""
ROWS_S = 3e-4
"""Nominal seconds to set up a row. Source: `benchmarks/nominal_seconds.py`, for all below."""
MOVE_S = 1e-6
"""Nominal seconds of one edge's move, besides the parts below."""
ROW_S = 5e-7
"""Nominal seconds of a move for each row, if rows depend on one of its nodes."""
ENTRY_S = 2.5e-9
"""Nominal seconds of a move for each entry of its edge."""


def descend(
    problem: Flat,
    rows: Sequence[MemoryConstraint],
    limit_bytes: float,
    price_s: float,
    start: Labels,
    clock: SearchClock = PROCESSOR,
) -> Labels:
    """A pairwise local optimum of cost + price_s * overflowing bytes, no worse than `start`.

    Args:
      problem: merged, as flat arrays.
      rows: the memory rows to consider.
      limit_bytes: the limit of each row.
      price_s: seconds a byte over the limit.
      start: the first assignment; it may overflow.
      clock: counts the time spent.
    """
    from autoshard.search.solver import moves  # it imports Numba, which takes a while

    labels = np.array(start, int)
    over_bytes = np.array([row.total_bytes(start) for row in rows], float) - limit_bytes
    flat = flat_rows(rows, problem.places)
    num_moves = moves.descend(problem, flat, price_s, labels, over_bytes, MAX_PASSES)
    clock.spend(ROWS_S * len(rows) + float(num_moves @ _move_s(problem, flat)))
    return tuple(labels.tolist())


def _move_s(problem: Flat, rows: FlatRows) -> np.ndarray:
    """[edges]: nominal seconds of a move."""
    topology, num_rows = problem.topology, rows.bytes.shape[1]
    at_v = topology.other[topology.at_u]
    at_u = topology.node[topology.at_u]
    has_rows = rows.has_rows[at_u] | rows.has_rows[at_v]
    return MOVE_S + ROW_S * num_rows * has_rows + ENTRY_S * np.diff(problem.places.entries)
