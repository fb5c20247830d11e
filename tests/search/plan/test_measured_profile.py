"""Profiles of searched plans: what streams and ops do adds up, and the fullest slice is the device's peak."""

import functools

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search import driver
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.plan.measured_profile import NUM_SLICES, UNIT_BYTES
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from tests.search.adamw import adamw_chain

NUM_LAYERS, WIDTH, ROWS = 3, 1024, 8192


@functools.cache
def searched() -> SearchResult:
    step, *shapes = adamw_chain(NUM_LAYERS, WIDTH, ROWS)
    return driver.find(trace(step, *shapes), parse_cluster("8xH100-80GB"), Options(8 << 30, mesh=(8,)))


@functools.cache
def profile():
    return searched().plan.estimates.profile


def test_the_streams_of_a_step_take_as_long_as_its_parts():
    estimates, found = searched().plan.estimates, profile()
    assert {len(shares) for shares in found.busy.values()} == {NUM_SLICES}
    assert all(0 <= share <= 1 for shares in found.busy.values() for share in shares)
    took = {name: sum(shares) * found.seconds / NUM_SLICES for name, shares in found.busy.items()}
    moving_s = sum(one.seconds for one in estimates.collectives)
    assert took.pop("collectives over data") == pytest.approx(moving_s, rel=0.1)
    assert {*took} == {"forward", "backward", "update"}
    assert sum(took.values()) == pytest.approx(estimates.compute_s, rel=0.05)
    assert 0.99 * estimates.compute_s <= found.seconds <= 1.01 * (estimates.compute_s + moving_s)


def test_phases_follow_one_another():
    first = {name: next(n for n, share in enumerate(s) if share) for name, s in profile().busy.items()}
    assert first["forward"] <= first["backward"] <= first["update"]


def test_the_fullest_slice_is_the_peak_but_for_its_margin():
    estimates, found = searched().plan.estimates, profile()
    assert {len(held) for held in found.held_bytes.values()} == {NUM_SLICES}
    fullest = max(map(sum, zip(*found.held_bytes.values(), strict=True)))
    assert fullest <= estimates.peak_bytes + len(found.held_bytes) * UNIT_BYTES
    assert fullest >= 0.9 * estimates.peak_bytes
    for kind in ("parameters", "optimizer_state"):
        assert all(abs(held - estimates.residents[kind]) < UNIT_BYTES for held in found.held_bytes[kind])


def test_ops_have_the_flops_of_the_model_and_the_longest_comes_first():
    """Three products a layer but for the first one, which hands no gradient on."""
    ops = profile().ops
    assert [op.seconds for op in ops] == sorted((op.seconds for op in ops), reverse=True)
    flops = (3 * NUM_LAYERS - 1) * 2 * ROWS * WIDTH**2
    assert 8 * sum(op.flops for op in ops) == flops
    least_bytes = 4 * (2 * ROWS // 8 * WIDTH + WIDTH**2)
    assert all(op.moved_bytes == op.runs * least_bytes for op in ops)
    assert all(0 < op.flops / op.seconds < op.peak_flops_per_s for op in ops)


def test_kernels_of_all_classes_take_the_time_that_the_device_computes():
    """Three products a layer but for the first one, and no convolution."""
    estimates, kernels = searched().plan.estimates, profile().kernels
    assert {*kernels} == {"products", "elementwise and fused"}
    assert kernels["products"].runs == 3 * NUM_LAYERS - 1
    assert kernels["products"].seconds == pytest.approx(sum(op.seconds for op in profile().ops), rel=1e-6)
    assert sum(one.seconds for one in kernels.values()) == pytest.approx(estimates.compute_s, rel=0.05)


def test_a_profile_goes_through_the_file(tmp_path):
    searched().plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").estimates.profile == profile()
    assert not Plan.load(tmp_path / "plan.json").is_edited
    numbers = [
        line for line in (tmp_path / "plan.json").read_text().splitlines() if line.strip(" ,").isdigit()
    ]
    assert numbers == []
