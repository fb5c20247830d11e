"""Plans that experts know are called by the experts' words, on the smallest steps for which they are best or pinned.

The shares from which the words are made are checked by hand: pins say what rests split, and a step's products what its
FLOPs are. `tests/search/plan/test_headline.py` has the words for shares that no small step has.
"""

import functools
import json
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from tests.zoo import make_dlrm, make_megatron, make_mlp, make_moe

PLENTY = 2**45


@functools.cache
def traced(make, **sizes):
    case = make(**sizes)
    return trace(case.step, *case.abstract_args())


def plan_for(step, mesh, pins=(), memory=PLENTY, cluster="8xH100-80GB", **options):
    """A plan with the specs of arguments whose paths end in a text pinned."""
    pinned = {a.name: spec for a in step.arguments for end, spec in pins if a.name.endswith(end)}
    return find(step, parse_cluster(cluster), Options(int(memory), mesh, pinned, **options)).plan


def first_line(plan):
    return str(plan).splitlines()[0]


MLP = {"widths": (1024, 1024, 1024), "batch": 65536}
WEIGHTS = "['w']"
PARAMS = tuple(f"['params'][{i}]{WEIGHTS}" for i in range(2))
MOMENTA = tuple(f".trace[{i}]{WEIGHTS}" for i in range(2))


def both(names, spec):
    return [(name, spec) for name in names]


def test_whole_parameters_and_examples_split_are_data_parallel():
    pins = [*both(PARAMS, P()), *both(MOMENTA, P())]
    plan = plan_for(traced(make_mlp, **MLP), (8,), pins)
    assert first_line(plan) == "data parallel over 8"
    (use,) = plan.estimates.shares[0].axes
    assert (use.axis, use.size, use.examples, use.parameters, use.optimizer_state) == (
        "data",
        8,
        1.0,
        0.0,
        0.0,
    )


@pytest.mark.parametrize(
    ("cluster", "kind", "words"),
    [
        ("8xH100-80GB", "all-reduce", "ZeRO-1 over 8"),  # switches that sum make an all-reduce as cheap
        ("8xL4", "reduce-scatter", "ZeRO-2 over 8"),
    ],
)
def test_split_optimizer_state_is_zero_by_the_way_in_which_gradients_are_summed(cluster, kind, words):
    pins = [*both(PARAMS, P()), *both(MOMENTA, P("data"))]
    step = traced(make_mlp, widths=(1024, 1024, 1024), batch=8192)  # too few examples to hide sums behind
    plan = plan_for(step, (8,), pins, cluster=cluster)
    gradients = [c.kind for c in plan.estimates.collectives if c.kind != "all-gather" and c.bytes > 2**20]
    assert gradients == [kind]
    assert first_line(plan) == words
    assert plan.estimates.shares[0].axes[0].optimizer_state > 0.99


def test_split_parameters_are_fsdp_where_the_backward_phase_gathers_them_again():
    """Eight layers, of which a device cannot hold all weights at once."""
    step = traced(make_mlp, widths=(1024,) * 9, batch=8192)
    pins = [(WEIGHTS, P("data")), ("['x']", P("data"))]
    once = plan_for(step, (8,), pins, remat="never")
    assert first_line(once) == "ZeRO-2 over 8"
    twice = plan_for(step, (8,), pins, 0.8 * once.estimates.peak_bytes, remat="never")
    assert first_line(twice) == "FSDP over 8"
    assert twice.estimates.shares[0].axes[0].regathered > 0.5


def megatron_pins(axis):
    columns = [(f"['{name}']['w']", P(None, axis)) for name in ("qkv", "fc1")]
    return [*columns, *((f"['{name}']['w']", P(axis)) for name in ("out", "fc2"))]


FEW_TOKENS = {"num_layers": 1, "hidden": 2048, "heads": 16, "vocab": 64, "seq": 256, "batch": 2}


def test_columns_then_rows_are_tensor_parallel():
    step = traced(make_megatron, **FEW_TOKENS, compute_dtype=jnp.bfloat16)
    plan = plan_for(step, (8,), megatron_pins("data"))
    assert first_line(plan) == "tensor parallel over 8"


def test_examples_over_one_axis_and_weights_over_the_other_are_two_dimensional():
    step = traced(make_megatron, **FEW_TOKENS, compute_dtype=jnp.bfloat16)
    plan = plan_for(step, (2, 4), [*megatron_pins("model"), ("['tokens']", P("data"))])
    assert first_line(plan) == "data parallel over 2 x tensor parallel over 4"


