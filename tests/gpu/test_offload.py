"""What is in the host's memory, as XLA:GPU compiles it: its bytes, its copies, and what is left on the device."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.xla.hlo import FROM_HOST, TO_HOST
from autoshard.cost_model.xla.process import Compiler
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.verification.judge import CompilerVerifier
from tests.search.adamw import adamw_chain
from tests.search.lora import lora_chain

NUM_LAYERS, WIDTH = 12, 1024
"""So many layers that an activation more or less, which the scheduler decides, is a small share of a peak."""
STATE_BYTES = NUM_LAYERS * WIDTH * WIDTH * 4
"""Of the parameters, and of each of Adam's moments."""
SHARE = 0.12
"""By how much a peak may be off. Source: the spread of `benchmarks.truth`."""


def verified(
    offload, num_devices=8, cap_bytes=80 << 30, clip=False, num_layers=NUM_LAYERS, step=None, **host
):
    """A plan, compiled; `host` are numbers of the cluster's hosts."""
    step = step or trace(*adamw_chain(num_layers, WIDTH, 8192, 1.0 if clip else None))
    cluster = replace(parse_cluster(f"{num_devices}xH100-80GB"), **host)
    options = Options(cap_bytes, (num_devices,), remat="never", offload=offload, microbatches=1)
    found = find(step, cluster, options)
    return CompilerVerifier(cluster, Compiler(), lambda line: None).verified(found, full=True)


def copied(proof):
    return {c.direction: (c.count, c.bytes) for c in proof.host_copies}


@pytest.mark.parametrize("clip", [False, True])
def test_an_optimizers_state_is_on_the_host_between_steps(clip):
    proof = verified(("optimizer_state",), clip=clip)
    assert proof.compiled.host_bytes == proof.predicted.host_bytes == 2 * STATE_BYTES // 8
    assert copied(proof) == dict.fromkeys((TO_HOST, FROM_HOST), (2 * NUM_LAYERS, 2 * STATE_BYTES // 8))
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)
    assert not [c for c in proof.collectives if c.differs]


def test_a_host_that_updates_gets_gradients_and_keeps_the_state():
    """Behind a clipping of all gradients. Parameters on the host come for the two phases that read them."""
    fast = {"host_bytes_per_s": 1e13, "host_cores": 1000}
    proof = verified(("optimizer_state", "parameters"), clip=True, num_layers=4, **fast)
    all_bytes = 4 * WIDTH * WIDTH * 4 // 8
    assert copied(proof) == {TO_HOST: (4, all_bytes), FROM_HOST: (7, 7 * all_bytes // 4)}
    assert proof.compiled.host_bytes == pytest.approx(7 * all_bytes, rel=1e-3)
    assert proof.predicted.host_bytes == pytest.approx(proof.compiled.host_bytes, abs=1e-3 * all_bytes)
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)
    assert not [c for c in proof.collectives if c.differs]


def test_parameters_come_once_for_each_phase():
    proof = verified(("optimizer_state", "parameters"))
    assert proof.compiled.host_bytes == proof.predicted.host_bytes == 3 * STATE_BYTES // 8
    assert copied(proof)[TO_HOST] == (3 * NUM_LAYERS, 3 * STATE_BYTES // 8)
    assert copied(proof)[FROM_HOST][0] == 5 * NUM_LAYERS - 1  # nothing is propagated into the batch
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)


@pytest.mark.parametrize("is_scanned", [False, True])
def test_frozen_weights_come_for_each_phase_and_never_go_back(is_scanned):
    """Stacks of a loop come slice by slice; the backward loop needs the first layer's, too."""
    proof = verified(
        ("frozen_weights",), 1, step=trace(*lora_chain(NUM_LAYERS, WIDTH, 8192, is_scanned=is_scanned))
    )
    assert proof.compiled.host_bytes == proof.predicted.host_bytes == STATE_BYTES
    num_copies = 2 * NUM_LAYERS - (not is_scanned)
    assert copied(proof) == {FROM_HOST: (num_copies, num_copies * STATE_BYTES // NUM_LAYERS)}
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)


def test_stacks_of_trained_weights_come_slice_by_slice_and_whole_for_their_update():
    step = trace(*lora_chain(NUM_LAYERS, WIDTH, 8192, rank=WIDTH // 2, is_scanned=True))
    proof = verified(("parameters",), 1, step=step)
    assert proof.compiled.host_bytes == proof.predicted.host_bytes == STATE_BYTES
    assert copied(proof)[TO_HOST] == (2, STATE_BYTES)
    assert copied(proof)[FROM_HOST] == (4 * NUM_LAYERS + 2, 3 * STATE_BYTES)
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)


@pytest.mark.parametrize(
    ("num_devices", "num_layers", "share"), [(1, 16, 0.85), pytest.param(8, 24, 0.45, marks=pytest.mark.slow)]
)
def test_residuals_wait_on_the_host_and_leave_the_device(num_devices, num_layers, share):
    free = verified("never", num_devices, num_layers=num_layers)
    cap_bytes = int(share * free.compiled.peak_bytes)
    proof = verified(("residuals",), num_devices, cap_bytes, num_layers=num_layers)
    assert proof.compiled.peak_bytes < cap_bytes
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)
    (count, num_bytes) = copied(proof)[TO_HOST]
    assert copied(proof)[FROM_HOST] == (count, num_bytes)
    assert 0 < proof.compiled.host_bytes == proof.predicted.host_bytes == num_bytes


def test_stacks_of_a_loop_wait_on_the_host_and_leave_the_device():
    """Eight layers in a loop; each keeps three arrays of its width for the backward loop."""
    w = jax.ShapeDtypeStruct((8, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((1 << 15, WIDTH), jnp.float32)

    def step(params, x):
        def loss(params):
            y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(jnp.sin(x @ w[0]) @ w[1]), None), x, params)
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    cluster, traced = parse_cluster("1xH100-80GB"), trace(step, (w, w), x)
    free = find(traced, cluster, Options(80 << 30, remat="never", offload="never", microbatches=1))
    cap_bytes = int(0.7 * free.plan.estimates.peak_bytes)
    found = find(traced, cluster, Options(cap_bytes, remat="never", offload=("residuals",), microbatches=1))
    proof = CompilerVerifier(cluster, Compiler(), lambda line: None).verified(found, full=True)
    (count, num_bytes) = copied(proof)[TO_HOST]
    assert copied(proof)[FROM_HOST] == (count, num_bytes)
    assert proof.compiled.peak_bytes <= cap_bytes
    assert proof.predicted.peak_bytes == pytest.approx(proof.compiled.peak_bytes, rel=SHARE)
    assert 0 < proof.compiled.host_bytes == proof.predicted.host_bytes == num_bytes
