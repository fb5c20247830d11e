"""The smallest peak against brute force, with rows known beforehand and on demand, in time and out of it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver import min_peak
from autoshard.search.solver.clock import NEVER, PROCESSOR, Deadline, WorkClock
from autoshard.search.solver.milp import MilpResult, free_of_cost
from autoshard.search.solver.min_peak import RELATIVE_GAP, minimise_peak, smallest_peak
from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem, merged
from autoshard.search.solver.separation import NoFitError
from autoshard.search.solver.trws import Trws
from tests.search.solver.problems import (
    every_cost_s,
    every_peak_bytes,
    layered,
    limited_problems,
    turned,
)


def every_allowed_peak_bytes(problem, rows):
    return np.where(np.isfinite(every_cost_s(problem)), every_peak_bytes(problem, rows), np.inf)


def check(problem, rows, limit_bytes, violated=None):
    """With the rows known beforehand, or handed out by `violated`."""
    table, known = every_allowed_peak_bytes(problem, rows), () if violated else rows
    if table.min() == np.inf:
        with pytest.raises(NoFitError) as error:
            minimise_peak(problem, limit_bytes=limit_bytes, rows=known, violated=violated)
        assert error.value.is_proven
        return
    found = minimise_peak(problem, limit_bytes=limit_bytes, rows=known, violated=violated)
    want_bytes = max(table.min(), limit_bytes)
    assert max(table[found.labels], limit_bytes) == found.peak_bytes
    assert want_bytes <= found.peak_bytes <= want_bytes * (1 + RELATIVE_GAP)
    assert want_bytes * (1 - RELATIVE_GAP) <= found.bound_bytes <= want_bytes * (1 + 1e-9)


@given(limited_problems())
def test_rows_known_beforehand(limited):
    problem, rows, limit_bytes = limited
    check(problem, rows, limit_bytes)


@given(limited_problems(), st.integers(1, 2))
def test_rows_on_demand(limited, num_at_once):
    problem, rows, limit_bytes = limited

    def violated(labels):
        over = [row for row in rows if row.total_bytes(labels) > limit_bytes]
        return sorted(over, key=lambda row: -row.total_bytes(labels))[:num_at_once]

    check(problem, rows, limit_bytes, violated)


@pytest.mark.parametrize("seed", range(3))
def test_many_rows_over_wide_layers(seed):
    problem, _ = layered(3, 2, 4, seed)
    rng = np.random.default_rng(seed)
    rows = tuple(
        MemoryConstraint(f"{i}", tuple((n, rng.integers(0, 10, 4) * 1e9) for n in range(6)), 0.0)
        for i in range(12)
    )
    check(problem, rows, 1e9)
    check(turned(problem), rows, 1e9)


def test_costs_do_not_matter_and_what_is_forbidden_does():
    nodes = (np.array([0.0, 1e6, np.inf]), np.array([0.0, 1.0]))
    edge = Edge(0, 1, np.array([[0.0, 0.0], [0.0, np.inf], [0.0, 0.0]]))
    row = MemoryConstraint("point", ((0, np.array([9.0, 2.0, 0.0])), (1, np.array([4.0, 1.0]))), 1.0)
    found = minimise_peak(Problem(nodes, (edge,)), limit_bytes=1.0, rows=(row,))
    assert (found.labels, found.peak_bytes) == ((1, 0), 7.0)


def test_what_fits_is_enough():
    row = MemoryConstraint("point", ((0, np.array([5.0, 3.0])),), 0.0)
    found = minimise_peak(Problem((np.zeros(2),), ()), limit_bytes=6.0, rows=(row,))
    assert found.peak_bytes == found.bound_bytes == 6.0


def test_without_time_there_is_an_answer_whose_bound_holds():
    for seed in range(4):
        problem, rows = layered(3, 2, 4, seed)
        smallest = every_peak_bytes(problem, rows).min()
        try:
            found = minimise_peak(
                problem, limit_bytes=1.0, rows=rows, deadline=Deadline.after(0.0, PROCESSOR)
            )
        except NoFitError as error:
            proven = error.is_proven
            assert not proven
            continue
        assert found.bound_bytes <= smallest * (1 + 1e-9) <= found.peak_bytes * (1 + 2e-9)


def test_no_program_is_begun_when_time_is_out(monkeypatch):
    """Rows on demand take several programs; without time, there is one."""
    problem, _ = layered(3, 2, 4, 0)
    rng = np.random.default_rng(0)
    rows = [
        MemoryConstraint(f"{i}", tuple((n, rng.integers(0, 10, 4) * 1e9) for n in range(6)), 0.0)
        for i in range(12)
    ]
    num_programs = []

    def counted(*args):
        num_programs[-1] += 1
        return smallest_peak(*args)

    monkeypatch.setattr(min_peak, "smallest_peak", counted)
    for time_limit_s in (60.0, 0.0):
        num_programs.append(0)
        minimise_peak(problem, limit_bytes=1e9, rows=rows, deadline=Deadline.after(time_limit_s, WorkClock()))
    assert num_programs[0] > 1
    assert num_programs[1] == 1


def test_a_program_that_stops_at_its_gap_is_near_enough(monkeypatch):
    """A program's gap is of the peak that it found, which is larger than the smallest, and ours is of the smallest."""
    peaks_bytes = 1e9 * (1 + RELATIVE_GAP * np.linspace(0, 2, 20_001))
    row = MemoryConstraint("point", ((0, peaks_bytes),), 0.0)

    def largest_in_gap(problem, rows, limit_bytes, *, deadline, relative_gap):
        is_in_gap = peaks_bytes - peaks_bytes[0] <= relative_gap * peaks_bytes
        return MilpResult((int(np.flatnonzero(is_in_gap)[-1]),), peaks_bytes[0])

    monkeypatch.setattr(min_peak, "solve_peak", largest_in_gap)
    monkeypatch.setattr(min_peak, "descend", lambda problem, rows, limit_bytes, price_s, start, clock: start)
    found = minimise_peak(Problem((np.zeros(len(peaks_bytes)),), ()), limit_bytes=1.0, rows=(row,))
    assert peaks_bytes[0] < found.peak_bytes <= peaks_bytes[0] * (1 + RELATIVE_GAP)


def test_of_given_rows_among_the_labels_kept():
    problem = Problem((np.zeros(3), np.zeros(2)), (Edge(0, 1, np.zeros((3, 2))),))
    row = MemoryConstraint("point", ((0, np.array([1.0, 5.0, 3.0])), (1, np.array([2.0, 4.0]))), 0.0)
    trws = Trws(merged(free_of_cost(problem)))
    assert smallest_peak(trws, (row,), 1.0, NEVER).labels == (0, 0)
    trws.keep([np.array([False, True, True]), np.array([False, True])])
    found = smallest_peak(trws, (row,), 1.0, NEVER)
    assert found.labels == (2, 1)
    assert found.bound == pytest.approx(7.0, rel=RELATIVE_GAP)
    trws.keep([np.array([False, False]), np.array([True])])
    assert smallest_peak(trws, (row,), 1.0, NEVER).bound == np.inf
