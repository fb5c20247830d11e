"""Which decisions give way, against every assignment of small problems."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.plan.reconciliation import ContradictionError, Kept, Reconciled, reconciled
from autoshard.search.solver.pbqp import Edge, Problem

FIRM = 2
NUM_LABELS = 3


def problem(num_nodes: int, forbidden: dict[tuple[int, int], np.ndarray]) -> Problem:
    edges = [Edge(u, v, np.where(cost, np.inf, 0.0)) for (u, v), cost in forbidden.items()]
    return Problem((np.zeros(NUM_LABELS),) * num_nodes, tuple(edges))


def goes(of: Problem, kept: Kept) -> bool:
    return any(np.isfinite(of.cost_s(labels)) for labels in product(*(k.tolist() for k in kept)))


def only(labels: dict[int, int], num_nodes: int) -> Kept:
    return tuple(np.array([labels[n]]) if n in labels else np.arange(NUM_LABELS) for n in range(num_nodes))


EQUAL = ~np.eye(NUM_LABELS, dtype=bool)
"""Forbids what is not equal."""


def chain(num_nodes: int) -> Problem:
    return problem(num_nodes, {(n, n + 1): EQUAL for n in range(num_nodes - 1)})


def test_what_goes_together_stays():
    kept = only({0: 1, 2: 1}, 3)
    found = reconciled(chain(3), kept, {0: 0, 2: 0}, FIRM)
    assert found.anew == ()
    assert found.kept == kept


@pytest.mark.parametrize(
    ("firmness", "anew"), [((2, 0), (3,)), ((0, 2), (0,)), ((1, 0), (3,)), ((0, 0), (3,))]
)
def test_the_less_firm_gives_way_also_through_nodes_that_are_free(firmness, anew):
    found = reconciled(chain(4), only({0: 0, 3: 1}, 4), dict(zip((0, 3), firmness, strict=True)), FIRM)
    assert found.anew == anew
    assert [len(found.kept[n]) for n in (0, 3)] == [NUM_LABELS if n in anew else 1 for n in (0, 3)]


def test_bystanders_stay_as_they_are():
    star = problem(4, {(0, n): EQUAL for n in (1, 2, 3)})
    found = reconciled(star, only({0: 0, 1: 0, 2: 1, 3: 0}, 4), {0: FIRM, 1: 0, 2: 0, 3: 0}, FIRM)
    assert found.anew == (2,)


def test_firm_ones_that_contradict_each_other_are_named_and_no_others():
    star = problem(4, {(0, n): EQUAL for n in (1, 2, 3)})
    firmness = dict.fromkeys(range(1, 4), FIRM)
    with pytest.raises(ContradictionError) as raised:
        reconciled(star, only({1: 0, 2: 1, 3: 0}, 4), firmness, FIRM)
    assert raised.value.nodes in ((1, 2), (2, 3))


@st.composite
def cases(draw):
    num_nodes = draw(st.integers(2, 5))
    pairs = [(u, v) for v in range(num_nodes) for u in range(v)]
    tables = st.lists(st.booleans(), min_size=NUM_LABELS**2, max_size=NUM_LABELS**2)
    forbidden = {
        pair: np.array(draw(tables)).reshape(NUM_LABELS, NUM_LABELS) for pair in pairs if draw(st.booleans())
    }
    labels = draw(st.dictionaries(st.integers(0, num_nodes - 1), st.integers(0, NUM_LABELS - 1)))
    firmness = {node: draw(st.integers(0, FIRM)) for node in labels}
    return problem(num_nodes, forbidden), labels, firmness, num_nodes


def outcome(of: Problem, kept: Kept, firmness: dict[int, int]) -> Reconciled | ContradictionError:
    try:
        return reconciled(of, kept, firmness, FIRM)
    except ContradictionError as e:
        return e


@given(cases())
def test_no_more_gives_way_than_must_and_nothing_firm(case):
    of, labels, firmness, num_nodes = case
    found = outcome(of, only(labels, num_nodes), firmness)
    if isinstance(found, ContradictionError):
        assert all(firmness[n] == FIRM for n in found.nodes)
        assert not goes(of, only({n: labels[n] for n in found.nodes}, num_nodes))
        return
    stayed = {n: label for n, label in labels.items() if n not in found.anew}
    assert all(firmness[n] < FIRM for n in found.anew)
    if goes(of, only(labels, num_nodes)):
        assert not found.anew
    for node in found.anew:
        assert not goes(of, only(stayed | {node: labels[node]}, num_nodes))
