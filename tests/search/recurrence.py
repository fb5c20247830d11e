"""A recurrence that is trained over its steps: all carries and residuals are kept, unless it is cut into segments."""

import jax
import jax.numpy as jnp

from autoshard.search.ir.trace import trace
from autoshard.search.memory.loop_pairs import loop_pairs


def recurrence(length, batch=4, width=8, reverse=False, dtype=jnp.float32):
    """A step with two carries, integer residuals and results of every iteration, and its abstract arguments."""

    def step(params, xs):
        def loss(params):
            def body(carry, x):
                h, n = carry
                z = jnp.tanh(h @ params["w"] + x @ params["u"])
                h = jnp.where(n % 2 == 0, z, h + jnp.sin(z))
                return (h, n + 1), (jnp.sum(h), jnp.argmax(h))

            start = jnp.zeros((batch, width), dtype), 0
            (h, _), (sums, places) = jax.lax.scan(body, start, xs, reverse=reverse)
            return jnp.mean(h**2) + jnp.mean(sums**2), places

        (value, places), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value, places

    params = {"w": jax.ShapeDtypeStruct((width, width), dtype), "u": jax.ShapeDtypeStruct((3, width), dtype)}
    return step, params, jax.ShapeDtypeStruct((length, batch, 3), dtype)


def traced(*args, **options):
    """The traced step, and the op index of its forward loop."""
    step = trace(*recurrence(*args, **options))
    (loop,) = loop_pairs(step.graph)
    return step, loop
