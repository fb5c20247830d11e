"""Prices on memory: bounds hold under any of them, the best ones are found, branches part the labels."""

import numpy as np
import pytest
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st

from autoshard.search.solver.flat import flat
from autoshard.search.solver.lagrangian import CuttingPlanes, Relaxation
from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem, merged
from autoshard.search.solver.trws import Trws
from tests.search.solver.problems import (
    at_most,
    chains,
    cheapest_with,
    every_cost_s,
    every_fitting_cost_s,
    every_row_bytes,
    layered,
    limited_problems,
    optimum_s,
    rows_of,
)

PRICES_S = st.sampled_from([0.0, 1e-16, 1e-10, 1e-9, 5e-9])
"""Seconds a byte."""


def relaxed(problem, rows, limit_bytes):
    """The relaxation of a problem that allows something."""
    whole = merged(problem)
    planes, trws = CuttingPlanes(flat(whole), limit_bytes), Trws(whole)
    trws.make_consistent()
    if not trws.is_feasible:
        reject()
    for row in rows:
        planes.add_row(row)
    return Relaxation(planes, trws)


def best_dual_s(problem, row, limit_bytes):
    """The best Lagrangian bound of one row, by brute force: the highest point under all assignments' lines, which is at a
    price of zero or where two of them cross."""
    cost_s = every_cost_s(problem).ravel()
    is_allowed = np.isfinite(cost_s)
    over = (every_row_bytes(problem, row) - limit_bytes).ravel()[is_allowed]
    lines = np.unique(np.stack([cost_s[is_allowed], over]), axis=1)
    crossings = [0.0]
    for cost, slope in lines.T:
        other = lines[1] != slope
        crossings += list((cost - lines[0][other]) / (lines[1][other] - slope))
    prices = np.array([price for price in crossings if price >= 0.0])
    return (lines[0] + prices[:, None] * lines[1]).min(1).max()


# --- bounds


@given(st.data())
def test_bounds_hold_under_any_prices(data):
    problem, rows, limit_bytes = data.draw(limited_problems())
    whole, table = relaxed(problem, rows, limit_bytes), every_fitting_cost_s(problem, rows, limit_bytes)
    for _ in range(3):
        whole.set_prices(np.array([data.draw(PRICES_S) for _ in rows]))
        bound, labels = whole.run(data.draw(st.integers(1, 4)))
        assert at_most(bound, table.min())
        assert all(label in kept for label, kept in zip(labels, whole.trws.kept, strict=True))
        for node, (kept, bounds) in enumerate(zip(whole.trws.kept, whole.label_bounds(), strict=True)):
            assert all(map(at_most, bounds, cheapest_with(table, node)[kept]))
    assert at_most(whole.best_bound_s, table.min())
    assert at_most(bound, whole.best_bound_s)


@given(st.data())
def test_on_a_chain_the_bound_is_that_of_the_prices(data):
    """There message passing is exact: the cheapest assignment, bytes over the limit charged."""
    problem = data.draw(chains())
    rows, limit_bytes = data.draw(rows_of(problem)), 1e9 * data.draw(st.integers(1, 25))
    whole = relaxed(problem, rows, limit_bytes)
    prices_s = np.array([data.draw(PRICES_S) for _ in rows])
    whole.set_prices(data.draw(st.sampled_from([0.5, 2.0])) * prices_s)
    whole.set_prices(prices_s)
    bound, labels = whole.run(2)
    over = [
        price * (every_row_bytes(problem, row) - limit_bytes)
        for price, row in zip(prices_s, rows, strict=True)
    ]
    priced_s = every_cost_s(problem) + sum(over)
    tolerance = 1e-9 * (np.abs(priced_s[np.isfinite(priced_s)]).max() + sum(prices_s) * limit_bytes)
    assert bound == pytest.approx(priced_s.min(), abs=tolerance)
    assert priced_s[labels] == pytest.approx(priced_s.min(), abs=tolerance)


@settings(max_examples=15)
@given(st.data())
def test_the_best_prices_of_one_row_are_found(data):
    problem = data.draw(chains(forbidden=False, max_nodes=3))
    (row,), limit_bytes = data.draw(rows_of(problem, max_rows=1)), 1e9 * data.draw(st.integers(1, 25))
    assume(every_row_bytes(problem, row).min() <= limit_bytes)
    whole = relaxed(problem, (row,), limit_bytes)
    whole.planes.of(whole.run(2)[1])
    for _ in range(20):
        whole.set_prices(whole.next_prices())
        whole.planes.of(whole.run(2)[1])
    want_s = best_dual_s(problem, row, limit_bytes)
    assert whole.best_bound_s == pytest.approx(want_s, rel=1e-3, abs=1e-3 * every_cost_s(problem).max())
    assert at_most(whole.best_bound_s, want_s)


# --- two assignments, on paper


