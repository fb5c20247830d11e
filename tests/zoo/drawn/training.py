"""What makes a network a training step: losses, optimizers, states and metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from ..case import Integers, Normal
from .dice import Dice
from .layer import Shape, distinct

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adamw": lambda: optax.adamw(1e-3, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)),
    "scheduled adam": lambda: optax.adam(optax.warmup_cosine_decay_schedule(1e-4, 1e-2, 2, 10)),
    "clipped adam": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-3)),
    "lion": lambda: optax.lion(1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "rmsprop": lambda: optax.rmsprop(1e-3, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-3),
    "adagrad": lambda: optax.adagrad(1e-2),
    "clipped by value": lambda: optax.chain(optax.clip(0.01), optax.add_decayed_weights(0.1), optax.sgd(0.1)),
    "every second step": lambda: optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    "if finite": lambda: optax.apply_if_finite(optax.sgd(0.05, momentum=0.9), 3),
    "with its average": lambda: optax.chain(optax.adam(1e-3), optax.ema(0.9)),
}


class Loss(NamedTuple):
    """What is asked of one activation.

    Attributes:
        name: What it is.
        wanted: The batch's part that it is compared with.
        value: `(activation, wanted) -> scalar`.
    """

    name: str
    wanted: Normal | Integers
    value: Callable[[jax.Array, jax.Array], jax.Array]


def draw_loss(dice: Dice, shape: Shape, dtype: Any) -> Loss:
    """Squares or Huber's against numbers, logistic against bits, cross-entropy against classes."""
    name = dice.pick(("squares", "huber", "logistic", "classes", "classes"))
    if name == "squares":
        return Loss(name, Normal(shape, dtype), lambda y, wanted: jnp.mean((y - wanted) ** 2))
    if name == "huber":
        return Loss(name, Normal(shape, dtype), lambda y, wanted: optax.huber_loss(y, wanted).mean())
    if name == "logistic":
        return Loss(
            name, Integers(shape, 2), lambda y, bits: optax.sigmoid_binary_cross_entropy(y, bits).mean()
        )
    dim = dice.below(len(shape))
    classes = Integers((*shape[:dim], *shape[dim + 1 :]), shape[dim])
    return Loss(f"classes {dim}", classes, lambda y, wanted: _cross_entropy(y, wanted, dim))


def _cross_entropy(y: jax.Array, labels: jax.Array, dim: int) -> jax.Array:
    """With PaLM's z-loss: the sum over classes of a gradient that is a rounding error otherwise."""
    y = 3.0 * jnp.moveaxis(y, dim, -1)
    entropy = optax.softmax_cross_entropy_with_integer_labels(y, labels)
    return jnp.mean(entropy + 0.01 * jax.nn.logsumexp(y, axis=-1) ** 2)


Objective = Callable[[Any], tuple[jax.Array, Any]]
"""Parameters to a loss and a metric."""


def _vjp(objective: Objective, params: Any) -> tuple[Any, Any, Any]:
    loss, pull, metric = jax.vjp(objective, params, has_aux=True)
    return loss, metric, pull(jnp.ones_like(loss))[0]


def _value_and_grad(objective: Objective, params: Any) -> tuple[Any, Any, Any]:
    (loss, metric), grads = jax.value_and_grad(objective, has_aux=True)(params)
    return loss, metric, grads


GRADIENTS: dict[str, Callable[[Objective, Any], tuple[Any, Any, Any]]] = {
    "grad": lambda objective, params: (None, None, jax.grad(lambda p: objective(p)[0])(params)),
    "grad with aux": lambda objective, params: (None, *jax.grad(objective, has_aux=True)(params)[::-1]),
    "value_and_grad": lambda objective, params: _value_and_grad(lambda p: (objective(p)[0], None), params),
    "value_and_grad with aux": _value_and_grad,
    "grad of a checkpoint": lambda objective, params: _value_and_grad(jax.checkpoint(objective), params),
    "vjp": _vjp,
}
"""From an objective and parameters to a loss, a metric and gradients; None stands for what is not asked for."""


METRICS: dict[str, Callable[[jax.Array], Any]] = {
    "mean": jnp.mean,
    "activation": lambda y: y,
    "norms": lambda y: jnp.sqrt(jnp.sum(y**2, axis=tuple(range(1, y.ndim)))),
    "class": lambda y: jnp.argmax(distinct(y), axis=-1),
    "share": lambda y: (y > 0.0123).mean(dtype=y.dtype),
    "extremes": lambda y: {"least": y.min(), "most": y.max()},
    "nothing": lambda y: None,
}


class State(NamedTuple):
    params: Any
    opt_state: Any
    average: Any
    key: Any


class TrainState(struct.PyTreeNode):
    params: Any
    opt_state: Any
    average: Any
    key: Any


CONTAINERS: dict[str, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    "named tuple": (State, lambda state: state),
    "dataclass": (TrainState, lambda state: state),
    "dict": (lambda *parts: dict(zip(State._fields, parts, strict=True)), lambda state: State(**state)),
    "tuple": (lambda *parts: parts, lambda state: State(*state)),
}
"""How to pack a state's parts, and how to reach them."""

KEYS: dict[str, Callable[[int], jax.Array]] = {"typed": jax.random.key, "raw": jax.random.PRNGKey}
