"""Elimination against brute force: the minimum, an assignment that has it, and when it gives up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.elimination import Elimination
from autoshard.search.solver.pbqp import Edge, Problem, merged
from tests.search.solver.problems import chains, every_cost_s, layered, optimum_s, problems

PLENTY = 1e6


def eliminate(problem, max_entries):
    elimination = Elimination(problem)
    elimination.run(max_entries)
    return None if elimination.left else (elimination.total, elimination.labels())


def check(problem):
    found = eliminate(merged(problem), PLENTY)
    assert found is not None
    cost_s, labels = found
    np.testing.assert_allclose(cost_s, optimum_s(problem), rtol=1e-9)
    np.testing.assert_allclose(every_cost_s(problem)[labels], optimum_s(problem), rtol=1e-9)


@given(problems())
def test_the_minimum_and_where_it_is(problem):
    check(problem)


@given(chains())
def test_the_minimum_of_a_chain(problem):
    check(problem)


@pytest.mark.parametrize("seed", range(4))
def test_the_minimum_of_wide_layers(seed):
    check(layered(4, 2, 3, seed)[0])


@pytest.mark.parametrize("best", [0, 1, 2])
def test_of_labels_that_cost_their_neighbours_the_same_the_cheapest_counts(best):
    own_s = np.array([5.0, 5.0, 5.0])
    own_s[best] = 1.0
    alike = np.tile([0.0, 2.0], (3, 1))
    check(Problem((own_s, np.array([3.0, 0.0])), (Edge(0, 1, alike),)))


def test_labels_that_differ_towards_one_neighbour_only():
    left, right = (
        np.array([[0.0, 9.0], [0.0, 9.0], [9.0, 0.0]]),
        np.array([[9.0, 0.0], [0.0, 9.0], [0.0, 9.0]]),
    )
    nodes = (np.array([0.0, 0.1, 0.0]), np.array([4.0, 0.0]), np.array([1.0, 0.0]))
    check(Problem(nodes, (Edge(0, 1, left), Edge(0, 2, right))))


def test_nothing_is_allowed():
    forbidden = Problem((np.zeros(2), np.zeros(2)), (Edge(0, 1, np.full((2, 2), np.inf)),))
    cost_s, _ = eliminate(forbidden, PLENTY)
    assert cost_s == np.inf


def test_no_nodes_and_no_edges():
    assert eliminate(Problem((), ()), PLENTY) == (0.0, ())
    assert eliminate(Problem((np.array([2.0, 1.0]), np.array([3.0])), ()), PLENTY) == (4.0, (1, 0))


def test_it_gives_up_above_the_entries_allowed_and_not_before():
    """In a triangle of nodes with three labels, whoever goes first makes a table of 27 entries before it is minimised."""
    rng = np.random.default_rng(0)
    nodes = tuple(rng.random(3) for _ in range(3))
    triangle = Problem(nodes, tuple(Edge(u, v, rng.random((3, 3))) for u, v in ((0, 1), (0, 2), (1, 2))))
    assert eliminate(triangle, 26) is None
    found = eliminate(triangle, 27)
    assert found is not None
    assert found[0] == pytest.approx(optimum_s(triangle))


def test_a_table_of_classes_is_smaller_than_one_of_labels():
    """Of six labels, two differ towards their neighbours: nine become four times two."""
    rng = np.random.default_rng(0)
    few = np.arange(6) % 2
    edges = tuple(Edge(u, v, rng.random((2, 2))[np.ix_(few, few)]) for u, v in ((0, 1), (0, 2), (1, 2)))
    problem = Problem(tuple(rng.random(6) for _ in range(3)), edges)
    found = eliminate(problem, 6 * 2 * 2)
    assert found is not None
    assert found[0] == pytest.approx(optimum_s(problem))
    assert eliminate(problem, 6 * 2 * 2 - 1) is None


def test_the_smallest_table_goes_first():
    """A star's leaves make tables of two nodes; its centre would make one of all."""
    rng = np.random.default_rng(0)
    nodes = tuple(rng.random(3) for _ in range(6))
    star = Problem(nodes, tuple(Edge(0, leaf, rng.random((3, 3))) for leaf in range(1, 6)))
    assert eliminate(star, 9) is not None


@given(problems(), st.data())
def test_a_fixed_node_keeps_its_label_and_the_others_are_best_for_it(problem, data):
    problem = merged(problem)
    node = data.draw(st.integers(0, len(problem.num_labels) - 1))
    label = data.draw(st.integers(0, problem.num_labels[node] - 1))
    untouched = Elimination(problem)
    elimination = untouched.copy()
    elimination.fix(node, label)
    elimination.run(PLENTY)
    labels, want = elimination.labels(), every_cost_s(problem).take(label, axis=node).min()
    assert labels[node] == label
    np.testing.assert_allclose(elimination.total, want, rtol=1e-9)
    np.testing.assert_allclose(every_cost_s(problem)[labels], want, rtol=1e-9)
    assert len(untouched.left) == len(problem.num_labels)
