"""A Transformer whose MLPs are experts, as in GShard: top-k gating, capacity, einsum dispatch and combine."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers


def top_k_gating(probs, k, capacity):
    """GShard's algorithm 1: where each token goes, and with what weight.

    Args:
        probs: `[batch, seq, expert]`, the router's softmax. Each batch row is a group.
        k: How many experts a token chooses.
        capacity: How many tokens of a group an expert takes; later ones are dropped.

    Returns:
        `combine` of `[batch, seq, expert, capacity]`, and the load-balancing loss.
    """
    num_experts = probs.shape[-1]
    gates, experts = jax.lax.top_k(probs, k)
    gates = gates / gates.sum(-1, keepdims=True)
    combine = jnp.zeros((*probs.shape, capacity), probs.dtype)
    taken = jnp.zeros((probs.shape[0], 1, num_experts), probs.dtype)
    for choice in range(k):
        mask = jax.nn.one_hot(experts[..., choice], num_experts, dtype=probs.dtype)
        position = jnp.cumsum(mask, axis=1) - mask + taken
        taken = taken + mask.sum(axis=1, keepdims=True)
        # one_hot of a position beyond the capacity is all zeros: the token is dropped.
        slot = jax.nn.one_hot(position.astype(jnp.int32), capacity, dtype=probs.dtype)
        combine = combine + gates[..., choice, None, None] * mask[..., None] * slot
    first = jax.nn.one_hot(experts[..., 0], num_experts, dtype=probs.dtype)
    balance = num_experts * jnp.mean(jnp.sum(first.mean(axis=1) * probs.mean(axis=1), axis=-1))
    return combine, balance


class Experts(nn.Module):
    num_experts: int
    ffn: int
    k: int
    capacity_factor: float
    dtype: Any

    @nn.compact
    def __call__(self, x):
        _, seq, hidden = x.shape
        init = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", init, (self.num_experts, hidden, self.ffn), self.dtype)
        down = self.param("down", init, (self.num_experts, self.ffn, hidden), self.dtype)
        router = nn.Dense(
            self.num_experts, use_bias=False, dtype=self.dtype, param_dtype=self.dtype, name="router"
        )
        capacity = int(self.capacity_factor * self.k * seq / self.num_experts)
        combine, balance = top_k_gating(nn.softmax(router(x)), self.k, capacity)
        dispatch = (combine > 0).astype(x.dtype)
        routed = jnp.einsum("bsec,bsm->ebcm", dispatch, x)
        routed = nn.relu(jnp.einsum("ebcm,emf->ebcf", routed, up))
        routed = jnp.einsum("ebcf,efm->ebcm", routed, down)
        return jnp.einsum("bsec,ebcm->bsm", combine, routed), balance


class MoETransformer(nn.Module):
    num_layers: int
    hidden: int
    heads: int
    vocab: int
    experts: dict[str, Any]
    dtype: Any

    @nn.compact
    def __call__(self, tokens):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.Embed(self.vocab, self.hidden, **types, name="embed")(tokens)
        mask = nn.make_causal_mask(tokens)
        total_balance = 0.0
        for i in range(self.num_layers):
            y = nn.LayerNorm(**types)(x)
            x = x + nn.MultiHeadDotProductAttention(self.heads, **types, name=f"attn_{i}")(y, mask=mask)
            y, balance = Experts(**self.experts, dtype=self.dtype, name=f"moe_{i}")(nn.LayerNorm(**types)(x))
            x, total_balance = x + y, total_balance + balance
        return nn.Dense(self.vocab, **types, name="head")(nn.LayerNorm(**types)(x)), total_balance


def make_moe(
    num_layers=2,
    hidden=32,
    heads=8,
    num_experts=8,
    ffn=64,
    k=2,
    capacity_factor=2.0,
    vocab=64,
    seq=16,
    batch=24,
    optimizer=None,
    dtype=jnp.float32,
) -> Case:
    """Every layer's MLP is `num_experts` experts of width `ffn`."""
    experts = {"num_experts": num_experts, "ffn": ffn, "k": k, "capacity_factor": capacity_factor}
    model = MoETransformer(num_layers, hidden, heads, vocab, experts, dtype)
    optimizer = optimizer or optax.adam(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, seq), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            logits, balance = state.apply_fn({"params": params}, batch["tokens"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()
            return loss + 0.01 * balance, {"loss": loss, "balance": balance}

        (_, metrics), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), metrics

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("moe", step, init, inputs)
