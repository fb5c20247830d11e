"""The ILP against brute force on problems small enough for it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search import ilp
from search.elimination import eliminate
from search.ilp import Edge, NoFitError, Problem, Row, minimise_peak, solve
from search.messages import Messages
from search.milp import solve_milp
from search.pbqp import merged

SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNITS_S = st.sampled_from([1e-6, 1.0, 10.0])


def costs(draw, shape, unit_s):
    """Few distinct values, zeros and forbidden entries among them: ties and infeasibility are common."""
    values = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(0.1, 5.0), st.just(np.inf))
    drawn = draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(drawn).reshape(shape) * unit_s


@st.composite
def problems(draw):
    unit_s = draw(UNITS_S)
    num_labels = draw(st.lists(st.integers(2, 4), min_size=3, max_size=6))
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
        rows.append(Row(f"point {index}", tuple(sizes), 1e9 * draw(st.integers(0, 3))))
    return tuple(rows)


@st.composite
def limited_problems(draw):
    problem = draw(problems())
    return problem, draw(rows_of(problem)), 1e9 * draw(st.integers(1, 25))


def optimum_s(problem, rows=(), limit_bytes=np.inf):
    fitting = (
        problem.cost_s(labels)
        for labels in product(*map(range, problem.num_labels))
        if all(row.total_bytes(labels) <= limit_bytes for row in rows)
    )
    return min(fitting, default=np.inf)


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
    peaks = [
        max(row.total_bytes(labels) for row in rows)
        for labels in product(*map(range, problem.num_labels))
        if np.isfinite(problem.cost_s(labels))
    ]
    if not peaks:
        with pytest.raises(NoFitError):
            minimise_peak(problem, limit_bytes=limit_bytes, rows=rows)
        return
    found = minimise_peak(problem, limit_bytes=limit_bytes, rows=rows)
    want_bytes = max(min(peaks), limit_bytes)
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
    return Problem(tuple(nodes), edges), (Row("all", sizes, 0.0),)


@pytest.mark.parametrize("seed", range(3))
def test_every_stage_agrees_with_one_integer_program(seed):
    problem, rows = layered(5, 2, 4, seed)
    limit_bytes = 25e9
    program = solve_milp(merged(problem), rows, limit_bytes, time_limit_s=60.0, relative_gap=0.0)
    found = solve(problem, limit_bytes=limit_bytes, rows=rows, relative_gap=0.0)
    assert found.cost_s == pytest.approx(problem.cost_s(program.labels), rel=1e-9)


@pytest.mark.parametrize("max_program_labels", [0, 400])
@pytest.mark.parametrize("seed", range(6))
def test_branching_is_exact(monkeypatch, seed, max_program_labels):
    monkeypatch.setattr(ilp, "MAX_PROGRAM_LABELS", max_program_labels)
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
    messages = Messages(merged(problem))
    messages.make_consistent()
    if not messages.is_feasible:
        assert optimum_s(problem) == np.inf
        return
    bounds = [messages.sweep()[0] for _ in range(6)]
    assert max(bounds) <= optimum_s(problem) * (1 + 1e-9)
    label_bounds = messages.label_bounds()
    for labels in product(*map(range, problem.num_labels)):
        cost_s = problem.cost_s(labels)
        for node, label in enumerate(labels if np.isfinite(cost_s) else ()):
            kept = messages.kept[node].tolist()
            assert label in kept
            assert label_bounds[node][kept.index(label)] <= cost_s * (1 + 1e-9) + 1e-15
