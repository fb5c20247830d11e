"""A plan's numbers for loggers: their names, their values, and what is left out."""

from dataclasses import replace

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.metrics import examples, tokens
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.work_shares import WorkShares
from tests.search.plan.test_summary import gpt, make_plan

ARGUMENTS = {
    "params['w']": "float32[64,64] parameter",
    "batch['tokens']": "int32[32,1024] batch",
    "batch['mask']": "bool[32,1024] batch",
    "batch['weight']": "float32[32] batch",
    "rate": "float32[] frozen",
    "key": "uint32[2] key",
}


def outline(**changed):
    return Outline(ARGUMENTS | changed, {}, {})


@pytest.fixture
def plan():
    """16 H100s with 989 TFLOP/s each, a step of 10 ms: 15.824e12 FLOPs are a tenth of their peak."""
    plan = make_plan(gpt())
    shares = (WorkShares(model_flops={"bfloat16": 15.824e12}),)
    estimates = replace(plan.estimates, shares=shares, host_bytes=1 << 30)
    return replace(plan, estimates=estimates, outline=outline())


def test_the_numbers_of_a_plan_under_names_that_stay(plan):
    assert plan.metrics() == pytest.approx(
        {
            "devices": 16.0,
            "memory_cap_bytes": float(20 << 30),
            "examples": 32.0,
            "tokens": 32768.0,
            "predicted_step_s": 0.01,
            "model_flops": 15.824e12,
            "predicted_mfu": 0.1,
            "predicted_examples_per_s": 3200.0,
            "predicted_tokens_per_s": 3276800.0,
            "predicted_peak_bytes": float(10 << 30),
            "predicted_host_bytes": float(1 << 30),
            "certified_gap": 0.005,
        }
    )
    assert {type(value) for value in plan.metrics().values()} == {float}


def test_a_loaded_plan_has_the_same_ones(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    assert type(plan).load(tmp_path / "plan.json").metrics() == plan.metrics()


def test_what_is_not_known_is_left_out(plan):
    bare = replace(plan, outline=None, gap=None, estimates=replace(plan.estimates, shares=()))
    assert set(bare.metrics()) == {
        "devices",
        "memory_cap_bytes",
        "predicted_step_s",
        "predicted_peak_bytes",
        "predicted_host_bytes",
    }


def test_a_compiled_peak_and_a_bubble_have_names_of_their_own(plan):
    compiled = replace(plan, estimates=replace(plan.estimates, compiled_peak_bytes=11 << 30))
    assert compiled.metrics()["compiled_peak_bytes"] == 11 << 30
    pipeline = replace(plan, schedule="1f1b", executor="mpmd", estimates=replace(plan.estimates, bubble=0.2))
    assert pipeline.metrics()["predicted_bubble"] == 0.2


def test_predictions_for_other_decisions_are_left_out(plan):
    plan = replace(plan, marks=marks_of(plan))
    assert "predicted_step_s" in plan.metrics()
    (one,) = plan.shardings
    edited = replace(plan, shardings=(replace(one, arguments=one.arguments | {"params['new']": "P()"}),))
    assert set(edited.metrics()) == {"devices", "memory_cap_bytes", "examples", "tokens"}


def test_examples_are_the_first_dimension_that_all_arrays_of_the_batch_share():
    assert examples(outline()) == 32
    assert examples(outline(other="float32[4,32] batch")) == 0
    assert examples(Outline({}, {}, {})) == 0


def test_tokens_are_whole_numbers_in_two_dimensions():
    assert tokens(outline(longer="int32[32,2048] batch")) == 65536
    assert tokens(Outline({"image": "uint8[8,224,224,3] batch", "label": "int32[8] batch"}, {}, {})) == 0


def test_a_cluster_that_makes_no_sense_is_the_plans_fault(plan):
    with pytest.raises(PlanError, match="plan: cluster"):
        replace(plan, cluster={**plan.cluster, "num_devices": -1}).metrics()


def test_the_printed_plan_says_the_same_numbers(plan):
    lines = str(plan).splitlines()
    assert "predicted step time: 10 ms, MFU 10%" in lines
    assert "predicted throughput: 3.2k examples/s, 3.28M tokens/s, 15.8 TFLOP of the model a step" in lines
