"""Plans without overlap: communication runs beside computation only if the memory cap has room for it."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

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


def test_a_plan_overlaps_unless_the_cap_has_no_room_for_it():
    roomy, tight = found(ROOMY_BYTES), found(TIGHT_BYTES)
    assert (roomy.overlap, tight.overlap) == (True, False)
    assert roomy.estimates.hidden_s > 0 == tight.estimates.hidden_s
    assert tight.estimates.peak_bytes <= TIGHT_BYTES
    assert roomy.estimates.step_s < tight.estimates.step_s


def test_without_overlap_a_step_takes_its_computation_and_all_of_its_communication():
    estimates = found(TIGHT_BYTES).estimates
    communication_s = sum(one.seconds for one in estimates.collectives)
    assert estimates.step_s == pytest.approx(estimates.compute_s + communication_s)


def test_a_saved_plan_says_that_it_does_not_overlap_and_is_applied_as_it_is():
    plan = found(TIGHT_BYTES)
    data = plan.to_json()
    assert data["overlap"] is False
    again = applying.apply(STEP, Plan.from_json(data), CLUSTER).plan
    assert again == plan
    assert again.estimates == plan.estimates
    assert "no overlap" in str(plan)
    assert "xla_gpu_enable_latency_hiding_scheduler=False" in summary(plan)


def test_an_edited_plan_does_without_overlap():
    plan = found(ROOMY_BYTES)
    edited = replace(plan, overlap=False, is_sealed=False)
    assert edited != plan
    assert edited.is_edited
    estimates = applying.apply(STEP, edited, CLUSTER).plan.estimates
    assert estimates.step_s == pytest.approx(plan.estimates.unhidden_s)
    assert estimates.peak_bytes <= plan.estimates.peak_bytes
