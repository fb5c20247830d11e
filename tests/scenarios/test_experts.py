"""The search finds what experts found, on problems sized so that it is best, and flips where it should.

Shapes are abstract, so sizes are real ones. On the cluster of equal links, costs have published closed forms (Shoeybi et
al. 2019 for tensor parallelism, Rajbhandari et al. 2020 for ZeRO): per block of P = 12 h^2 parameters and T tokens in the
group, tensor parallelism moves 8 T h elements, data parallelism 2 P, FSDP 3 P.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.cluster import Link
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.driver import find, find_as_written
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.problem.flat_program import ReadPhase
from tests.zoo import (
    LLAMA_7B,
    make_dlrm,
    make_evoformer,
    make_llama,
    make_megatron,
    make_mlp,
    make_moe,
)

GIB = 2**30
PLENTY = 2**45
HIDDEN = 4096
LAYERS = 2
SEARCH_S = 2.0
"""Nominal seconds: the expert's plan is found long before it is proven to be the best."""


def plan_for(case, cluster, mesh=None, memory=PLENTY):
    step = trace(case.step, *case.abstract_args())
    hardware = parse_cluster(cluster) if isinstance(cluster, str) else cluster
    return find(step, hardware, Options(int(memory), mesh, remat="never", nominal_s=SEARCH_S)).plan


def equal_links(num_devices=8):
    """H100s whose links are all alike and have hardly any latency, so that only bytes count."""
    link = Link(100e9, 1e-9)
    h100 = parse_cluster("8xH100-80GB")
    return replace(h100, num_devices=num_devices, devices_per_node=num_devices, intra=link, inter=link)


def blocks(tokens, **sizes):
    return make_megatron(
        num_layers=LAYERS,
        hidden=HIDDEN,
        heads=32,
        vocab=512,
        seq=tokens // 8,
        batch=8,
        compute_dtype=jnp.bfloat16,
        **sizes,
    )


@cache
def plan_of_blocks(share):
    """Of so many times as many tokens as the hidden size."""
    return plan_for(blocks(int(share * HIDDEN)), equal_links(), (8,))


def argument(plan, path):
    (spec,) = [s for name, s in plan.decisions.arguments.items() if name.endswith(path)]
    return spec


def moved(plan, *kinds):
    return sum(c.bytes for c in plan.estimates.collectives if c.kind in kinds)


def large(plan, kind, least=2**20):
    """How many collectives of a kind are of a size that counts."""
    return sum(c.count for c in plan.estimates.collectives if c.kind == kind and c.bytes / c.count >= least)


def products(plan):
    return [
        s for name, s in plan.decisions.ops.items() if name.startswith("forward") and "dot_general" in name
    ]


def is_tensor_parallel(plan):
    """Columns then rows, in both halves of the block."""
    weights = [f"['layers'][1]['{name}']['w']" for name in ("qkv", "out", "fc1", "fc2")]
    split_columns, split_rows = "P(None, 'data')", "P('data')"
    rests = [argument(plan, f"['params']{w}") for w in weights]
    return rests == [split_columns, split_rows, split_columns, split_rows]


def test_megatron_splits_columns_then_rows_with_one_all_reduce_per_half_block_each_way():
    case = make_megatron(
        num_layers=2, hidden=2048, heads=16, vocab=512, seq=256, batch=2, compute_dtype=jnp.bfloat16
    )
    plan = plan_for(case, "8xH100-80GB", (8,))
    assert is_tensor_parallel(plan)
    assert large(plan, "all-reduce") == 2 * 2 * 2  # layers, half-blocks, ways
    others = [large(plan, kind) for kind in ("all-gather", "reduce-scatter", "all-to-all")]
    assert others in ([0, 0, 0], [1, 0, 0])  # the embedding's result, where its table is split by columns


@pytest.mark.slow  # `test_activations` and `test_headlines` have smaller steps that are sequence parallel
def test_sequence_parallelism_replaces_all_reduces_when_memory_asks_for_it():
    case = make_megatron(
        num_layers=2, hidden=2048, heads=16, vocab=512, seq=256, batch=2, compute_dtype=jnp.bfloat16
    )
    loose = plan_for(
        case, "8xA100-80GB", (8,)
    )  # whose switches don't sum: an all-reduce has no other advantage
    tight = plan_for(case, "8xA100-80GB", (8,), 0.95 * loose.estimates.peak_bytes)
    assert large(loose, "reduce-scatter") == 0
    assert large(tight, "reduce-scatter") > 0
    assert moved(tight, "all-gather") > 2 * moved(loose, "all-gather")
    assert moved(tight, "all-reduce") < 0.1 * moved(loose, "all-reduce")
    assert tight.estimates.peak_bytes <= 0.95 * loose.estimates.peak_bytes


