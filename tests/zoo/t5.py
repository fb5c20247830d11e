"""A T5-like encoder-decoder in Flax Linen: relative position biases, padding masks, Adafactor.

The loss divides by the number of real target tokens in the batch: a value that no microbatch knows.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers

PAD = 0


def relative_buckets(queries, keys, num_buckets):
    distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    return jnp.clip(distance + num_buckets // 2, 0, num_buckets - 1)


class Attention(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x, context, mask, bias=None):
        types = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.dtype}
        head_dim = x.shape[-1] // self.heads
        q = nn.DenseGeneral((self.heads, head_dim), **types, name="q")(x)
        k = nn.DenseGeneral((self.heads, head_dim), **types, name="k")(context)
        v = nn.DenseGeneral((self.heads, head_dim), **types, name="v")(context)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if bias is not None:
            scores = scores + bias
        weights = nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), **types, name="out")(mixed)


class FeedForward(nn.Module):
    ffn: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        types = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.dtype}
        gate = nn.gelu(nn.Dense(self.ffn, **types, name="gate")(x))
        up = nn.Dense(self.ffn, **types, name="up")(x)
        return nn.Dense(x.shape[-1], **types, name="down")(gate * up)


class Stack(nn.Module):
    """The encoder, or the decoder where `encoded` is given."""

    num_layers: int
    heads: int
    ffn: int
    dtype: Any

    @nn.compact
    def __call__(self, x, mask, encoded=None, encoded_mask=None):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        num_buckets = 32
        buckets = relative_buckets(x.shape[1], x.shape[1], num_buckets)
        bias = nn.Embed(num_buckets, self.heads, **types, name="bias")(buckets).transpose(2, 0, 1)
        for i in range(self.num_layers):
            y = nn.RMSNorm(**types)(x)
            x = x + Attention(self.heads, self.dtype, name=f"self_{i}")(y, y, mask, bias)
            if encoded is not None:
                y = nn.RMSNorm(**types)(x)
                x = x + Attention(self.heads, self.dtype, name=f"cross_{i}")(y, encoded, encoded_mask)
            x = x + FeedForward(self.ffn, self.dtype, name=f"mlp_{i}")(nn.RMSNorm(**types)(x))
        return nn.RMSNorm(**types)(x)


class T5(nn.Module):
    num_layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    dtype: Any

    @nn.compact
    def __call__(self, source, target):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        embed = nn.Embed(self.vocab, self.hidden, **types, name="embed")
        source_mask = (source != PAD)[:, None, None, :]
        stack = (self.num_layers, self.heads, self.ffn, self.dtype)
        encoded = Stack(*stack, name="encoder")(embed(source), source_mask)
        causal = nn.make_causal_mask(target, dtype=bool)
        decoded = Stack(*stack, name="decoder")(embed(target), causal, encoded, source_mask)
        return nn.Dense(self.vocab, use_bias=False, **types, name="head")(decoded)


def make_t5(
    num_layers=2,
    hidden=32,
    heads=8,
    ffn=64,
    vocab=64,
    source_seq=16,
    target_seq=8,
    batch=24,
    dtype=jnp.float32,
) -> Case:
    """`num_layers` in the encoder and as many in the decoder."""
    model = T5(num_layers, hidden, heads, ffn, vocab, dtype)
    # Factored second moments for every matrix, tiny ones included.
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=16)

    def init():
        source, target = jnp.zeros((1, source_seq), jnp.int32), jnp.zeros((1, target_seq), jnp.int32)
        params = model.init(jax.random.key(0), source, target)["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        target = batch["target"]
        shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)), constant_values=PAD)
        real = (target != PAD).astype(dtype)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["source"], shifted)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return jnp.sum(losses * real) / jnp.sum(real)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "num_tokens": real.sum()}

    inputs = {"source": Integers((batch, source_seq), vocab), "target": Integers((batch, target_seq), vocab)}
    return Case("t5", step, init, inputs)
