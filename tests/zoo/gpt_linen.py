"""A GPT in Flax Linen with dropout: TrainState, AdamW, and a key folded with the step."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers


class Block(nn.Module):
    hidden: int
    heads: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        y = nn.LayerNorm(**types)(x)
        y = nn.MultiHeadDotProductAttention(self.heads, **types, name="attn")(y, mask=mask)
        x = x + nn.Dropout(self.dropout, deterministic=False)(y)
        y = nn.LayerNorm(**types)(x)
        y = nn.gelu(nn.Dense(4 * self.hidden, **types, name="fc1")(y))
        y = nn.Dense(self.hidden, **types, name="fc2")(y)
        return x + nn.Dropout(self.dropout, deterministic=False)(y)


class GPT(nn.Module):
    num_layers: int
    hidden: int
    heads: int
    vocab: int
    dropout: float
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        embed = nn.Embed(self.vocab, self.hidden, **types, name="embed")
        positions = nn.Embed(tokens.shape[1], self.hidden, **types, name="positions")
        x = embed(tokens) + positions(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(self.dropout, deterministic=False)(x)
        mask = nn.make_causal_mask(tokens)
        for i in range(self.num_layers):
            x = Block(self.hidden, self.heads, self.dropout, self.dtype, name=f"block_{i}")(x, mask)
        return embed.attend(nn.LayerNorm(**types)(x))


def make_gpt_linen(
    num_layers=2,
    hidden=32,
    heads=8,
    vocab=64,
    seq=16,
    batch=24,
    dropout=0.1,
    optimizer=None,
    dtype=jnp.float32,
) -> Case:
    """Tied embeddings; the batch holds `seq + 1` tokens, sliced into inputs and targets."""
    model = GPT(num_layers, hidden, heads, vocab, dropout, dtype)
    optimizer = optimizer or optax.adamw(1e-3, weight_decay=0.01)

    def init():
        params_key, dropout_key = jax.random.split(jax.random.key(0))
        tokens = jnp.zeros((1, seq), jnp.int32)
        variables = model.init({"params": params_key, "dropout": dropout_key}, tokens)
        return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optimizer)

    def step(state, batch, key):
        dropout_key = jax.random.fold_in(key, state.step)
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, tokens, rngs={"dropout": dropout_key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    inputs = {"tokens": Integers((batch, seq + 1), vocab)}
    return Case("gpt_linen", step, init, inputs, extra=lambda: (jax.random.key(1),))
