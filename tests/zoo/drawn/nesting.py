"""Layers made of layers: loops, branches, recomputation, gradients of one's own, `vmap`.

What is inside keeps its input's shape: a layer that does by itself, or whose result is added to its input.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .algebra import ALGEBRA
from .dice import Dice
from .indexing import INDEXING
from .layer import Layer, Shape, Weight, draw
from .noise import NOISE
from .windows import WINDOWS

OF_ONE = (ALGEBRA, ALGEBRA, ALGEBRA, INDEXING, INDEXING, WINDOWS, NOISE)
"""Kinds of layers of one activation, by family, as often as they are drawn."""


def inner(dice: Dice, shape: Shape, depth: int) -> Layer:
    """A layer that keeps the shape; nested `depth` times at most."""
    if depth and dice.flip(0.3):
        return dice.pick(NESTING)(dice, shape, depth - 1)
    while True:
        layer, made = draw(dice, dice.pick(OF_ONE), shape)
        if made == shape:
            return layer
        if _broadcasts(made, shape):
            return _added(layer)


def _broadcasts(made: Shape, shape: Shape) -> bool:
    pairs = zip(reversed(made), reversed(shape), strict=False)
    return len(made) <= len(shape) and all(m in (1, n) for m, n in pairs)


def _added(layer: Layer) -> Layer:
    return Layer(
        f"{layer.name} added",
        lambda weights, key, x: x + 0.5 * layer.apply(weights, key, x),
        layer.weights,
    )


def chain(dice: Dice, shape: Shape, depth: int) -> Layer:
    """One to three such layers in a row."""
    layers = [inner(dice, shape, depth) for _ in range(dice.between(1, 3))]

    def apply(weights, key, x):
        for layer, w in zip(layers, weights, strict=True):
            x = layer.apply(w, key, x)
        return x

    return Layer(", ".join(layer.name for layer in layers), apply, [layer.weights for layer in layers])


def _stacked(weights: Any, count: int) -> Any:
    return jax.tree.map(lambda w: Weight((count, *w.shape)), weights)


# --- loops


def scanned_layers(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`lax.scan` over stacked weights, forth or back, at times with results of every layer and with checkpoints."""
    body, count, is_reversed = chain(dice, shape, depth), dice.between(1, 3), dice.flip(0.3)
    is_watched, is_checkpointed, has_own_keys = dice.flip(), dice.flip(0.3), dice.flip()
    scale = dice.numbers(shape)

    def apply(weights, key, x):
        def layer(x, per_layer):
            w, own_key = per_layer
            y = body.apply(w, own_key if has_own_keys else key, x * scale.astype(x.dtype))
            return jnp.tanh(y), 0.1 * y.mean(0) if is_watched else jnp.zeros((), y.dtype)

        layer = jax.checkpoint(layer, prevent_cse=False) if is_checkpointed else layer
        keys = jax.random.split(key, count) if has_own_keys else None
        x, seen = lax.scan(layer, x, (weights, keys), reverse=is_reversed, length=count)
        return x + seen.sum(0)

    return Layer(f"scan {count} x ({body.name})", apply, _stacked(body.weights, count))


def scanned_time(dice: Dice, shape: Shape, depth: int) -> Layer:
    """A recurrent cell over one dimension: weights are constants of the loop, the carry is a state, a count and a key."""
    dim, is_reversed, is_learned = dice.below(len(shape)), dice.flip(0.3), dice.flip()
    at_once = (*shape[:dim], *shape[dim + 1 :])
    if not at_once:
        return scanned_layers(dice, shape, depth)
    cell, decay = chain(dice, at_once, depth), dice.pick((0.5, 0.9))

    def apply(weights, key, x):
        def advance(carry, now):
            state, count, key = carry
            key, used = jax.random.split(key)
            state = jnp.tanh(decay * state + cell.apply(weights["cell"], used, now) + 0.01 * count)
            return (state, count + 1, key), state

        first = weights["first"] if is_learned else jnp.zeros(at_once, x.dtype)
        _, states = lax.scan(advance, (first, 0, key), jnp.moveaxis(x, dim, 0), reverse=is_reversed)
        return jnp.moveaxis(states, 0, dim)

    weights = {"cell": cell.weights} | ({"first": Weight(at_once)} if is_learned else {})
    return Layer(f"scan over {dim} ({cell.name})", apply, weights)


