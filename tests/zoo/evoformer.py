"""An Evoformer (AlphaFold 2, supplement 1.6) in pure Flax Linen.

Each block attends over the alignment's rows and columns, sends outer products to the pair
representation, and updates that by triangle multiplications, triangle attention (if it has heads) and a transition.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers

ALPHAFOLD_2 = {
    "num_layers": 48,
    "msa_features": 256,
    "pair_features": 128,
    "heads": 8,
    "triangle_heads": 4,
    "outer_features": 32,
    "sequences": 512,
    "residues": 384,
    "batch": 128,
    "dtype": jnp.bfloat16,
    "scanned": True,
}
"""As it is fine-tuned: table 4 of the supplement."""


class GatedAttention(nn.Module):
    """Attention over the second-last dimension; `bias` is `[batch, head, q, k]`, the same for all rows."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x, bias=None):
        types = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.dtype}
        head_dim = x.shape[-1] // self.heads
        q, k, v = (nn.DenseGeneral((self.heads, head_dim), **types, name=name)(x) for name in "qkv")
        scores = jnp.einsum("brqhd,brkhd->brhqk", q, k) / head_dim**0.5
        if bias is not None:
            scores = scores + bias[:, None]
        mixed = jnp.einsum("brhqk,brkhd->brqhd", nn.softmax(scores), v)
        gate = nn.sigmoid(nn.DenseGeneral((self.heads, head_dim), **types, name="gate")(x))
        return nn.DenseGeneral(x.shape[-1], axis=(-2, -1), **types, name="out")(gate * mixed)


class OuterProductMean(nn.Module):
    features: int
    inner: int
    dtype: Any

    @nn.compact
    def __call__(self, msa):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        left = nn.Dense(self.inner, **types, name="left")(msa)
        right = nn.Dense(self.inner, **types, name="right")(msa)
        outer = jnp.einsum("bsic,bsjd->bijcd", left, right) / msa.shape[1]
        return nn.DenseGeneral(self.features, axis=(-2, -1), **types, name="out")(outer)


class TriangleMultiplication(nn.Module):
    equation: str
    dtype: Any

    @nn.compact
    def __call__(self, pair):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        features = pair.shape[-1]

        def gated(name):
            gate = nn.sigmoid(nn.Dense(features, **types, name=f"{name}_gate")(pair))
            return gate * nn.Dense(features, **types, name=name)(pair)

        triangles = jnp.einsum(self.equation, gated("left"), gated("right"))
        out = nn.Dense(features, **types, name="out")(nn.LayerNorm(**types)(triangles))
        return nn.sigmoid(nn.Dense(features, **types, name="gate")(pair)) * out


class TriangleAttention(nn.Module):
    """Each row of pairs attends over itself, with the pairs of its columns as a bias."""

    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, pair):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        pair = nn.LayerNorm(**types)(pair)
        bias = nn.Dense(self.heads, use_bias=False, **types, name="bias")(pair)
        return GatedAttention(self.heads, self.dtype, name="attention")(pair, bias.transpose(0, 3, 1, 2))