@pytest.mark.parametrize("mesh", [(8, 8), pytest.param(None, marks=pytest.mark.slow)])
def test_where_nodes_are_far_apart_the_search_finds_hybrid_sharding(mesh):
    """Scanned layers on Ethernet: kernels split inside the node and whole across nodes, found without being asked for. From
    data parallelism there, parameters, moments, gradients and copies of seven stacks have to change at once."""
    case = make_llama(**LLAMA_7B, scanned=True)
    step = trace(case.step, *case.abstract_args())
    cluster = parse_cluster("64xA100-80GB-Ethernet")
    cap_bytes = cluster.device_memory_limit()
    columns = {"wq", "wk", "wv", "gate", "up"}
    pins = {
        a.name: P(None, None, "model") if name in columns else P(None, "model")
        for a in step.arguments
        for name in [a.name.split("'")[-2]]
        if "['layers']" in a.name and not name.endswith("norm")
    }
    assert len(pins) == 3 * 7
    expert = find_as_written(step, cluster, Options(cap_bytes, (8, 8), pins)).plan
    plan = find_as_written(step, cluster, Options(cap_bytes, mesh)).plan
    assert plan.estimates.step_s <= 1.005 * expert.estimates.step_s
    assert plan.gap <= 0.01


@pytest.mark.parametrize("share", [*(pytest.param(s, marks=pytest.mark.slow) for s in (0.25, 0.5)), 1])
def test_few_tokens_are_tensor_parallel(share):
    plan = plan_of_blocks(share)
    forward = products(plan)
    assert all("P('data')," not in s.split(" -> ")[0] or "unreduced" in s for s in forward[1:-1]), forward
    assert argument(plan, "['params']['layers'][1]['fc1']['w']") == "P(None, 'data')"
    assert argument(plan, "['params']['layers'][1]['fc2']['w']") == "P('data')"


def test_many_tokens_are_data_parallel_and_gradients_are_reduced_once():
    plan = plan_for(blocks(8 * HIDDEN), equal_links(), (8,))
    assert all(s.startswith("P('data')") for s in products(plan)[:-1])
    weights, tables = 2 * 12 * HIDDEN**2 * LAYERS, 2 * (512 + HIDDEN) * HIDDEN
    at_least, at_most = (
        2 * (weights + tables),
        2 * weights + 3 * tables,
    )  # two readers may gather a table each
    assert at_least <= moved(plan, "reduce-scatter", "all-gather", "all-reduce") <= 1.01 * at_most


@pytest.mark.parametrize(
    ("layers", "shares"), [(2, (0.87,)), pytest.param(12, (0.96, 0.92, 0.87), marks=pytest.mark.slow)]
)
def test_a_falling_cap_turns_data_parallelism_into_fsdp(layers, shares):
    case = make_megatron(
        num_layers=layers, hidden=2048, heads=16, vocab=512, seq=128, batch=256, compute_dtype=jnp.bfloat16
    )
    loose = plan_for(case, "8xH100-80GB", (8,))
    caps = [share * loose.estimates.peak_bytes for share in shares]
    plans = [loose, *(plan_for(case, "8xH100-80GB", (8,), cap) for cap in caps)]
    once = 2 * 12 * 2048**2 * layers
    gathered = [moved(plan, "all-gather") / once for plan in plans]
    assert gathered[0] == pytest.approx(1, rel=0.1)  # kept for the backward phase: ZeRO-1's traffic
    assert gathered == sorted(gathered)
    assert gathered[-1] > 1.7  # gathered again in the backward phase
    assert [moved(plan, "reduce-scatter") / once for plan in plans] == pytest.approx(
        [1] * len(plans), rel=0.05
    )
    assert plans[-1].estimates.step_s > loose.estimates.step_s
    copy_sources = plans[-1].decisions.copies.items()
    assert [name for name, way in copy_sources if way.startswith("fresh P()") and "backward" in name]


def test_tensor_parallelism_gives_way_where_the_closed_form_says():
    """8 T h = 3 P at T = 4.5 h, and = 2 P at T = 3 h; half-blocks flip on their own, so look at both sides."""

    def gathered_weights(share):
        plan = plan_of_blocks(share)
        return sum(s.startswith("P('data')") for s in products(plan)[:-1]) / len(products(plan)[:-1])

    assert gathered_weights(1) == 0
    assert gathered_weights(6) == 1


def test_small_models_are_data_parallel():
    plan = plan_for(make_mlp(widths=(256, 256, 256), batch=65536), "8xH100-80GB", (8,))
    weights = {s for name, s in plan.decisions.arguments.items() if name.endswith("['w']")}
    assert weights == {"P()"}
    assert all(s.startswith("P('data')") for s in products(plan))
    assert {c.kind for c in plan.estimates.collectives} == {"all-reduce"}


