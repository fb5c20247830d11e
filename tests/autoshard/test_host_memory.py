"""State that a step itself keeps in the host's memory: it stays there, in and out, and the numbers are one device's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import placing
from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.ir.trace import trace
from tests.search.adamw import adamw_chain
from tests.search.lora import lora_chain

pytestmark = pytest.mark.devices

Space = jax.memory.Space
HOST = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
DEVICE = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="device")
X = np.linspace(-1, 1, 32 * 16, dtype="float32").reshape(32, 16)


def whole(tree, target):
    return jax.device_put(tree, target)


def leaf_by_leaf(tree, target):
    return jax.tree.map(lambda x: jax.device_put(x, target), tree)


def momentum(put, device, host):
    def step(state, x):
        def loss(w):
            return jnp.mean(jnp.tanh(x @ w["a"] @ w["b"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state["w"])
        m = jax.tree.map(lambda m, g: 0.9 * m + g, put(state["m"], device), grads)
        return {"w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], m), "m": put(m, host)}, value

    return step


def fresh():
    w = {"a": jnp.full((16, 32), 0.1, "float32"), "b": jnp.full((32, 16), 0.2, "float32")}
    return {"w": w, "m": jax.device_put(jax.tree.map(jnp.ones_like, w), HOST)}


def kinds(tree):
    return [x.sharding.memory_kind for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("put", "device", "host", "options"),
    [
        (whole, Space.Device, Space.Host, {}),
        (leaf_by_leaf, DEVICE, HOST, {"microbatches": 2}),
        (whole, Space.Device, Space.Host, {"stages": 2, "microbatches": 2}),
    ],
)
def test_state_on_the_host_stays_there_and_trains_as_on_one_device(put, device, host, options):
    step = momentum(put, device, host)
    planned = autoshard.parallelize(step, **options)
    wanted, got = fresh(), fresh()
    for _ in range(2):
        (wanted, loss), (got, own) = jax.jit(step)(wanted, X), planned(got, X)
        assert kinds(got) == kinds(wanted)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), (got, own), (wanted, loss))


def frozen_step():
    """A step with frozen weights on the host, and arrays for it."""
    step, *shapes = lora_chain(num_layers=2, width=256, rows=16)
    rng = np.random.default_rng(0)
    arrays = jax.tree.map(lambda s: (rng.standard_normal(s.shape) / 16).astype(s.dtype), shapes)
    return step, autoshard.parallelize(step, offload=("frozen_weights",), mesh=(8,)), arrays


def test_frozen_weights_are_placed_on_the_host_once():
    step, planned, (state, base, x) = frozen_step()
    _, on_host, _ = planned.in_shardings(state, base, x)
    base = jax.device_put(base, on_host)
    assert kinds(base) == ["pinned_host"] * 2
    wanted, got = state, jax.tree.map(jnp.copy, state)
    for _ in range(2):
        (wanted, loss), (got, own) = jax.jit(step)(wanted, base_of(base), x), planned(got, base, x)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), (got, own), (wanted, loss)
        )
    assert set(kinds(got)) == {"device"}


def base_of(base):
    return jax.tree.map(np.asarray, base)


def test_frozen_weights_that_move_to_the_host_in_each_call_are_warned_of(monkeypatch):
    monkeypatch.setattr(placing, "LARGE_BYTES", 1)
    _, planned, args = frozen_step()
    with pytest.warns(autoshard.AutoshardWarning, match=r"move in each call: base\[0\], base\[1\]"):
        planned(*args)


def test_state_that_the_host_updates_moves_there_once(monkeypatch, tmp_path):
    """It is not donated, and yet no call moves it again. Its plan's file runs as well as the search does."""
    monkeypatch.setattr(placing, "LARGE_BYTES", 1)
    cluster = dataclasses.replace(parse_cluster("8xCPU"), host_bytes_per_s=1e13, host_cores=1000)
    step, *shapes = adamw_chain(num_layers=1, width=256, rows=16)
    planned = autoshard.parallelize(step, cluster=cluster, offload=("optimizer_state",), mesh=(8,))
    wanted, got = (jax.tree.map(lambda s: jnp.full(s.shape, 0.01, s.dtype), shapes) for _ in range(2))
    wanted[1], got[1] = (jax.tree.map(jnp.zeros_like, state) for _, state, _ in (wanted, got))
    for _ in range(2):
        got[0], got[1], own = planned(*got)
        wanted[0], wanted[1], loss = jax.jit(step)(*wanted)
        assert kinds(got[:2]) == ["device"] * 2 + ["pinned_host"] * 2
        assert_close((got, own), (wanted, loss))
    assert "state on the host, updated there" in str(planned.plan)
    planned.plan.save(tmp_path / "plan.json")
    again = autoshard.parallelize(step, plan=tmp_path / "plan.json")(*wanted)
    assert_close(again, jax.jit(step)(*wanted))


def assert_close(own, wanted):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), own, wanted)


def test_each_array_of_a_tree_that_is_put_elsewhere_is_a_copy_of_its_own():
    step = trace(momentum(whole, Space.Device, Space.Host), fresh(), X)
    copies = [op for op in step.graph.ops if op.is_transfer]
    assert [len(op.outputs) for op in copies] == [1] * 4
    on_host = [step.graph.values[v].is_on_host for v in step.graph.inputs]
    assert on_host == [True, True, False, False, False]


def test_a_put_that_changes_no_memory_is_no_copy():
    step = trace(lambda x: jax.device_put(2 * x, jax.devices()[0]), X)
    assert not any(op.is_transfer for op in step.graph.ops)
