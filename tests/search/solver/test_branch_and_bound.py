"""The whole search against brute force: its optimum, its bound at any gap and under any cutoff, its stages one by one."""

from contextlib import suppress
from dataclasses import replace
from itertools import count, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.solver import branch_and_bound, trws
from autoshard.search.solver.branch_and_bound import NoFitError, solve
from autoshard.search.solver.clock import WorkClock
from autoshard.search.solver.contraction import Contraction
from autoshard.search.solver.flat import flat
from autoshard.search.solver.local_search import descend
from autoshard.search.solver.milp import solve_milp
from autoshard.search.solver.opening import Opening
from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem, merged
from autoshard.search.solver.separation import separation_oracle
from tests.search.solver.problems import (
    at_most,
    every_cost_s,
    every_fitting_cost_s,
    every_row_bytes,
    layered,
    limited_problems,
    optimum_s,
    problems,
    rows_with_pairs,
    turned,
)

GAPS = st.sampled_from([0.0, 1e-4, 0.1, 0.5, 0.9])


def check(problem, rows, limit_bytes, relative_gap, violated=None):
    given_rows = {"violated": violated} if violated else {"rows": rows}
    want_s = optimum_s(problem, rows, limit_bytes)
    if want_s == np.inf:
        with pytest.raises(NoFitError) as error:
            solve(problem, limit_bytes=limit_bytes, relative_gap=relative_gap, **given_rows)
        assert error.value.is_proven
        return
    found = solve(problem, limit_bytes=limit_bytes, relative_gap=relative_gap, **given_rows)
    assert found.cost_s == pytest.approx(problem.cost_s(found.labels), rel=1e-12)
    assert all(row.total_bytes(found.labels) <= limit_bytes for row in rows)
    assert at_most(found.cost_s * (1 - relative_gap), want_s)
    assert at_most(found.bound_s, want_s)
    assert found.gap <= relative_gap + 1e-9
    assert found.gap == pytest.approx(1 - found.bound_s / found.cost_s if found.cost_s else 0.0, abs=1e-12)


@given(problems(), GAPS)
def test_optimum_without_rows(problem, relative_gap):
    check(problem, (), np.inf, relative_gap)


@given(limited_problems(), GAPS)
def test_optimum_with_rows(limited, relative_gap):
    problem, rows, limit_bytes = limited
    check(problem, rows, limit_bytes, relative_gap)


@given(limited_problems(), st.integers(1, 2))
def test_lazy_rows_equal_eager_ones(limited, num_at_once):
    problem, rows, limit_bytes = limited

    def violated(labels):
        return [row for row in rows if row.total_bytes(labels) > limit_bytes][:num_at_once]

    check(problem, rows, limit_bytes, 0.0, violated)


@given(st.data())
def test_rows_may_be_bounds_of_memory_that_pairs_of_nodes_decide(data):
    """A value counts where it is larger than its source. A row counts the difference, if it is one under its assignment."""
    problem, _, limit_bytes = data.draw(limited_problems())
    truth = data.draw(rows_with_pairs(problem))

    def bound(row, labels):
        total = {node: num_bytes.copy() for node, num_bytes in row.bytes}
        for u, v, num_bytes in row.pairs:
            if (
                num_bytes[labels[u], labels[v]] > 0
            ):  # own - source, as the largest own and the least source give it
                own, source = (num_bytes.max(axis=1), num_bytes.max(axis=0))
                for node, change in ((u, own), (v, source - num_bytes.max())):
                    total[node] = total.get(node, 0.0) + change
        return replace(row, bytes=tuple(sorted(total.items())), pairs=(), expansion=lambda _: row)

    def violated(labels):
        return [bound(row, labels) for row in truth if row.total_bytes(labels) > limit_bytes]

    check(problem, truth, limit_bytes, 0.0, violated)


@given(limited_problems())
def test_same_inputs_same_answer(limited):
    problem, rows, limit_bytes = limited
    try:
        first = solve(problem, limit_bytes=limit_bytes, rows=rows)
    except NoFitError:
        return
    second = solve(problem, limit_bytes=limit_bytes, rows=rows)
    assert (first.labels, first.cost_s, first.bound_s) == (second.labels, second.cost_s, second.bound_s)