def two(limit_bytes=10.0):
    """Fast and 14 bytes, or 4 s slower and 4 bytes."""
    problem = Problem((np.array([1.0, 5.0]),), ())
    row = MemoryConstraint("point", ((0, np.array([12.0, 2.0])),), 2.0)
    return problem, row, limit_bytes


def test_an_assignments_cost_and_its_bytes_over_each_limit():
    problem, row, limit_bytes = two()
    planes = CuttingPlanes(flat(problem), limit_bytes)
    assert planes.of((0,)) == (1.0, [])
    assert planes.fits((0,))
    planes.add_row(row)
    assert planes.of((0,)) == (1.0, [4.0])
    assert planes.of((1,)) == (5.0, [-6.0])
    assert not planes.fits((0,))
    assert planes.fits((1,))
    planes.add_row(MemoryConstraint("fixed", (), 10.0))
    assert planes.of((1,)) == (5.0, [-6.0, 0.0])
    assert planes.fits((1,))
    planes.add_row(MemoryConstraint("more", (), 10.5))
    assert not planes.fits((1,))


def test_assignments_of_kept_labels_that_are_allowed():
    problem = Problem((np.array([1.0, 5.0, np.inf]), np.zeros(2)), ())
    planes = CuttingPlanes(flat(problem), 1.0)
    for labels in ((0, 0), (0, 1), (1, 1), (2, 1)):
        planes.of(labels)
    assert planes.within([np.arange(3), np.arange(2)]) == [(0, 0), (0, 1), (1, 1)]
    assert planes.within([np.array([1, 2]), np.arange(2)]) == [(1, 1)]
    assert planes.within([np.array([0]), np.array([1])]) == [(0, 1)]
    assert planes.within([np.array([1]), np.array([0])]) == []


def test_the_next_prices_lie_half_way_to_where_the_planes_meet():
    """1 + 4p = 5 - 6p at p = 0.4, where both members weigh so that they fit on average: 0.6 of 14 bytes and 0.4 of 4."""
    problem, row, limit_bytes = two()
    whole = relaxed(problem, (row,), limit_bytes)
    whole.run(1)
    whole.planes.of((1,))
    assert whole.next_prices() == pytest.approx([0.2])
    assert dict((labels, weight) for weight, labels in whole.fractional) == pytest.approx(
        {(0,): 0.6, (1,): 0.4}
    )
    whole.set_prices(np.array([0.4]))
    bound, _ = whole.run(1)
    assert bound == pytest.approx(2.6)
    assert whole.best_prices_s.tolist() == [0.4]
    assert whole.next_prices() == pytest.approx([0.4])


def test_worse_prices_do_not_replace_the_best():
    problem, row, limit_bytes = two()
    whole = relaxed(problem, (row,), limit_bytes)
    for price, best_bound_s, best_price in ((0.4, 2.6, 0.4), (0.1, 2.6, 0.4), (1.0, 2.6, 0.4)):
        whole.set_prices(np.array([price]))
        bound, _ = whole.run(1)
        assert bound == pytest.approx(min(1.0 + 4 * price, 5.0 - 6 * price))
        assert (whole.best_bound_s, whole.best_prices_s.tolist()) == (
            pytest.approx(best_bound_s),
            [best_price],
        )


@pytest.mark.parametrize("seed", range(5))
def test_prices_far_off_leave_no_messages_behind(seed):
    """After them, prices near the best go on with the messages that these had left, on the labels that remain."""
    problem, rows = layered(4, 3, 5, seed)
    whole = relaxed(problem, rows, 80e9)
    whole.run(10)
    some = np.arange(5) < 4
    near, far = whole.branch(0, some), whole.branch(0, np.ones(5, bool))
    far.set_prices(np.array([1e-6]))
    assert far.run(6)[0] < whole.best_bound_s
    far.trws.keep([some, *(np.ones(5, bool) for _ in range(11))])
    for part in (near, far):
        part.set_prices(np.array([1e-13]))
    assert far.run(1)[0] == pytest.approx(near.run(1)[0], rel=1e-9)
    assert far.best_bound_s == near.best_bound_s > 0.9 * whole.best_bound_s


@pytest.mark.parametrize("seed", range(5))
def test_prices_that_stay_go_on_with_their_messages(seed):
    """Though others gave a better bound."""
    problem, rows = layered(4, 3, 5, seed)
    once, again = relaxed(problem, rows, 80e9), relaxed(problem, rows, 80e9)
    for part in (once, again):
        part.run(10)
        part.set_prices(np.array([1e-8]))
    before, _ = again.run(3)
    again.set_prices(np.array([1e-8]))
    assert before < again.best_bound_s
    assert max(before, again.run(3)[0]) == once.run(6)[0]


