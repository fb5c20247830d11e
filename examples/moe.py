"""A mixture of experts in Flax Linen: each token visits its two best experts, as in GShard.

The experts are one stacked weight, and tokens reach them through einsums. Whether each device then
holds some of the experts (expert parallelism, with its all-to-alls) is for the search to find out.

    python examples/moe.py              # on the GPUs here; without any, on 8 simulated devices

The same step with Mixtral 8x7B's widths, planned for a cluster that this machine does not have:

    autoshard search examples/moe.py:target --cluster 64xH100-80GB --memory 70GiB --out plan.json
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

OPTIMIZER = optax.adamw(2e-3)


@dataclass(frozen=True)
class Config:
    num_layers: int = 2
    hidden: int = 64
    heads: int = 8
    num_experts: int = 8
    ffn: int = 128
    vocab: int = 64
    seq: int = 32
    batch: int = 64
    dtype: Any = jnp.float32  # of the computation; parameters are float32

    @property
    def capacity(self):
        """Tokens of one sequence that an expert takes: its fair share of two choices per token."""
        return 2 * self.seq // self.num_experts


MIXTRAL = Config(32, 4096, 32, ffn=14336, vocab=32000, seq=4096, batch=32, dtype=jnp.bfloat16)


def route(probs, capacity):
    """From the router's `[batch, seq, expert]` to weights `[batch, seq, expert, slot]`.

    A token whose expert has no slot left gets no weight there. The second value is GShard's loss that
    balances the experts.
    """
    num_experts = probs.shape[-1]
    gates, experts = jax.lax.top_k(probs, 2)
    gates = gates / gates.sum(-1, keepdims=True)
    best, second = jnp.moveaxis(jax.nn.one_hot(experts, num_experts), 2, 0)
    best_slot = jnp.cumsum(best, axis=1) - best
    second_slot = jnp.cumsum(second, axis=1) - second + best.sum(1, keepdims=True)

    def spread(gate, chosen, slot):
        slots = jax.nn.one_hot(slot.astype(jnp.int32), capacity)  # all zeros beyond the capacity
        return (gate * chosen)[..., None] * slots

    weights = spread(gates[..., :1], best, best_slot) + spread(gates[..., 1:], second, second_slot)
    return weights, num_experts * jnp.mean(jnp.sum(best.mean(1) * probs.mean(1), axis=-1))


class Experts(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x):
        config, dtype = self.config, self.config.dtype
        initializer = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", initializer, (config.num_experts, config.hidden, config.ffn))
        down = self.param("down", initializer, (config.num_experts, config.ffn, config.hidden))
        probs = nn.softmax(nn.Dense(config.num_experts, name="router")(x))
        weights, balance_loss = route(probs, config.capacity)
        y = jnp.einsum("bsec,bsm->ebcm", (weights > 0).astype(dtype), x)
        y = nn.silu(jnp.einsum("ebcm,emf->ebcf", y, up.astype(dtype)))
        y = jnp.einsum("ebcf,efm->ebcm", y, down.astype(dtype))
        return jnp.einsum("bsec,ebcm->bsm", weights.astype(dtype), y), balance_loss


class MoE(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens):
        config, dtype = self.config, self.config.dtype
        x = nn.Embed(config.vocab, config.hidden, dtype=dtype, name="embed")(tokens)
        x = x + nn.Embed(config.seq, config.hidden, dtype=dtype, name="positions")(jnp.arange(config.seq))
        mask, balance_loss = nn.make_causal_mask(tokens), 0.0
        for i in range(config.num_layers):
            attention = nn.MultiHeadDotProductAttention(config.heads, dtype=dtype, name=f"attention_{i}")
            x = x + attention(nn.RMSNorm(dtype=dtype)(x), mask=mask)
            y, loss = Experts(config, name=f"experts_{i}")(nn.RMSNorm(dtype=dtype)(x))
            x, balance_loss = x + y, balance_loss + loss
        return nn.Dense(config.vocab, name="head")(nn.RMSNorm()(x)), balance_loss


def create_state(config: Config):
    model = MoE(config)
    params = model.init(jax.random.key(0), jnp.zeros((1, config.seq), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=OPTIMIZER)


@autoshard.parallelize
def train_step(state, batch):
    def loss_fn(params):
        logits, balance_loss = state.apply_fn({"params": params}, batch["tokens"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
        return loss + 0.01 * balance_loss, loss

    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def target():
    """What `autoshard search` plans: the step and the shapes of its arguments at full size."""
    tokens = jax.ShapeDtypeStruct((MIXTRAL.batch, MIXTRAL.seq), jnp.int32)
    state = jax.eval_shape(partial(create_state, MIXTRAL))
    return train_step, (state, {"tokens": tokens, "targets": tokens})


def make_batch(config: Config, rng):
    """Sequences that count up, each by a stride of its own."""
    strides = rng.integers(1, 8, size=(config.batch, 1))
    numbers = rng.integers(config.vocab, size=(config.batch, 1)) + strides * np.arange(config.seq + 1)
    numbers = (numbers % config.vocab).astype(np.int32)
    return {"tokens": numbers[:, :-1], "targets": numbers[:, 1:]}


def main(num_steps=60):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config, rng = Config(), np.random.default_rng(0)
    state = train_step.init(partial(create_state, config), args=(make_batch(config, rng),))
    print(train_step.plan)
    for i in range(1, num_steps + 1):
        state, metrics = train_step(state, make_batch(config, rng))
        if i == 1 or i % 10 == 0:
            print(f"step {i:4}  loss {metrics['loss']:.3f}")


if __name__ == "__main__":
    main()
