"""The cheapest sequence under a budget, against Dijkstra's algorithm over all sequences and REVOLVE's closed form."""

import re
from math import comb

import pytest

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.search.memory.retention import ValueGraph, footprints, solve
from tests.search.memory.value_graphs import cheapest, forward_backward, layered, revolve_chain

GRAPHS = [forward_backward(seed, layers) for layers in (3, 4) for seed in range(8)] + [
    layered(seed, 8) for seed in range(12)
]
DIAMOND = ValueGraph([1, 2, 3, 4], [4, 3, 2, 1], [(0, 1), (0, 2), (1, 3), (2, 3)])


def tight_budgets(graph: ValueGraph) -> list[int]:
    """From what the largest node takes to just below what all of it takes without recomputation."""
    least, peak = graph.least_budget(), max(footprints(graph, range(len(graph))))
    return sorted({b for b in (least, least + 1, (least + peak) // 2, peak - 1) if least <= b < peak})


def forward_steps(num_steps: int, num_slots: int) -> int:
    """Griewank and Walther (2000), proposition 1: r l - C(s + r, r - 1), C(s + r - 1, s) < l <= C(s + r, s)."""
    r = next(r for r in range(num_steps) if num_steps <= comb(num_slots + r, num_slots))
    return r * num_steps - (comb(num_slots + r, r - 1) if r else 0)


@pytest.mark.parametrize("graph", GRAPHS, ids=range(len(GRAPHS)))
def test_no_sequence_is_cheaper(graph):
    for budget in tight_budgets(graph):
        best = cheapest(graph, budget)
        if best is None:
            with pytest.raises(InfeasibleError):
                solve(graph, budget)
            continue
        plan = solve(graph, budget)
        assert plan.cost == best
        assert plan.is_optimal
        assert plan.bound_any_order <= best
        taken = footprints(graph, plan.sequence)
        assert max(taken) == plan.peak <= budget
        assert sum(graph.costs[v] for v in plan.sequence) == plan.cost


@pytest.mark.parametrize(("seed", "num_nodes", "budget"), [(81, 6, 11), (32, 8, 11), (144, 9, 14)])
def test_a_budget_that_wants_more_runs_than_one(seed, num_nodes, budget):
    """Nodes are computed again in another order than the graph's."""
    graph = layered(seed, num_nodes)
    plan = solve(graph, budget)
    assert plan.cost == cheapest(graph, budget)
    assert plan.num_runs > 1


@pytest.mark.parametrize("seed", range(20))
def test_an_infeasible_budget_is_told_from_one_that_is_enough(seed):
    graph = layered(seed, 7)
    with pytest.raises(InfeasibleError) as caught:
        solve(graph, graph.least_budget() - 1)
    needed, enough = map(int, re.findall(r"needs (\d+).* and (\d+) is enough", str(caught.value))[0])
    assert cheapest(graph, needed - 1) is None
    assert cheapest(graph, enough) is not None


@pytest.mark.parametrize(
    ("num_steps", "num_slots"), [(1, 1), (2, 1), (4, 1), (3, 2), (6, 2), (7, 2), (5, 3), (8, 3), (6, 4)]
)
def test_revolve_is_proven(num_steps, num_slots):
    plan = solve(revolve_chain(num_steps), num_slots + 1)
    assert plan.cost == forward_steps(num_steps, num_slots)
    assert plan.is_optimal


@pytest.mark.parametrize(("num_steps", "num_slots", "steps"), [(16, 3, 33), (32, 5, 68)])
def test_revolve_comes_out_where_the_proof_takes_longer(num_steps, num_slots, steps):
    assert forward_steps(num_steps, num_slots) == steps
    plan = solve(revolve_chain(num_steps), num_slots + 1, time_limit_s=1.0)
    assert plan.cost == steps
    assert num_steps - 1 <= plan.bound <= steps


def test_without_a_shortage_everything_is_computed_once():
    plan = solve(DIAMOND, 9)
    assert (plan.sequence, plan.cost, plan.peak, plan.gap) == ((0, 1, 2, 3), 10, 9, 0.0)
    assert solve(ValueGraph([], [], []), 0).sequence == ()


def test_sizes_and_costs_may_have_any_unit():
    """Bytes in the billions and fractions of seconds: the same sequence."""
    for graph in (forward_backward(3, 4), layered(5, 8)):
        budget = tight_budgets(graph)[-1]
        real = ValueGraph([c * 1e-3 / 7 for c in graph.costs], [s * 2**30 for s in graph.sizes], graph.edges)
        plan, same = solve(graph, budget), solve(real, budget * 2**30 + 1)
        assert same.cost == pytest.approx(plan.cost * 1e-3 / 7)
        assert same.is_optimal
        assert same.peak == plan.peak * 2**30


def test_the_same_graph_gives_the_same_sequence():
    graph = forward_backward(11, 8)
    budget = int(0.7 * max(footprints(graph, range(len(graph)))))
    assert solve(graph, budget) == solve(graph, budget)


def test_footprints_by_hand():
    """Node 0 is dropped after node 1, made again for node 2, and gone when node 3 is computed."""
    assert footprints(DIAMOND, (0, 1, 2, 3)) == [4, 7, 9, 6]
    assert footprints(DIAMOND, (0, 1, 0, 2, 3)) == [4, 7, 7, 9, 6]
    assert footprints(ValueGraph([1, 1], [5, 3], []), (0, 1)) == [5, 3]


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ((0, 2), "position 1 .* computes node 2 where node 1 of 4 comes next"),
        ((0, 1, 2, 3, 4), "position 4 .* computes node 4"),
        ((0, 1, 2), "never computes node 3 of 4"),
    ],
)
def test_a_sequence_that_is_none(sequence, message):
    with pytest.raises(InputError, match=message):
        footprints(DIAMOND, sequence)
