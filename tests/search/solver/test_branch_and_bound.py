"""The ILP against brute force on problems small enough for it."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search.solver import branch_and_bound
from search.solver.branch_and_bound import Edge, MemoryConstraint, NoFitError, Problem, minimise_peak, solve
from search.solver.elimination import eliminate
from search.solver.milp import solve_milp
from search.solver.pbqp import merged
from search.solver.trws import Trws

SETTINGS = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNITS_S = st.sampled_from([1e-6, 1.0, 10.0])


def costs(draw, shape, unit_s):
    """Few distinct values, zeros and forbidden entries among them: ties and infeasibility are common."""
    values = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(0.1, 5.0), st.just(np.inf))
    drawn = draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(drawn).reshape(shape) * unit_s


@st.composite
def problems(draw):
    unit_s = draw(UNITS_S)
    num_labels = draw(st.lists(st.integers(2, 4), min_size=3, max_size=7))
    pairs = st.tuples(*[st.integers(0, len(num_labels) - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    edges = [
        Edge(u, v, costs(draw, (num_labels[u], num_labels[v]), unit_s))
        for u, v in draw(st.lists(pairs, max_size=9))
    ]
    return Problem(tuple(costs(draw, (num,), unit_s) for num in num_labels), tuple(edges))


@st.composite
def rows_of(draw, problem):
    rows = []
    for index in range(draw(st.integers(1, 4))):
        nodes = draw(st.sets(st.integers(0, len(problem.num_labels) - 1)))
        sizes = [
            (node, 1e9 * np.array(draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)), float))
            for node in sorted(nodes)
            for num in [problem.num_labels[node]]
        ]
        rows.append(MemoryConstraint(f"point {index}", tuple(sizes), 1e9 * draw(st.integers(0, 3))))
    return tuple(rows)


@st.composite
def limited_problems(draw):
    problem = draw(problems())
    return problem, draw(rows_of(problem)), 1e9 * draw(st.integers(1, 25))


def along(values, nodes, num_nodes):
    """Values over some nodes' labels, as an array over all nodes'."""
    order = np.argsort(nodes)
    shape = np.ones(num_nodes, int)
    shape[list(nodes)] = values.shape
    return values.transpose(order).reshape(shape)


def every_cost_s(problem):
    """The cost of every assignment, [labels of node 0, labels of node 1, ...]."""
    num = len(problem.num_labels)
    total = np.zeros(problem.num_labels)
    for node, cost in enumerate(problem.node_cost_s):
        total = total + along(cost, (node,), num)
    for edge in problem.edges:
        total = total + along(edge.cost_s, (edge.u, edge.v), num)
    return total


def every_peak_bytes(problem, rows):
    """The largest row of every assignment."""
    num = len(problem.num_labels)
    totals = [np.full(problem.num_labels, -np.inf)]
    for row in rows:
        total = np.full(problem.num_labels, row.fixed_bytes)
        for node, per_label in row.bytes:
            total = total + along(per_label, (node,), num)
        totals.append(total)
    return np.max(totals, axis=0)


def optimum_s(problem, rows=(), limit_bytes=np.inf):
    return np.where(every_peak_bytes(problem, rows) <= limit_bytes, every_cost_s(problem), np.inf).min()


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
    assert found.cost_s <= want_s * (1 + relative_gap + 1e-9)
    assert found.bound_s <= want_s * (1 + 1e-9)
    assert found.gap <= relative_gap + 1e-9


@SETTINGS
@given(problems(), st.sampled_from([0.0, 1e-4, 0.1]))
def test_optimum_without_rows(problem, relative_gap):
    check(problem, (), np.inf, relative_gap)


@SETTINGS
@given(limited_problems(), st.sampled_from([0.0, 1e-4, 0.1]))
def test_optimum_with_rows(limited, relative_gap):
    problem, rows, limit_bytes = limited
    check(problem, rows, limit_bytes, relative_gap)


@SETTINGS
@given(limited_problems(), st.integers(1, 2))
def test_lazy_rows_equal_eager_ones(limited, num_at_once):
    problem, rows, limit_bytes = limited

    def violated(labels):
        return [row for row in rows if row.total_bytes(labels) > limit_bytes][:num_at_once]

    check(problem, rows, limit_bytes, 0.0, violated)


@SETTINGS
@given(limited_problems())
def test_same_inputs_same_answer(limited):
    problem, rows, limit_bytes = limited
    try:
        first = solve(problem, limit_bytes=limit_bytes, rows=rows)
    except NoFitError:
        return
    second = solve(problem, limit_bytes=limit_bytes, rows=rows)
    assert (first.labels, first.cost_s, first.bound_s) == (second.labels, second.cost_s, second.bound_s)


@SETTINGS
@given(limited_problems())
def test_smallest_peak(limited):
    problem, rows, limit_bytes = limited
    smallest = np.where(np.isfinite(every_cost_s(problem)), every_peak_bytes(problem, rows), np.inf).min()
    if smallest == np.inf:
        with pytest.raises(NoFitError):
            minimise_peak(problem, limit_bytes=limit_bytes, rows=rows)
        return
    found = minimise_peak(problem, limit_bytes=limit_bytes, rows=rows)
    want_bytes = max(smallest, limit_bytes)
    assert np.isfinite(problem.cost_s(found.labels))
    assert max(row.total_bytes(found.labels) for row in rows) <= found.peak_bytes
    assert want_bytes <= found.peak_bytes <= want_bytes * 1.001
    assert found.bound_bytes <= want_bytes * (1 + 1e-9)


def layered(num_layers, width, num_labels, seed):
    """Layers of nodes, each joined to all of the layer before: wide enough that no stage can be skipped."""
    rng = np.random.default_rng(seed)
    nodes = [rng.integers(0, 20, num_labels) / 10 for _ in range(num_layers * width)]
    pairs = [
        (layer * width + i, (layer + 1) * width + j)
        for layer in range(num_layers - 1)
        for i in range(width)
        for j in range(width)
    ]
    edges = tuple(Edge(u, v, rng.integers(0, 20, (num_labels, num_labels)) / 10) for u, v in pairs)
    sizes = tuple((node, rng.integers(0, 10, num_labels) * 1e9) for node in range(len(nodes)))
    return Problem(tuple(nodes), edges), (MemoryConstraint("all", sizes, 0.0),)


@pytest.mark.parametrize("seed", range(3))
def test_every_stage_agrees_with_one_integer_program(seed):
    problem, rows = layered(5, 2, 4, seed)
    limit_bytes = 25e9
    program = solve_milp(merged(problem), rows, limit_bytes, time_limit_s=60.0, relative_gap=0.0)
    found = solve(problem, limit_bytes=limit_bytes, rows=rows, relative_gap=0.0)
    assert found.cost_s == pytest.approx(problem.cost_s(program.labels), rel=1e-9)


@pytest.mark.parametrize("max_program_labels", [-1, 500])
@pytest.mark.parametrize("seed", range(3))
def test_branching_is_exact(monkeypatch, seed, max_program_labels):
    monkeypatch.setattr(branch_and_bound, "MAX_PROGRAM_LABELS", max_program_labels)
    problem, rows = layered(3, 2, 4, seed)
    for limit_bytes in (8e9, 15e9, 20e9):
        check(problem, rows, limit_bytes, 0.0)


@pytest.mark.parametrize("seed", range(4))
def test_elimination_is_exact(seed):
    problem, _ = layered(4, 2, 3, seed)
    cost_s, labels = eliminate(problem, 1e6)
    assert cost_s == pytest.approx(optimum_s(problem), rel=1e-9)
    assert problem.cost_s(labels) == pytest.approx(cost_s, rel=1e-9)


def test_elimination_gives_up_on_large_tables():
    problem, _ = layered(4, 3, 3, 0)
    assert eliminate(problem, 9) is None


@SETTINGS
@given(problems())
def test_label_bounds_hold(problem):
    messages = Trws(merged(problem))
    messages.make_consistent()
    if not messages.is_feasible:
        assert optimum_s(problem) == np.inf
        return
    bounds = [messages.sweep()[0] for _ in range(6)]
    assert max(bounds) <= optimum_s(problem) * (1 + 1e-9)
    label_bounds = messages.label_bounds()
    costs_s = every_cost_s(problem)
    for node, (kept, bounds) in enumerate(zip(messages.kept, label_bounds, strict=True)):
        cheapest = np.moveaxis(costs_s, node, 0).reshape(problem.num_labels[node], -1).min(1)
        assert set(np.flatnonzero(np.isfinite(cheapest))) <= set(kept)
        assert (bounds <= cheapest[kept] * (1 + 1e-9) + 1e-15).all()


@pytest.mark.parametrize("time_limit_s", [0.0, 0.02, 0.1])
def test_bound_holds_when_time_runs_out(monkeypatch, time_limit_s):
    monkeypatch.setattr(branch_and_bound, "MAX_PROGRAM_LABELS", -1)
    for seed in range(4):
        problem, rows = layered(3, 2, 4, seed)
        want_s = optimum_s(problem, rows, 15e9)
        try:
            found = solve(problem, limit_bytes=15e9, rows=rows, time_limit_s=time_limit_s, relative_gap=0.0)
        except NoFitError as error:
            is_proven = error.is_proven
            assert not is_proven
            continue
        assert found.bound_s <= want_s * (1 + 1e-9)
        assert found.cost_s >= want_s * (1 - 1e-9)


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
    turned = Problem(problem.node_cost_s, tuple(edge.turned() for edge in reversed(problem.edges)))
    given_rows = {"limit_bytes": 20e9, "rows": rows}
    assert solve(problem, **given_rows).labels == solve(turned, **given_rows).labels
