"""Attention as people write it: in einsum or by JAX, grouped or not, under masks of several kinds."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.search.ir.graph import Graph, Op, walk

Form = Callable[..., Any]


def _positions(n: int) -> tuple[Any, Any]:
    return jnp.arange(n)[:, None], jnp.arange(n)[None, :]


def nothing(scores, segments):
    return scores


def causal(scores, segments):
    i, j = _positions(scores.shape[-1])
    return jnp.where(i >= j, scores, -1e30)


def windowed(scores, segments):
    i, j = _positions(scores.shape[-1])
    return jnp.where((i >= j) & (i - j < 5), scores, -jnp.inf)


def packed(scores, segments):
    """Examples in one sequence see themselves only."""
    same = segments[:, :, None] == segments[:, None, :]
    n = scores.shape[-1]
    return jnp.where(same[:, None, None] & jnp.tril(jnp.ones((n, n), bool)), scores, -1e9)


def biased(scores, segments):
    """Scores fall with the distance (Press et al., ALiBi, 2022)."""
    i, j = _positions(scores.shape[-1])
    return jnp.where(i >= j, scores - 0.1 * (i - j), -1e30)


MASKS: dict[str, Form] = {f.__name__: f for f in (nothing, causal, windowed, packed, biased)}


def by_softmax(mask: Form = causal) -> Form:
    """Queries [b, n, heads, d], keys and values [b, n, fewer heads, d]."""

    def attend(q, k, v, segments):
        q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
        scores = jnp.einsum("bqkgd,bskd->bkgqs", q * q.shape[-1] ** -0.5, k)
        p = jax.nn.softmax(mask(scores, segments), axis=-1)
        return jnp.einsum("bkgqs,bskd->bqkgd", p, v).reshape(*q.shape[:2], -1)

    return attend


def by_hand(mask: Form = causal) -> Form:
    """A softmax that is spelled out, and heads before positions."""

    def attend(q, k, v, segments):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        scores = jnp.einsum("bqhd,bshd->bhqs", q, k) / q.shape[-1] ** 0.5
        scores = jnp.squeeze(mask(jnp.expand_dims(scores, 2), segments), 2)
        e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
        o = jnp.einsum("bhqs,bshd->bhqd", e / e.sum(-1, keepdims=True), v)
        return o.transpose(0, 2, 1, 3).reshape(*q.shape[:2], -1)

    return attend


def by_jax(**options) -> Form:
    """JAX's own function."""

    def attend(q, k, v, segments):
        return jax.nn.dot_product_attention(q, k, v, **options).reshape(*q.shape[:2], -1)

    return attend


def gradients(attend: Form, *, recomputes: bool = False) -> Form:
    """A function that returns the output, and the gradients of its queries, keys and values."""
    attend = jax.checkpoint(attend) if recomputes else attend

    def run(q, k, v, segments):
        loss = lambda q, k, v: jnp.sum(jnp.sin(attend(q, k, v, segments)))  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)

    return run


def shapes(batch: int, length: int, heads: int, key_heads: int, channels: int, dtype="float64") -> list[Any]:
    """Of queries, keys, values, and the numbers of the segments."""
    kinds = [(heads, dtype), (key_heads, dtype), (key_heads, dtype)]
    found: list[Any] = [jax.ShapeDtypeStruct((batch, length, h, channels), kind) for h, kind in kinds]
    return [*found, jax.ShapeDtypeStruct((batch, length), "int32")]


def drawn(structs: list[Any], seed: int = 0) -> list[Any]:
    """Arrays of these shapes."""
    keys = jax.random.split(jax.random.key(seed), len(structs))
    arrays = [
        jax.random.normal(key, s.shape, s.dtype) for key, s in zip(keys[:-1], structs[:-1], strict=True)
    ]
    return [*arrays, jnp.cumsum(jax.random.bernoulli(keys[-1], 0.1, structs[-1].shape), -1).astype("int32")]


def named(graph: Graph, name: str) -> list[Op]:
    """The ops of a graph, and of its loops, with a primitive's name."""
    return [op for _, one in walk(graph) for op in one.ops if op.name == name]


def layer_step(attend: Form, heads: int, key_heads: int) -> Form:
    """A training step of one attention layer, with checkpoint: (weights, x [b, n, channels]) -> (weights, loss)."""

    def layer(w, x):
        q, k, v = (
            (x @ w[n]).reshape(*x.shape[:2], h, -1)
            for n, h in zip("qkv", (heads, key_heads, key_heads), strict=True)
        )
        return x + attend(q, k, v, None) @ w["o"]

    def step(weights, x):
        loss = lambda w: jnp.mean(jnp.square(jax.checkpoint(layer)(w, x).astype("float32")))  # noqa: E731
        value, gradient = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - (0.01 * g).astype(w.dtype), weights, gradient), value

    return step


def layer_shapes(batch: int, length: int, heads: int, key_heads: int, channels: int, dtype="bfloat16"):
    """The shapes of the weights and of x."""
    sizes = {"q": heads, "k": key_heads, "v": key_heads}
    width = heads * channels
    weights = {n: jax.ShapeDtypeStruct((width, h * channels), dtype) for n, h in sizes.items()}
    weights["o"] = jax.ShapeDtypeStruct((width, width), dtype)
    return weights, jax.ShapeDtypeStruct((batch, length, width), dtype)
