"""A chain of equal layers under AdamW, whose state is twice its parameters: what the host's memory is for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def adamw_chain(
    num_layers: int,
    width: int,
    rows: int,
    clip: float | None = None,
    tx: optax.GradientTransformation | None = None,
) -> tuple[Callable[..., Any], Any, Any, Any]:
    """A training step, and the shapes of its parameters, its optimizer's state and its batch. `tx` replaces AdamW."""
    update = tx or optax.adamw(1e-3)
    update = update if clip is None else optax.chain(optax.clip_by_global_norm(clip), update)

    def step(params, state, x):
        def loss(params):
            y = x
            for i in range(num_layers):
                y = jnp.tanh(y @ params[f"w{i}"])
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(params)
        changes, state = update.update(gradients, state, params)
        return optax.apply_updates(params, changes), state, value

    params = {f"w{i}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(num_layers)}
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    return step, params, jax.eval_shape(update.init, params), x
