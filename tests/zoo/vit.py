"""A Vision Transformer in Flax Linen: patches by a strided convolution, a class token, AdamW."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers, Normal


class Block(nn.Module):
    heads: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = x + nn.MultiHeadDotProductAttention(self.heads, **types, name="attn")(nn.LayerNorm(**types)(x))
        y = nn.Dense(4 * x.shape[-1], **types, name="fc1")(nn.LayerNorm(**types)(x))
        return x + nn.Dense(x.shape[-1], **types, name="fc2")(nn.gelu(y))


class ViT(nn.Module):
    num_layers: int
    hidden: int
    heads: int
    patch: int
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        size = (self.patch, self.patch)
        x = nn.Conv(self.hidden, size, strides=size, padding="VALID", **types, name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.hidden)
        class_token = self.param("class_token", nn.initializers.zeros, (1, 1, self.hidden), self.dtype)
        x = jnp.concatenate([jnp.broadcast_to(class_token, (x.shape[0], 1, self.hidden)), x], axis=1)
        x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]), self.dtype)
        for i in range(self.num_layers):
            x = Block(self.heads, self.dtype, name=f"block_{i}")(x)
        return nn.Dense(self.num_classes, **types, name="head")(nn.LayerNorm(**types)(x[:, 0]))


def make_vit(
    num_layers=2,
    hidden=32,
    heads=8,
    image=16,
    patch=4,
    num_classes=16,
    batch=24,
    optimizer=None,
    dtype=jnp.float32,
) -> Case:
    """Images are `[batch, image, image, 3]`, cut in patches of `patch` by `patch`."""
    model = ViT(num_layers, hidden, heads, patch, num_classes, dtype)
    optimizer = optimizer or optax.adamw(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, image, image, 3), dtype))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            targets = optax.smooth_labels(jax.nn.one_hot(batch["label"], num_classes, dtype=dtype), 0.1)
            return optax.softmax_cross_entropy(logits, targets).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    inputs = {"image": Normal((batch, image, image, 3), dtype), "label": Integers((batch,), num_classes)}
    return Case("vit", step, init, inputs)
