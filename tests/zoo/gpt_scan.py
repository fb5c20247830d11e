"""A GPT in Flax Linen whose layers are one `nn.scan`, with or without `nn.remat`."""

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
    dtype: Any

    @nn.compact
    def __call__(self, x, mask):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        y = nn.LayerNorm(**types)(x)
        x = x + nn.MultiHeadDotProductAttention(self.heads, **types, name="attn")(y, mask=mask)
        y = nn.LayerNorm(**types)(x)
        y = nn.gelu(nn.Dense(4 * self.hidden, **types, name="fc1")(y))
        return x + nn.Dense(self.hidden, **types, name="fc2")(y), None


class ScannedGPT(nn.Module):
    num_layers: int
    hidden: int
    heads: int
    vocab: int
    remat: bool
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Embed(self.vocab, self.hidden, **types, name="embed")(tokens)
        x = x + nn.Embed(tokens.shape[1], self.hidden, **types, name="positions")(jnp.arange(tokens.shape[1]))
        layers = nn.scan(
            nn.remat(Block, prevent_cse=False) if self.remat else Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
        )
        x, _ = layers(self.hidden, self.heads, self.dtype, name="blocks")(x, nn.make_causal_mask(tokens))
        return nn.Dense(self.vocab, use_bias=False, **types, name="head")(nn.LayerNorm(**types)(x))


def make_gpt_scan(
    num_layers=4,
    hidden=32,
    heads=8,
    vocab=64,
    seq=16,
    batch=24,
    remat=False,
    optimizer=None,
    dtype=jnp.float32,
) -> Case:
    """The stacked parameters carry the layer as their first dimension."""
    model = ScannedGPT(num_layers, hidden, heads, vocab, remat, dtype)
    optimizer = optimizer or optax.adamw(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("gpt_scan_remat" if remat else "gpt_scan", step, init, inputs)
