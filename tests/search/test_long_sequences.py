"""Attention in blocks, or as it is written: the search of both forms, against searches of each form alone."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.driver import find, find_as_written
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.mesh_problem import RELATIVE_GAP
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, LATEST, Options
from autoshard.search.solver.clock import WorkClock
from tests.attentions import MASKS, by_softmax, layer_shapes, layer_step

PLENTY = 1 << 42


def layer(batch, length, heads, key_heads=None, mask="causal", dtype="bfloat16"):
    key_heads = key_heads or heads
    step = layer_step(by_softmax(MASKS[mask]), heads, key_heads)
    return trace(step, *layer_shapes(batch, length, heads, key_heads, 128, dtype))


def in_blocks_s(step, cluster):
    return find_as_written(blockwise(step), cluster, Options(PLENTY)).found.cost_s


@settings(max_examples=4, deadline=None)
@given(
    st.sampled_from(("4xH100-80GB", "4xL4", "4xA100-80GB", "8xA100-80GB")),
    st.sampled_from((1, 4, 8)),
    st.sampled_from((512, 2048, 8192)),
    st.sampled_from(((4, 4), (8, 2))),
    st.sampled_from(("nothing", "causal", "windowed")),
    st.sampled_from(("bfloat16", "float32")),
)
def test_no_form_alone_has_a_faster_plan(preset, batch, length, heads, mask, dtype):
    cluster, step = parse_cluster(preset), layer(batch, length, *heads, mask, dtype)
    as_written_s = find_as_written(step, cluster, Options(PLENTY)).found.cost_s
    least_s = min(as_written_s, in_blocks_s(step, cluster))
    assert find(step, cluster, Options(PLENTY)).found.cost_s <= least_s / (1 - RELATIVE_GAP)


@pytest.mark.parametrize(
    ("length", "dtype", "attention"), [(8192, "float32", "blockwise"), (2048, "bfloat16", "")]
)
def test_no_plan_in_blocks_that_is_asked_for_wins(length, dtype, attention):
    """With an example for each device, no device splits a sequence, and still one of both steps is faster in blocks."""
    cluster, step = parse_cluster("4xA100-80GB"), layer(4, length, 8, 2, "causal", dtype)
    plan = find(step, cluster, Options(PLENTY))
    assert plan.plan.attention == attention
    pinned = find(step, cluster, Options(PLENTY, (4,), {"x": P("data")}))
    for other_s in (in_blocks_s(step, cluster), pinned.found.cost_s):
        assert plan.found.cost_s <= other_s / (1 - RELATIVE_GAP)


def test_both_forms_are_searched_in_the_time_of_one_and_a_quarter():
    step, clock = layer(4, 8192, 8), WorkClock()
    find(step, parse_cluster("8xA100-80GB"), Options(PLENTY, clock=clock))
    assert 0 < clock.now_s <= LATEST * DEFAULT_TIME_LIMIT_S


@pytest.mark.parametrize("length", [2048, 8192])
def test_under_a_cap_no_form_alone_has_a_faster_plan(length):
    """Scores are most of the memory; to keep to the cap, the step as it is written has to recompute them."""
    cluster, step = parse_cluster("4xA100-80GB"), layer(4, length, 8, 2, "causal", "bfloat16")
    cap_bytes = find_as_written(step, cluster, Options(PLENTY)).plan.estimates.peak_bytes // 2
    forms = (find_as_written(one, cluster, Options(cap_bytes)) for one in (step, blockwise(step)))
    least_s = min(form.found.cost_s for form in forms)
    assert find(step, cluster, Options(cap_bytes)).found.cost_s <= least_s / (1 - RELATIVE_GAP)
