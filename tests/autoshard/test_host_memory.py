"""State that a step itself keeps in the host's memory: it stays there, in and out, and the numbers are one device's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.search.ir.trace import trace

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


def test_each_array_of_a_tree_that_is_put_elsewhere_is_a_copy_of_its_own():
    step = trace(momentum(whole, Space.Device, Space.Host), fresh(), X)
    copies = [op for op in step.graph.ops if op.is_transfer]
    assert [len(op.outputs) for op in copies] == [1] * 4
    on_host = [step.graph.values[v].is_on_host for v in step.graph.inputs]
    assert on_host == [True, True, False, False, False]


def test_a_put_that_changes_no_memory_is_no_copy():
    step = trace(lambda x: jax.device_put(2 * x, jax.devices()[0]), X)
    assert not any(op.is_transfer for op in step.graph.ops)
