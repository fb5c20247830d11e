"""Flat arrays hold the problem that they were made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.flat import flat, flat_bytes, flat_cost_s, tables
from autoshard.search.solver.pbqp import MemoryConstraint, Problem, merged
from tests.search.solver.problems import problems


@given(problems(), st.data())
def test_an_assignments_cost(problem, data):
    problem = merged(problem)
    labels = tuple(data.draw(st.integers(0, num - 1)) for num in problem.num_labels)
    assert flat_cost_s(flat(problem), labels) == pytest.approx(problem.cost_s(labels), rel=1e-12, abs=1e-12)


@given(problems())
def test_each_edges_table(problem):
    problem = merged(problem)
    arrays = flat(problem)
    for edge, table in zip(problem.edges, tables(arrays, arrays.entries_s), strict=True):
        np.testing.assert_array_equal(table, edge.cost_s)


@given(problems())
def test_sides_of_one_edge_are_each_others_mates(problem):
    problem = merged(problem)
    net = flat(problem).topology
    assert len(net.edge) == 2 * len(problem.edges)
    for side, mate in enumerate(net.mate):
        edge = problem.edges[net.edge[side]]
        assert (net.node[side], net.other[side]) == ((edge.u, edge.v) if net.is_u[side] else (edge.v, edge.u))
        assert net.mate[mate] == side
        assert net.edge[mate] == net.edge[side]
        assert net.first[net.node[side]] <= side < net.first[net.node[side] + 1]


def test_a_rows_bytes():
    nodes = flat(Problem((np.zeros(2), np.zeros(3)), ())).places
    row = MemoryConstraint("row", ((1, np.array([3.0, 4.0, 5.0])),), 7.0)
    assert flat_bytes(row, nodes).tolist() == [0.0, 0.0, 3.0, 4.0, 5.0]
