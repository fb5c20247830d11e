"""A diffusion U-Net (Ho et al., 2020) in Flax Linen: GroupNorm, time embeddings, AdamW, and an EMA of the parameters."""

from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax

from .case import Case, Integers, Normal

EMA_DECAY = 0.999


class TimeEmbedding(nn.Module):
    """Sines and cosines of a step of the diffusion, and an MLP over them."""

    features: int
    dtype: Any

    @nn.compact
    def __call__(self, t):
        rates = 1e4 ** -jnp.linspace(0, 1, self.features // 2, dtype=self.dtype)
        angles = t.astype(self.dtype)[:, None] * rates
        x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        for _ in range(2):
            x = nn.silu(nn.Dense(self.features, dtype=self.dtype, param_dtype=self.dtype)(x))
        return x


class ResidualBlock(nn.Module):
    features: int
    dtype: Any

    @nn.compact
    def __call__(self, x, t):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        norms = types | {"num_groups": 4, "force_float32_reductions": False}
        y = nn.Conv(self.features, (3, 3), **types)(nn.silu(nn.GroupNorm(**norms)(x)))
        y = y + nn.Dense(self.features, **types)(t)[:, None, None, :]
        y = nn.Conv(self.features, (3, 3), **types)(nn.silu(nn.GroupNorm(**norms)(y)))
        if x.shape[-1] != self.features:
            x = nn.Conv(self.features, (1, 1), **types)(x)
        return x + y


class UNet(nn.Module):
    stage_features: tuple[int, ...]
    blocks_per_stage: int
    dtype: Any

    @nn.compact
    def __call__(self, x, t):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        channels, skipped = x.shape[-1], []
        t = TimeEmbedding(4 * self.stage_features[0], self.dtype)(t)
        x = nn.Conv(self.stage_features[0], (3, 3), **types)(x)
        for stage, features in enumerate(self.stage_features):
            if stage > 0:
                x = nn.Conv(features, (3, 3), strides=2, **types)(x)
            for _ in range(self.blocks_per_stage):
                x = ResidualBlock(features, self.dtype)(x, t)
                skipped.append(x)
        for stage, features in reversed(list(enumerate(self.stage_features))):
            for _ in range(self.blocks_per_stage):
                x = jnp.concatenate([x, skipped.pop()], axis=-1)
                x = ResidualBlock(features, self.dtype)(x, t)
            if stage > 0:
                x = x.repeat(2, axis=1).repeat(2, axis=2)
        return nn.Conv(channels, (3, 3), **types)(nn.silu(x))


class State(flax.struct.PyTreeNode):
    params: Any
    ema: Any
    opt_state: Any


def make_unet(
    stage_features=(16, 32), blocks_per_stage=1, image=8, channels=3, batch=24, dtype=jnp.float32
) -> Case:
    """Images are `[batch, image, image, channels]`; each stage after the first halves their sides."""
    model = UNet(stage_features, blocks_per_stage, dtype)
    tx = optax.adamw(1e-3)

    def init():
        image_like = jnp.zeros((1, image, image, channels), dtype)
        params = model.init(jax.random.key(0), image_like, jnp.zeros(1, jnp.int32))
        return State(params, params, tx.init(params))

    def step(state, batch):
        def loss_fn(params):
            signal = jnp.cos(batch["t"].astype(dtype) / 1000 * jnp.pi / 2)[:, None, None, None]
            noised = signal * batch["image"] + jnp.sqrt(1 - signal**2) * batch["noise"]
            return jnp.mean((model.apply(params, noised, batch["t"]) - batch["noise"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        ema = jax.tree.map(lambda e, p: EMA_DECAY * e + (1 - EMA_DECAY) * p, state.ema, params)
        return State(params, ema, opt_state), {"loss": loss}

    images = Normal((batch, image, image, channels), dtype)
    return Case("unet", step, init, {"image": images, "noise": images, "t": Integers((batch,), 1000)})
