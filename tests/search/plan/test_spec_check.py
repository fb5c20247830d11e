"""Specs of a plan, without its step: which can be, and which cannot on any shape."""

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.plan import Decisions
from autoshard.search.plan.spec_check import check_specs


def check(arguments="P()", ops="P() -> P()", copies="fresh P()"):
    mesh = {"data": 4, "model": 2}
    check_specs(Decisions(mesh, {"w": arguments}, {"dot": ops}, {"w -> forward": copies}), "plan.json")


@pytest.mark.parametrize(
    "said", ["P()", "P('data', None) on host", "P(None, ('data', 'model'))", "jax.P('data')"]
)
def test_an_argument_rests_in_one_spec(said):
    check(arguments=said)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("P('batch')", "axis 'batch' is not in the mesh"),
        ("P('data', 'data')", "an axis is used twice"),
        ("P(data)", "wanted quoted axis names or None"),
        ("P('data'", "wanted a spec such as"),
        ("P() P()", "wanted a spec such as"),
        ("replicated", "wanted a spec such as"),
        ("", "wanted a spec such as"),
    ],
)
def test_an_argument_that_cannot_rest_so_is_named(said, message):
    with pytest.raises(PlanError, match=rf"plan\.json: w: {message}"):
        check(arguments=said)


def test_ops_and_copies_are_checked_too():
    check(ops="P('data'), P(None, 'model') -> P(unreduced={'data'})", copies="all-gather P('model')")
    with pytest.raises(PlanError, match=r"plan\.json: dot: axis 'batch'"):
        check(ops="P('data'), P() -> P('batch')")
    with pytest.raises(PlanError, match=r"plan\.json: w -> forward: wanted specs"):
        check(copies="all-gather")