def test_prices_rise_in_bounds():
    """Where nothing seen fits the planes rise for ever: the first move makes the limit as dear as the step, later ones
    besides multiply the best price."""
    problem, row, _ = two()
    whole = relaxed(problem, (row,), 1.0)
    whole.run(1)
    assert whole.next_prices() == pytest.approx([0.5 * 1.0])
    whole.set_prices(np.array([1.0]))
    whole.run(1)
    assert whole.next_prices() == pytest.approx([0.5 * 1.0 + 0.5 * (4.0 * 1.0 + 5.0)])


def test_without_an_assignment_seen_prices_stay():
    problem, row, limit_bytes = two()
    whole = relaxed(problem, (row,), limit_bytes)
    assert whole.next_prices().tolist() == [0.0]
    assert whole.fractional == ()


def test_a_new_row_is_free_until_it_is_priced():
    problem, row, limit_bytes = two()
    whole = relaxed(problem, (row,), limit_bytes)
    whole.set_prices(np.array([0.4]))
    whole.planes.add_row(MemoryConstraint("new", ((0, np.array([30.0, 0.0])),), 0.0))
    bound, _ = whole.run(1)
    assert bound == pytest.approx(2.6)
    assert whole.prices_s.tolist() == [0.4, 0.0]
    whole.set_prices(np.array([0.4, 1.0]))
    assert whole.run(1)[0] == pytest.approx(min(1 + 0.4 * 4 + 20, 5 - 0.4 * 6 - 10))


# --- branches


@given(st.data())
def test_branches_share_a_nodes_labels_and_lose_nothing(data):
    problem, rows, limit_bytes = data.draw(limited_problems())
    whole, table = relaxed(problem, rows, limit_bytes), every_fitting_cost_s(problem, rows, limit_bytes)
    for _ in range(data.draw(st.integers(0, 3))):
        whole.planes.of(whole.run(1)[1])
        whole.set_prices(whole.next_prices())
    assume(whole.trws.num_kept > len(whole.trws.kept))
    node, mask = whole.branching_node()
    before = [kept.tolist() for kept in whole.trws.kept]
    parts = [whole.branch(node, mask), whole.branch(node, ~mask)]
    assert [kept.tolist() for kept in whole.trws.kept] == before
    assert 0 < mask.sum() < len(mask)
    optima = []
    for part, chosen in zip(parts, (mask, ~mask), strict=True):
        left = np.full(table.shape, np.inf)
        cut = [k[chosen] if n == node else k for n, k in enumerate(whole.trws.kept)]
        left[np.ix_(*cut)] = table[np.ix_(*cut)]
        optima.append(left.min())
        assert part.best_bound_s == whole.best_bound_s
        if part.trws.is_feasible:
            assert set(part.trws.kept[node]) <= set(cut[node])
            assert at_most(part.run(2)[0], left.min())
    assert min(optima) == table.min() == optimum_s(problem, rows, limit_bytes)


def disputed(bytes_of, weights):
    """Where to branch if members that weigh so take the labels of the same number at every node, at a price of one."""
    num_labels = [len(per_label) for per_label in bytes_of]
    problem = Problem(tuple(np.zeros(num) for num in num_labels), ())
    row = MemoryConstraint("point", tuple(enumerate(map(np.array, bytes_of))), 0.0)
    whole = relaxed(problem, (row,), 1.0)
    whole.run(1)
    whole.best_prices_s = np.ones(1)
    whole.fractional = tuple((weight, (label,) * len(bytes_of)) for label, weight in enumerate(weights))
    node, mask = whole.branching_node()
    return node, mask.tolist()


def test_it_branches_where_members_disagree_about_most_bytes():
    assert disputed([[0.0, 5.0], [0.0, 9.0], [2.0, 4.0]], [0.5, 0.5]) == (1, [True, False])
    assert disputed([[0.0, 5.0], [9.0, 9.0]], [0.5, 0.5]) == (0, [True, False])


def test_where_members_agree_the_node_with_the_widest_range_is_taken():
    assert disputed([[0.0, 0.0, 5.0], [0.0, 0.0, 9.0]], [0.5, 0.5]) == (1, [True, True, False])
    assert disputed([[0.0, 5.0], [9.0, 0.0], [0.0, 7.0]], []) == (1, [False, True])


def test_a_little_disagreement_outweighs_a_wide_range():
    assert disputed([[0.0, 1.0, 1.0], [3.0, 3.0, 90.0]], [0.5, 0.5]) == (0, [True, False, False])


def test_rare_members_count_little():
    """The first node's members are 10 bytes apart, but one weighs a hundredth; the second's are 4 apart and weigh alike."""
    assert disputed([[0.0, 0.0, 10.0], [0.0, 4.0, 0.0]], [0.5, 0.49, 0.01])[0] == 1


def test_without_bytes_the_node_with_most_labels_is_halved():
    problem = Problem((np.zeros(2), np.zeros(5), np.zeros(3)), (Edge(0, 1, np.zeros((2, 5))),))
    node, mask = relaxed(problem, (), 1.0).branching_node()
    assert (node, mask.tolist()) == (1, [True, True, False, False, False])
