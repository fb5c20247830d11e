"""Frozen weights in another type than the activations that they multiply, as XLA:GPU compiles them: collectives and peak."""

import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.hlo import FROM_HOST
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from tests.search.lora import lora_chain

NUM_LAYERS, WIDTH = 8, 1024
WEIGHTS_BYTES = NUM_LAYERS * WIDTH * WIDTH * 2

SHARE = 0.06
"""By how much a peak may be off. Source: of these programs, up to 4.6% were seen."""


def verified(cluster_name, rows, cap_bytes=None, width=WIDTH, **options):
    """A chain of frozen weights in bfloat16 and activations in float32, planned and compiled."""
    step = trace(*lora_chain(NUM_LAYERS, width, rows, rank=8, base_dtype=jnp.bfloat16))
    cluster = parse_cluster(cluster_name)
    found = find(step, cluster, Options(cap_bytes or cluster.device_memory_limit(), **options))
    return CompilerVerifier(cluster, Compiler(), lambda line: None).verified(found, full=True)


def assert_as_predicted(proof):
    assert not proof.differing
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)


def test_converted_weights_are_on_the_device_from_one_phase_to_the_next():
    proof = verified("1xL4", 2048, microbatches=1, offload="never", remat="never")
    assert_as_predicted(proof)
    assert proof.compiled.peak_bytes > 3 * WEIGHTS_BYTES  # in bfloat16 and in float32


def test_each_phase_converts_weights_from_the_host():
    proof = verified("1xL4", 2048, microbatches=1, offload=("frozen_weights",), remat="never")
    assert_as_predicted(proof)
    num_copies = 2 * NUM_LAYERS - 1
    assert [(c.direction, c.count) for c in proof.host_copies] == [(FROM_HOST, num_copies)]


def test_sums_of_products_are_reduced_once_behind_a_fetch():
    """Both products of a layer are terms of a sum over devices that split what they contract."""
    proof = verified("2xL4", 64, width=2 * WIDTH, microbatches=1, offload=("frozen_weights",))
    assert {c.kind for c in proof.collectives} & {"all-reduce", "reduce-scatter"}
    assert_as_predicted(proof)


def test_split_weights_are_gathered_in_their_own_type():
    pins = {"x": P("data")} | {f"base[{i}]": P("data") for i in range(NUM_LAYERS)}
    proof = verified("8xH100-80GB", 16384, mesh=(8,), pins=pins, microbatches=1, offload="never")
    (gathered,) = [c for c in proof.collectives if c.kind == "all-gather"]
    assert gathered.compiled_bytes % WEIGHTS_BYTES == 0
    assert_as_predicted(proof)
