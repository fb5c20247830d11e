"""Plans as values: which two are equal, and that they can be hashed, pickled and copied."""

import copy
import pickle
from dataclasses import fields, replace

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.plan import Candidate, Collective, Estimates, Plan, Sharding, Stage, StageEstimates

COLLECTIVES = (Collective("all-reduce", ("data",), 2, 1 << 20, 1e-3),)
SHARDING = Sharding(
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

STAGE = StageEstimates(
    forward_s=0.1,
    backward_s=0.2,
    update_s=0.1,
    residual_bytes=9,
    state_bytes=9,
    peak_bytes=9,
    collectives=COLLECTIVES,
)
OF_PIPELINE = {
    "memory_bytes": 1 << 30,
    "workers": 2,
    "microbatches": 4,
    "shardings": (SHARDING,),
    "estimates": Estimates(step_s=1.0, peak_bytes=1 << 20, bubble=0.25, stages=(STAGE,) * 2),
}

PLANS = {
    "jit": Plan(
        **OF_STEP,
        options={"pin": {"w": "P('data')"}},
        meshes=((8,), (2, 4)),
        memory_bytes=1 << 30,
        executor="jit",
        microbatches=1,
        retention={},
        shardings=(SHARDING,),
        estimates=Estimates(
            step_s=1.0,
            peak_bytes=1 << 20,
            compute_s=0.5,
            residents={"state": 1 << 20},
            collectives=COLLECTIVES,
        ),
        gap=0.0,
        marks="abcd",
        **BESIDES,
    ),
    "mpmd": Plan(
        **OF_STEP,
        **OF_PIPELINE,
        executor="mpmd",
        schedule="1f1b",
        stages=(Stage(0, 2), Stage(7, 2)),
        retention={"forward tanh": "remat"},
        groups=("fast", "slow"),
        **BESIDES,
    ),
    "spmd": Plan(
        **OF_STEP,
        **OF_PIPELINE,
        executor="spmd",
        schedule="gpipe",
        stages=(Stage(replicas=2),) * 2,
        retention={},
        **BESIDES,
    ),
}

OTHERS = {
    "attention": "blockwise",
    "overlap": 0.5,
    "step": "another_step",
    "fingerprint": "fedcba9876543210",
    "jax": "0.11",
    "cluster": {"name": "8xCPU", "nodes": [2]},
    "options": {"remat": "never"},
    "meshes": ((2, 2, 2),),
    "memory_bytes": 1 << 29,
    "executor": "another",
    "gap": 0.5,
    "candidates": (Candidate((8,), bound_s=1.0),),
    "marks": "efgh",
    "schedule": "zb-h1",
    "workers": 3,
    "microbatches": 8,
    "stages": (Stage(0, 4),),
    "retention": {"forward exp": "remat"},
    "shardings": (replace(SHARDING, arguments={**SHARDING.arguments, "x": "P('data')"}),),
    "estimates": Estimates(step_s=2.0, peak_bytes=1),
    "groups": ("slow", "fast"),
    "search_s": {"solve": 3.0},
    "outline": None,
    "is_sealed": False,
}
"""Another value of each field."""

SAID_ONLY = {
    "step",
    "jax",
    "options",
    "meshes",
    "estimates",
    "gap",
    "candidates",
    "marks",
    "search_s",
    "outline",
    "is_sealed",
}
"""Fields that say how a plan came to be, or what is predicted of it: two equal plans may differ in them."""


@pytest.mark.parametrize(
    ("plan", "field"),
    [pytest.param(p, f.name, id=f"{kind}, {f.name}") for kind, p in PLANS.items() for f in fields(p)],
)
def test_plans_are_equal_if_they_decide_the_same_for_the_same_step(plan, field):
    changed = replace(plan, **{field: OTHERS[field]})
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
    assert plan not in (plan.to_json(), None, SHARDING)
    assert sum(plan == one for one in PLANS.values()) == 1


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_order_of_decisions_in_a_file_does_not_count(plan):
    def turned(value):
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return [turned(v) for v in value] if isinstance(value, list) else value

    again = Plan.from_json(turned(plan.to_json()))
    assert (again, hash(again)) == (plan, hash(plan))


@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_a_pipeline_without_overlap_is_refused(executor):
    data = replace(PLANS[executor], overlap=0.0).to_json()
    with pytest.raises(PlanError, match="overlap is 0, and must be 1 for a pipeline"):
        Plan.from_json(data)
