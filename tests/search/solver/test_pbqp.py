"""Costs and rows of an assignment against arrays over all assignments; merging and restricting change neither."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.pbqp import (
    Edge,
    MemoryConstraint,
    Problem,
    merged,
    near,
    original,
    restricted_row,
)
from tests.search.solver.problems import (
    assignments,
    every_cost_s,
    every_row_bytes,
    limited_problems,
    problems,
    rows_with_pairs,
    turned,
)

LABELS = np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


@given(st.data())
def test_the_cost_and_the_bytes_of_an_assignment(data):
    problem, rows, _ = data.draw(limited_problems())
    labels = data.draw(assignments(problem))
    np.testing.assert_allclose(problem.cost_s(labels), every_cost_s(problem)[labels], rtol=1e-12)
    for row in rows:
        assert row.total_bytes(labels) == every_row_bytes(problem, row)[labels]


@given(problems())
def test_merging_leaves_one_edge_a_pair_and_every_cost(problem):
    whole = merged(problem)
    pairs = [(edge.u, edge.v) for edge in whole.edges]
    assert pairs == sorted({(min(e.u, e.v), max(e.u, e.v)) for e in problem.edges})
    np.testing.assert_allclose(every_cost_s(whole), every_cost_s(problem), rtol=1e-12)


@given(problems())
def test_merging_does_not_depend_on_order_or_direction(problem):
    np.testing.assert_allclose(every_cost_s(merged(turned(problem))), every_cost_s(problem), rtol=1e-12)


@given(st.data())
def test_a_restricted_row_counts_the_kept_labels_alike(data):
    problem = data.draw(problems())
    (row, *_) = data.draw(rows_with_pairs(problem))
    kept = [
        np.flatnonzero(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for n in problem.num_labels
    ]
    small = restricted_row(row, kept)
    assert small.name == row.name
    for (node, per_label), (_, whole) in zip(small.bytes, row.bytes, strict=True):
        assert per_label.tolist() == whole[kept[node]].tolist()
    assert (small.fixed_bytes, [n for n, _ in small.bytes]) == (row.fixed_bytes, [n for n, _ in row.bytes])
    for (*ends, of_pair), (u, v, whole) in zip(small.pairs, row.pairs, strict=True):
        assert (ends, of_pair.tolist()) == ([u, v], whole[kept[u]][:, kept[v]].tolist())


@given(st.data())
def test_an_expansion_is_made_for_the_original_labels_and_restricted_and_scaled_as_its_row(data):
    problem = data.draw(problems())
    (truth, *_) = data.draw(rows_with_pairs(problem))
    kept = [
        np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))) for n in problem.num_labels
    ]
    asked = []
    row = replace(truth, pairs=(), expansion=lambda labels: asked.append(labels) or truth)
    labels = tuple(data.draw(st.integers(0, len(k) - 1)) for k in kept)
    (found,) = near([restricted_row(row.scaled(2.0), kept)], labels)
    assert asked == [original(kept, labels)]
    assert found.total_bytes(labels) == 2 * truth.total_bytes(original(kept, labels))


def test_rows_of_one_point_have_one_expansion():
    exact = MemoryConstraint("a", (), 3.0)
    cuts = [MemoryConstraint("a", (), n, lambda labels: exact) for n in (1.0, 2.0)]
    other = MemoryConstraint("b", (), 4.0)
    assert near([*cuts, other], (0,)) == [exact, other]


def test_merging_and_turning_leave_what_they_are_given():
    problem = Problem((np.zeros(3), np.zeros(2)), (Edge(1, 0, LABELS), Edge(1, 0, LABELS)))
    assert merged(problem).edges[0].cost_s.tolist() == (2 * LABELS.T).tolist()
    assert LABELS[1, 2] == 6.0
    edge = problem.edges[0].transposed()
    assert (edge.u, edge.v, edge.cost_s.tolist()) == (0, 1, LABELS.T.tolist())


def test_the_number_of_labels_of_each_node():
    assert Problem((np.zeros(3), np.zeros(1)), ()).num_labels == (3, 1)


def test_what_makes_no_sense_is_refused():
    with pytest.raises(AssertionError, match="edge from node 1 to itself"):
        Edge(1, 1, LABELS)
    with pytest.raises(AssertionError, match=r"edge 0-1: \(2, 3\) costs for \(3, 2\) labels"):
        Problem((np.zeros(3), np.zeros(2)), (Edge(0, 1, LABELS),))
    with pytest.raises(AssertionError, match="row a: nodes not sorted or not distinct"):
        MemoryConstraint("a", ((1, np.zeros(2)), (0, np.zeros(2))), 0.0)
    with pytest.raises(AssertionError, match="not distinct"):
        MemoryConstraint("a", ((1, np.zeros(2)), (1, np.zeros(2))), 0.0)
