"""`jax_debug_nans` and `jax_debug_infs`: the error names the line of the step that made the value, as under `jax.jit`."""

import jax
import jax.numpy as jnp
import pytest

import autoshard


def loss(w, x):
    return jnp.sum(jnp.log(x @ w["first"]) @ w["second"])


def step(w, x):
    value, gradients = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda a, g: a - 0.0 * g, w, gradients), value


LINE = loss.__code__.co_firstlineno + 1
PIPELINE = {"stages": 2, "microbatches": 2}


@pytest.mark.parametrize(
    ("switch", "bad", "options"),
    [(jax.debug_nans, -1.0, {}), (jax.debug_infs, 0.0, {}), (jax.debug_nans, -1.0, PIPELINE)],
    ids=["nan", "infinity", "in a pipeline"],
)
def test_the_first_bad_value_is_found_by_its_line(switch, bad, options):
    w = {"first": jnp.ones((8, 8)), "second": jnp.ones((8, 8))}
    with switch(True):
        trained = autoshard.parallelize(step, cluster="8xCPU", **options)
        w, _ = trained(w, jnp.ones((8, 8)))  # its state is donated to the next call
        with pytest.raises(FloatingPointError, match=rf"test_debug_nans.py:{LINE}\b"):
            trained(w, jnp.full((8, 8), bad))


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_bad_value_in_a_loop_is_found_by_the_line_in_its_body(microbatches):
    def layer(h, w):
        y = h @ w
        return jnp.log(y), None

    def of_layers(w, x):
        value, gradient = jax.value_and_grad(lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0]))(w)
        return w - gradient, value

    with jax.debug_nans(True):
        trained = autoshard.parallelize(of_layers, cluster="8xCPU", microbatches=microbatches)
        with pytest.raises(
            FloatingPointError, match=rf"log at .*test_debug_nans.py:{layer.__code__.co_firstlineno + 2}\b"
        ):
            trained(jnp.ones((2, 8, 8)), jnp.full((16, 8), 0.01))  # the second layer's
