"""A ResNet in Flax Linen, with evaluation and checkpoints: a run that is stopped goes on where it was.

The means and variances of BatchNorm are those of the whole batch, on however many devices its images lie.

    python examples/resnet.py           # on the GPUs here; without any, on 8 simulated devices

ResNet-50 on ImageNet, planned for a cluster that this machine does not have:

    autoshard search examples/resnet.py:target --cluster 64xH100-80GB --memory 70GiB --out plan.json
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax.training import train_state

import autoshard


@dataclass(frozen=True)
class Config:
    blocks: tuple[int, ...] = (1, 1)  # in each stage
    features: int = 16  # of the first stage; each further stage doubles them
    image: int = 32
    num_classes: int = 16
    batch: int = 64
    dtype: Any = jnp.float32  # of the computation; parameters are float32


RESNET_50 = Config((3, 4, 6, 3), 64, image=224, num_classes=1000, batch=4096, dtype=jnp.bfloat16)


class Bottleneck(nn.Module):
    features: int
    stride: int
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.features, (1, 1))(x)))
        y = nn.relu(self.norm()(self.conv(self.features, (3, 3), strides=self.stride)(y)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(4 * self.features, (1, 1))(y))
        if x.shape != y.shape:
            x = self.norm()(self.conv(4 * self.features, (1, 1), strides=self.stride)(x))
        return nn.relu(x + y)


class ResNet(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, images, train):
        config = self.config
        conv = partial(nn.Conv, use_bias=False, dtype=config.dtype)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=config.dtype)
        x = nn.relu(norm()(conv(config.features, (7, 7), strides=2)(images)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, num_blocks in enumerate(config.blocks):
            for block in range(num_blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                x = Bottleneck(config.features * 2**stage, stride, conv, norm)(x)
        return nn.Dense(config.num_classes)(x.mean(axis=(1, 2)))


class TrainState(train_state.TrainState):
    batch_stats: Any


def create_state(config: Config):
    model, images = ResNet(config), jnp.zeros((1, config.image, config.image, 3))
    variables = model.init(jax.random.key(0), images, train=False)
    return TrainState.create(apply_fn=model.apply, tx=optax.sgd(0.05, momentum=0.9), **variables)


@autoshard.parallelize
def train_step(state, batch):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updated = state.apply_fn(variables, batch["image"], train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
        return loss, updated["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@partial(autoshard.parallelize, like=train_step)  # the state stays where training has it
def accuracy(state, batch):
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["image"], train=False)
    return jnp.mean(logits.argmax(-1) == batch["label"])


def target():
    """The step and the shapes of its arguments at full size, for the command line."""
    config = RESNET_50
    batch = {
        "image": jax.ShapeDtypeStruct((config.batch, config.image, config.image, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((config.batch,), jnp.int32),
    }
    return train_step, (jax.eval_shape(partial(create_state, config)), batch)


def make_batch(config: Config, seed: int):
    """Noisy images, each of its class's colour pattern."""
    patterns = np.random.default_rng(0).standard_normal((config.num_classes, config.image, config.image, 3))
    rng = np.random.default_rng(seed)
    label = rng.integers(config.num_classes, size=config.batch, dtype=np.int32)
    noise = rng.standard_normal((config.batch, *patterns.shape[1:]))
    return {"image": (patterns[label] + noise).astype(np.float32), "label": label}


def main(num_steps=60, folder="checkpoints/resnet"):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config = Config()
    create, unseen = partial(create_state, config), make_batch(config, seed=0)

    with ocp.CheckpointManager(Path(folder).absolute()) as checkpoints:
        if (done := checkpoints.latest_step()) is None:
            state, done = train_step.init(create, args=(unseen,)), 0
        else:
            print(f"going on after step {done}")
            abstract = train_step.abstract_state(create, args=(unseen,))
            state = checkpoints.restore(done, args=ocp.args.StandardRestore(abstract))
        print(train_step.plan)
        for i in range(done + 1, num_steps + 1):
            state, loss = train_step(state, make_batch(config, seed=i))
            if i % 20 == 0:
                print(f"step {i:4}  loss {loss:.2f}  accuracy {accuracy(state, unseen):.2f}")
                checkpoints.save(i, args=ocp.args.StandardSave(state))


if __name__ == "__main__":
    main()
