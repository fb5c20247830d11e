"""Checkpoints with Orbax: state is saved from its shards, and restored onto those of a plan, for as many devices or less."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import autoshard

pytestmark = pytest.mark.devices

OPTIMIZER = optax.adam(1e-2)
X = np.linspace(-1, 1, 16 * 32, dtype="float32").reshape(16, 32)


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - x) ** 2)


def train(state, x):
    grads = jax.grad(loss)(state["params"], x)
    updates, moments = OPTIMIZER.update(grads, state["opt"])
    return {
        "params": optax.apply_updates(state["params"], updates),
        "opt": moments,
        "step": state["step"] + 1,
    }


def create(key):
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (32, 64)), "down": jax.random.normal(down, (64, 32))}
    return {"params": params, "opt": OPTIMIZER.init(params), "step": jnp.int32(0)}


PIN = {"['params']['up']": "P(None, 'data')", "mu['up']": "P('data')"}
parallelize = functools.partial(autoshard.parallelize, mesh=(8,), pin=PIN)


def plain(count):
    state = create(jax.random.key(0))
    for _ in range(count):
        state = train(state, X)
    return state


def assert_close(a, b):
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), a, b)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint after two steps on eight devices."""
    path = tmp_path_factory.mktemp("run") / "state"
    step = parallelize(train)
    state = step.init(create, jax.random.key(0), args=(X,))
    state = step(step(state, X), X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return path


def restored(path, abstract):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, abstract)


@pytest.mark.parametrize("num_devices", [8, 4])
def test_a_run_goes_on_where_it_ended(saved, num_devices):
    traced = []

    @autoshard.parallelize(mesh=(num_devices,), pin=PIN, devices=jax.devices()[:num_devices])
    def step(state, x):
        traced.append(None)
        return train(state, x)

    abstract = step.abstract_state(create, jax.random.key(0), args=(X,))
    assert {len(x.sharding.device_set) for x in jax.tree.leaves(abstract)} == {num_devices}
    assert abstract["params"]["up"].sharding.spec == jax.P(None, "data")
    assert abstract["opt"][0].mu["up"].sharding.spec == jax.P("data")
    state = restored(saved, abstract)
    assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(lambda x: x.sharding, abstract)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = step(state, X)
    assert len(traced) == 1
    assert_close(state, plain(3))


def test_objects_are_restored_through_their_state(tmp_path):
    def update(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean((model(x) - x) ** 2))(model))

    def make():
        model = nnx.Linear(32, 32, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)

    step = parallelize(update, pin={"model.kernel": "P(None, 'data')"})
    model, optimizer = step.init(make, args=(X,))
    step(model, optimizer, X)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state((model, optimizer)))

    step = autoshard.parallelize(update, devices=jax.devices()[4:])
    objects, abstract = nnx.split(step.abstract_state(make, args=(X,)))
    restored_model, restored_optimizer = nnx.merge(objects, restored(tmp_path / "state", abstract))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(restored_model, restored_optimizer, X)
    assert restored_model.kernel[...].sharding.device_set == set(jax.devices()[4:])

    wanted = make()
    for _ in range(2):
        update(*wanted, X)
    assert_close(nnx.state((restored_model, restored_optimizer)), nnx.state(wanted))
