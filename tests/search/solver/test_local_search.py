"""Pair moves: never worse than the start, and no pair of joined nodes could do better in the end."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver.flat import flat
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem, merged
from tests.search.solver.problems import (
    assignments,
    every_cost_s,
    every_row_bytes,
    limited_problems,
    rows_with_pairs,
)

PRICES_S = st.sampled_from([0.0, 1e-10, 1e-9, 1e-6])
"""Per byte: nothing, on a level with the costs, and more than any cost."""


def every_priced_s(problem, rows, limit_bytes, price_s):
    """What descends, of every assignment: its cost, and a price on each byte by which it overflows a row."""
    over = [np.maximum(every_row_bytes(problem, row) - limit_bytes, 0.0) for row in rows]
    return every_cost_s(problem) + price_s * sum(over, np.zeros(problem.num_labels))


def around(labels, edge):
    """Of an array over all labels, the part in which only an edge's nodes may change."""
    return tuple(slice(None) if node in (edge.u, edge.v) else label for node, label in enumerate(labels))


@given(st.data())
def test_it_ends_no_higher_than_it_starts_where_no_pair_can_move(data):
    problem, rows, limit_bytes = data.draw(limited_problems())
    rows = data.draw(st.one_of(st.just(rows), rows_with_pairs(problem)))
    price_s, start = data.draw(PRICES_S), data.draw(assignments(problem))
    whole = merged(problem)
    end = descend(flat(whole), rows, limit_bytes, price_s, start)
    table = every_priced_s(problem, rows, limit_bytes, price_s)
    assert table[end] <= table[start]
    for edge in whole.edges:
        best_s = table[around(end, edge)].min()
        assert table[end] <= best_s * (1 + 1e-9) or table[end] == best_s == np.inf


@given(st.data())
def test_a_dear_price_keeps_what_fits_fitting(data):
    problem, rows, limit_bytes = data.draw(limited_problems(forbidden=False))
    start = data.draw(assignments(problem))
    if any(row.total_bytes(start) > limit_bytes for row in rows):
        return
    end = descend(flat(merged(problem)), rows, limit_bytes, 1.0, start)
    assert all(row.total_bytes(end) <= limit_bytes for row in rows)


SWAP = Problem(
    (np.array([1.0, 0.9]), np.array([1.0, 0.9])), (Edge(0, 1, np.array([[0.0, 9.0], [9.0, 0.0]])),)
)
"""Neither node gains by changing alone, both together do."""


def test_two_nodes_move_together():
    assert descend(flat(SWAP), (), np.inf, 0.0, (0, 0)) == (1, 1)


def test_a_chain_is_gone_through_again_where_surroundings_changed():
    """Only the last pair gains by moving; then the one before it does, and so on to the front, one in each pass."""
    follow = np.array([[1.0, 5.0], [9.0, 0.0]])
    nodes = (*(np.zeros(2) for _ in range(7)), np.array([100.0, 0.0]))
    chain = Problem(nodes, tuple(Edge(u, u + 1, follow) for u in range(7)))
    assert descend(flat(chain), (), np.inf, 0.0, (0,) * 8) == (1,) * 8


def test_an_overflow_is_paid_for_where_it_is_cheapest():
    nodes = (np.array([0.0, 2.0]), np.array([0.0, 1.0]), np.array([0.0, 3.0]))
    edges = tuple(Edge(u, u + 1, np.zeros((2, 2))) for u in range(2))
    row = MemoryConstraint("point", tuple((node, np.array([4.0, 0.0])) for node in range(3)), 1.0)
    problem = Problem(nodes, edges)
    assert descend(flat(problem), (row,), 9.0, 1.0, (0, 0, 0)) == (0, 1, 0)
    assert descend(flat(problem), (row,), 5.0, 1.0, (0, 0, 0)) == (1, 1, 0)
    assert descend(flat(problem), (row,), 9.0, 0.1, (0, 0, 0)) == (0, 0, 0)


def test_it_leaves_what_is_forbidden():
    nodes = (np.array([np.inf, 1.0]), np.array([0.0, np.inf]))
    assert descend(flat(Problem(nodes, (Edge(0, 1, np.zeros((2, 2))),))), (), np.inf, 0.0, (0, 1)) == (1, 0)


def test_a_gain_of_rounding_is_none():
    nodes = (np.array([1.0, 1.0 - 1e-14]), np.array([0.0, 0.0]))
    assert descend(flat(Problem(nodes, (Edge(0, 1, np.zeros((2, 2))),))), (), np.inf, 0.0, (0, 0)) == (0, 0)
