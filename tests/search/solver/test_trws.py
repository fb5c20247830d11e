"""Message passing: what it moves, what it bounds, and what may be dropped."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoshard.search.solver.pbqp import Edge, Problem, merged
from autoshard.search.solver.trws import Trws
from tests.search.solver.problems import (
    along,
    at_most,
    chains,
    cheapest_with,
    every_cost_s,
    optimum_s,
    problems,
)


def swept(problem, num_sweeps):
    """Message passing on a problem that allows something, after some sweeps; the last one's bound and labels."""
    trws = Trws(merged(problem))
    trws.make_consistent()
    assume(trws.is_feasible)
    found = [trws.sweep() for _ in range(num_sweeps)]
    return trws, found


def on_kept(table, trws):
    """An array over all labels, cut down to those kept."""
    return table[np.ix_(*trws.kept)]


def every_moved_cost_s(trws):
    """The cost of every kept assignment as message passing has moved it between nodes and edges."""
    return every_cost_s(trws.reparametrised())


@given(problems(), st.integers(0, 5))
def test_moving_costs_changes_no_assignments_cost(problem, num_sweeps):
    trws, _ = swept(problem, num_sweeps)
    want = on_kept(every_cost_s(problem), trws)
    np.testing.assert_allclose(
        every_moved_cost_s(trws),
        want,
        rtol=1e-9,
        atol=1e-9 * np.nanmax(want[np.isfinite(want)], initial=1e-6),
    )


@given(problems())
def test_bounds_hold_and_never_fall(problem):
    _, found = swept(problem, 8)
    bounds = [bound for bound, _ in found]
    assert all(at_most(bound, optimum_s(problem)) for bound in bounds)
    assert all(at_most(earlier, later) for earlier, later in pairwise(bounds))


@given(chains())
def test_on_a_chain_two_sweeps_find_the_minimum(problem):
    trws, found = swept(problem, 2)
    bound, labels = found[-1]
    want = optimum_s(problem)
    assert np.isfinite(want) == trws.is_feasible
    np.testing.assert_allclose(bound, want, rtol=1e-9, atol=1e-15)
    np.testing.assert_allclose(every_cost_s(problem)[labels], want, rtol=1e-9, atol=1e-15)


@given(problems(), st.integers(0, 6))
def test_label_bounds_hold_for_each_label(problem, num_sweeps):
    trws, _ = swept(problem, num_sweeps)
    table = every_cost_s(problem)
    for node, (kept, bounds) in enumerate(zip(trws.kept, trws.label_bounds(), strict=True)):
        assert all(map(at_most, bounds, cheapest_with(table, node)[kept]))


@given(problems(), st.integers(0, 6))
def test_pair_bounds_hold_for_each_pair(problem, num_sweeps):
    trws, _ = swept(problem, num_sweeps)
    table = every_cost_s(problem)
    for edge, bounds in zip(trws.rest().edges, trws.pair_bounds(), strict=True):
        others = tuple(n for n in range(table.ndim) if n not in (edge.u, edge.v))
        want = table.min(axis=others)[np.ix_(trws.kept[edge.u], trws.kept[edge.v])]
        assert all(map(at_most, bounds.ravel(), want.ravel()))


@given(problems(), st.integers(0, 6))
def test_pair_bounds_say_no_less_than_those_of_labels(problem, num_sweeps):
    trws, _ = swept(problem, num_sweeps)
    of_labels = trws.label_bounds()
    for edge, bounds in zip(trws.rest().edges, trws.pair_bounds(), strict=True):
        assert all(map(at_most, of_labels[edge.u], bounds.min(1)))
        assert all(map(at_most, of_labels[edge.v], bounds.min(0)))


@given(chains())
def test_label_bounds_are_exact_where_a_chains_messages_end(problem):
    trws, _ = swept(problem, 2)
    want = cheapest_with(every_cost_s(problem), 0)[trws.kept[0]]
    np.testing.assert_allclose(trws.label_bounds()[0], want, rtol=1e-9, atol=1e-15)


@given(problems())
def test_label_bounds_are_no_lower_than_the_bound(problem):
    trws, found = swept(problem, 4)
    for bounds in trws.label_bounds():
        assert at_most(found[-1][0], bounds.min())


@given(problems())
def test_only_labels_that_no_assignment_can_have_are_inconsistent(problem):
    trws = Trws(merged(problem))
    trws.make_consistent()
    table = every_cost_s(problem)
    assert trws.is_feasible or not np.isfinite(table).any()
    for node, kept in enumerate(trws.kept):
        assert (
            set(np.flatnonzero(np.isfinite(cheapest_with(table, node)))) <= set(kept) or not trws.is_feasible
        )
    for edge in merged(problem).edges if trws.is_feasible else ():
        allowed = np.isfinite(edge.cost_s[np.ix_(trws.kept[edge.u], trws.kept[edge.v])])
        assert allowed.any(0).all()
        assert allowed.any(1).all()


