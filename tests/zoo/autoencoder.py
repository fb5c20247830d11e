"""A convolutional autoencoder in Flax Linen: strided convolutions down, transposed ones back up."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from .case import Case, Normal


class Autoencoder(nn.Module):
    features: tuple[int, ...]
    latent: int
    dtype: Any

    @nn.compact
    def __call__(self, images):
        types = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = images
        for i, features in enumerate(self.features):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2, **types, name=f"down_{i}")(x))
        small = x.shape[1:]
        x = nn.Dense(self.latent, **types, name="encode")(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.Dense(small[0] * small[1] * small[2], **types, name="decode")(x))
        x = x.reshape(x.shape[0], *small)
        for i, features in enumerate(reversed((images.shape[-1], *self.features[:-1]))):
            x = nn.ConvTranspose(features, (3, 3), strides=(2, 2), **types, name=f"up_{i}")(nn.relu(x))
        return x


def make_autoencoder(
    features=(16, 32), latent=16, image=16, batch=24, optimizer=None, dtype=jnp.float32
) -> Case:
    """Each of `features` halves the image on the way down."""
    model = Autoencoder(features, latent, dtype)
    optimizer = optimizer or optax.adam(1e-3)

    def init():
        params = model.init(jax.random.key(0), jnp.zeros((1, image, image, 3), dtype))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)

    def step(state, batch):
        def loss_fn(params):
            rebuilt = state.apply_fn({"params": params}, batch["image"])
            return jnp.mean((rebuilt - batch["image"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return Case("autoencoder", step, init, {"image": Normal((batch, image, image, 3), dtype)})
