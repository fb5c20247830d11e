"""State in an `nnx.State`, handed back or lost; what a pure step leaves of its arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import InputError
from autoshard.search.ir.graph import Role
from autoshard.search.ir.in_place import InPlace
from autoshard.search.ir.trace import trace

pytestmark = pytest.mark.devices

X = jnp.linspace(-1, 1, 32).reshape(8, 4)


class Model(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.dropout(self.linear(x)))


def create(dropout=0.0):
    model = Model(nnx.Rngs(0), dropout)
    return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)


def loss_fn(model, x):
    return jnp.mean((model(x) - 1) ** 2)


def in_place(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss


def plain_losses(count):
    model, optimizer = create()
    return [float(nnx.jit(in_place)(model, optimizer, X)) for _ in range(count)]


def test_a_state_that_is_changed_and_not_returned_is_refused():
    graphdef, state = nnx.split(create())

    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        return in_place(model, optimizer, x)

    refused = r"changes state\[0\]\['linear'\]\['bias'\].* and \d+ more, part of an nnx\.State, in place .*nnx\.state"
    with pytest.raises(InputError, match=refused):
        autoshard.parallelize(step, mesh=(8,))(state, X)
    with pytest.raises(InputError, match=refused):
        autoshard.search(step, state, X, cluster="8xH100-80GB")


def test_a_state_that_is_returned_trains():
    graphdef, state = nnx.split(create())

    @autoshard.parallelize(mesh=(8,))
    def step(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        loss = in_place(model, optimizer, x)
        return nnx.state((model, optimizer)), loss

    losses = []
    for _ in range(3):
        state, loss = step(state, X)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, plain_losses(3), rtol=1e-5)


def test_what_is_left_as_it_was_is_no_result():
    def step(w, frozen, x):
        new = w - jax.grad(lambda w: jnp.mean((x @ w @ frozen) ** 2))(w)
        return InPlace(jnp.sum(x), {0: new, 1: frozen}, (x + 1,), None)

    traced = trace(step, jnp.eye(4), jnp.eye(4), X)
    assert traced.results == ("result", "new w", "made[0]")
    assert traced.replaces == (None, 0, None)
    assert [a.role for a in traced.arguments] == [Role.PARAMETER, Role.FROZEN, Role.BATCH]


def test_what_is_left_in_another_shape_replaces_nothing():
    traced = trace(lambda w, x: InPlace(None, {0: jnp.concatenate([w, x])}, (), None), jnp.eye(4), X)
    assert traced.replaces == (None,)


def test_a_dict_that_is_changed_in_place_is_the_steps_own_affair():
    def step(w, batch):
        batch["x"] = batch["x"] * 2
        return w - jax.grad(lambda w: jnp.mean((batch.pop("x") @ w) ** 2))(w)

    assert trace(step, jnp.eye(4), {"x": X}).replaces == (0,)
