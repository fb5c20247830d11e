"""A network, and a training step around it, drawn from a seed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ..case import Case, Integers, Normal
from .algebra import OF_TWO, dense, einsum
from .dice import Dice
from .layer import MAX_ENTRIES, Layer, Shape, Weight, draw
from .nesting import NESTING, OF_ONE
from .training import CONTAINERS, GRADIENTS, KEYS, METRICS, OPTIMIZERS, Loss, draw_loss

MAX_DEPTH = 2
"""Of layers in layers."""


@dataclass(frozen=True, slots=True)
class Node:
    """A layer at its place in the network.

    Attributes:
        layer: What is computed.
        reads: Positions of the activations that it reads; the batch's are first.
        shape: Of what it makes.
    """

    layer: Layer
    reads: tuple[int, ...]
    shape: Shape


@dataclass(frozen=True)
class Drawn:
    """A training step, as data: it can be printed, and made smaller by `dataclasses.replace`.

    Attributes:
        inputs: What the network reads of a batch.
        nodes: The network.
        losses: Per position of an activation: what is asked of it.
        gradient: Of `GRADIENTS`.
        optimizer: Of `OPTIMIZERS`.
        metric: Of `METRICS`.
        container: Of `CONTAINERS`.
        key: Of `KEYS`.
        is_key_state: Whether the key is split and kept in the state; else the step gets the same one always.
        is_averaged: Whether the state has an average of the parameters.
        dtype: Of all that is not an integer.
    """

    inputs: tuple[Normal | Integers, ...]
    nodes: tuple[Node, ...]
    losses: dict[int, Loss]
    gradient: str
    optimizer: str
    metric: str
    container: str
    key: str
    is_key_state: bool
    is_averaged: bool
    dtype: Any

    def __str__(self) -> str:
        lines = [f"{i} = batch {spec.shape}" for i, spec in enumerate(self.inputs)]
        for i, node in enumerate(self.nodes, len(self.inputs)):
            lines.append(f"{i} = {node.layer.name} of {', '.join(map(str, node.reads))}: {node.shape}")
        lines += [f"loss of {i}: {loss.name}" for i, loss in self.losses.items()]
        lines.append(
            f"{self.gradient}, {self.optimizer}, metric {self.metric}, state in a {self.container}, {self.key} key"
        )
        return "\n".join(lines)

    def case(self) -> Case:
        """The step with its state and its batches."""
        inputs = {"x": self.inputs, "wanted": {str(i): loss.wanted for i, loss in self.losses.items()}}
        extra = tuple if self.is_key_state else (lambda: (KEYS[self.key](1),))
        return Case("drawn", self.step, self.init, inputs, extra)

    # --- the network

    def _alive(self) -> list[int]:
        """Positions of the nodes that some loss depends on."""
        alive: set[int] = set(self.losses)
        first = len(self.inputs)
        for i in reversed(range(first, first + len(self.nodes))):
            alive.update(self.nodes[i - first].reads if i in alive else ())
        return sorted(i for i in alive if i >= first)

    def _forward(self, params: Any, key: Any, xs: tuple[jax.Array, ...]) -> dict[int, jax.Array]:
        values = dict(enumerate(xs))
        for i in self._alive():
            node = self.nodes[i - len(xs)]
            read = [values[r] for r in node.reads]
            values[i] = node.layer.apply(params[str(i)], key, *read)
        return values

    def _params(self) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        return {
            str(i): jax.tree.map(
                lambda w: w.sample(rng, self.dtype), self.nodes[i - len(self.inputs)].layer.weights
            )
            for i in self._alive()
        }

    # --- the training step

    @property
    def _transformation(self) -> optax.GradientTransformation:
        return OPTIMIZERS[self.optimizer]()

    def init(self) -> Any:
        """The state before the first step."""
        params = self._params()
        pack, _ = CONTAINERS[self.container]
        average = jax.tree.map(jnp.copy, params) if self.is_averaged else ()
        key = KEYS[self.key](1) if self.is_key_state else ()
        return pack(params, self._transformation.init(params), average, key)

    def step(self, state: Any, batch: Any, *extra: Any) -> tuple[Any, dict[str, Any]]:
        """One step of training."""
        pack, parts_of = CONTAINERS[self.container]
        old = parts_of(state)
        kept, key = jax.random.split(old.key) if self.is_key_state else (old.key, *extra)

        def objective(params):
            values = self._forward(params, key, batch["x"])
            losses = [loss.value(values[i], batch["wanted"][str(i)]) for i, loss in self.losses.items()]
            return sum(losses, jnp.zeros((), self.dtype)), METRICS[self.metric](values[max(self.losses)])

        loss, metric, grads = GRADIENTS[self.gradient](objective, old.params)
        updates, opt_state = self._transformation.update(grads, old.opt_state, old.params)
        params = optax.apply_updates(old.params, updates)
        average = (
            jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, old.average, params) if self.is_averaged else ()
        )
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), self.metric: metric}
        return pack(params, opt_state, average, kept), metrics


# --- drawing


def draw_step(dice: Dice, dtype: Any = jnp.float64) -> Drawn:
    """A training step of `dtype`."""
    inputs = _inputs(dice, dtype)
    nodes = _network(dice, inputs)
    shapes = [spec.shape for spec in inputs] + [node.shape for node in nodes]
    read = {i for node in nodes for i in node.reads}
    unread = [i for i in range(len(inputs), len(shapes)) if i not in read]
    return Drawn(
        inputs=inputs,
        nodes=nodes,
        losses={i: draw_loss(dice, shapes[i], dtype) for i in unread},
        gradient=dice.pick(list(GRADIENTS)),
        optimizer=dice.pick(list(OPTIMIZERS)),
        metric=dice.pick(list(METRICS)),
        container=dice.pick(list(CONTAINERS)),
        key=dice.pick(list(KEYS)),
        is_key_state=dice.flip(),
        is_averaged=dice.flip(0.3),
        dtype=dtype,
    )


def _inputs(dice: Dice, dtype: Any) -> tuple[Normal | Integers, ...]:
    """Numbers of two to four dimensions, the first of them the batch; at times tokens too."""
    batch = dice.pick((24, 24, 24, 8, 12, 16, 6, 5))
    shape = (batch, *(min(dice.size(), 24) for _ in range(dice.pick((1, 1, 2, 2, 3)))))
    while np.prod(shape) > MAX_ENTRIES:
        shape = shape[:-1]
    tokens = (Integers((batch, dice.pick((1, 3, 8, 12))), 24),) if dice.flip(0.4) else ()
    return Normal(shape, dtype), *tokens


def _network(dice: Dice, inputs: tuple[Normal | Integers, ...]) -> tuple[Node, ...]:
    """A first product or lookup of each input, then layers of one or of two activations before them."""
    nodes = [_first(dice, i, spec) for i, spec in enumerate(inputs)]
    for _ in range(dice.between(3, 8)):
        nodes.append(_next(dice, nodes, len(inputs)))
    return tuple(nodes)


def _first(dice: Dice, i: int, spec: Normal | Integers) -> Node:
    if isinstance(spec, Normal):
        layer, made = draw(dice, (dense, einsum), spec.shape)
        return Node(layer, (i,), made)
    width = dice.pick((3, 8, 12, 24))
    lookup = Layer("embedding", lambda weights, key, tokens: weights[tokens], Weight((spec.bound, width)))
    return Node(lookup, (i,), (*spec.shape, width))


def _next(dice: Dice, nodes: list[Node], first: int) -> Node:
    """Mostly of the newest activation, at times with another that nobody has read."""
    one = len(nodes) - 1 if dice.flip(0.8) else dice.below(len(nodes))
    read = {i - first for node in nodes for i in node.reads}
    others = [i for i in range(len(nodes)) if i != one and (i not in read or dice.flip(0.3))]
    if others and dice.flip(0.4):
        other = dice.pick(others)
        layer, made = draw(dice, OF_TWO, nodes[one].shape, nodes[other].shape)
        return Node(layer, (first + one, first + other), made)
    if dice.flip(0.4):
        shape = nodes[one].shape
        return Node(dice.pick(NESTING)(dice, shape, MAX_DEPTH - 1), (first + one,), shape)
    layer, made = draw(dice, dice.pick(OF_ONE), nodes[one].shape)
    return Node(layer, (first + one,), made)
