"""A chain of frozen layers with trained adapters of low rank beside them (LoRA), under AdamW."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def lora_chain(
    num_layers: int,
    width: int,
    rows: int,
    dtype: Any = jnp.float32,
    rank: int = 4,
    is_scanned: bool = False,
    base_dtype: Any = None,
) -> tuple[Callable[..., Any], Any, Any, Any]:
    """A training step, and the shapes of its state, its frozen weights and its batch; layers are unrolled, or a loop over
    stacks. `base_dtype` is the type of the frozen weights, if they have another one."""
    update = optax.adamw(1e-3)

    def layer(y, weights):
        w, (down, up) = weights
        return jnp.tanh(y @ w + (y @ down) @ up), None

    def step(state, base, x):
        adapters, moments = state

        def loss(adapters):
            if is_scanned:
                return jnp.mean(jax.lax.scan(layer, x, (base, adapters))[0] ** 2)
            y = x
            for weights in zip(base, adapters, strict=True):
                y, _ = layer(y, weights)
            return jnp.mean(y**2)

        value, gradients = jax.value_and_grad(loss)(adapters)
        changes, moments = update.update(gradients, moments, adapters)
        return (optax.apply_updates(adapters, changes), moments), value

    def shape(*sizes: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    frozen = base_dtype or dtype
    base, adapters = (
        [shape(width, width, dtype=frozen)] * num_layers,
        [(shape(width, rank), shape(rank, width))] * num_layers,
    )
    if is_scanned:
        base = shape(num_layers, width, width, dtype=frozen)
        adapters = shape(num_layers, width, rank), shape(num_layers, rank, width)
    return step, (adapters, jax.eval_shape(update.init, adapters)), base, shape(rows, width)
