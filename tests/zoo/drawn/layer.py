"""What a drawn network is made of: functions of activations, with the weights that they want."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np

from .dice import Dice

Shape = tuple[int, ...]

MAX_ENTRIES, MAX_RANK, MAX_DIM = 8192, 4, 48


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight to be made."""

    shape: Shape

    def sample(self, rng: np.random.Generator, dtype: Any) -> jax.Array:
        scale = max(self.shape, default=1) ** -0.5
        return jax.numpy.asarray(scale * rng.standard_normal(self.shape), dtype)


@dataclass(frozen=True, slots=True)
class Layer:
    """A function of one or two activations.

    Attributes:
        name: What it does, for whoever reads the step.
        apply: `(weights, key, *activations) -> activation`.
        weights: Pytree of `Weight`.
    """

    name: str
    apply: Callable[..., jax.Array]
    weights: Any = ()

    def result(self, *shapes: Shape, dtype: Any = np.float32) -> Shape:
        """The shape that it makes of activations of these shapes."""
        weights = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, dtype), self.weights)
        xs = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
        return jax.eval_shape(self.apply, weights, jax.eval_shape(jax.random.key, 0), *xs).shape


Kind = Callable[..., Layer | None]
"""`(dice, *shapes) -> Layer`: draws one layer of a kind, or None where these shapes do not suit it."""


def draw(dice: Dice, kinds: Sequence[Kind], *shapes: Shape) -> tuple[Layer, Shape]:
    """A layer of some kind that suits these shapes and makes an activation of reasonable size."""
    while True:
        layer = dice.pick(kinds)(dice, *shapes)
        if layer is not None and is_reasonable(shape := layer.result(*shapes)):
            return layer, shape


def is_reasonable(shape: Shape) -> bool:
    return 1 <= len(shape) <= MAX_RANK and 0 < prod(shape) <= MAX_ENTRIES and max(shape) <= MAX_DIM


def elementwise(name: str, function: Callable[[jax.Array], jax.Array]) -> Layer:
    """A layer that needs neither weights nor random bits."""
    return Layer(name, lambda weights, key, x: function(x))


def distinct(x: jax.Array) -> jax.Array:
    """The same, no two entries equal: what is chosen of them must not hang on rounding."""
    ramp = np.sin(np.arange(x.size) + 1.0).reshape(x.shape)
    return x + 0.1 * ramp.astype(x.dtype)
