"""A language model of stacked LSTMs in Flax Linen: `nn.RNN` scans over time."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers


class LSTM(nn.Module):
    num_layers: int
    hidden: int
    vocab: int
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Embed(self.vocab, self.hidden, **types, name="embed")(tokens)
        for i in range(self.num_layers):
            x = nn.RNN(nn.OptimizedLSTMCell(self.hidden, **types), name=f"lstm_{i}")(x)
        return nn.Dense(self.vocab, **types, name="head")(x)


def make_lstm(num_layers=2, hidden=32, vocab=64, seq=12, batch=24, optimizer=None, dtype=jnp.float32) -> Case:
    """By default Adam after clipping by the global norm, as recurrent networks want."""
    model = LSTM(num_layers, hidden, vocab, dtype)
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))

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
    return Case("lstm", step, init, inputs)
