"""Llama 3 in plain JAX: RMSNorm, rotary positions, grouped-query attention, SwiGLU, an untied head.

AdamW after clipping by the global norm, under a warmup-cosine schedule, as the real one is trained.
"""

import jax
import jax.numpy as jnp
import optax

from .case import Case, Integers

LLAMA_3_8B = {
    "num_layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn": 14336,
    "vocab": 128256,
    "seq": 4096,
    "batch": 64,
    "compute_dtype": jnp.bfloat16,
}

LLAMA_7B = LLAMA_3_8B | {"ffn": 11008, "vocab": 32000}
"""As large as the first Llama, with the grouped heads of later ones."""


def rms_norm(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return normal.astype(x.dtype) * scale


def rotary_angles(seq, head_dim, dtype):
    frequency = 500_000.0 ** (-jnp.arange(0, head_dim, 2, dtype=dtype) / head_dim)
    return jnp.outer(jnp.arange(seq, dtype=dtype), frequency)


def rotate(x, angles):
    """`x` is `[batch, seq, ..., head_dim]`, `angles` `[seq, head_dim / 2]`."""
    angles = jnp.expand_dims(angles, tuple(range(1, x.ndim - 2)))
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attention(x, layer, angles, heads, kv_heads):
    batch, seq, _ = x.shape
    wide = jnp.promote_types(x.dtype, jnp.float32)
    q = rotate((x @ layer["wq"]).reshape(batch, seq, kv_heads, heads // kv_heads, -1), angles)
    k = rotate((x @ layer["wk"]).reshape(batch, seq, kv_heads, -1), angles)
    v = (x @ layer["wv"]).reshape(batch, seq, kv_heads, -1)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(wide) / q.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones((seq, seq), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(x.dtype)
    return jnp.einsum("bkgqs,bskd->bqkgd", weights, v).reshape(batch, seq, -1) @ layer["wo"]


def swiglu(x, layer):
    return (jax.nn.silu(x @ layer["gate"]) * (x @ layer["up"])) @ layer["down"]


def over_layers(block, x, layers):
    """Layers one after the other; where they are one stack, in a loop that keeps nothing of their insides."""
    if isinstance(layers, dict):
        return jax.lax.scan(jax.checkpoint(lambda x, layer: (block(x, layer), None)), x, layers)[0]
    for layer in layers:
        x = block(x, layer)
    return x


def make_llama(
    num_layers=2,
    hidden=64,
    heads=16,
    kv_heads=8,
    ffn=96,
    vocab=64,
    seq=16,
    batch=24,
    optimizer=None,
    dtype=jnp.float32,
    compute_dtype=None,
    scanned=False,
) -> Case:
    """Parameters rest in `dtype`; layers compute in `compute_dtype`, by default the same. Scanned ones are cast in the loop.

    `make_llama(**LLAMA_3_8B)` is the real one.
    """
    compute_dtype = compute_dtype or dtype
    head_dim = hidden // heads
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=10, decay_steps=1000)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1)
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), adamw)
    layer_shapes = {
        "wq": (hidden, heads * head_dim),
        "wk": (hidden, kv_heads * head_dim),
        "wv": (hidden, kv_heads * head_dim),
        "wo": (heads * head_dim, hidden),
        "gate": (hidden, ffn),
        "up": (hidden, ffn),
        "down": (ffn, hidden),
    }

    def stacked(layers):
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers) if scanned else layers

    def cast(params):
        return jax.tree.map(lambda param: param.astype(compute_dtype), params)

    def init():
        keys = iter(jax.random.split(jax.random.key(0), num_layers * len(layer_shapes) + 2))

        def matrix(shape):
            return 0.02 * jax.random.normal(next(keys), shape, dtype)

        def layer():
            norms = {"attn_norm": jnp.ones(hidden, dtype), "mlp_norm": jnp.ones(hidden, dtype)}
            return norms | {name: matrix(shape) for name, shape in layer_shapes.items()}

        params = {
            "embed": matrix((vocab, hidden)),
            "layers": stacked([layer() for _ in range(num_layers)]),
            "norm": jnp.ones(hidden, dtype),
            "head": matrix((hidden, vocab)),
        }
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_fn(params, batch):
        params = {k: part if scanned and k == "layers" else cast(part) for k, part in params.items()}
        angles = rotary_angles(seq, head_dim, dtype)

        def block(x, layer):
            layer = cast(layer)
            x = x + attention(rms_norm(x, layer["attn_norm"]), layer, angles, heads, kv_heads)
            return x + swiglu(rms_norm(x, layer["mlp_norm"]), layer)

        x = over_layers(block, params["embed"][batch["tokens"]], params["layers"])
        logits = (rms_norm(x, params["norm"]) @ params["head"]).astype(dtype)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
        return {"params": params, "opt_state": opt_state}, metrics

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("llama", step, init, inputs)
