"""Equinox modules are arguments and results as they are: arrays are split over devices, all other leaves are constants."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard

pytestmark = pytest.mark.devices

OPTIMIZER = optax.adam(1e-2)
X, Y = np.random.default_rng(0).standard_normal((2, 16, 8)).astype("float32")


class Model(eqx.Module):
    """Leaves of all kinds: arrays, functions, numbers and texts that decide on the program."""

    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    norm: str = "none"

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(8, 8, width_size=16, depth=1, key=key)
        self.dropout = eqx.nn.Dropout(0.25)

    def __call__(self, x, key):
        y = self.dropout(self.mlp(x), key=key)
        return y if self.norm == "none" else y / jnp.linalg.norm(y)


def create(key):
    model = Model(key)
    return model, OPTIMIZER.init(eqx.filter(model, eqx.is_array))


def loss_fn(model, x, y, key):
    return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - y) ** 2)


def train_step(model, moments, x, y, key):
    loss, gradients = eqx.filter_value_and_grad(loss_fn)(model, x, y, key)
    updates, moments = OPTIMIZER.update(gradients, moments, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), moments, loss


def trained(step, state, count=3):
    losses = []
    for i in range(count):
        *state, loss = step(*state, X, Y, jax.random.key(i))
        losses.append(float(loss))
    return state[0], losses


@pytest.fixture(scope="module")
def alone():
    return trained(eqx.filter_jit(train_step), create(jax.random.key(0)))


@pytest.mark.parametrize("wrapped", [lambda f: f, eqx.filter_jit], ids=["plain", "filter_jit"])
def test_a_step_on_modules_trains_as_under_filter_jit(wrapped, alone):
    step = autoshard.parallelize(wrapped(train_step), pin={"model.mlp.layers[0].weight": "P('data')"})
    state = step.init(create, jax.random.key(0), args=(X, Y, jax.random.key(0)))
    assert state[0].mlp.layers[0].weight.sharding.spec == jax.P("data")
    wanted, *_ = step.in_shardings(*state, X, Y, jax.random.key(0))
    assert wanted == jax.tree.map(lambda x: x.sharding, eqx.filter(state[0], eqx.is_array))
    model, losses = trained(step, state)
    np.testing.assert_allclose(losses, alone[1], rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        *(eqx.filter(m, eqx.is_array) for m in (model, alone[0])),
    )
    assert model.mlp.activation is alone[0].mlp.activation
    assert (model.dropout.p, model.norm) == (0.25, "none")


def test_another_constant_is_another_program():
    evaluate = autoshard.parallelize(loss_fn)
    model, _ = create(jax.random.key(0))
    certain = eqx.nn.inference_mode(model)
    key = jax.random.key(0)
    np.testing.assert_allclose(evaluate(model, X, Y, key), loss_fn(model, X, Y, key), rtol=1e-5)
    with pytest.warns(autoshard.AutoshardWarning, match="planning once"):
        np.testing.assert_allclose(evaluate(certain, X, Y, key), loss_fn(certain, X, Y, key), rtol=1e-5)


def test_modules_of_shapes_are_planned():
    shapes = eqx.filter_eval_shape(create, jax.random.key(0))
    plan = autoshard.search(train_step, *shapes, X, Y, jax.random.key(0), cluster="8xH100-80GB")
    assert "model.mlp.layers[0].weight" in plan.decisions.arguments
    assert not any("activation" in name or "dropout" in name for name in plan.decisions.arguments)


def test_numbers_outside_of_modules_stay_arguments():
    traced = []

    @autoshard.parallelize
    def step(model, rate):
        traced.append(rate)
        return jax.tree.map(lambda w: w - rate * w if eqx.is_array(w) else w, model)

    model = step(step(Model(jax.random.key(0)), 0.1), 0.2)
    assert len(traced) == 1
    np.testing.assert_allclose(
        model.mlp.layers[0].bias, 0.72 * Model(jax.random.key(0)).mlp.layers[0].bias, rtol=1e-5
    )
