"""Bounds under all limits, against brute force."""

import numpy as np
import pytest

from autoshard.search.solver.cap_curve import CapCurve
from autoshard.search.solver.clock import Deadline, WorkClock
from autoshard.search.solver.opening import Opening
from tests.search.solver.problems import at_most, every_cost_s, every_row_bytes, layered, optimum_s

GAP = 0.01


def curve(problem, rows, least_bytes=0.0):
    """The bounds, and the number of prices that were tried."""

    def violated(limit_bytes):
        return lambda labels: [row for row in rows if row.total_bytes(labels) > limit_bytes]

    return CapCurve(Opening(problem, clock=WorkClock()), violated, least_bytes, GAP)


def limits(problem, rows):
    """Limits from the smallest peak to one that all assignments keep to."""
    peak = np.max([every_row_bytes(problem, row) for row in rows], axis=0)
    return np.linspace(float(peak.min()), float(peak.max()), 9).tolist()


@pytest.mark.parametrize("seed", range(20))
def test_no_assignment_that_keeps_to_a_limit_costs_less(seed):
    """Whatever limits prices were looked for."""
    problem, rows = layered(3, 2, 4, seed)
    found = curve(problem, rows)
    for limit_bytes in limits(problem, rows)[::2]:
        found.refine(limit_bytes, Deadline.after(10.0, found.opening.clock))
    bounds_s = [found.at(limit_bytes) for limit_bytes in limits(problem, rows)]
    assert bounds_s == sorted(bounds_s, reverse=True)
    for limit_bytes, bound_s in zip(limits(problem, rows), bounds_s, strict=True):
        assert at_most(bound_s, optimum_s(problem, rows, limit_bytes))


@pytest.mark.parametrize("seed", range(5))
def test_bounds_are_near_the_relaxed_optimum(seed):
    """The best prices of brute force, one row: the lower convex hull of all assignments' costs over their bytes."""
    problem, (row, *_) = layered(3, 2, 4, seed)
    costs_s, num_bytes = every_cost_s(problem).ravel(), every_row_bytes(problem, row).ravel()
    prices = np.concatenate([[0.0], np.geomspace(1e-13, 1e-7, 2000)])
    limit_bytes = float(np.quantile(num_bytes[np.isfinite(costs_s)], 0.02))
    want_s = max(float((costs_s + price * (num_bytes - limit_bytes)).min()) for price in prices)
    found = curve(problem, (row,))
    found.refine(limit_bytes, Deadline.after(60.0, found.opening.clock))
    assert at_most(found.at(limit_bytes), want_s * (1 + 1e-3))
    assert found.at(limit_bytes) >= 0.9 * want_s
    assert want_s > found.at(num_bytes.max())  # the cheapest assignment does not fit


def test_where_the_chord_is_near_no_prices_are_looked_for():
    problem, rows = layered(3, 2, 4, 0)
    found, (low, *_, high) = curve(problem, rows), limits(problem, rows)[3:]
    deadline = Deadline.after(60.0, found.opening.clock)
    for limit_bytes in (low, high):
        found.refine(limit_bytes, deadline)
    spent_s = found.opening.clock.now_s
    found.refine(low, deadline)
    found.refine((1 - 1e-6) * high + 1e-6 * low, deadline)
    assert found.opening.clock.now_s == spent_s


def test_below_the_least_that_can_be_held_nothing_fits():
    problem, rows = layered(3, 2, 4, 0)
    found = curve(problem, rows, least_bytes=5e9)
    found.refine(4e9, Deadline.after(60.0, found.opening.clock))
    assert found.at(4e9) == np.inf
    assert found.at(6e9) < np.inf