@pytest.mark.parametrize("seed", range(3))
def test_every_stage_agrees_with_one_integer_program(seed):
    problem, rows = layered(5, 2, 4, seed)
    limit_bytes = 25e9
    program = solve_milp(merged(problem), rows, limit_bytes, relative_gap=0.0)
    found = solve(problem, limit_bytes=limit_bytes, rows=rows, relative_gap=0.0)
    assert found.cost_s == pytest.approx(problem.cost_s(program.labels), rel=1e-9)


MANY_BRANCHES = {(1, 0.0, -1), (2, 0.0, -1)}
"""Cases that take long; of the first seed there are fewer branches, and of drawn problems."""


@pytest.mark.parametrize(
    ("seed", "relative_gap", "max_program_labels"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] if case in MANY_BRANCHES else [])
        for case in product(range(3), (0.0, 0.1, 0.3), (-1, 500))
    ],
)
def test_branching_is_exact(monkeypatch, seed, relative_gap, max_program_labels):
    monkeypatch.setattr(branch_and_bound, "MAX_PROGRAM_LABELS", max_program_labels)
    problem, rows = layered(3, 2, 4, seed)
    for limit_bytes in (8e9, 15e9, 20e9):
        check(problem, rows, limit_bytes, relative_gap)


@given(limited_problems(), st.sampled_from([0.5, 0.999, 1.001, 1.5, 4.0]), GAPS)
def test_a_cutoff_never_loses_what_beats_it_nor_lifts_the_bound(limited, times, relative_gap):
    """What is dropped because it cannot beat the cutoff stays in the bound."""
    problem, rows, limit_bytes = limited
    want_s = optimum_s(problem, rows, limit_bytes)
    if not 0 < want_s < np.inf:
        return
    given = {"limit_bytes": limit_bytes, "rows": rows, "relative_gap": relative_gap}
    try:
        found = solve(problem, cutoff_s=times * want_s, **given)
    except NoFitError as error:
        bound_s = error.bound_s
        assert times * (1 - relative_gap) <= 1 + 1e-6
    else:
        bound_s = found.bound_s
        assert found.cost_s < times * want_s
    assert at_most(bound_s, want_s)
    assert bound_s >= min(times * (1 - relative_gap), 1 - relative_gap) * want_s * (1 - 1e-6)


@given(limited_problems(), st.sampled_from([0.5, 0.9, 1.0]), GAPS)
def test_a_bound_that_is_known_ends_a_search_within_the_gap_of_it_and_no_sooner(limited, share, relative_gap):
    problem, rows, limit_bytes = limited
    want_s = optimum_s(problem, rows, limit_bytes)
    if not 0 < want_s < np.inf:
        return
    known_s = share * want_s
    found = solve(problem, limit_bytes=limit_bytes, rows=rows, relative_gap=relative_gap, known_s=known_s)
    assert at_most(known_s, found.bound_s)
    assert at_most(found.bound_s, want_s)
    assert at_most(found.cost_s * (1 - relative_gap), want_s)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_dropped_for_a_wide_gap_stays_in_the_bound(seed):
    """Pricing and dropping take turns here: labels go whose assignments are cheaper than the incumbent."""
    problem, rows = layered(3, 2, 4, seed)
    check(problem, rows, 14e9, 0.4)


@pytest.mark.parametrize("seed", range(10))
def test_better_than_the_incumbent_by_more_than_the_gap_is_never_dropped(monkeypatch, seed):
    """Message passing alone, told of an incumbent: whatever is worth having is still there when it is done."""
    problem, rows = layered(3, 2, 4, seed)
    table = every_fitting_cost_s(problem, rows, 20e9)
    incumbent_s = float(np.sort(table, axis=None)[20])
    search = branch_and_bound.Search(Opening(problem), 20e9, lambda labels: (), 0.05)
    search.cost_s = incumbent_s
    whole = branch_and_bound.Relaxation(search.planes, search.opening.consistent.copy())
    search.planes.add_row(rows[0])
    for _ in range(10):
        search._reprice(whole)
        search._drop(whole)
        kept = np.ix_(*whole.trws.kept)
        lost = table.copy()
        lost[kept] = np.inf
        assert lost.min() >= incumbent_s * (1 - 0.05) * (1 - 1e-9)
        assert at_most(search.floor_s, lost.min())


