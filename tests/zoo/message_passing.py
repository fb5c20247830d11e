"""A message-passing network (Gilmer et al., 2017) in plain JAX: one graph, under `vmap` over a batch of them."""

import jax
import jax.numpy as jnp
import optax

from .case import Case, Integers, Normal


def mlp(layers, x):
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def energy(params, nodes, edges, senders, receivers):
    """A number per graph, of features `[nodes, d]` and `[edges, d]`; messages go from senders to receivers."""
    h, e = nodes @ params["embed_nodes"], edges @ params["embed_edges"]
    for layer in params["layers"]:
        messages = mlp(layer["message"], jnp.concatenate([h[senders], h[receivers], e], axis=-1))
        received = jax.ops.segment_sum(messages, receivers, num_segments=len(nodes))
        h = h + mlp(layer["update"], jnp.concatenate([h, received], axis=-1))
    return mlp(params["readout"], h.sum(axis=0))[0]


def make_message_passing(
    num_layers=2,
    features=16,
    hidden=32,
    num_nodes=8,
    num_edges=24,
    batch=24,
    optimizer=None,
    dtype=jnp.float32,
) -> Case:
    """`num_nodes` and `num_edges` are those of one graph of `batch`."""
    tx = optimizer or optax.adam(1e-3)

    def init():
        keys = iter(jax.random.split(jax.random.key(0), 4 * num_layers + 6))

        def linear(fan_in, fan_out):
            return jax.nn.initializers.he_normal()(next(keys), (fan_in, fan_out), dtype)

        def two_layers(fan_in, fan_out):
            return [
                (linear(fan_in, hidden), jnp.zeros(hidden, dtype)),
                (linear(hidden, fan_out), jnp.zeros(fan_out, dtype)),
            ]

        params = {
            "embed_nodes": linear(features, hidden),
            "embed_edges": linear(features, hidden),
            "layers": [
                {"message": two_layers(3 * hidden, hidden), "update": two_layers(2 * hidden, hidden)}
                for _ in range(num_layers)
            ],
            "readout": two_layers(hidden, 1),
        }
        return {"params": params, "opt_state": tx.init(params)}

    def step(state, batch):
        def loss_fn(params):
            graphs = (batch["nodes"], batch["edges"], batch["senders"], batch["receivers"])
            predicted = jax.vmap(energy, in_axes=(None, 0, 0, 0, 0))(params, *graphs)
            return jnp.mean((predicted - batch["energy"]) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {
            "loss": loss
        }

    inputs = {
        "nodes": Normal((batch, num_nodes, features), dtype),
        "edges": Normal((batch, num_edges, features), dtype),
        "senders": Integers((batch, num_edges), num_nodes),
        "receivers": Integers((batch, num_edges), num_nodes),
        "energy": Normal((batch,), dtype),
    }
    return Case("message_passing", step, init, inputs)