@given(st.data())
def test_dropping_loses_only_what_it_is_told_to(data):
    """Halfway through, masks drop labels: every assignment without them keeps its cost, and bounds hold for it."""
    problem = data.draw(problems())
    trws, _ = swept(problem, data.draw(st.integers(0, 3)))
    dropped = [data.draw(st.sets(st.integers(0, len(k) - 1), max_size=len(k) - 1)) for k in trws.kept]
    masks = [~np.isin(np.arange(len(k)), list(d)) for k, d in zip(trws.kept, dropped, strict=True)]
    wanted = [kept[mask] for kept, mask in zip(trws.kept, masks, strict=True)]
    table, left = every_cost_s(problem), np.full(problem.num_labels, np.inf)
    left[np.ix_(*wanted)] = table[np.ix_(*wanted)]
    trws.keep(masks)
    assert trws.is_feasible or not np.isfinite(left).any()
    if not trws.is_feasible:
        return
    assert all(set(kept) <= set(want) for kept, want in zip(trws.kept, wanted, strict=True))
    np.testing.assert_allclose(every_cost_s(trws.rest()), on_kept(table, trws), rtol=1e-9)
    for node, kept in enumerate(trws.kept):
        assert set(np.flatnonzero(np.isfinite(cheapest_with(left, node)))) <= set(kept)
    bound, labels = trws.sweep()
    assert at_most(bound, left.min())
    assert all(label in kept for label, kept in zip(labels, trws.kept, strict=True))


@given(st.data())
def test_what_is_added_to_a_node_is_added_to_its_labels(data):
    problem = data.draw(problems())
    trws, _ = swept(problem, data.draw(st.integers(0, 2)))
    node = data.draw(st.integers(0, len(problem.num_labels) - 1))
    extra_s = np.arange(1.0, 1 + problem.num_labels[node])
    trws.add(node, extra_s)
    table = every_cost_s(problem) + along(extra_s, (node,), len(problem.num_labels))
    want = on_kept(table, trws)
    np.testing.assert_allclose(every_moved_cost_s(trws), want, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(every_cost_s(trws.rest()), on_kept(every_cost_s(problem), trws), rtol=1e-12)
    assert at_most(trws.sweep()[0], table.min())


@given(problems())
def test_a_copy_goes_its_own_way(problem):
    trws, _ = swept(problem, 1)
    before = every_moved_cost_s(trws), [kept.tolist() for kept in trws.kept], trws.label_bounds()
    other = trws.copy()
    assert other.sweep() == trws.copy().sweep()
    other.add(0, np.ones(problem.num_labels[0]))
    other.keep([np.arange(len(kept)) == 0 for kept in other.kept])
    after = every_moved_cost_s(trws), [kept.tolist() for kept in trws.kept], trws.label_bounds()
    assert before[1] == after[1]
    np.testing.assert_array_equal(before[0], after[0])
    assert all(map(np.array_equal, before[2], after[2]))


@given(problems())
def test_numbers_of_kept_labels_and_back(problem):
    trws, found = swept(problem, 1)
    labels = found[0][1]
    inside = trws.renumbered(labels)
    assert trws.original(inside) == labels
    assert all(kept[index] == label for kept, index, label in zip(trws.kept, inside, labels, strict=True))
    assert trws.num_kept == sum(map(len, trws.kept)) == sum(trws.rest().num_labels)


def test_sweeps_go_forward_and_back_in_turn():
    """A chain's costs all lie at its last node after one sweep, and at its first after the next."""
    chain = Problem(
        (np.array([0.0, 3.0]), np.array([2.0, 0.0])), (Edge(0, 1, np.array([[5.0, 1.0], [0.0, 4.0]])),)
    )
    trws = Trws(chain)
    assert trws.sweep() == (1.0, (0, 1))
    assert trws.reparametrised().node_cost_s[1].tolist() == [5.0, 1.0]
    assert trws.sweep() == (1.0, (0, 1))
    assert trws.reparametrised().node_cost_s[0].tolist() == [1.0, 5.0]


def test_a_label_picked_first_counts_for_those_after():
    """Going forward, the second node must suit the first, whatever it would like best itself."""
    chain = Problem(
        (np.array([0.0, 1.0]), np.array([0.0, 1.0])), (Edge(0, 1, np.array([[9.0, 0.0], [0.0, 9.0]])),)
    )
    assert Trws(chain).sweep()[1] == (0, 1)
    back = Trws(Problem(chain.node_cost_s, (Edge(1, 0, chain.edges[0].cost_s),)))
    assert back.sweep()[1] == (0, 1)


def test_a_cycle_that_cannot_agree_is_worth_what_the_relaxation_says():
    """Three nodes that each want to differ from the next: the linear relaxation costs 0, labels cost 1."""
    differ = np.eye(2)
    cycle = Problem(
        tuple(np.zeros(2) for _ in range(3)), tuple(Edge(u, v, differ) for u, v in ((0, 1), (0, 2), (1, 2)))
    )
    trws = Trws(cycle)
    assert max(trws.sweep()[0] for _ in range(20)) == pytest.approx(0.0)
    assert optimum_s(cycle) == 1.0


def test_a_nodes_cost_is_shared_among_its_later_edges():
    """A tree is solved exactly in the end, also where a node has two neighbours after it."""
    rng = np.random.default_rng(1)
    edges = tuple(Edge((child - 1) // 2, child, rng.random((3, 3))) for child in range(1, 7))
    tree = Problem(tuple(rng.random(3) for _ in range(7)), edges)
    trws = Trws(tree)
    assert max(trws.sweep()[0] for _ in range(60)) == pytest.approx(optimum_s(tree), rel=1e-6)
