"""DLRM (Naumov et al., 2019) in plain JAX: embedding tables, two MLPs, and dot products between them."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .case import Case, Integers, Normal


def mlp(x, layers):
    for layer in layers:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x


def interact(vectors):
    """Dot products between all pairs of `vectors`, `[batch, n, d]` to `[batch, n * (n - 1) / 2]`."""
    products = jnp.einsum("bid,bjd->bij", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], k=-1)
    return products[:, rows, columns]


def forward(params, batch):
    dense = mlp(batch["dense"], params["bottom"])
    rows = [table[ids] for table, ids in zip(params["tables"], batch["sparse"], strict=True)]
    pairs = interact(jnp.stack([dense, *rows], axis=1))
    top = mlp(jnp.concatenate([dense, pairs], axis=1), params["top"])
    return (top @ params["out"]["w"] + params["out"]["b"])[:, 0]


def make_dlrm(
    table_rows=(512, 256, 64),
    embed_dim=16,
    num_dense=8,
    bottom=(32,),
    top=(64, 32),
    batch=48,
    optimizer="adagrad",
    dtype=jnp.float32,
) -> Case:
    """`bottom` and `top` are the hidden widths of the MLPs; `optimizer` is `"sgd"` or `"adagrad"`."""
    tx = {"sgd": optax.sgd, "adagrad": optax.adagrad}[optimizer](0.05)
    num_vectors = len(table_rows) + 1
    bottom_widths = (num_dense, *bottom, embed_dim)
    top_widths = (embed_dim + num_vectors * (num_vectors - 1) // 2, *top)

    def init():
        keys = iter(jax.random.split(jax.random.key(0), len(table_rows) + len(bottom) + len(top) + 2))

        def linear(fan_in, fan_out):
            w = jax.nn.initializers.he_normal()(next(keys), (fan_in, fan_out), dtype)
            return {"w": w, "b": jnp.zeros(fan_out, dtype)}

        params = {
            "tables": [jax.random.normal(next(keys), (rows, embed_dim), dtype) for rows in table_rows],
            "bottom": [linear(*pair) for pair in pairwise(bottom_widths)],
            "top": [linear(*pair) for pair in pairwise(top_widths)],
            "out": linear(top_widths[-1], 1),
        }
        return {"params": params, "opt_state": tx.init(params)}

    def loss_fn(params, batch):
        logits = forward(params, batch)
        return optax.sigmoid_binary_cross_entropy(logits, batch["click"].astype(dtype)).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    inputs = {
        "dense": Normal((batch, num_dense), dtype),
        "sparse": [Integers((batch,), rows) for rows in table_rows],
        "click": Integers((batch,), 2),
    }
    return Case("dlrm", step, init, inputs)
