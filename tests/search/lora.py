"""A chain of frozen layers with trained adapters of low rank beside them (LoRA), under AdamW."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def lora_chain(
    num_layers: int, width: int, rows: int, dtype: Any = jnp.float32, rank: int = 4
) -> tuple[Callable[..., Any], Any, Any, Any]:
    """A training step, and the shapes of its state, its frozen weights and its batch."""
    update = optax.adamw(1e-3)

    def step(state, base, x):
        adapters, moments = state

        def loss(adapters):
            y = x
            for w, (down, up) in zip(base, adapters, strict=True):
                y = jnp.tanh(y @ w + (y @ down) @ up)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(adapters)
        changes, moments = update.update(gradients, moments, adapters)
        return (optax.apply_updates(adapters, changes), moments), value

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    base = [shape(width, width)] * num_layers
    adapters = [(shape(width, rank), shape(rank, width))] * num_layers
    return step, (adapters, jax.eval_shape(update.init, adapters)), base, shape(rows, width)
