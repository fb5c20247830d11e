"""Overlap under a cap: communication runs beside computation as far as the memory cap has room for it."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import applying, driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.summary import summary
from tests.search.chain import chain

CLUSTER = parse_cluster("64xA100-80GB-Ethernet")
STEP = trace(
    chain,
    [jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 6,
    jax.ShapeDtypeStruct((1 << 17, 2048), jnp.float32),
)
TIGHT_BYTES, ROOMY_BYTES = 307 << 20, 1 << 30


@functools.cache
def found(cap_bytes: int) -> Plan:
    return driver.find(STEP, CLUSTER, Options(cap_bytes, (2, 4, 8), remat="never")).plan


@functools.cache
def edited(overlap: float) -> Plan:
    """The plan under a cap with plenty of room, with another share of the scheduler's budget."""
    plan = replace(found(ROOMY_BYTES), overlap=overlap, is_sealed=False)
    assert plan.is_edited
    return applying.apply(STEP, plan, CLUSTER).plan


def test_a_plan_overlaps_as_far_as_the_cap_has_room_for_it():
    roomy, tight = found(ROOMY_BYTES), found(TIGHT_BYTES)
    assert roomy.overlap == 1 > tight.overlap > 0
    assert roomy.estimates.hidden_s > tight.estimates.hidden_s > 0
    assert tight.estimates.peak_bytes <= TIGHT_BYTES
    assert roomy.estimates.step_s < tight.estimates.step_s


def test_an_edited_plan_overlaps_no_more_than_its_cap_has_room_for():
    tight = found(TIGHT_BYTES)
    again = applying.apply(STEP, replace(tight, overlap=1.0, is_sealed=False), CLUSTER).plan
    assert again.overlap == tight.overlap
    assert again.estimates == tight.estimates


def test_with_less_overlap_a_step_takes_longer():
    taken_s = [edited(overlap).estimates.step_s for overlap in (1.0, 0.25, 0.125, 0.0)]
    assert taken_s == sorted(taken_s)
    assert taken_s[0] < taken_s[-1]


def test_without_overlap_a_step_takes_its_computation_and_all_of_its_communication():
    estimates = edited(0.0).estimates
    communication_s = sum(one.seconds for one in estimates.collectives)
    assert estimates.step_s == pytest.approx(estimates.compute_s + communication_s)
    assert estimates.step_s == pytest.approx(found(ROOMY_BYTES).estimates.unhidden_s)
    assert estimates.peak_bytes <= found(ROOMY_BYTES).estimates.peak_bytes


@pytest.mark.parametrize(("share", "text"), [(0.5, "overlap 50%"), (0.0, "no overlap")])
def test_a_saved_plan_says_its_overlap_and_is_applied_as_it_is(share, text):
    plan = edited(share)
    data = plan.to_json()
    assert data["overlap"] == share
    again = applying.apply(STEP, Plan.from_json(data), CLUSTER).plan
    assert again == plan
    assert again.estimates == plan.estimates
    assert text in str(plan)
    assert ("xla_gpu_enable_latency_hiding_scheduler=False" in summary(plan)) == (share == 0)


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_an_overlap_that_is_no_share_is_refused(share):
    with pytest.raises(PlanError, match="overlap"):
        Plan.from_json({**found(ROOMY_BYTES).to_json(), "overlap": share})
