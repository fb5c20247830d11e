"""A ResNet in Flax Linen with BatchNorm, whose running statistics travel in the train state.

BatchNorm's mean and variance are over the whole batch, on however many devices the images lie:
a parallelized step computes what the step computes on one device.

    python examples/resnet.py           # on the GPUs here; without any, on 8 simulated devices

The same step as a ResNet-50 on ImageNet, planned for a cluster that this machine does not have:

    autoshard search examples/resnet.py:target --cluster 64xH100-80GB --memory 70GiB --out plan.json
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import autoshard

OPTIMIZER = optax.sgd(0.05, momentum=0.9, nesterov=True)


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, ...] = (1, 1)  # residual blocks in each stage
    features: int = 16  # of the first stage; each next stage doubles them
    image: int = 32
    num_classes: int = 16
    batch: int = 64
    dtype: Any = jnp.float32  # of the computation; parameters are float32


RESNET_50 = Config((3, 4, 6, 3), 64, image=224, num_classes=1000, batch=4096, dtype=jnp.bfloat16)


class Bottleneck(nn.Module):
    features: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.features, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.features, (3, 3), strides=self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, images):
        config, dtype = self.config, self.config.dtype
        x = nn.Conv(config.features, (7, 7), strides=2, use_bias=False, dtype=dtype, name="stem")(images)
        x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=dtype)(x))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, num_blocks in enumerate(config.blocks):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                features = config.features * 2**stage
                x = Bottleneck(features, stride, dtype, name=f"stage{stage}_block{block}")(x)
        return nn.Dense(config.num_classes, name="head")(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_state(config: Config):
    model = ResNet(config)
    images = jnp.zeros((1, config.image, config.image, 3))
    variables = model.init(jax.random.key(0), images)
    return TrainState.create(apply_fn=model.apply, tx=OPTIMIZER, **variables)


@autoshard.parallelize
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, batch["image"], mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, (logits, updated["batch_stats"])

    (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    accuracy = jnp.mean(logits.argmax(-1) == batch["label"])
    state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
    return state, {"loss": loss, "accuracy": accuracy}


def target():
    """What `autoshard search` plans: the step and the shapes of its arguments at full size."""
    config = RESNET_50
    batch = {
        "image": jax.ShapeDtypeStruct((config.batch, config.image, config.image, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((config.batch,), jnp.int32),
    }
    return train_step, (jax.eval_shape(partial(create_state, config)), batch)


def make_batches(config: Config):
    """Yields noisy images, each of its class's color pattern."""
    rng = np.random.default_rng(0)
    patterns = rng.standard_normal((config.num_classes, config.image, config.image, 3), np.float32)
    while True:
        label = rng.integers(config.num_classes, size=config.batch, dtype=np.int32)
        noise = rng.standard_normal((config.batch, *patterns.shape[1:]), np.float32)
        yield {"image": patterns[label] + 2 * noise, "label": label}


def main(num_steps=60):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config = Config()
    batches = make_batches(config)
    state = train_step.init(partial(create_state, config), args=(next(batches),))
    print(train_step.plan)
    for i in range(1, num_steps + 1):
        state, metrics = train_step(state, next(batches))
        if i == 1 or i % 10 == 0:
            print(f"step {i:4}  loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.2f}")


if __name__ == "__main__":
    main()