@pytest.mark.parametrize("price_s", [0.0, 1e-12])
@pytest.mark.parametrize("seed", range(5))
def test_an_assignment_that_overflows_is_repaired(seed, price_s):
    """Before any branching, and before memory has a price: what is cheapest without the row leads to an incumbent that
    keeps to it."""
    problem, (row,) = layered(3, 2, 4, seed)
    cheapest = every_cost_s(problem).argmin()
    start = tuple(map(int, np.unravel_index(cheapest, problem.num_labels)))
    limit_bytes = (row.total_bytes(start) + every_row_bytes(problem, row).min()) / 2
    search = branch_and_bound.Search(Opening(problem), limit_bytes, lambda labels: (), 0.0)
    search.planes.add_row(row)
    whole = branch_and_bound.Relaxation(search.planes, search.opening.consistent.copy())
    assert not search._offer(start)
    whole.set_prices(np.array([price_s]))
    search._repair(whole, start)
    assert search.labels is not None
    assert row.total_bytes(search.labels) <= limit_bytes
    assert search.cost_s == pytest.approx(problem.cost_s(search.labels))


@pytest.mark.parametrize("seed", range(5))
def test_a_beginning_that_fits_is_an_incumbent(seed):
    """Though what descends from it, memory or no memory, does not fit."""
    problem, (row,) = layered(3, 2, 4, seed)
    row_bytes = every_row_bytes(problem, row)
    start = tuple(map(int, np.unravel_index(row_bytes.argmin(), problem.num_labels)))
    descended = descend(flat(problem), (), np.inf, 0.0, start)
    limit_bytes = (row.total_bytes(start) + row.total_bytes(descended)) / 2

    def violated(labels):
        return (row,) if row.total_bytes(labels) > limit_bytes else ()

    opening = Opening(problem, lambda: [start])
    search = branch_and_bound.Search(opening, limit_bytes, violated, 0.0)
    search._start()
    assert violated(descended)
    assert search.labels is not None
    assert not violated(search.labels)
    assert search.cost_s < problem.cost_s(start)


@pytest.mark.parametrize("seed", range(5))
def test_a_beginning_that_fits_is_an_answer_though_there_was_no_time(seed):
    problem, (row,) = layered(3, 2, 4, seed)
    row_bytes = every_row_bytes(problem, row)
    start = tuple(map(int, np.unravel_index(row_bytes.argmin(), problem.num_labels)))
    opening = Opening(problem, lambda: [start], WorkClock())
    limit_bytes = row.total_bytes(start)
    assert row.total_bytes(opening.descended) > limit_bytes
    violated = separation_oracle((row,), None, limit_bytes)
    found = branch_and_bound.Search(opening, limit_bytes, violated, 0.0).run(0.0)
    assert row.total_bytes(found.labels) <= limit_bytes


@pytest.mark.parametrize("seed", range(10))
def test_a_search_goes_on_where_it_ended(seed):
    """In turns that take longer and longer it ends with the optimum, and its bound never falls."""
    problem, rows = layered(3, 2, 4, seed)
    violated = separation_oracle(rows, None, 20e9)
    opening = Opening(problem, clock=WorkClock())
    search, bounds_s = branch_and_bound.Search(opening, 20e9, violated, 0.0), [-np.inf]
    while search.stages and not search._is_closed(search.whole) and len(bounds_s) < 30:
        try:
            bounds_s.append(search.run(1e-4 * 2 ** len(bounds_s)).bound_s)
        except NoFitError as e:
            bounds_s.append(e.bound_s)
    assert len(bounds_s) < 30
    assert bounds_s == sorted(bounds_s)
    if (want_s := optimum_s(problem, rows, 20e9)) == np.inf:
        assert bounds_s[-1] == np.inf
        return
    found = search.run(0.0)
    assert found.cost_s == pytest.approx(want_s, rel=1e-9)
    assert found.bound_s == pytest.approx(found.cost_s, rel=1e-9)


