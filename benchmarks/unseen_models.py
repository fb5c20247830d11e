"""Ten small training steps of as many kinds, on which no rule and no constant of autoshard was tuned.

Each is a loss in plain JAX under AdamW: convolutions up and down, two players, routed experts, depthwise convolutions, a
recurrence, adaptive norms, a variational code, embedding tables, gated mixing, messages on a graph. They have few ops, as
each is searched and compiled many times.

Do not tune on them: a constant that was moved for one of these makes the table of `benchmarks.compiled_caps` worthless.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

Params = Any
Batch = Mapping[str, Any]
Loss = Callable[[Params, Batch], Any]

OPTIMIZER = optax.adamw(1e-3)


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of float32."""
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def whole(*shape: int) -> jax.ShapeDtypeStruct:
    """The shape of an array of int32."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


Unseen = tuple[Callable[..., Any], tuple[Any, ...]]
"""A training step and the shapes of its arguments."""


def trained(loss: Loss, params: Params, batch: Batch) -> Unseen:
    """A step of AdamW on a loss."""

    def step(state: Any, batch: Batch) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], batch)
        updates, moments = OPTIMIZER.update(grads, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "moments": moments}, value

    state = {"params": params, "moments": jax.eval_shape(OPTIMIZER.init, params)}
    return step, (state, batch)


def conv(x: Any, kernel: Any, stride: int = 1, groups: int = 1) -> Any:
    """A convolution over images, channels last."""
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def normalized(x: Any) -> Any:
    """Zero mean and unit variance over the last dimension."""
    mean = x.mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)


def unet(batch: int = 64, image: int = 64, width: int = 64) -> Unseen:
    """Convolutions down and up, with the activations of the way down beside those of the way up."""

    def loss(p: Params, b: Batch) -> Any:
        first = jax.nn.silu(normalized(conv(b["image"], p["first"])))
        second = jax.nn.silu(normalized(conv(first, p["down"], 2)))
        middle = jax.nn.silu(normalized(conv(second, p["middle"]))) + second
        up = jax.image.resize(middle, (batch, image, image, 2 * width), "nearest")
        last = jax.nn.silu(normalized(conv(jnp.concatenate([first, up], -1), p["up"])))
        return jnp.square(conv(last, p["last"]) - b["noise"]).mean()

    kernels = {
        "first": floats(3, 3, 3, width),
        "down": floats(3, 3, width, 2 * width),
        "middle": floats(3, 3, 2 * width, 2 * width),
        "up": floats(3, 3, 3 * width, width),
        "last": floats(3, 3, width, 3),
    }
    images = floats(batch, image, image, 3)
    return trained(loss, kernels, {"image": images, "noise": images})


def gan(batch: int = 512, code: int = 256, width: int = 2048, size: int = 3072) -> Unseen:
    """Two players with an optimizer each; the second one's gradient goes through the first one's result."""

    def made(g: Params, code: Any) -> Any:
        return jnp.tanh(jax.nn.relu(jax.nn.relu(code @ g["in"]) @ g["middle"]) @ g["out"])

    def judged(d: Params, x: Any) -> Any:
        return jax.nn.leaky_relu(jax.nn.leaky_relu(x @ d["in"]) @ d["middle"]) @ d["out"]

    def step(state: Any, b: Batch) -> Any:
        def of_judge(d: Params) -> Any:
            fake = made(state["maker"], b["code"])
            return (jax.nn.softplus(-judged(d, b["data"])) + jax.nn.softplus(judged(d, fake))).mean()

        def of_maker(g: Params) -> Any:
            return jax.nn.softplus(-judged(state["judge"], made(g, b["code"]))).mean()

        new = dict[str, Any]()
        for name, loss in (("judge", of_judge), ("maker", of_maker)):
            grads = jax.grad(loss)(state[name])
            updates, new[f"of {name}"] = OPTIMIZER.update(grads, state[f"of {name}"], state[name])
            new[name] = optax.apply_updates(state[name], updates)
        return new, of_judge(state["judge"])

    maker = {"in": floats(code, width), "middle": floats(width, width), "out": floats(width, size)}
    judge = {"in": floats(size, width), "middle": floats(width, width), "out": floats(width, 1)}
    state = {"judge": judge, "maker": maker}
    state |= {f"of {name}": jax.eval_shape(OPTIMIZER.init, one) for name, one in state.items()}
    return step, (state, {"code": floats(batch, code), "data": floats(batch, size)})


def experts(batch: int = 64, length: int = 128, width: int = 512, count: int = 8) -> Unseen:
    """Tokens sent to one of several feed-forward networks each, with room for so many."""
    room = 2 * length // count

    def loss(p: Params, b: Batch) -> Any:
        x = p["table"][b["tokens"]]
        weights = jax.nn.softmax(x @ p["router"])
        chosen = jax.nn.one_hot(weights.argmax(-1), count)
        place = jnp.cumsum(chosen, 1) * chosen - 1
        sent = jax.nn.one_hot(place.astype(jnp.int32), room) * chosen[..., None]
        there = jnp.einsum("blec,bld->ebcd", sent, x)
        hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", there, p["in"]))
        back = jnp.einsum("ebcf,efd->ebcd", hidden, p["out"])
        y = x + jnp.einsum("blec,ebcd->bld", sent, back) * weights.max(-1, keepdims=True)
        return -jnp.take_along_axis(
            jax.nn.log_softmax(normalized(y) @ p["table"].T), b["tokens"][..., None], -1
        ).mean()

    params = {
        "table": floats(4096, width),
        "router": floats(width, count),
        "in": floats(count, width, 4 * width),
        "out": floats(count, 4 * width, width),
    }
    return trained(loss, params, {"tokens": whole(batch, length)})


def convnet(batch: int = 128, image: int = 56, width: int = 96, blocks: int = 2) -> Unseen:
    """Depthwise convolutions, and products over channels."""

    def loss(p: Params, b: Batch) -> Any:
        x = conv(b["image"], p["stem"], 2)
        for block in p["blocks"]:
            y = normalized(conv(x, block["depthwise"], groups=width)) @ block["in"]
            x = x + jax.nn.gelu(y) @ block["out"]
        return optax.softmax_cross_entropy_with_integer_labels(x.mean((1, 2)) @ p["head"], b["label"]).mean()

    block = {
        "depthwise": floats(7, 7, 1, width),
        "in": floats(width, 4 * width),
        "out": floats(4 * width, width),
    }
    params = {
        "stem": floats(4, 4, 3, width),
        "blocks": [dict(block) for _ in range(blocks)],
        "head": floats(width, 1000),
    }
    return trained(loss, params, {"image": floats(batch, image, image, 3), "label": whole(batch)})


def rnn(batch: int = 256, length: int = 64, width: int = 1024) -> Unseen:
    """A gated recurrence over time, as a loop."""

    def loss(p: Params, b: Batch) -> Any:
        def tick(h: Any, x: Any) -> tuple[Any, Any]:
            update, reset, new = jnp.split(x @ p["in"], 3, -1)
            at_update, at_reset, at_new = jnp.split(h @ p["recurrent"], 3, -1)
            gate = jax.nn.sigmoid(update + at_update)
            h = gate * h + (1 - gate) * jnp.tanh(new + jax.nn.sigmoid(reset + at_reset) * at_new)
            return h, h

        x = p["table"][b["tokens"]].swapaxes(0, 1)
        _, seen = jax.lax.scan(tick, jnp.zeros((batch, width)), x)
        scores = seen[:-1] @ p["head"]
        return optax.softmax_cross_entropy_with_integer_labels(scores, b["tokens"].T[1:]).mean()

    params = {
        "table": floats(2048, width),
        "in": floats(width, 3 * width),
        "recurrent": floats(width, 3 * width),
        "head": floats(width, 2048),
    }
    return trained(loss, params, {"tokens": whole(batch, length)})


def diffusion(batch: int = 128, patches: int = 256, width: int = 384, layers: int = 6) -> Unseen:
    """A transformer whose norms depend on a time, its layers a loop."""
    heads = 6

    def block(x: Any, p: Params, at: Any) -> Any:
        shift, scale, gate, shift2, scale2, gate2 = jnp.split((at @ p["adapt"])[:, None], 6, -1)
        y = normalized(x) * (1 + scale) + shift
        q, k, v = jnp.split((y @ p["qkv"]).reshape(batch, patches, heads, -1), 3, -1)
        weights = jax.nn.softmax(jnp.einsum("bihd,bjhd->bhij", q, k) / (width // heads) ** 0.5)
        x = x + gate * (jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(x.shape) @ p["out"])
        y = normalized(x) * (1 + scale2) + shift2
        return x + gate2 * (jax.nn.gelu(y @ p["up"]) @ p["down"])

    def loss(p: Params, b: Batch) -> Any:
        at = jax.nn.silu(b["time"][:, None] * p["time"])
        x, _ = jax.lax.scan(lambda x, layer: (block(x, layer, at), None), b["noisy"] @ p["in"], p["layers"])
        return jnp.square(normalized(x) @ p["last"] - b["noise"]).mean()

    stack = {
        "adapt": floats(layers, width, 6 * width),
        "qkv": floats(layers, width, 3 * width),
        "out": floats(layers, width, width),
        "up": floats(layers, width, 4 * width),
        "down": floats(layers, 4 * width, width),
    }
    params = {"time": floats(width), "in": floats(16, width), "last": floats(width, 16), "layers": stack}
    batch_of = {
        "noisy": floats(batch, patches, 16),
        "noise": floats(batch, patches, 16),
        "time": floats(batch),
    }
    return trained(loss, params, batch_of)


def vae(batch: int = 256, image: int = 32, width: int = 128, code: int = 64) -> Unseen:
    """Convolutions to a random code, and transposed ones back."""

    def back(x: Any, kernel: Any) -> Any:
        return jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(p: Params, b: Batch) -> Any:
        x = jax.nn.relu(conv(jax.nn.relu(conv(b["image"], p["first"], 2)), p["second"], 2))
        mean, spread = jnp.split(x.reshape(batch, -1) @ p["to code"], 2, -1)
        drawn = mean + jnp.exp(spread) * b["noise"]
        y = jax.nn.relu(drawn @ p["from code"]).reshape(x.shape)
        y = back(jax.nn.relu(back(y, p["third"])), p["last"])
        apart = jnp.square(mean) + jnp.exp(2 * spread) - 2 * spread
        return jnp.square(y - b["image"]).mean() + 1e-3 * apart.mean()

    flat = (image // 4) ** 2 * 2 * width
    params = {
        "first": floats(3, 3, 3, width),
        "second": floats(3, 3, width, 2 * width),
        "to code": floats(flat, 2 * code),
        "from code": floats(code, flat),
        "third": floats(3, 3, 2 * width, width),
        "last": floats(3, 3, width, 3),
    }
    return trained(loss, params, {"image": floats(batch, image, image, 3), "noise": floats(batch, code)})


def tables(batch: int = 8192, width: int = 64, fields: int = 8) -> Unseen:
    """Embedding tables of many rows, their products in pairs, and a small network."""

    def loss(p: Params, b: Batch) -> Any:
        found = jnp.stack([p[f"table {i}"][b["ids"][:, i]] for i in range(fields)], 1)
        pairs = jnp.einsum("bid,bjd->bij", found, found).reshape(batch, -1)
        x = jax.nn.relu(jnp.concatenate([pairs, b["numbers"]], -1) @ p["in"])
        scores = (jax.nn.relu(x @ p["middle"]) @ p["out"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(scores, b["clicks"]).mean()

    params = {f"table {i}": floats(100_000, width) for i in range(fields)}
    params |= {"in": floats(fields**2 + 16, 1024), "middle": floats(1024, 1024), "out": floats(1024, 1)}
    return trained(
        loss, params, {"ids": whole(batch, fields), "numbers": floats(batch, 16), "clicks": floats(batch)}
    )


def gated(batch: int = 64, length: int = 256, width: int = 512, blocks: int = 3) -> Unseen:
    """Products over positions that gate products over channels, written out."""

    def loss(p: Params, b: Batch) -> Any:
        x = p["table"][b["tokens"]]
        for block in p["blocks"]:
            u, v = jnp.split(jax.nn.gelu(normalized(x) @ block["in"]), 2, -1)
            v = jnp.einsum("bld,lm->bmd", normalized(v), block["space"])
            x = x + (u * v) @ block["out"]
        scores = normalized(x) @ p["table"].T
        return optax.softmax_cross_entropy_with_integer_labels(scores, b["tokens"]).mean()

    block = {
        "in": floats(width, 4 * width),
        "space": floats(length, length),
        "out": floats(2 * width, width),
    }
    params = {"table": floats(4096, width), "blocks": [dict(block) for _ in range(blocks)]}
    return trained(loss, params, {"tokens": whole(batch, length)})


def graph(batch: int = 64, nodes: int = 128, width: int = 256, rounds: int = 3) -> Unseen:
    """Messages between all pairs of nodes, as of a molecule."""

    def loss(p: Params, b: Batch) -> Any:
        h = b["nodes"] @ p["in"]
        for layer in p["layers"]:
            pair = (h @ layer["from"])[:, :, None] + (h @ layer["to"])[:, None] + b["edges"] @ layer["edge"]
            weight = jax.nn.sigmoid(pair @ layer["gate"])
            h = h + jnp.tanh((weight * jax.nn.silu(pair)).sum(2) @ layer["out"])
        return jnp.square((h @ p["last"]).sum((1, 2)) - b["energy"]).mean()

    layer = {
        "from": floats(width, width),
        "to": floats(width, width),
        "edge": floats(8, width),
        "gate": floats(width, 1),
        "out": floats(width, width),
    }
    params = {
        "in": floats(32, width),
        "layers": [dict(layer) for _ in range(rounds)],
        "last": floats(width, 1),
    }
    shapes = {
        "nodes": floats(batch, nodes, 32),
        "edges": floats(batch, nodes, nodes, 8),
        "energy": floats(batch),
    }
    return trained(loss, params, shapes)


UNSEEN: Mapping[str, Callable[[], Unseen]] = {
    made.__name__: made for made in (unet, gan, experts, convnet, rnn, diffusion, vae, tables, gated, graph)
}
"""Every model, by name."""
