"""Plans as values: which two are equal, and that they can be hashed, pickled and copied."""

import copy
import pickle
from dataclasses import fields, replace

import pytest

from autoshard.search.plan.outline import Outline
from autoshard.search.plan.pipeline_plan import PipelineEstimates, PipelinePlan, Stage, StageEstimates
from autoshard.search.plan.plan import Collective, Decisions, Estimates, Plan
from autoshard.search.plan.spmd_plan import SpmdEstimates, SpmdPlan

COLLECTIVES = (Collective("all-reduce", ("data",), 2, 1 << 20, 1e-3),)
DECISIONS = Decisions(
    {"data": 2, "model": 4},
    {"w": "P('data')", "x": "P()"},
    {"forward dot": "P() -> P()"},
    {"x -> update": "P()"},
)
OUTLINE = Outline({"w": "float32[8] parameter"}, {}, {"dot_general": 1})
OF_STEP = {
    "step": "step",
    "fingerprint": "0123456789abcdef",
    "jax": "0.12",
    "cluster": {"name": "8xCPU", "nodes": [1]},
}
BESIDES = {"search_s": {"solve": 1.5}, "outline": OUTLINE}

PLANS = {
    "one program": Plan(
        **OF_STEP,
        options={"pin": {"w": "P('data')"}},
        meshes=((8,), (2, 4)),
        memory_bytes=1 << 30,
        decisions=DECISIONS,
        estimates=Estimates(1.0, 0.5, 0.0, 0.0, 0.25, 1 << 20, 0, {"state": 1 << 20}, "dot", COLLECTIVES),
        gap=0.0,
        marks="abcd",
        **BESIDES,
    ),
    "a program per stage": PipelinePlan(
        **OF_STEP,
        memory_bytes=1 << 30,
        schedule="1f1b",
        workers=2,
        microbatches=4,
        stages=(Stage(0, {"replica": 1, "data": 4}), Stage(7, {"replica": 1, "data": 4})),
        retention={"forward tanh": "remat"},
        decisions=(DECISIONS,),
        estimates=PipelineEstimates(1.0, 0.25, 1 << 20, (StageEstimates(*[0.1] * 6, *[9] * 4, COLLECTIVES),) * 2),
        groups=("fast", "slow"),
        **BESIDES,
    ),
    "one program for all stages": SpmdPlan(
        **OF_STEP,
        memory_bytes=1 << 30,
        schedule="gpipe",
        microbatches=4,
        stages=2,
        mesh={"stage": 2, "replica": 1},
        retention={},
        estimates=SpmdEstimates(1.0, 0.25, 1 << 20, *[0.1] * 4, 9, 9, COLLECTIVES),
        decisions=DECISIONS,
        **BESIDES,
    ),
}  # fmt: skip

OTHERS = {
    "step": "another_step",
    "fingerprint": "fedcba9876543210",
    "jax": "0.11",
    "cluster": {"name": "8xCPU", "nodes": [2]},
    "options": {},
    "meshes": ((8,),),
    "memory_bytes": 1 << 29,
    "gap": None,
    "marks": "",
    "schedule": "zb-h1",
    "workers": 1,
    "microbatches": 8,
    "stages": 4,
    "mesh": {"stage": 1, "replica": 2},
    "retention": {"forward exp": "remat"},
    "groups": ("slow", "fast"),
    "search_s": {"solve": 3.0},
    "outline": None,
    "is_sealed": False,
}
"""Another value of each field; that of decisions, stages and estimates depends on the kind of plan."""

SAID_ONLY = {
    "step",
    "jax",
    "options",
    "meshes",
    "estimates",
    "gap",
    "marks",
    "search_s",
    "outline",
    "is_sealed",
}
"""Fields that say how a plan came to be, or what is predicted of it: two equal plans may differ in them."""


def other(plan, field):
    """A plan with another value of one field."""
    value = getattr(plan, field)
    if field == "estimates":
        return replace(plan, estimates=replace(value, step_s=2.0))
    if field == "decisions":
        changed = replace(DECISIONS, arguments={**DECISIONS.arguments, "x": "P('data')"})
        return replace(plan, decisions=(changed,) if isinstance(value, tuple) else changed)
    if field == "stages" and isinstance(value, tuple):
        return replace(plan, stages=(value[0], replace(value[1], first_op=8)))
    return replace(plan, **{field: OTHERS[field]})


@pytest.mark.parametrize(
    ("plan", "field"),
    [pytest.param(p, f.name, id=f"{kind}, {f.name}") for kind, p in PLANS.items() for f in fields(p)],
)
def test_plans_are_equal_if_they_decide_the_same_for_the_same_step(plan, field):
    changed = other(plan, field)
    assert getattr(changed, field) != getattr(plan, field)
    is_equal = field in SAID_ONLY
    assert (changed == plan, changed != plan) == (is_equal, not is_equal)
    assert len({plan, changed}) == (1 if is_equal else 2)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
def test_a_copy_is_equal_and_whole(plan, again):
    copied = again(plan)
    assert (copied, hash(copied)) == (plan, hash(plan))
    assert (copied.to_json(), copied.search_s) == (plan.to_json(), plan.search_s)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_is_not_equal_to_what_is_no_plan(plan):
    assert plan not in (plan.to_json(), None, DECISIONS)
    assert sum(plan == one for one in PLANS.values()) == 1


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_order_of_decisions_in_a_file_does_not_count(plan):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(v) for v in value] if isinstance(value, list) else value

    again = type(plan).from_json(turned(plan.to_json()))
    assert (again, hash(again)) == (plan, hash(plan))
