"""The best checkpoints of a chain, against REVOLVE's recursion and all sequences."""

from functools import cache

import pytest

from autoshard.search.memory.checkpoints import checkpointed
from autoshard.search.memory.retention import footprints
from autoshard.search.memory.value_graph import ValueGraph
from tests.search.memory.value_graphs import cheapest, revolve_chain


@cache
def forward_steps(num_steps: int, num_slots: int) -> int:
    """Griewank and Walther (2000), section 2: advance, reverse what is behind with a slot less, then what is before."""
    if num_steps == 1 or num_slots == 1:
        return num_steps * (num_steps - 1) // 2
    return min(
        m + forward_steps(num_steps - m, num_slots - 1) + forward_steps(m, num_slots)
        for m in range(1, num_steps)
    )


@pytest.mark.parametrize("num_slots", range(1, 7))
@pytest.mark.parametrize("num_steps", [1, 2, 3, 5, 8, 13, 21, 32])
def test_unit_chains_are_reversed_as_by_revolve(num_steps, num_slots):
    graph = revolve_chain(num_steps)
    sequence = checkpointed(graph, num_slots + 1)
    if num_steps == 1:
        assert sequence is None or sequence == (0, 1)
        return
    assert sequence is not None
    assert max(footprints(graph, sequence)) <= num_slots + 1
    assert sum(graph.costs[v] for v in sequence) == forward_steps(num_steps, num_slots)


@pytest.mark.parametrize("budget", range(5, 12))
def test_chains_of_several_sizes(budget):
    """No sequence whatsoever is cheaper."""
    chain = [(v, v + 1) for v in range(4)]
    back = [(4, 5), (3, 6), (2, 7), (1, 8), (0, 9)] + [(v, v + 1) for v in range(5, 9)]
    graph = ValueGraph([3, 1, 4, 1, 5, 0, 0, 0, 0, 0], [2, 3, 1, 2, 1, 0, 0, 0, 0, 0], chain + back)
    sequence = checkpointed(graph, budget)
    assert sequence is not None
    assert max(footprints(graph, sequence)) <= budget
    assert sum(graph.costs[v] for v in sequence) == cheapest(graph, budget)


def test_what_is_no_chain_or_does_not_fit():
    diamond = ValueGraph([1] * 4, [1] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    assert checkpointed(diamond, 100) is None
    assert checkpointed(revolve_chain(8), 1) is None
