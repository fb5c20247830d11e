"""Networks of convolutions over images and volumes, with all kinds of windows that halos serve."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


class Plain(nn.Module):
    """Residual blocks at one resolution."""

    features: int = 64
    num_blocks: int = 2

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.features, (3, 3))(x)
        for _ in range(self.num_blocks):
            x = x + nn.Conv(self.features, (3, 3))(nn.silu(nn.GroupNorm(4)(x)))
        return nn.Conv(3, (1, 1))(x)


class DownAndUp(nn.Module):
    """A pooling, a stride behind a padding, and two ways up again."""

    @nn.compact
    def __call__(self, x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        skipped = x = nn.silu(nn.Conv(4, (3, 3), **types)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
        x = nn.silu(nn.Conv(4, (3, 3), kernel_dilation=2, **types)(x))
        x = jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0)))
        x = nn.silu(nn.Conv(4, (3, 3), strides=2, padding="VALID", **types)(x))
        x = nn.silu(nn.ConvTranspose(4, (4, 4), strides=(2, 2), **types)(x))
        x = x.repeat(2, axis=1).repeat(2, axis=2)
        x = nn.silu(nn.Conv(4, (7, 7), **types)(jnp.concatenate([x, skipped], axis=-1)))
        return nn.Conv(1, (1, 1), **types)(nn.GroupNorm(2, epsilon=1e-3, **types)(x))


class Grouped(nn.Module):
    """Patches, depthwise convolutions, groups of channels, and a pooling that keeps all rows."""

    @nn.compact
    def __call__(self, x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        x = nn.Conv(8, (4, 4), strides=4, padding="VALID", **types)(x)
        x = x + nn.Conv(8, (7, 7), feature_group_count=8, **types)(nn.silu(x))
        x = nn.max_pool(x, (3, 3), (1, 1), "SAME")
        x = nn.Conv(8, (3, 3), strides=2, feature_group_count=2, **types)(x)
        return nn.ConvTranspose(2, (2, 2), strides=(2, 2), **types)(x)


class Volumes(nn.Module):
    """Three spatial dimensions, and averages."""

    features: int = 4

    @nn.compact
    def __call__(self, x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        x = nn.silu(nn.Conv(self.features, (3, 3, 3), **types)(x))
        x = nn.avg_pool(x, (3, 2, 2), (2, 2, 2), "SAME")
        return nn.Conv(2, (5, 3, 1), strides=(2, 1, 1), **types)(x)


def training(model: nn.Module) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: (model.apply(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    return step


def shapes(model: nn.Module, shape: tuple[int, ...], dtype: Any = jnp.float32) -> tuple[Any, ...]:
    """The arguments of a step, as shapes."""
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros(shape, dtype)))
    return params, jax.ShapeDtypeStruct(shape, dtype)
