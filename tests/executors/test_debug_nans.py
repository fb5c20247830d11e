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