def counted(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`fori_loop` of constant length, which JAX differentiates."""
    body, count = chain(dice, shape, depth), dice.between(1, 3)

    def apply(weights, key, x):
        def once(i, x):
            return jnp.tanh(body.apply(weights, jax.random.fold_in(key, i), x)) * (1 + 0.1 * i)

        return lax.fori_loop(0, count, once, x)

    return Layer(f"fori {count} x ({body.name})", apply, body.weights)


def repeated_until(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`while_loop`, which has no gradient: it only runs forward."""
    body, limit = chain(dice, shape, depth), dice.pick((2.17, 4.31))

    def apply(weights, key, x):
        def goes_on(carry):
            count, x = carry
            return (count < 3) & (jnp.abs(x).sum() < limit * x.size)

        def once(carry):
            count, x = carry
            return count + 1, 1.5 * jnp.tanh(body.apply(lax.stop_gradient(weights), key, x)) + 0.1 * x

        found = lax.while_loop(goes_on, once, (0, lax.stop_gradient(x)))[1]
        return x + 0.3 * found

    return Layer(f"while ({body.name})", apply, body.weights)


def mapped(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`lax.map` over the leading dimension."""
    if len(shape) < 2:
        return counted(dice, shape, depth)
    body = chain(dice, shape[1:], depth)
    return Layer(
        f"map ({body.name})",
        lambda weights, key, x: lax.map(lambda x: body.apply(weights, key, x), x),
        body.weights,
    )


# --- branches


def branched(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`cond` or `switch`, by a number that the step computes."""
    branches = [chain(dice, shape, depth) for _ in range(dice.pick((2, 2, 3)))]

    def apply(weights, key, x):
        functions = [lambda w, x, b=b, i=i: b.apply(w[i], key, x) for i, b in enumerate(branches)]
        if len(branches) == 2:
            return lax.cond(x.mean() > 0.0123, *functions, weights, x)
        return lax.switch(jnp.int32(jnp.abs(x).mean() * 7.3) % 3, functions, weights, x)

    names = " | ".join(b.name for b in branches)
    return Layer(f"branches ({names})", apply, [b.weights for b in branches])


# --- transformations

POLICIES = {
    "": None,
    "dots saved": jax.checkpoint_policies.dots_saveable,
    "all saved": jax.checkpoint_policies.everything_saveable,
}


def checkpointed(dice: Dice, shape: Shape, depth: int) -> Layer:
    body, policy, prevents_cse = chain(dice, shape, depth), dice.pick(list(POLICIES)), dice.flip(0.7)
    recomputed = jax.checkpoint(body.apply, policy=POLICIES[policy], prevent_cse=prevents_cse)
    return Layer(f"checkpoint {policy} ({body.name})", recomputed, body.weights)


def with_own_gradient(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`custom_vjp`: what comes back is scaled, and clipped."""
    body, limit = chain(dice, shape, depth), dice.pick((0.0123, 1.234))

    @jax.custom_vjp
    def function(weights, key, x):
        return body.apply(weights, key, x)

    def backward(kept, g):
        weights, key, x = kept
        _, pull = jax.vjp(lambda weights, x: body.apply(weights, key, x), weights, x)
        weights, x = pull(0.9 * jnp.clip(g, -limit, limit) + 0.1 * g)
        return weights, None, x

    function.defvjp(lambda *args: (function(*args), args), backward)
    return Layer(f"custom_vjp ({body.name})", function, body.weights)


def with_own_tangent(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`custom_jvp` around one's input."""

    @jax.custom_jvp
    def saturated(x):
        return x / (1 + jnp.abs(x))

    saturated.defjvp(lambda x, t: (saturated(*x), t[0] / (1 + jnp.abs(x[0])) ** 2))
    body = chain(dice, shape, depth)
    return Layer(
        f"custom_jvp ({body.name})",
        lambda weights, key, x: saturated(body.apply(weights, key, x)),
        body.weights,
    )


def vectorised(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`vmap` over any dimension, with weights and keys of each entry's own or shared."""
    if len(shape) < 2:
        return with_own_tangent(dice, shape, depth)
    dim, has_own_weights, has_own_keys = dice.below(len(shape)), dice.flip(), dice.flip(0.3)
    body = chain(dice, (*shape[:dim], *shape[dim + 1 :]), depth)
    axes = (0 if has_own_weights else None, 0 if has_own_keys else None, dim)

    def apply(weights, key, x):
        key = jax.random.split(key, shape[dim]) if has_own_keys else key
        return jax.vmap(body.apply, axes, dim)(weights, key, x)

    weights = _stacked(body.weights, shape[dim]) if has_own_weights else body.weights
    return Layer(f"vmap {dim} ({body.name})", apply, weights)


def compiled(dice: Dice, shape: Shape, depth: int) -> Layer:
    """`jit` inside the step, called twice."""
    body = chain(dice, shape, depth)
    function = jax.jit(body.apply)
    return Layer(
        f"jit ({body.name})",
        lambda weights, key, x: 0.5 * (x + function(weights, key, jnp.tanh(function(weights, key, x)))),
        body.weights,
    )


NESTING = (
    scanned_layers,
    scanned_layers,
    scanned_time,
    counted,
    repeated_until,
    mapped,
    branched,
    checkpointed,
    with_own_gradient,
    with_own_tangent,
    vectorised,
    compiled,
)