def test_sums_scattered_along_the_sequence_are_sequence_parallelism():
    step = traced(make_megatron, **FEW_TOKENS, compute_dtype=jnp.bfloat16)
    pins = megatron_pins("data")
    loose = plan_for(step, (8,), pins, cluster="8xA100-80GB", remat="never")
    tight = plan_for(
        step, (8,), pins, 0.93 * loose.estimates.peak_bytes, cluster="8xA100-80GB", remat="never"
    )
    assert first_line(loose) == "tensor parallel over 8"
    assert first_line(tight) == "tensor parallel over 8 with sequence parallelism"


def test_stacked_weights_that_meet_their_own_tokens_are_experts():
    step = traced(
        make_moe, num_layers=1, hidden=1024, heads=16, num_experts=16, ffn=4096, seq=1024, batch=8, vocab=64
    )
    plan = plan_for(step, (8,), [("['up']", P("data")), ("['down']", P("data")), ("['tokens']", P("data"))])
    assert first_line(plan).endswith(" + expert parallel over 8")
    (use,) = plan.estimates.shares[0].axes
    assert use.experts > use.examples


def test_tables_that_are_looked_up_where_they_are():
    sizes = {"num_dense": 64, "bottom": (64,), "top": (64,), "batch": 262144}
    step = traced(make_dlrm, table_rows=(8_000_000, 4_000_000), embed_dim=128, optimizer="sgd", **sizes)
    tables = [(f"['tables'][{n}]", P(None, "data")) for n in range(2)]
    plan = plan_for(step, (8,), tables)
    assert first_line(plan) == "data parallel over 8, tables split over 8, tables updated by rows"


def test_model_flops_are_those_of_the_products_whatever_is_recomputed_or_split():
    """Two layers forward, two weight gradients, one gradient of the input: five products of 2 x batch x 1024 x 1024."""
    flops = {"float32": 5 * 2.0 * MLP["batch"] * 1024**2}
    step = traced(make_mlp, **MLP)
    for mesh in ((8,), (2, 4)):
        assert plan_for(step, mesh).estimates.shares[0].model_flops == flops
    plan = plan_for(step, (8,), microbatches=4)
    assert plan.estimates.shares[0].model_flops == flops
    assert ", 4 microbatches" in first_line(plan)
    peak = 8 * parse_cluster("8xH100-80GB").device.peak_flops_per_s("float32")
    share = 100 * flops["float32"] / (peak * plan.estimates.step_s)
    assert f", MFU {share:.0f}%" in str(plan).splitlines()[1]


SHAPES = [jax.ShapeDtypeStruct((256, 256), "float32")] * 4, jax.ShapeDtypeStruct((64, 256), "float32")


def unrolled(weights, x):
    def loss(weights):
        return jnp.mean(functools.reduce(lambda h, w: jnp.tanh(h @ w), weights, x) ** 2)

    return [w - g for w, g in zip(weights, jax.grad(loss)(weights), strict=True)]


def test_a_pipeline_is_called_by_its_stages_schedule_microbatches_and_replicas():
    plan = autoshard.search(
        unrolled, *SHAPES, cluster="8xA100-80GB", stages=2, schedule="1f1b", microbatches=4, mesh=(4, 1)
    )
    assert first_line(plan) == "2 stages x 1F1B, 4 microbatches, data parallel over 4"
    flops = (3 * 4 - 1) * 2.0 * 64 * 256 * 256  # no gradient of the input
    assert plan.estimates.shares[0].model_flops == {"float32": flops}


@pytest.mark.parametrize(("first", "second"), [*pairwise(["step", "cluster", "arguments", "traced"])])
def test_the_answer_comes_first_and_the_fingerprint_last(first, second):
    text = str(plan_for(traced(make_mlp, **MLP), (8,)))
    starts = [line.split()[0] for line in text.splitlines() if not line.startswith(" ")]
    assert starts[1:5] == ["predicted", "predicted", "predicted", "certified"]
    assert starts.index(first) < starts.index(second)


def test_a_file_keeps_the_shares_and_a_plan_without_them_is_named_by_its_mesh():
    plan = plan_for(traced(make_mlp, **MLP), (8,))
    data = json.loads(json.dumps(plan.to_json()))
    assert autoshard.Plan.from_json(data) == plan
    assert first_line(autoshard.Plan.from_json(data)) == first_line(plan)
    without = replace(plan, estimates=replace(plan.estimates, shares=()))
    assert first_line(without) == "split over data=8"
