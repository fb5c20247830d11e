"""What a test needs to know about a model: how to make its state, its batches and its step.

A `Case` holds functions and shapes, never arrays, so a model of any size can be described, traced
and searched; only `args` allocates.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True)
class Normal:
    """An input of unit normals."""

    shape: tuple[int, ...]
    dtype: Any

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return rng.standard_normal(self.shape).astype(self.dtype)


@dataclass(frozen=True, slots=True)
class Integers:
    """An input of int32 in `[0, bound)`: tokens, labels, rows of a table."""

    shape: tuple[int, ...]
    bound: int
    dtype: Any = np.int32

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.bound, size=self.shape, dtype=self.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A model with its train step, written for one device.

    Attributes:
        name: The model's name.
        step: Plain function `(state, batch, *extra) -> (state, metrics)`, not jitted.
        init: Builds the state.
        inputs: Pytree of `Normal` and `Integers`: what a batch looks like.
        extra: Builds the step's arguments after the batch, such as a dropout key.
    """

    name: str
    step: Callable
    init: Callable[[], Any]
    inputs: Any
    extra: Callable[[], tuple] = tuple

    def batch(self, i: int) -> Any:
        """The numpy batch of step `i`, the same in every process."""
        rng = np.random.default_rng(i)
        return jax.tree.map(lambda spec: spec.sample(rng), self.inputs)

    def args(self) -> tuple:
        """Arguments for a first step."""
        return self.start(), self.batch(0), *self.extra()

    def start(self) -> Any:
        """A state that `init` might have made, drawn by NumPy: `init` takes as long to compile as the step.

        All but the parameters is zero, as optimizers begin; a state without `params` is made by `init`.
        """
        shapes = jax.eval_shape(self.init)
        names = {_name(path[0]) for path, _ in jax.tree.leaves_with_path(shapes) if path}
        if "params" not in names or any(_is_key(x) for x in jax.tree.leaves(shapes)):
            return jax.jit(self.init)()
        rng = np.random.default_rng(0)

        def drawn(path: tuple[Any, ...], x: Any) -> jax.Array:
            if _name(path[0]) != "params" or _name(path[-1]) == "bias":
                return jnp.zeros(x.shape, x.dtype)
            return jnp.asarray(rng.standard_normal(x.shape) / prod(x.shape[:-1]) ** 0.5, x.dtype)

        return jax.tree.map_with_path(drawn, shapes)

    def abstract_args(self) -> tuple:
        """The same arguments as shapes and dtypes; nothing is allocated."""
        batch = jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), self.inputs)
        return jax.eval_shape(self.init), batch, *jax.eval_shape(self.extra)


def _name(entry: Any) -> Any:
    """The key or the attribute at which a part of a pytree lies."""
    return getattr(entry, "key", getattr(entry, "name", None))


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
