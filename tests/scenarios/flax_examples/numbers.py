"""What both of a loop's runs come to: on one device as JAX jits it, on eight as decorated."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard import Parallelized

NUM_STEPS = 3

Decorator = Callable[..., Any]
"""`jax.jit` or `nnx.jit`, or what takes its place; with static arguments as these have them."""


def assert_trains_alike(train: Callable[[Decorator], Any], jit: Decorator) -> None:
    """Asserts that a loop comes to the same numbers with its steps decorated by either, and that its state is split.

    Args:
      train: the loop; it is given the decorator of its steps, and returns all that it has made.
      jit: the decorator on one device.
    """
    made: list[Parallelized] = []

    def parallelize(step: Callable[..., Any], **static: Any) -> Parallelized:
        made.append(autoshard.parallelize(step, **static))
        return made[-1]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        on_one, on_many = (jax.tree.leaves_with_path(train(by)) for by in (jit, parallelize))
    assert not [w for w in said if "planning once" in str(w.message)]
    assert set(made[0].plan.decisions.arguments.values()) != {"P()"}
    for (path, one), (_, many) in zip(on_one, on_many, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(_numbers(many), _numbers(one), rtol=1e-4, atol=1e-5, err_msg=name)


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
