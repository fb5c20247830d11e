"""An MLP-Mixer in Flax Linen: one MLP over the patches, one over the channels, AdamW."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Integers, Normal


class Mlp(nn.Module):
    hidden: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        y = nn.gelu(nn.Dense(self.hidden, **types, name="fc1")(x))
        return nn.Dense(x.shape[-1], **types, name="fc2")(y)


class Block(nn.Module):
    token_ffn: int
    channel_ffn: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        tokens = nn.LayerNorm(**types)(x).swapaxes(1, 2)
        x = x + Mlp(self.token_ffn, self.dtype, name="tokens")(tokens).swapaxes(1, 2)
        return x + Mlp(self.channel_ffn, self.dtype, name="channels")(nn.LayerNorm(**types)(x))


class Mixer(nn.Module):
    num_layers: int
    channels: int
    token_ffn: int
    channel_ffn: int
    patch: int
    num_classes: int
    dtype: Any

    @nn.compact
    def __call__(self, images):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        size = (self.patch, self.patch)
        x = nn.Conv(self.channels, size, strides=size, padding="VALID", **types, name="patches")(images)
        x = x.reshape(x.shape[0], -1, self.channels)
        for i in range(self.num_layers):
            x = Block(self.token_ffn, self.channel_ffn, self.dtype, name=f"block_{i}")(x)
        return nn.Dense(self.num_classes, **types, name="head")(nn.LayerNorm(**types)(x).mean(axis=1))


def make_mixer(
    num_layers=2,
    channels=32,
    token_ffn=16,
    channel_ffn=64,
    image=16,
    patch=4,
    num_classes=16,
    batch=24,
    dtype=jnp.float32,
) -> Case:
    """Images are `[batch, image, image, 3]`, cut in patches of `patch` by `patch`."""
    model = Mixer(num_layers, channels, token_ffn, channel_ffn, patch, num_classes, dtype)
    optimizer = optax.adamw(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, image, image, 3), dtype))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["image"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    inputs = {"image": Normal((batch, image, image, 3), dtype), "label": Integers((batch,), num_classes)}
    return Case("mixer", step, init, inputs)
