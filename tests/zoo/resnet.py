"""A ResNet in Flax Linen with BatchNorm: the state carries running statistics."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training import train_state

from .case import Case, Integers, Normal


class ResidualBlock(nn.Module):
    features: int
    stride: int
    bottleneck: bool
    dtype: Any
    batch_norm: bool = True

    @nn.compact
    def __call__(self, x):
        width = 4 * self.features if self.bottleneck else self.features
        y = nn.relu(self._norm()(self._conv(1, 1, self.features)(x))) if self.bottleneck else x
        y = nn.relu(self._norm()(self._conv(3, self.stride, self.features)(y)))
        y = self._norm()(self._conv(1 if self.bottleneck else 3, 1, width)(y))
        if y.shape != x.shape:
            x = self._norm()(self._conv(1, self.stride, width)(x))
        return nn.relu(x + y)

    def _conv(self, size, stride, features):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        return nn.Conv(features, (size, size), strides=stride, use_bias=False, **types)

    def _norm(self):
        # Statistics follow `dtype`; Flax's default keeps them in float32 even in a float64 model.
        types = {"dtype": self.dtype, "param_dtype": self.dtype, "force_float32_reductions": False}
        if not self.batch_norm:
            return nn.GroupNorm(4, **types)
        return nn.BatchNorm(use_running_average=False, momentum=0.9, **types)


class ResNet(nn.Module):
    stage_features: tuple[int, ...]
    blocks_per_stage: tuple[int, ...]
    bottleneck: bool
    stem: tuple[int, int]
    num_classes: int
    dtype: Any
    batch_norm: bool = True

    @nn.compact
    def __call__(self, x):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        size, stride = self.stem
        stem = nn.Conv(self.stage_features[0], (size, size), strides=stride, **types, name="stem")
        x = nn.relu(stem(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for stage, features in enumerate(self.stage_features):
            for block in range(self.blocks_per_stage[stage]):
                stride, name = 2 if stage > 0 and block == 0 else 1, f"stage{stage}_block{block}"
                x = ResidualBlock(features, stride, self.bottleneck, self.dtype, self.batch_norm, name=name)(
                    x
                )
        return nn.Dense(self.num_classes, **types, name="head")(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def make_resnet(
    stage_features=(16, 32),
    blocks_per_stage=(1, 1),
    bottleneck=False,
    stem=(3, 1),
    image=16,
    num_classes=16,
    batch=24,
    batch_norm=True,
    dtype=jnp.float32,
) -> Case:
    """Images are `[batch, image, image, 3]`; `stem` is the first convolution's size and stride. Without batch norm, each
    example's channels are normalised in groups."""
    model = ResNet(stage_features, blocks_per_stage, bottleneck, stem, num_classes, dtype, batch_norm)
    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)

    def init():
        variables = model.init(jax.random.key(0), jnp.zeros((1, image, image, 3), dtype))
        return TrainState.create(apply_fn=model.apply, tx=optimizer, **{"batch_stats": {}, **variables})

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
            accuracy = jnp.mean(logits.argmax(-1) == batch["label"], dtype=logits.dtype)
            return loss, (updated.get("batch_stats", {}), accuracy)

        (loss, (batch_stats, accuracy)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, {"loss": loss, "accuracy": accuracy}

    inputs = {"image": Normal((batch, image, image, 3), dtype), "label": Integers((batch,), num_classes)}
    return Case("resnet", step, init, inputs)
