"""Graphs of values say what is wrong with them, and what they are."""

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.search.memory.value_graph import ValueGraph


@pytest.mark.parametrize(
    ("costs", "sizes", "edges", "message"),
    [
        ([1], [1, 2], [], "1 costs and 2 sizes"),
        ([1, -1], [1, 2], [], "node 1 costs -1"),
        ([1, float("inf")], [1, 2], [], "node 1 costs inf"),
        ([1], [1.5], [], "takes 1.5"),
        ([1, 1], [1, 1], [(1, 0)], r"edge \(1, 0\)"),
        ([1, 1], [1, 1], [(0, 2)], r"edge \(0, 2\) of a graph of 2"),
    ],
)
def test_what_is_no_graph(costs, sizes, edges, message):
    with pytest.raises(InputError, match=message):
        ValueGraph(costs, sizes, edges)


def test_a_graph_knows_its_neighbours():
    graph = ValueGraph([1] * 5, [1, 2, 4, 8, 16], [(0, 1), (1, 3), (0, 3), (1, 3), (2, 4)])
    assert graph.operands() == [[], [0], [], [0, 1], [2]]
    assert graph.readers() == [[1, 3], [3], [4], [], []]
    assert graph.last_uses() == [3, 3, 4, 3, 4]
    assert graph.least_budget() == 20
