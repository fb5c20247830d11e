"""The GPT of the Megatron papers in plain JAX: fused QKV, a GELU MLP of 4 x hidden, tied embeddings.

With `dropout`, the step takes a key, and drops where Megatron does: attention weights, and what both half-blocks add. With
`scanned`, the layers are a loop.
"""

import jax
import jax.numpy as jnp
import optax

from .case import Case, Integers


def layer_norm(x, norm):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True)
    variance = wide.var(-1, keepdims=True)
    return ((wide - mean) * jax.lax.rsqrt(variance + 1e-5)).astype(x.dtype) * norm["scale"] + norm["bias"]


def dropped(x, rate, key):
    """What is left after dropout; without a key, all."""
    if key is None:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0)


def attention(x, layer, heads, rate, key):
    batch, seq, hidden = x.shape
    qkv = (x @ layer["qkv"]["w"] + layer["qkv"]["b"]).reshape(batch, seq, heads, 3, hidden // heads)
    q, k, v = qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (hidden // heads) ** 0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    scores = jnp.where(causal, scores.astype(jnp.promote_types(x.dtype, jnp.float32)), -1e9)
    weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
    weights = dropped(weights, rate, key)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, seq, hidden)
    return mixed @ layer["out"]["w"] + layer["out"]["b"]


def mlp(x, layer):
    x = jax.nn.gelu(x @ layer["fc1"]["w"] + layer["fc1"]["b"])
    return x @ layer["fc2"]["w"] + layer["fc2"]["b"]


def forward(params, tokens, heads, rate=0.0, key=None):
    x = params["embed"][tokens] + params["positions"]

    def block(x, numbered):
        i, layer = numbered
        keys = (None,) * 3 if key is None else jax.random.split(jax.random.fold_in(key, i), 3)
        mixed = attention(layer_norm(x, layer["norm1"]), layer, heads, rate, keys[0])
        x = x + dropped(mixed, rate, keys[1])
        return x + dropped(mlp(layer_norm(x, layer["norm2"]), layer), rate, keys[2]), None

    if isinstance(params["layers"], dict):
        numbers = jnp.arange(len(params["layers"]["norm1"]["scale"]))
        x, _ = jax.lax.scan(block, x, (numbers, params["layers"]))
    else:
        for numbered in enumerate(params["layers"]):
            x, _ = block(x, numbered)
    return layer_norm(x, params["norm"]) @ params["embed"].T


def make_megatron(
    num_layers=2,
    hidden=32,
    heads=8,
    vocab=64,
    seq=16,
    batch=24,
    dtype=jnp.float32,
    compute_dtype=None,
    dropout=0.0,
    scanned=False,
) -> Case:
    """Parameters rest in `dtype`; the layers compute in `compute_dtype`, by default the same."""
    compute_dtype = compute_dtype or dtype
    optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)

    def norm():
        return {"scale": jnp.ones(hidden, dtype), "bias": jnp.zeros(hidden, dtype)}

    def init():
        keys = iter(jax.random.split(jax.random.key(0), 4 * num_layers + 2))

        def table(rows, columns):
            return 0.02 * jax.random.normal(next(keys), (rows, columns), dtype)

        def linear(fan_in, fan_out):
            return {"w": table(fan_in, fan_out), "b": jnp.zeros(fan_out, dtype)}

        def layer():
            return {
                "norm1": norm(),
                "qkv": linear(hidden, 3 * hidden),
                "out": linear(hidden, hidden),
                "norm2": norm(),
                "fc1": linear(hidden, 4 * hidden),
                "fc2": linear(4 * hidden, hidden),
            }

        layers = [layer() for _ in range(num_layers)]
        params = {
            "embed": table(vocab, hidden),
            "positions": table(seq, hidden),
            "layers": jax.tree.map(lambda *each: jnp.stack(each), *layers) if scanned else layers,
            "norm": norm(),
        }
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_fn(params, batch, key):
        params = jax.tree.map(lambda param: param.astype(compute_dtype), params)
        logits = forward(params, batch["tokens"], heads, dropout, key).astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(state, batch, key=None):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch, key)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("megatron", step, init, inputs, lambda: (jax.random.key(1),) if dropout else ())