@pytest.mark.parametrize("time_limit_s", [-1.0, 0.0, 0.02, 0.1])
def test_bound_holds_when_time_runs_out(monkeypatch, time_limit_s):
    """There is one in any case, of the first sweeps."""
    monkeypatch.setattr(branch_and_bound, "MAX_PROGRAM_LABELS", -1)
    for seed in range(4):
        problem, rows = layered(3, 2, 4, seed)
        want_s = optimum_s(problem, rows, 15e9)
        try:
            found = solve(
                problem,
                limit_bytes=15e9,
                rows=rows,
                time_limit_s=time_limit_s,
                relative_gap=0.0,
                clock=WorkClock(),
            )
        except NoFitError as error:
            bound_s = error.bound_s
        else:
            bound_s = found.bound_s
            assert found.cost_s >= want_s * (1 - 1e-9)
        assert 0 < bound_s <= want_s * (1 + 1e-9)


def test_time_runs_out_in_no_stage_but_the_first(monkeypatch):
    """The first sweeps take all of it: nothing else begins."""
    monkeypatch.setattr(trws, "EDGE_S", 1.0)
    problem, rows = layered(3, 2, 4, 0)

    def taken_s(time_limit_s):
        clock = WorkClock()
        with suppress(NoFitError):
            solve(problem, limit_bytes=15e9, rows=rows, time_limit_s=time_limit_s, clock=clock)
        return clock.now_s

    assert taken_s(-1.0) == taken_s(5.0) < taken_s(1e4)


@pytest.mark.parametrize("seed", [1, 2])
def test_no_time_is_spent_on_what_could_not_win_it_back(monkeypatch, seed):
    """After the first sweeps, what is left is worth less than the time that looking for it takes."""
    monkeypatch.setattr(branch_and_bound, "MAX_PROGRAM_LABELS", -1)
    problem, rows = layered(3, 2, 4, seed)
    options = {
        "limit_bytes": 15e9,
        "rows": rows,
        "relative_gap": 0.0,
        "cutoff_s": 2 * optimum_s(problem, rows, 15e9),
    }
    whole = solve(problem, **options, num_runs=1e12)
    assert whole.cost_s == pytest.approx(optimum_s(problem, rows, 15e9))
    assert whole.stats.num_pricings > 0
    with suppress(NoFitError):
        assert solve(problem, **options, num_runs=1e-12).stats.num_pricings == 0


def test_no_edges_and_one_label():
    assert solve(Problem((np.array([2.0]), np.array([3.0, 1.0])), ())).labels == (0, 1)


def test_no_nodes():
    assert solve(Problem((), ())).labels == ()


def test_limit_of_zero_bytes():
    problem = Problem((np.array([1.0, 2.0]),), ())
    rows = (MemoryConstraint("point", ((0, np.array([1.0, 0.0])),), 0.0),)
    assert solve(problem, limit_bytes=0.0, rows=rows).labels == (1,)


def test_a_node_without_labels_fits_nothing():
    with pytest.raises(NoFitError) as error:
        solve(Problem((np.zeros(0), np.zeros(2)), (Edge(0, 1, np.zeros((0, 2))),)))
    assert error.value.is_proven


def test_ties_go_to_the_same_labels_whatever_the_edges_order():
    problem, rows = layered(3, 2, 4, 7)
    given_rows = {"limit_bytes": 20e9, "rows": rows}
    assert solve(problem, **given_rows).labels == solve(turned(problem), **given_rows).labels


@given(limited_problems(), GAPS)
def test_who_solves_again_under_rows_finds_as_much(limited, relative_gap):
    """What is remembered of the problem without rows, and of it under a higher limit, proves no more than is true."""
    problem, rows, limit_bytes = limited
    opening = Opening(problem)
    for limit in (np.inf, 1.5 * limit_bytes, limit_bytes):
        want_s = optimum_s(problem, rows, limit)
        if want_s == np.inf:
            with pytest.raises(NoFitError) as error:
                solve(opening, limit_bytes=limit, rows=rows, relative_gap=relative_gap)
            assert error.value.is_proven
        else:
            found = solve(opening, limit_bytes=limit, rows=rows, relative_gap=relative_gap)
            assert at_most(found.cost_s * (1 - relative_gap), want_s)
            assert at_most(found.bound_s, want_s)
        assert at_most(opening.bound_s, optimum_s(problem, (), np.inf))


