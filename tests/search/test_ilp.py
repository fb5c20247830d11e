"""The ILP against brute force on problems small enough for it."""

from itertools import product

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from search.ilp import Edge, NoFitError, Problem, Row, minimise_peak, solve

SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UNITS_S = st.sampled_from([1e-6, 1.0, 10.0])


def costs(draw, shape, unit_s):
    """Few distinct values, zeros and forbidden entries among them, so that ties and infeasibility are common."""
    values = st.one_of(st.just(0.0), st.integers(1, 5).map(float), st.floats(0.1, 5.0), st.just(np.inf))
    drawn = draw(st.lists(values, min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    return np.array(drawn).reshape(shape) * unit_s


@st.composite
def problems(draw):
    unit_s = draw(UNITS_S)
    num_labels = draw(st.lists(st.integers(2, 4), min_size=3, max_size=6))
    pairs = st.tuples(*[st.integers(0, len(num_labels) - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    edges = [
        Edge(u, v, costs(draw, (num_labels[u], num_labels[v]), unit_s)) for u, v in draw(st.lists(pairs, max_size=9))
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
