"""A multilayer perceptron in plain JAX, trained with momentum."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import optax

from .case import Case, Integers, Normal


def make_mlp(widths=(32, 64, 64, 16), batch=24, optimizer=None, dtype=jnp.float32) -> Case:
    """`widths` are the sizes of the input, of each hidden layer and of the output."""
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    initializer = jax.nn.initializers.he_normal()

    def init():
        keys = jax.random.split(jax.random.key(0), len(widths) - 1)
        params = [
            {"w": initializer(key, (fan_in, fan_out), dtype), "b": jnp.zeros(fan_out, dtype)}
            for key, (fan_in, fan_out) in zip(keys, pairwise(widths), strict=True)
        ]
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_fn(params, batch):
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    inputs = {"x": Normal((batch, widths[0]), dtype), "label": Integers((batch,), widths[-1])}
    return Case("mlp", step, init, inputs)
