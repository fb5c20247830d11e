"""Attention in blocks, or as it is written: the bound that decides, against searches of both forms."""

from math import inf

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.driver import find, find_as_written
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.mesh_problem import RELATIVE_GAP, StepProblem
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, LATEST, Options
from autoshard.search.solver.clock import WorkClock
from autoshard.search.space.long_sequences import least_as_written_s, least_in_blocks_s
from autoshard.search.space.queue import Queue
from autoshard.search.space.trials import Trials
from tests.attentions import MASKS, by_softmax, layer_shapes, layer_step

PLENTY = 1 << 42
ROUNDING = 1e-9


def layer(batch, length, heads, key_heads=None, mask="causal", dtype="bfloat16"):
    key_heads = key_heads or heads
    step = layer_step(by_softmax(MASKS[mask]), heads, key_heads)
    return trace(step, *layer_shapes(batch, length, heads, key_heads, 128, dtype))


def searched(step, cluster):
    """The best plan of a step in one form, and the lower bounds on all its plans without a cap, by mesh."""
    trials = Trials(
        step, [""] * len(step.arguments), cluster, Options(PLENTY), lambda line: None, WorkClock()
    )
    queue = Queue(trials)
    return queue.run(), queue.certificate.uncapped_s


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
def test_no_plan_of_the_other_form_is_faster_than_its_bound(preset, batch, length, heads, mask, dtype):
    cluster, step = parse_cluster(preset), layer(batch, length, *heads, mask, dtype)
    blocks = blockwise(step)
    (best, written_s), (other, in_blocks_s) = (searched(one, cluster) for one in (step, blocks))
    bounds_s = least_in_blocks_s(best, written_s, blocks, is_pinned=False)
    assert other.cost_s >= (1 - ROUNDING) * min(bounds_s.get(other.on_mesh.shape, -inf), best.cost_s)
    problem = StepProblem.of(step, [""] * len(step.arguments), cluster.device)
    costed = problem.on(cluster, other.on_mesh.shape).memory.costed
    bounds_s = least_as_written_s(other, in_blocks_s, blocks, costed, is_pinned=False)
    assert best.cost_s >= (1 - ROUNDING) * min(bounds_s.get(best.on_mesh.shape, -inf), other.cost_s)


def beside_hidden_layer(batch, length):
    """Attention of one head, and beside it a hidden layer of as many elements as its scores."""
    attention = layer_step(by_softmax(MASKS["causal"]), 1, 1)

    def loss(v, x):
        return jnp.sum((jnp.tanh(x @ v["in"]) @ v["out"]).astype("float32") ** 2)

    def step(w, v, x):
        return attention(w, x), jax.tree.map(lambda v, g: v - 0.1 * g, v, jax.grad(loss)(v, x))

    w, x = layer_shapes(batch, length, 1, 1, 128, "bfloat16")
    shapes = {"in": (x.shape[-1], length), "out": (length, x.shape[-1])}
    v = {name: jax.ShapeDtypeStruct(shape, "bfloat16") for name, shape in shapes.items()}
    return trace(step, w, v, x)


def saved_s(step, cluster):
    """Seconds by which blocks may be faster, by the bound on plans in blocks."""
    (found, written_s), blocks = searched(step, cluster), blockwise(step)
    bounds_s = least_in_blocks_s(found, written_s, blocks, is_pinned=False)
    return written_s[4,] - bounds_s[4,]


def test_blocks_promise_no_more_beside_a_hidden_layer_of_the_size_of_scores():
    cluster = parse_cluster("4xA100-80GB")
    alone_s, beside_s = (saved_s(one, cluster) for one in (layer(4, 8192, 1), beside_hidden_layer(4, 8192)))
    assert beside_s <= max(0.0, alone_s)


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