def test_large_models_shard_the_optimizer_state():
    """ZeRO-1 costs what data parallelism costs, and updates a shard instead of everything."""
    plan = plan_for(make_mlp(widths=(4096, 8192, 4096), batch=65536), "8xH100-80GB", (8,))
    momenta = {
        s for name, s in plan.decisions.arguments.items() if ".trace" in name and name.endswith("['w']")
    }
    assert "P()" not in momenta


def test_vocabulary_parallel_embedding_and_logits():
    case = make_megatron(
        num_layers=2, hidden=2048, heads=16, vocab=131072, seq=512, batch=2, compute_dtype=jnp.bfloat16
    )
    plan = plan_for(case, "8xH100-80GB", (8,))
    assert argument(plan, "['params']['embed']") == "P('data')"
    gathers = [s for name, s in plan.decisions.ops.items() if name.startswith("forward gather")]
    assert "P('data'), P() -> P(unreduced={'data'})" in gathers  # rows looked up where they are, then summed
    assert "P(None, None, 'data'), P() -> P(unreduced={'data'})" in gathers  # so is the label's logit


def test_experts_are_reached_by_all_to_all():
    case = make_moe(
        num_layers=2, hidden=1024, heads=16, num_experts=16, ffn=4096, seq=1024, batch=8, vocab=1024
    )
    plan = plan_for(case, "8xH100-80GB", (8,))
    experts = {
        s for name, s in plan.decisions.arguments.items() if ".params['moe_" in name and "router" not in name
    }
    assert experts == {"P('data')"}
    assert large(plan, "all-to-all") == 2 * 2 * 2  # layers, dispatch and combine, ways


def test_embedding_tables_are_split_by_columns_or_rows():
    sizes = {"num_dense": 64, "bottom": (64,), "top": (64,), "batch": 16384}
    wide = make_dlrm(table_rows=(8_000_000, 4_000_000), embed_dim=128, optimizer="sgd", **sizes)
    plan = plan_for(wide, "8xH100-80GB", (8,), 8 * GIB)
    assert argument(plan, "['params']['tables'][0]") == "P(None, 'data')"
    narrow = make_dlrm(table_rows=(8_000_000, 4_000_000), embed_dim=12, optimizer="sgd", **sizes)
    plan = plan_for(narrow, "8xH100-80GB", (8,), GIB // 2)  # less than the tables
    assert argument(plan, "['params']['tables'][0]") == "P('data')"
    assert "P('data'), P() -> P(unreduced={'data'})" in plan.decisions.ops["forward gather"]


def test_dynamic_axial_parallelism_on_an_evoformer_block():
    """Row and column attention split the other axis each, with an all-to-all between (FastFold; Cheng et al. 2022)."""
    case = make_evoformer(
        num_layers=1, msa_features=256, pair_features=128, heads=8, sequences=128, residues=256, batch=1
    )
    plan = plan_for(case, "8xA100-80GB", (8,))
    row = [s for name, s in plan.decisions.ops.items() if "/row/" in name and name.startswith("forward")]
    column = [
        s for name, s in plan.decisions.ops.items() if "/column/" in name and name.startswith("forward")
    ]
    assert row
    assert column
    assert large(plan, "all-to-all") > 0
    weights = [s for name, s in plan.decisions.arguments.items() if ".params[" in name and "kernel" in name]
    assert Counter(weights).most_common(1)[0][0] == "P()"


def test_tensor_parallelism_stays_inside_the_node():
    case = make_megatron(
        num_layers=1, hidden=8192, heads=64, vocab=1024, seq=512, batch=8, compute_dtype=jnp.bfloat16
    )
    # Nodes, devices of a node. With a 400 Gb/s port for each GPU, rings across nodes are as fast as within.
    plan = plan_for(case, "16xH100-80GB-Ethernet", (2, 8))
    rows = [s for s in products(plan) if "unreduced" in s]
    assert len(rows) == 2  # half-blocks
    assert all("unreduced={'model'}" in s for s in rows)
    crossing_bytes = sum(c.bytes for c in plan.estimates.collectives if "data" in c.axes)
    assert crossing_bytes < 1e-3 * moved(plan, "all-gather", "reduce-scatter")


@pytest.mark.slow  # `test_few_layers_stand_for_many` of tests/search/test_shortened_search.py shows why
def test_search_cost_does_not_grow_with_depth():
    def num_decisions(num_layers):
        case = make_megatron(
            num_layers=num_layers,
            hidden=1024,
            heads=8,
            vocab=512,
            seq=128,
            batch=64,
            compute_dtype=jnp.bfloat16,
        )
        decisions = plan_for(case, "8xH100-80GB", (8,)).decisions
        of_arguments = {f"{name} -> {phase}" for name in decisions.arguments for phase in ReadPhase}
        return len(decisions.ops) + len(decisions.copies.keys() - of_arguments)

    assert num_decisions(8) == num_decisions(6)
