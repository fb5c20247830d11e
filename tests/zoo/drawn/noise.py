"""Random bits: they are the same however they are split."""

import jax
import jax.numpy as jnp

from .dice import Dice
from .layer import Layer, Shape

NOISES = {
    "dropout": lambda key, x: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0.0),
    "dropped rows": lambda key, x: x * jax.random.bernoulli(key, 0.8, (len(x),) + (1,) * (x.ndim - 1)),
    "normal": lambda key, x: x + 0.3 * jax.random.normal(key, x.shape, x.dtype),
    "normal columns": lambda key, x: x * (1 + 0.3 * jax.random.normal(key, x.shape[-1:], x.dtype)),
    "uniform": lambda key, x: x * jax.random.uniform(key, x.shape, x.dtype, 0.5, 1.5),
    "gumbel": lambda key, x: jax.nn.softmax(x + jax.random.gumbel(key, x.shape, x.dtype)) + 0.1 * x,
    "truncated": lambda key, x: x + 0.3 * jax.random.truncated_normal(key, -2.0, 2.0, x.shape, x.dtype),
    "bits": lambda key, x: x + 0.1 * (jax.random.bits(key, x.shape, jnp.uint32) % 7).astype(x.dtype),
    "integers": lambda key, x: x + 0.1 * jax.random.randint(key, x.shape, 0, 5),
    "permuted": lambda key, x: jax.random.permutation(key, x),
    "permuted apart": lambda key, x: jax.random.permutation(key, x, axis=-1, independent=True),
    "sampled": lambda key, x: (
        x * (0.5 + jax.nn.one_hot(jax.random.categorical(key, x), x.shape[-1], dtype=x.dtype))
    ),
    "two keys": lambda key, x: (
        x + sum(0.1 * jax.random.normal(k, x.shape, x.dtype) for k in jax.random.split(key))
    ),
    "key per row": lambda key, x: (
        x
        + 0.1 * jax.vmap(lambda k: jax.random.normal(k, x.shape[1:], x.dtype))(jax.random.split(key, len(x)))
    ),
}


def noise(dice: Dice, shape: Shape) -> Layer:
    """With a key of its own, made of the one that all share."""
    name, salt = dice.pick(list(NOISES)), dice.below(1000)
    return Layer(name, lambda weights, key, x: NOISES[name](jax.random.fold_in(key, salt), x))


NOISE = (noise,)
