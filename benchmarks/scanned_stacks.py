"""Transformers whose layers are one `scan`, and the ways in which people write by hand what is kept of a layer.

The models are those of the zoo, their layers' parameters stacked. A way (`BY_HAND`) takes a layer, its input and all layers'
parameters, and runs them one after the other. The policies are JAX's, each on every layer: what a `jax.checkpoint` with that
policy does not save is computed again in the backward phase; one has what it saves on the host until then. In groups, only
what enters every sqrt(n)-th layer is kept (Chen et al. 2016, "Training deep nets with sublinear memory cost", section 4.3).
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from tests.zoo import Case, llama, make_llama, make_megatron, megatron

Layer = Callable[[Any, Any], Any]
"""From an input and a layer's parameters to its result."""

Stack = Callable[[Layer, Any, Any], Any]
"""From a layer, the first input and the stacked parameters to the last result."""


def everything(layer: Layer, x: Any, layers: Any) -> Any:
    """Nothing is computed again."""
    return jax.lax.scan(lambda x, params: (layer(x, params), None), x, layers)[0]


def saving(policy: Callable[..., Any]) -> Stack:
    """A checkpoint around each layer."""

    def stack(layer: Layer, x: Any, layers: Any) -> Any:
        return everything(jax.checkpoint(layer, policy=policy, prevent_cse=False), x, layers)

    return stack


def grouped(layer: Layer, x: Any, layers: Any) -> Any:
    """A checkpoint around as many layers as there then are checkpoints."""
    num_layers = len(jax.tree.leaves(layers)[0])
    size = nearest_divisor(num_layers, math.sqrt(num_layers))
    groups = jax.tree.map(lambda p: p.reshape(num_layers // size, size, *p.shape[1:]), layers)
    group = jax.checkpoint(lambda x, params: everything(layer, x, params), prevent_cse=False)
    return everything(group, x, groups)


def nearest_divisor(n: int, wanted: float) -> int:
    """Of the divisors of a number, the one that comes closest; the smaller of two."""
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - wanted))


BY_HAND: Mapping[str, Stack] = {
    "everything_saveable": everything,
    "dots_saveable": saving(jax.checkpoint_policies.dots_saveable),
    "dots_with_no_batch_dims_saveable": saving(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "nothing_saveable": saving(jax.checkpoint_policies.nothing_saveable),
    "offload_dot_with_no_batch_dims": saving(
        jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    ),
    "every sqrt(n)-th layer": grouped,
}
"""The ways, by name."""


def make_scanned_gpt(stack: Stack = everything, *, heads: int, compute_dtype: Any, **sizes: int) -> Case:
    """The Megatron GPT."""

    def layer(x, params):
        x = x + megatron.attention(megatron.layer_norm(x, params["norm1"]), params, heads, 0.0, None)
        return x + megatron.mlp(megatron.layer_norm(x, params["norm2"]), params)

    def logits(params, tokens):
        x = stack(layer, params["embed"][tokens] + params["positions"], params["layers"])
        return megatron.layer_norm(x, params["norm"]) @ params["embed"].T

    unrolled = make_megatron(heads=heads, compute_dtype=compute_dtype, **sizes)
    return _scanned("scanned GPT", unrolled, logits, compute_dtype)


def make_scanned_llama(
    stack: Stack = everything, *, heads: int, kv_heads: int, compute_dtype: Any, **sizes: int
) -> Case:
    """Llama, with grouped heads."""

    def logits(params, tokens):
        angles = llama.rotary_angles(tokens.shape[1], sizes["hidden"] // heads, jnp.float32)

        def layer(x, params):
            normal = llama.rms_norm(x, params["attn_norm"])
            x = x + llama.attention(normal, params, angles, heads, kv_heads)
            return x + llama.swiglu(llama.rms_norm(x, params["mlp_norm"]), params)

        x = stack(layer, params["embed"][tokens], params["layers"])
        return llama.rms_norm(x, params["norm"]) @ params["head"]

    unrolled = make_llama(heads=heads, kv_heads=kv_heads, compute_dtype=compute_dtype, **sizes)
    return _scanned("scanned Llama", unrolled, logits, compute_dtype)


def _scanned(name: str, unrolled: Case, logits: Callable[[Any, Any], Any], compute_dtype: Any) -> Case:
    """A model's case, its list of layers stacked, trained by AdamW on next tokens."""
    optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.1)

    def init():
        params = unrolled.init()["params"]
        params["layers"] = jax.tree.map(lambda *same: jnp.stack(same), *params["layers"])
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss_fn(params, batch):
        params = jax.tree.map(lambda param: param.astype(compute_dtype), params)
        said = logits(params, batch["tokens"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(said, batch["targets"]).mean()

    def step(state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(state["params"], batch)
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, {
            "loss": loss
        }

    return Case(name, step, init, unrolled.inputs)
