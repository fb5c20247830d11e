"""What few layers of a deep step say where residuals wait on the host: each layer's wait for another layer."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import applying, driver
from autoshard.search import result as results
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.plan import Plan
from tests.search.chain import chain

FAR = parse_cluster("8xH100-80GB")
NEAR = replace(FAR, host_link=replace(FAR.host_link, bytes_per_s=1e12))
"""A host so near that what waits there is hidden."""

STEP = trace(
    chain,
    [jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)] * 16,
    jax.ShapeDtypeStruct((1 << 16, 512), jnp.bfloat16),
)


@functools.cache
def roomy_peak_bytes():
    """Peak of the step as it is."""
    return driver.find(STEP, NEAR, Options(1 << 40, (8,))).plan.estimates.peak_bytes


def found(share):
    """Under a cap of a share of what the step holds as it is, and what was said meanwhile."""
    said: list[str] = []
    options = Options(int(share * roomy_peak_bytes()), (8,), remat="never", microbatches=1)
    return driver.find(STEP, NEAR, options, said.append), said


def test_what_few_layers_say_is_put_on_all(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "UNUSED_SHARE", 1.0)  # however little is held, no more is looked for
    result, said = found(0.6)
    assert "the same on all layers" in said
    assert "all layers" not in said
    assert (result.short, result.whole) == (None, result)
    assert len(result.problem.offloaded_sites) > 8
    assert result.plan.estimates.peak_bytes <= result.plan.memory_bytes
    result.plan.save(tmp_path / "plan.json")
    again = applying.apply(STEP, Plan.load(tmp_path / "plan.json"), NEAR)
    assert (again.plan.decisions, again.plan.estimates) == (result.plan.decisions, result.plan.estimates)


@pytest.mark.parametrize("share", [pytest.param(0.8, marks=pytest.mark.slow), 0.6])
def test_where_fewer_might_do_all_layers_are_searched(share, monkeypatch):
    result, said = found(share)
    assert said.index("the same on all layers") < said.index("all layers")
    monkeypatch.setattr(results, "shortened", lambda *args: None)
    whole, _ = found(share)
    assert result.plan.estimates.step_s <= whole.plan.estimates.step_s
    assert len(result.problem.offloaded_sites) <= len(whole.problem.offloaded_sites)
