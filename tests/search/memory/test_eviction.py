"""A sequence by eviction fits its budget, and costs what its rule says."""

import pytest

from autoshard.search.memory.eviction import evicting
from autoshard.search.memory.retention import footprints
from autoshard.search.memory.value_graph import ValueGraph
from tests.search.memory.value_graphs import cheapest, forward_backward


@pytest.mark.parametrize("seed", range(10))
def test_a_sequence_fits_and_is_no_better_than_the_best(seed):
    graph = forward_backward(seed, 4)
    peak = max(footprints(graph, range(len(graph))))
    for budget in range(graph.least_budget(), peak + 1):
        sequence = evicting(graph, budget)
        if sequence is not None:
            assert max(footprints(graph, sequence)) <= budget
            best = cheapest(graph, budget)
            assert best is not None
            assert sum(graph.costs[v] for v in sequence) >= best
    assert evicting(graph, peak) == tuple(range(len(graph)))
    assert evicting(graph, graph.least_budget() - 1) is None


def test_what_is_cheap_and_large_and_needed_late_goes_first():
    """Three inputs wait for their readers beside a fourth: one must go."""
    edges = [(3, 4), (2, 5), (1, 6), (0, 7), (4, 5), (5, 6), (6, 7)]

    def evicted(costs, sizes):
        sequence = evicting(ValueGraph([*costs, 1, 0, 0, 0, 0], [*sizes, 1, 0, 0, 0, 0], edges), sum(sizes))
        return {v for v in sequence if sequence.count(v) > 1}

    assert evicted([1, 1, 1], [1, 1, 1]) == {0}
    assert evicted([9, 9, 1], [1, 1, 1]) == {2}
    assert evicted([1, 1, 1], [1, 1, 9]) == {2}
