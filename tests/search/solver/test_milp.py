"""The integer programs against brute force: their optimum, their bound, and what they prove impossible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.clock import PROCESSOR, Deadline, WorkClock
from autoshard.search.solver.milp import free_of_cost, solve_milp, solve_peak
from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem, merged
from tests.search.solver.problems import (
    at_most,
    every_cost_s,
    every_fitting_cost_s,
    every_peak_bytes,
    layered,
    limited_problems,
    problems,
)


@given(limited_problems(), st.sampled_from([0.0, 0.3]))
def test_the_cheapest_that_fits(limited, relative_gap):
    problem, rows, limit_bytes = limited
    table = every_fitting_cost_s(problem, rows, limit_bytes)
    found = solve_milp(merged(problem), rows, limit_bytes, relative_gap=relative_gap)
    if table.min() == np.inf:
        assert found.labels is None
        assert found.bound == np.inf
        return
    assert found.labels is not None
    assert table[found.labels] * (1 - relative_gap - 1e-6) <= table.min()
    rounding_s = 1e-9 * np.abs(table[np.isfinite(table)]).max()
    assert found.bound <= table.min() * (1 + 1e-6) + rounding_s
    assert found.bound >= table[found.labels] * (1 - relative_gap - 1e-6) - rounding_s


@given(limited_problems())
def test_the_smallest_peak(limited):
    problem, rows, limit_bytes = limited
    table = np.where(np.isfinite(every_cost_s(problem)), every_peak_bytes(problem, rows), np.inf)
    found = solve_peak(merged(problem), rows, limit_bytes, relative_gap=0.0)
    if table.min() == np.inf:
        assert found.labels is None
        assert found.bound == np.inf
        return
    assert found.labels is not None
    want_bytes = max(table.min(), limit_bytes)
    assert max(table[found.labels], limit_bytes) == pytest.approx(want_bytes, rel=1e-6)
    assert found.bound == pytest.approx(want_bytes, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("clock", [PROCESSOR, WorkClock()])
def test_the_bound_holds_when_time_runs_out(clock, seed):
    deadline = Deadline.after(0.0, clock)
    problem, rows = layered(3, 2, 4, seed)
    table = every_fitting_cost_s(problem, rows, 15e9)
    found = solve_milp(merged(problem), rows, 15e9, deadline=deadline, relative_gap=0.0)
    assert at_most(found.bound, table.min() * (1 + 1e-6))
    assert found.labels is None or table[found.labels] < np.inf


def test_seconds_may_be_tiny_and_bytes_huge():
    problem = Problem((np.array([1e-6, 3e-6]), np.array([2e-6, 1e-6])), (Edge(0, 1, np.eye(2) * 1e-6),))
    row = MemoryConstraint("point", ((0, np.array([8e10, 1e10])), (1, np.array([1e9, 5e9]))), 2e9)
    found = solve_milp(problem, (row,), 8.4e10, relative_gap=0.0)
    assert found.labels == (0, 0) or problem.cost_s(found.labels) == problem.cost_s((0, 0))
    tighter = solve_milp(problem, (row,), 8.2e10, relative_gap=0.0)
    assert tighter.labels == (1, 0) or problem.cost_s(tighter.labels) == problem.cost_s((1, 0))


def test_a_limit_is_kept_to_the_byte():
    problem = Problem((np.array([0.0, 1.0]),), ())
    row = MemoryConstraint("point", ((0, np.array([1000.0 + 1e-3, 0.0])),), 79_999_999_000.0)
    assert solve_milp(problem, (row,), 80e9, relative_gap=0.0).labels == (0,)
    over = MemoryConstraint("point", ((0, np.array([1000.0, 0.0])),), 79_999_999_900.0)
    assert solve_milp(problem, (over,), 80e9, relative_gap=0.0).labels == (1,)


def test_a_limit_of_nothing_and_costs_of_nothing():
    problem = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, np.array([[0.0, np.inf], [0.0, 0.0]])),))
    row = MemoryConstraint("point", ((0, np.array([0.0, 5.0])),), 0.0)
    assert solve_milp(problem, (row,), 0.0, relative_gap=0.0).labels == (0, 0)


def test_a_row_of_no_nodes_either_fits_or_does_not():
    problem, row = Problem((np.zeros(2),), ()), MemoryConstraint("fixed", (), 5.0)
    assert solve_milp(problem, (row,), 5.0, relative_gap=0.0).labels is not None
    assert solve_milp(problem, (row,), 4.0, relative_gap=0.0).bound == np.inf


def test_nodes_without_an_allowed_label():
    nothing = Problem((np.array([np.inf]), np.zeros(2)), (Edge(0, 1, np.zeros((1, 2))),))
    assert solve_milp(nothing, (), 1.0, relative_gap=0.0).bound == np.inf


@given(problems())
def test_free_of_cost_forbids_the_same(problem):
    free = every_cost_s(free_of_cost(problem))
    assert (np.isfinite(free) == np.isfinite(every_cost_s(problem))).all()
    assert set(np.unique(free)) <= {0.0, np.inf}
