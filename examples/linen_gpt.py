"""A GPT in Flax Linen, with dropout and a `TrainState`: the usual Linen train step, parallelized.

It learns sequences that count up, each by a stride of its own, modulo the vocabulary. The dropout key
is an ordinary argument: random numbers are the same however the step is sharded.

    python examples/linen_gpt.py        # on the GPUs here; without any, on 8 simulated devices

The same step at the size of GPT-3 13B, planned for a cluster that this machine does not have:

    autoshard search examples/linen_gpt.py:target --cluster 64xH100-80GB --memory 70GiB --out plan.json
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import autoshard

OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, weight_decay=0.1))


@dataclass(frozen=True)
class Config:
    num_layers: int = 2
    hidden: int = 64
    heads: int = 8
    vocab: int = 64
    seq: int = 32
    batch: int = 64
    dropout: float = 0.1
    dtype: Any = jnp.float32  # of the computation; parameters are float32


GPT3_13B = Config(40, 5120, 40, vocab=50304, seq=2048, batch=64, dtype=jnp.bfloat16)


class Block(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x, mask):
        config, dtype = self.config, self.config.dtype
        drop = nn.Dropout(config.dropout, deterministic=False)
        attention = nn.MultiHeadDotProductAttention(config.heads, dtype=dtype, name="attention")
        x = x + drop(attention(nn.LayerNorm(dtype=dtype)(x), mask=mask))
        y = nn.Dense(4 * config.hidden, dtype=dtype, name="fc1")(nn.LayerNorm(dtype=dtype)(x))
        return x + drop(nn.Dense(config.hidden, dtype=dtype, name="fc2")(nn.gelu(y)))


class GPT(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        config, dtype = self.config, self.config.dtype
        embed = nn.Embed(config.vocab, config.hidden, dtype=dtype, name="embed")
        positions = nn.Embed(config.seq, config.hidden, dtype=dtype, name="positions")
        x = embed(tokens) + positions(jnp.arange(config.seq))
        mask = nn.make_causal_mask(tokens)
        for i in range(config.num_layers):
            x = Block(config, name=f"block_{i}")(x, mask)
        return embed.attend(nn.LayerNorm(dtype=dtype)(x)).astype(jnp.float32)


def create_state(config: Config, key):
    model = GPT(config)
    params_key, dropout_key = jax.random.split(key)
    tokens = jnp.zeros((1, config.seq), jnp.int32)
    variables = model.init({"params": params_key, "dropout": dropout_key}, tokens)
    return TrainState.create(apply_fn=model.apply, params=variables["params"], tx=OPTIMIZER)


@autoshard.parallelize
def train_step(state, batch, key):
    dropout_key = jax.random.fold_in(key, state.step)

    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": dropout_key})
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def target():
    """What `autoshard search` plans: the step and the shapes of its arguments at full size."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(partial(create_state, GPT3_13B), key)
    tokens = jax.ShapeDtypeStruct((GPT3_13B.batch, GPT3_13B.seq), jnp.int32)
    return train_step, (state, {"tokens": tokens, "targets": tokens}, key)


def make_batches(config: Config):
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(config.vocab, size=(config.batch, 1))
        strides = rng.integers(1, 8, size=(config.batch, 1))
        numbers = (starts + strides * np.arange(config.seq + 1)) % config.vocab
        numbers = numbers.astype(np.int32)
        yield {"tokens": numbers[:, :-1], "targets": numbers[:, 1:]}


def main(num_steps=100, report_every=10):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config = Config()
    batches = make_batches(config)
    init_key, dropout_key = jax.random.split(jax.random.key(0))

    state = train_step.init(partial(create_state, config), init_key, args=(next(batches), dropout_key))
    print(train_step.plan)

    for i in range(1, num_steps + 1):
        state, metrics = train_step(state, next(batches), dropout_key)
        if i == 1 or i % report_every == 0:
            print(f"step {i:4}  loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