@pytest.mark.parametrize(("relative_gap", "is_known"), [(1e-4, False), (0.2, False), (0.2, True)])
@pytest.mark.parametrize("seed", range(5))
def test_who_solves_again_begins_with_prices(monkeypatch, seed, relative_gap, is_known):
    """Where what is cheapest without rows is known as closely as is asked, or lies on a bound that is known."""
    problem, rows = layered(3, 2, 4, seed)
    opening = Opening(problem)
    solve(opening, relative_gap=relative_gap)
    monkeypatch.setattr(Contraction, "turn", None)
    known_s = opening.least_s if is_known and opening.least_s == optimum_s(problem, (), np.inf) else -np.inf
    relative_gap = 1e-3 if known_s > 0 else max(relative_gap, 1e-3)
    found = solve(opening, limit_bytes=20e9, rows=rows, relative_gap=relative_gap, known_s=known_s)
    assert at_most(found.cost_s * (1 - relative_gap), optimum_s(problem, rows, 20e9))
    assert at_most(found.bound_s, optimum_s(problem, rows, 20e9))


@pytest.mark.parametrize("seed", range(5))
def test_who_solves_again_goes_on_with_the_smaller_problem(seed):
    """Where fewer assignments are wanted than before, or as many; not where more are."""
    opening = Opening(layered(4, 2, 3, seed)[0])
    least_s = optimum_s(opening.problem)
    made = opening.contraction(np.inf)
    made.turn(1.5 * least_s)
    assert opening.contraction(1.5 * least_s) is opening.contraction(1.2 * least_s) is made
    assert opening.contraction(2 * least_s) is not made
    assert solve(opening, relative_gap=0.0).cost_s == pytest.approx(least_s, rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_who_solves_again_begins_with_what_was_met(seed):
    """However little time there is: what was met under one limit may fit under a lower one."""
    problem, (row,) = layered(3, 2, 4, seed)
    opening = Opening(problem)
    solve(opening, limit_bytes=20e9, rows=(row,), relative_gap=0.0)
    limit_bytes = min(map(row.total_bytes, opening.met_s))
    again = solve(opening, limit_bytes=limit_bytes, rows=(row,), time_limit_s=-1.0)
    assert again.labels in opening.met_s
    assert row.total_bytes(again.labels) <= limit_bytes


class Asked:
    """A problem that takes three turns, and is asked for no more from one to the next."""

    worth_s, num_nodes = np.inf, 3

    @property
    def is_done(self):
        return not self.num_nodes

    def turn(self, worth_s, deadline):
        assert worth_s <= self.worth_s
        self.worth_s, self.num_nodes = worth_s, self.num_nodes - 1
        return 0.0, None


def test_what_is_wanted_may_round_otherwise_from_turn_to_turn(monkeypatch):
    """As prices times rows do, where another row comes to light."""
    problem, _ = layered(4, 2, 3, 0)
    wanted_s, numbers, asked = branch_and_bound.Search._wanted_s, count(), Asked()
    monkeypatch.setattr(Opening, "contraction", lambda opening, worth_s: asked)
    monkeypatch.setattr(
        branch_and_bound.Search,
        "_wanted_s",
        lambda search, part: wanted_s(search, part) * (1 + 1e-15 * next(numbers)),
    )
    found = solve(problem, relative_gap=0.0)
    assert asked.is_done
    assert found.cost_s == pytest.approx(optimum_s(problem, (), np.inf), rel=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_few_prices_tell_that_nothing_fits(monkeypatch, seed):
    """They rise without end; whether they do so in vain, the smallest peak says."""
    problem, rows = layered(3, 2, 4, seed)
    least_bytes = np.max([every_row_bytes(problem, row) for row in rows], axis=0).min()
    num_pricings, reprice = [0], branch_and_bound.Search._reprice

    def counted(search, part):
        num_pricings[0] += 1
        return reprice(search, part)

    monkeypatch.setattr(branch_and_bound.Search, "_reprice", counted)
    with pytest.raises(NoFitError) as error:
        solve(problem, limit_bytes=0.99 * least_bytes, rows=rows)
    assert error.value.is_proven
    assert num_pricings[0] <= 5
