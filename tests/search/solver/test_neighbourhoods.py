"""Moves of nearly all nodes at once, against brute force: never worse, the minimum where none has to be fixed, and out of
pits that no pair of nodes gets out of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver import neighbourhoods
from autoshard.search.solver.flat import flat
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.neighbourhoods import reoptimised
from autoshard.search.solver.pbqp import Edge, Problem, merged
from tests.search.solver.problems import assignments, every_cost_s, optimum_s, problems


@given(st.data())
def test_small_problems_are_solved_whatever_the_start(data):
    problem = merged(data.draw(problems()))
    start = data.draw(assignments(problem))
    labels, is_best = reoptimised(problem, start)
    assert is_best
    np.testing.assert_allclose(every_cost_s(problem)[labels], optimum_s(problem), rtol=1e-9)


@given(st.data())
def test_with_little_room_it_is_no_worse_and_says_so(data):
    problem = merged(data.draw(problems()))
    start = data.draw(assignments(problem))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbourhoods, "EASY_ENTRIES", 4)
        patch.setattr(neighbourhoods, "MAX_ENTRIES", data.draw(st.sampled_from([4, 9, 16])))
        labels, is_best = reoptimised(problem, start)
    assert every_cost_s(problem)[labels] <= every_cost_s(problem)[start]
    if is_best:
        np.testing.assert_allclose(every_cost_s(problem)[labels], optimum_s(problem), rtol=1e-9)


def ring(num_nodes, gain_s, apart_s):
    """Nodes that each would rather have label 1, joined to the next two, which they want to be like."""
    edges = [
        Edge(n, (n + step) % num_nodes, apart_s * (1 - np.eye(2)))
        for n in range(num_nodes)
        for step in (1, 2)
    ]
    return merged(Problem((np.array([gain_s, 0.0]),) * num_nodes, tuple(edges)))


def test_what_must_change_together_changes_together():
    problem = ring(12, gain_s=1.0, apart_s=2.0)
    start = (0,) * 12
    assert descend(flat(problem), (), np.inf, 0.0, start) == start
    assert reoptimised(problem, start) == ((1,) * 12, True)


def test_nodes_that_were_fixed_once_are_free_the_next_time(monkeypatch):
    """With one node fixed at 0 all others are better off at 1 even so; that one follows when another is fixed."""
    monkeypatch.setattr(neighbourhoods, "EASY_ENTRIES", 4)
    monkeypatch.setattr(neighbourhoods, "MAX_ENTRIES", 16)
    problem = ring(12, gain_s=1.0, apart_s=2.0)
    labels, is_best = reoptimised(problem, (0,) * 12)
    assert labels == (1,) * 12
    assert not is_best
