"""A DLRM (deep learning recommendation model) in plain JAX: large embedding tables, small MLPs.

The tables outgrow a device long before the arithmetic does. The search decides which of them to split, over which dimension,
and which to keep whole beside the data-parallel MLPs.

    python examples/dlrm.py             # on the GPUs here; without any, on 8 simulated devices

The tables of the Criteo data set, planned for a cluster that this machine does not have:

    autoshard search examples/dlrm.py:target --cluster 16xH100-80GB --memory 70GiB --out plan.json
"""

from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard

OPTIMIZER = optax.adagrad(0.05)


@dataclass(frozen=True)
class Config:
    rows: tuple[int, ...] = (1024, 256, 64, 512)  # of each table
    width: int = 16  # of an embedding
    num_dense: int = 8
    bottom: tuple[int, ...] = (64,)  # hidden widths of the MLP that embeds the dense features
    top: tuple[int, ...] = (64, 32)  # and of the one that predicts the click
    batch: int = 512


# Distinct values of each categorical column in Criteo's Kaggle data set.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
CRITEO = Config(
    rows=tuple(-(-rows // 64) * 64 for rows in CRITEO_ROWS),  # padded, so that they split evenly
    width=128,
    num_dense=13,
    bottom=(512, 256),
    top=(1024, 1024, 512, 256),
    batch=65536,
)


def create_state(config: Config):
    keys = (jax.random.fold_in(jax.random.key(0), i) for i in count())
    num_pairs = len(config.rows) * (len(config.rows) + 1) // 2

    def mlp(*widths):
        he_normal = jax.nn.initializers.he_normal()
        return [{"w": he_normal(next(keys), pair), "b": jnp.zeros(pair[1])} for pair in pairwise(widths)]

    params = {
        "tables": [0.1 * jax.random.normal(next(keys), (rows, config.width)) for rows in config.rows],
        "bottom": mlp(config.num_dense, *config.bottom, config.width),
        "top": mlp(config.width + num_pairs, *config.top, 1),
    }
    return {"params": params, "moments": OPTIMIZER.init(params)}


def apply_mlp(layers, x):
    for layer in layers[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ layers[-1]["w"] + layers[-1]["b"]


def predict(params, batch):
    """Logits `[batch]`: the dense features, and all dot products between embeddings, through an MLP."""
    dense = jax.nn.relu(apply_mlp(params["bottom"], batch["dense"]))
    lookups = [table[ids] for table, ids in zip(params["tables"], batch["ids"], strict=True)]
    vectors = jnp.stack([dense, *lookups], axis=1)
    products = jnp.einsum("biw,bjw->bij", vectors, vectors)
    rows, columns = np.tril_indices(vectors.shape[1], k=-1)
    features = jnp.concatenate([dense, products[:, rows, columns]], axis=1)
    return apply_mlp(params["top"], features)[:, 0]


def loss_fn(params, batch):
    return optax.sigmoid_binary_cross_entropy(predict(params, batch), batch["clicked"]).mean()


@autoshard.parallelize
def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
    updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, loss


def target():
    """The step and the shapes of its arguments at full size, for the command line."""
    config = CRITEO
    batch = {
        "dense": jax.ShapeDtypeStruct((config.batch, config.num_dense), jnp.float32),
        "ids": [jax.ShapeDtypeStruct((config.batch,), jnp.int32) for _ in config.rows],
        "clicked": jax.ShapeDtypeStruct((config.batch,), jnp.float32),
    }
    return train_step, (jax.eval_shape(partial(create_state, config)), batch)


def make_batches(config: Config):
    """Yields users who click by a hidden rule: a taste per row, and a weight per dense feature."""
    rng = np.random.default_rng(0)
    tastes = [rng.standard_normal(rows) for rows in config.rows]
    weights = rng.standard_normal(config.num_dense)
    while True:
        dense = rng.standard_normal((config.batch, config.num_dense), np.float32)
        ids = [rng.integers(rows, size=config.batch, dtype=np.int32) for rows in config.rows]
        liking = dense @ weights + sum(taste[i] for taste, i in zip(tastes, ids, strict=True))
        yield {"dense": dense, "ids": ids, "clicked": (liking > 0).astype(np.float32)}


def main(num_steps=100):
    jax.config.update("jax_num_cpu_devices", 8)  # simulated; GPUs are preferred where there are any
    config = Config()
    batches = make_batches(config)
    state = train_step.init(partial(create_state, config), args=(next(batches),))
    print(train_step.plan)
    for i in range(1, num_steps + 1):
        state, loss = train_step(state, next(batches))
        if i == 1 or i % 20 == 0:
            print(f"step {i:4}  loss {loss:.2f}")


if __name__ == "__main__":
    main()