class Transition(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        return nn.Dense(x.shape[-1], **types)(nn.relu(nn.Dense(4 * x.shape[-1], **types)(x)))


class EvoformerBlock(nn.Module):
    heads: int
    dtype: Any
    triangle_heads: int = 0
    outer_features: int = 8

    @nn.compact
    def __call__(self, msa, pair):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}

        def norm(x):
            return nn.LayerNorm(**types)(x)

        bias = nn.Dense(self.heads, use_bias=False, **types, name="pair_bias")(norm(pair))
        msa = msa + GatedAttention(self.heads, self.dtype, name="row")(norm(msa), bias.transpose(0, 3, 1, 2))
        columns = norm(msa).swapaxes(1, 2)
        msa = msa + GatedAttention(self.heads, self.dtype, name="column")(columns).swapaxes(1, 2)
        msa = msa + Transition(self.dtype, name="msa_transition")(norm(msa))
        outer = OuterProductMean(pair.shape[-1], self.outer_features, self.dtype, name="outer")
        pair = pair + outer(norm(msa))
        pair = pair + TriangleMultiplication("bikc,bjkc->bijc", self.dtype, name="outgoing")(norm(pair))
        pair = pair + TriangleMultiplication("bkjc,bkic->bijc", self.dtype, name="incoming")(norm(pair))
        if self.triangle_heads:
            starting = TriangleAttention(self.triangle_heads, self.dtype, name="starting")
            ending = TriangleAttention(self.triangle_heads, self.dtype, name="ending")
            pair = pair + starting(pair)
            pair = pair + ending(pair.swapaxes(1, 2)).swapaxes(1, 2)
        return msa, pair + Transition(self.dtype, name="pair_transition")(norm(pair))


class Evoformer(nn.Module):
    num_layers: int
    msa_features: int
    pair_features: int
    heads: int
    num_residue_types: int
    num_distances: int
    dtype: Any
    triangle_heads: int = 0
    outer_features: int = 8
    scanned: bool = False

    @nn.compact
    def __call__(self, alignment):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        msa = nn.Embed(self.num_residue_types, self.msa_features, **types, name="residues")(alignment)
        left = nn.Embed(self.num_residue_types, self.pair_features, **types, name="left")(alignment[:, 0])
        right = nn.Embed(self.num_residue_types, self.pair_features, **types, name="right")(alignment[:, 0])
        pair = left[:, :, None] + right[:, None, :]
        block = (self.heads, self.dtype, self.triangle_heads, self.outer_features)
        if self.scanned:
            msa, pair = self.over_blocks(EvoformerBlock(*block, name="blocks"), msa, pair)
        for i in range(0 if self.scanned else self.num_layers):
            msa, pair = EvoformerBlock(*block, name=f"block_{i}")(msa, pair)
        residue_logits = nn.Dense(self.num_residue_types, **types, name="residue_head")(msa)
        symmetric = pair + pair.swapaxes(1, 2)
        return residue_logits, nn.Dense(self.num_distances, **types, name="distance_head")(symmetric)

    def over_blocks(self, block, msa, pair):
        """Blocks in a loop, which keeps nothing of their insides."""
        layer = nn.remat(lambda block, carry, _: (block(*carry), None), prevent_cse=False)
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(layer, length=self.num_layers, **axes)(block, (msa, pair), None)[0]


def make_evoformer(
    num_layers=2,
    msa_features=32,
    pair_features=16,
    heads=8,
    sequences=8,
    residues=16,
    num_residue_types=24,
    num_distances=16,
    batch=24,
    optimizer=None,
    dtype=jnp.float32,
    triangle_heads=0,
    outer_features=8,
    scanned=False,
) -> Case:
    """The alignment is `[batch, sequences, residues]`; it learns residues and pairwise distances.

    `make_evoformer(**ALPHAFOLD_2)` has the real one's sizes.
    """
    sizes = (num_layers, msa_features, pair_features, heads, num_residue_types, num_distances)
    model = Evoformer(*sizes, dtype, triangle_heads, outer_features, scanned)
    optimizer = optimizer or optax.adam(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, sequences, residues), jnp.int32))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            residue_logits, distance_logits = state.apply_fn({"params": params}, batch["alignment"])
            cross_entropy = optax.softmax_cross_entropy_with_integer_labels
            residue_loss = cross_entropy(residue_logits, batch["residues"]).mean()
            return residue_loss + cross_entropy(distance_logits, batch["distances"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    inputs = {
        "alignment": Integers((batch, sequences, residues), num_residue_types),
        "residues": Integers((batch, sequences, residues), num_residue_types),
        "distances": Integers((batch, residues, residues), num_distances),
    }
    return Case("evoformer", step, init, inputs)
