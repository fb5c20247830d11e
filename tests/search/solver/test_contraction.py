"""Problems made smaller, against brute force: the minimum, bounds on the way, and what is not worth having."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.search.solver import contraction
from autoshard.search.solver.clock import WorkClock
from autoshard.search.solver.contraction import Contraction
from autoshard.search.solver.pbqp import Edge, Problem, merged
from autoshard.search.solver.trws import Trws
from tests.search.solver.problems import at_most, every_cost_s, layered, optimum_s, problems

MAX_TURNS = 50


def allows_something(problem):
    trws = Trws(merged(problem))
    trws.make_consistent()
    return trws.is_feasible


def begun(problem, num_sweeps=0):
    trws = Trws(merged(problem))
    trws.make_consistent()
    for _ in range(num_sweeps):
        trws.sweep()
    return Contraction(trws)


def ended(problem, worth_s=np.inf, num_sweeps=0):
    """Every turn's bound and assignment, until nothing is left."""
    made, turns = begun(problem, num_sweeps), []
    while not made.is_done and len(turns) < MAX_TURNS:
        turns.append(made.turn(worth_s))
    assert made.is_done
    return made, turns


@given(problems(), st.integers(0, 3))
def test_the_minimum_shows_in_the_end(problem, num_sweeps):
    assume(allows_something(problem))
    want_s = optimum_s(problem)
    made, turns = ended(problem, num_sweeps=num_sweeps)
    np.testing.assert_allclose(made.fixed_s, want_s, rtol=1e-9, atol=1e-15)
    if np.isfinite(want_s) and turns:
        bound_s, labels = turns[-1]
        np.testing.assert_allclose(bound_s, want_s, rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(every_cost_s(problem)[labels], want_s, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("worth", [np.inf, 1.001])
def test_neighbours_joined_cost_what_they_did(monkeypatch, seed, worth):
    """Nothing is eliminated but what has one neighbour, nor is an assignment improved until it is the best: what is left to
    find the minimum by is joining."""
    monkeypatch.setattr(contraction, "MAX_TABLE", 0.0)
    monkeypatch.setattr(contraction, "reoptimised", lambda problem, labels, deadline: (labels, False))
    problem, _ = layered(4, 2, 3, seed)
    want_s = optimum_s(problem)
    made, turns = ended(problem, worth * want_s)
    np.testing.assert_allclose(
        min(made.fixed_s, worth * want_s), want_s, rtol=worth - 1 + 1e-9 if worth < 2 else 1e-9
    )
    found_s = min(every_cost_s(problem)[labels] for _, labels in turns if labels is not None)
    np.testing.assert_allclose(found_s, want_s, rtol=1e-9)


@given(problems(), st.floats(0.5, 2.0))
def test_bounds_hold_and_what_is_dearer_is_left_out(problem, share):
    assume(allows_something(problem))
    worth_s = share * optimum_s(problem)
    made = begun(problem)
    while not made.is_done:
        bound_s, labels = made.turn(worth_s)
        assert at_most(bound_s, min(worth_s, optimum_s(problem)))
        assert labels is None or np.isfinite(every_cost_s(problem)[labels]) or optimum_s(problem) == np.inf
        if bound_s == worth_s:
            assert at_most(worth_s, optimum_s(problem))
            break


def test_a_cycle_that_no_message_sees():
    """Four nodes that all want to differ from their neighbours, with two labels each: any one edge costs nothing."""
    differ = np.array([[1.0, 0.0], [0.0, 1.0]])
    pairs = ((0, 1), (1, 2), (0, 2), (2, 3), (0, 3), (1, 3))
    problem = Problem(tuple(np.zeros(2) for _ in range(4)), tuple(Edge(u, v, differ) for u, v in pairs))
    trws = Trws(merged(problem))
    assert max(trws.sweep()[0] for _ in range(100)) < 0.01
    made, turns = ended(problem)
    assert made.fixed_s == pytest.approx(2.0)
    assert every_cost_s(problem)[turns[-1][1]] == pytest.approx(2.0)


def test_it_begins_with_what_is_left_of_a_problem():
    problem = merged(layered(3, 2, 4, 0)[0])
    trws = Trws(problem)
    trws.keep([np.arange(len(cost)) > 0 for cost in problem.node_cost_s])
    made = Contraction(trws)
    bound_s, labels = made.turn(np.inf)
    left = every_cost_s(problem)[tuple(slice(1, None) for _ in problem.node_cost_s)]
    assert min(labels) > 0
    assert at_most(bound_s, left.min())


def test_it_does_not_bring_back_what_was_left_out():
    problem = layered(4, 2, 3, 0)[0]
    made = begun(problem)
    made.turn(1.1 * optimum_s(problem))
    with pytest.raises(AssertionError, match="left out"):
        made.turn(1.2 * optimum_s(problem))


def test_its_clock_counts_what_it_does():
    trws, clock = Trws(merged(layered(4, 2, 3, 0)[0])), WorkClock()
    made = Contraction(trws, clock)
    begun_s = clock.now_s
    made.turn(np.inf)
    assert clock.now_s > begun_s
