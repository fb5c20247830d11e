"""Updates by zeros are removed, and with them the gradients that nothing else reads; other updates stay."""

import jax
import jax.numpy as jnp
import optax
import pytest

from autoshard.search.ir.trace import trace

W = jax.ShapeDtypeStruct((16, 16), jnp.float32)
X = jax.ShapeDtypeStruct((8, 16), jnp.float32)


def updated(update):
    def step(params, x):
        grads = jax.grad(lambda p: jnp.mean(jnp.tanh(x @ p[0]) @ p[1]))(params)
        return [update(params[0], grads[0]), params[1] - 0.1 * grads[1]]

    return trace(step, [W, W], X).graph


def num_products(graph):
    return sum(op.name == "dot_general" for op in graph.ops)


@pytest.mark.parametrize(
    "update",
    [
        lambda w, g: w + jnp.zeros_like(g),
        lambda w, g: jnp.zeros_like(w) + w,
        lambda w, g: w - 0.1 * jnp.zeros_like(g),
        lambda w, g: w + jnp.zeros_like(g, jnp.bfloat16).astype(w.dtype).reshape(w.shape),
        lambda w, g: optax.apply_updates(w, optax.set_to_zero().update(g, optax.EmptyState())[0]),
    ],
)
def test_an_array_plus_zeros_is_that_array(update):
    graph = updated(update)
    assert graph.outputs[0] == graph.inputs[0]
    assert num_products(graph) == num_products(updated(lambda w, g: w))


@pytest.mark.parametrize(
    "update",
    [
        lambda w, g: jnp.zeros_like(w) - w,
        lambda w, g: w + jnp.full_like(g, 1e-9),
        lambda w, g: w + jnp.inf * jnp.zeros_like(g),
        lambda w, g: w + g * jnp.zeros_like(g),
        lambda w, g: w * jnp.zeros_like(g),
    ],
    ids=["minus itself", "not zero", "not a number", "perhaps not a number", "a product"],
)
def test_what_may_change_an_array_stays(update):
    graph = updated(update)
    assert graph.outputs[0] != graph.inputs[0]
