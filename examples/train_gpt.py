"""A GPT in Flax NNX, trained on all devices by a step that is written for one.

The text is the reference manual that CPython carries with it, so nothing is downloaded.

    python examples/train_gpt.py        # on the GPUs here; without any, on 8 simulated devices

GPT-2 XL, planned for a cluster that this machine does not have:

    autoshard search examples/train_gpt.py:target --cluster 64xH100-80GB --memory 70GiB --out plan.json
"""

import time
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import autoshard


@dataclass(frozen=True)
class Config:
    num_layers: int = 3
    hidden: int = 64
    heads: int = 4
    vocab: int = 256  # bytes
    seq: int = 128
    batch: int = 32
    dtype: Any = jnp.float32  # of the computation; parameters are float32


GPT2_XL = Config(48, 1600, 25, vocab=50304, seq=1024, batch=256, dtype=jnp.bfloat16)


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        hidden, options = config.hidden, {"dtype": config.dtype, "rngs": rngs}
        self.norm1 = nnx.LayerNorm(hidden, **options)
        self.attention = nnx.MultiHeadAttention(config.heads, hidden, decode=False, **options)
        self.norm2 = nnx.LayerNorm(hidden, **options)
        self.fc1 = nnx.Linear(hidden, 4 * hidden, **options)
        self.fc2 = nnx.Linear(4 * hidden, hidden, **options)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.fc2(nnx.gelu(self.fc1(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        options = {"dtype": config.dtype, "rngs": rngs}
        self.embed = nnx.Embed(config.vocab, config.hidden, **options)
        self.positions = nnx.Embed(config.seq, config.hidden, **options)
        self.blocks = nnx.List(Block(config, rngs) for _ in range(config.num_layers))
        self.norm = nnx.LayerNorm(config.hidden, **options)
        self.head = nnx.Linear(config.hidden, config.vocab, use_bias=False, **options)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def create(config: Config):
    model = GPT(config, nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(5e-3, b2=0.95), wrt=nnx.Param)


def loss_fn(model, batch):
    logits = model(batch["tokens"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


@autoshard.parallelize
def train_step(model, optimizer, batch):
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    optimizer.update(model, grads)
    return loss


def target():
    """The step and the shapes of its arguments at full size, for the command line."""
    tokens = jax.ShapeDtypeStruct((GPT2_XL.batch, GPT2_XL.seq), jnp.int32)
    return train_step, (*nnx.eval_shape(partial(create, GPT2_XL)), {"tokens": tokens, "targets": tokens})


def read_batches(config: Config):
    """Yields random windows of the text, each with the bytes that follow."""
    text = np.frombuffer("\n".join(topics.values()).encode(), np.uint8).astype(np.int32)
    rng = np.random.default_rng(0)
    while True:
        starts = rng.integers(len(text) - config.seq, size=(config.batch, 1))
        windows = text[starts + np.arange(config.seq + 1)]
        yield {"tokens": windows[:, :-1], "targets": windows[:, 1:]}


def main(num_steps=200, report_every=25):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config = Config()
    batches = read_batches(config)

    model, optimizer = train_step.init(partial(create, config), args=(next(batches),))
    print(train_step.plan)

    print(f"step    1  loss {train_step(model, optimizer, next(batches)):.2f}")  # compiles
    start = time.perf_counter()
    for i in range(2, num_steps + 1):
        loss = train_step(model, optimizer, next(batches))
        if i % report_every == 0:
            loss = float(loss)  # waits for the step
            tokens_per_s = (i - 1) * config.batch * config.seq / (time.perf_counter() - start)
            print(f"step {i:4}  loss {loss:.2f}  {tokens_per_s:,.0f} tokens/s")

    train_step.plan.save("plan.json")
    print("saved plan.json: parallelize(plan='plan.json') searches nothing")


if __name__ == "__main__":
    main()
