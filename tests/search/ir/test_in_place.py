"""NNX objects among the arguments: read, handed back, or changed in place, which is refused."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard import InputError
from search.ir.trace import trace

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


def handed_back(model, optimizer, x):
    loss = in_place(model, optimizer, x)
    return model, optimizer, loss


def plain_losses(count):
    model, optimizer = create()
    return [float(nnx.jit(in_place)(model, optimizer, X)) for _ in range(count)]


REFUSED = r"changes model\.linear\.bias.* and \d+ more in place and does not return it.*return model, optimizer.*nnx\.split"


@pytest.mark.parametrize("step", [in_place, nnx.jit(in_place)], ids=["plain", "nnx.jit"])
def test_a_module_that_is_changed_and_not_returned_is_refused(step):
    with pytest.raises(InputError, match=REFUSED):
        autoshard.parallelize(step, mesh=(8,))(*create(), X)
    with pytest.raises(InputError, match=REFUSED):
        autoshard.search(step, *create(), X, cluster="8xH100-80GB")


def test_an_optimizer_that_is_not_returned_with_its_module_is_refused():
    def step(model, optimizer, x):
        in_place(model, optimizer, x)
        return model

    with pytest.raises(InputError, match=r"changes optimizer\.opt_state.* and \d+ more in place"):
        trace(step, *create(), X)


def test_a_variable_that_is_changed_is_refused():
    def step(count, x):
        count[...] += 1
        return x * count[...]

    with pytest.raises(InputError, match=r"the step 'step' changes count\.value in place"):
        trace(step, nnx.Variable(jnp.zeros(())), X)


def test_a_dropout_counter_that_would_stand_still_is_refused():
    def step(model, w, x):
        noisy = model(x)
        return w - jax.grad(lambda w: jnp.mean((noisy @ w) ** 2))(w)

    with pytest.raises(InputError, match=r"changes model\.dropout\.rngs\.count\.value in place"):
        trace(step, create(dropout=0.5)[0], jnp.eye(4), X)


@pytest.mark.parametrize("step", [handed_back, nnx.jit(handed_back)], ids=["plain", "nnx.jit"])
def test_the_first_way_trains(step):
    parallel, (model, optimizer), losses = autoshard.parallelize(step, mesh=(8,)), create(), []
    for _ in range(3):
        model, optimizer, loss = parallel(model, optimizer, X)
        losses.append(float(loss))
    np.testing.assert_allclose(losses, plain_losses(3), rtol=1e-5)


def test_the_second_way_trains():
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


@pytest.mark.parametrize("jit", [lambda step: step, nnx.jit], ids=["plain", "nnx.jit"])
def test_a_module_that_is_only_read(jit):
    def step(model, w, x):
        return w - jax.grad(lambda w: loss_fn(model, x @ w))(w)

    model, w = create()[0], jnp.eye(4)
    traced = trace(jit(step), model, w, X)
    assert traced.results == ("result",)
    assert len(traced.graph.outputs) == 1
    got = autoshard.parallelize(jit(step), mesh=(8,))(model, w, X)
    np.testing.assert_allclose(got, step(model, jnp.eye(4), X), rtol=1e-5)


def test_results_are_named_as_those_of_any_step():
    traced = trace(handed_back, *create(), X)
    assert traced.results[-1] == "result[2]"
    assert {a.name.partition(".")[0] for a in traced.arguments} == {"model", "optimizer", "x"}


def test_a_dict_that_is_changed_in_place_is_the_steps_own_affair():
    def step(w, batch):
        batch["x"] = batch["x"] * 2
        return w - jax.grad(lambda w: jnp.mean((batch.pop("x") @ w) ** 2))(w)

    assert trace(step, jnp.eye(4), {"x": X}).replaces == (0,)


def test_a_module_without_variables():
    assert trace(lambda layer, x: layer(x), nnx.Dropout(0.0), X).results == ("result",)


def test_flax_is_not_imported():
    code = """
import sys, jax.numpy as jnp, autoshard
from search.ir.trace import trace
trace(lambda w, x: w - x["x"].mean(), jnp.ones(8), {"x": jnp.ones(8)})
assert not [name for name in sys.modules if name.split(".")[0] == "flax"]
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"JAX_PLATFORMS": "cpu", "PYTHONPATH": "."})
