"""The step of the plan files of `former_files`, which earlier versions wrote.

They were made from this step by `autoshard.search(train_step, PARAMS, BATCH, ...)`, before all plans had one file form:

- `jit`: `mesh=(2, 4), microbatches=2, memory="44KiB"`, and the batch pinned
- `mpmd`, `spmd`: `stages=2, mesh=(2, 2), microbatches=2`, and the executor
- `plain`: as `spmd`, with `mesh=(4, 1)`
- `mixed`: `stages=2, microbatches=2`, on two nodes of four simulated devices, `slow` and `fast`
"""

from pathlib import Path

import jax
import jax.numpy as jnp

FOLDER = Path(__file__).parent / "former_files"

PARAMS = {
    "in": jax.ShapeDtypeStruct((16, 32), "float32"),
    "layers": jax.ShapeDtypeStruct((4, 32, 32), "float32"),
}
BATCH = jax.ShapeDtypeStruct((16, 16), "float32")


def train_step(params, batch):
    def loss(params):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch @ params["in"], params["layers"])
        return jnp.mean(x**2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))
