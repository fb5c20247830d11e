"""A compiled peak in a plan and in its file, and when it is dropped."""

import json
from dataclasses import replace

import jax
import pytest

from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.peak_band import PEAK_BAND, band, compiled, compiled_as, may_exceed
from autoshard.search.plan.plan import Plan
from tests.search.plan.test_saved import PLANS


def test_the_band_contains_the_prediction_and_crosses_the_cap_where_it_says():
    there = band(1000)
    assert there.least_bytes < 1000 < there.most_bytes
    assert may_exceed(1000, there.most_bytes - 1)
    assert not may_exceed(1000, there.most_bytes)
    assert may_exceed(1.0, PEAK_BAND[1] - 0.01), "shares are peaks, too"


@pytest.fixture(params=PLANS)
def plan(request):
    plan = replace(PLANS[request.param], jax=jax.__version__)
    return replace(plan, marks=marks_of(plan))


@pytest.mark.parametrize("peak_bytes", [None, 123_456])
def test_a_file_keeps_a_compiled_peak(plan, peak_bytes):
    data = json.loads(json.dumps(compiled(plan, peak_bytes).to_json()))
    read = Plan.from_json(data)
    assert (read.estimates.compiled_peak_bytes, read.is_sealed) == (peak_bytes, True)
    assert ("compiled_peak_bytes" in data["estimates"]) == (peak_bytes is not None)


def test_a_compiled_peak_survives_new_estimates_of_the_plan(plan):
    assert compiled_as(plan, compiled(plan, 123_456)).estimates.compiled_peak_bytes == 123_456


@pytest.mark.parametrize("change", [{"is_sealed": False}, {"jax": "0.1"}])
def test_a_compiled_peak_is_dropped_with_an_edit_and_with_another_version_of_jax(plan, change):
    old = replace(compiled(plan, 123_456), **change)
    assert compiled_as(plan, old).estimates.compiled_peak_bytes is None
