"""The training loops of Flax's NNX examples, in their style and tiny: https://github.com/google/flax/tree/main/examples.

Decorated and nothing else changed, they train as under `nnx.jit`; what they change in place, they change in place.
"""

from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import train_state

from tests.scenarios.flax_examples.numbers import NUM_STEPS, assert_trains_alike

pytestmark = pytest.mark.devices


def images(i, size=8, channels=1, count=16, num_classes=10):
    rng = np.random.default_rng(i)
    pixels = rng.random((count, size, size, channels), np.float32)
    return {"image": pixels, "label": rng.integers(num_classes, size=count, dtype=np.int32)}


def sentences(i, count=8, length=8, vocab=32):
    """Of unequal lengths, padded with zeros."""
    rng = np.random.default_rng(i)
    tokens = rng.integers(1, vocab, size=(count, length), dtype=np.int32)
    return np.where(np.arange(length) < rng.integers(3, length + 1, size=(count, 1)), tokens, 0)


def states_of(*objects):
    return [nnx.to_pure_dict(nnx.state(each)) for each in objects]


# --- MNIST: convolutions, statistics, dropout by streams that are an argument, training and evaluation in turn


class Cnn(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(0.025)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(64, 32, rngs=rngs)
        self.dropout2 = nnx.Dropout(0.025)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x, rngs):
        x = self.pool(nnx.relu(self.norm1(self.dropout1(self.conv1(x), rngs=rngs))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = nnx.relu(self.dropout2(self.linear1(x.reshape(x.shape[0], -1)), rngs=rngs))
        return self.linear2(x)


def digit_loss(model, batch, rngs):
    logits = model(batch["image"], rngs)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits


def train_mnist(jit):
    @jit
    def train_step(model, optimizer, metrics, batch, rngs):
        (loss, logits), grads = nnx.value_and_grad(digit_loss, has_aux=True)(model, batch, rngs)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, grads)

    @jit
    def eval_step(model, metrics, batch):
        loss, logits = digit_loss(model, batch, None)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])

    model = Cnn(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    rngs, history = nnx.Rngs(0), []
    for epoch in range(2):
        model.train()
        for i in range(NUM_STEPS):
            train_step(model, optimizer, metrics, images(NUM_STEPS * epoch + i), rngs)
        history.append(metrics.compute())
        metrics.reset()
        model.eval()
        eval_step(model, metrics, images(100))
        history.append(metrics.compute())
        metrics.reset()
    return history, states_of(model, optimizer, rngs)


# --- ImageNet: residual blocks with statistics, a schedule, weight decay as a part of the loss


class ResidualBlock(nnx.Module):
    def __init__(self, features, out_features, strides, rngs):
        conv = partial(nnx.Conv, use_bias=False, rngs=rngs)
        norm = partial(nnx.BatchNorm, momentum=0.9, epsilon=1e-5, rngs=rngs)
        self.conv1, self.norm1 = conv(features, out_features, (3, 3), strides=strides), norm(out_features)
        self.conv2 = conv(out_features, out_features, (3, 3))
        self.norm2 = norm(out_features, scale_init=nnx.initializers.zeros_init())
        self.projected = nnx.data(None)
        if strides != 1:
            self.projected = nnx.Sequential(
                conv(features, out_features, (1, 1), strides=strides), norm(out_features)
            )

    def __call__(self, x):
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.projected is None else self.projected(x)))


class ResNet(nnx.Module):
    def __init__(self, features, num_classes, rngs):
        self.stem = nnx.Conv(3, features, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List(
            [ResidualBlock(features, features, 1, rngs), ResidualBlock(features, 2 * features, 2, rngs)]
        )
        self.head = nnx.Linear(2 * features, num_classes, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(axis=(1, 2)))


def train_imagenet(jit):
    learning_rate = optax.join_schedules(
        [optax.linear_schedule(0.0, 0.1, 2), optax.cosine_decay_schedule(0.1, 10)], boundaries=[2]
    )

    @jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch["image"])
            one_hot = jax.nn.one_hot(batch["label"], 10)
            weights = [x for x in jax.tree.leaves(nnx.state(model, nnx.Param)) if x.ndim > 1]
            penalty = 0.5 * 1e-4 * sum(jnp.sum(w**2) for w in weights)
            return optax.softmax_cross_entropy(logits, one_hot).mean() + penalty, logits

        step = optimizer.step[...]
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        accuracy = jnp.mean(jnp.argmax(logits, -1) == batch["label"])
        return {"loss": loss, "accuracy": accuracy, "learning_rate": learning_rate(step)}

    model = ResNet(8, 10, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(learning_rate, momentum=0.9, nesterov=True), wrt=nnx.Param)
    model.train()
    history = [train_step(model, optimizer, images(i, channels=3)) for i in range(NUM_STEPS)]
    return history, states_of(model, optimizer)


# --- LM1B: a value of a state, in which the module's graph is static; arguments that are static


class TrainState(train_state.TrainState):
    graphdef: Any = flax.struct.field(pytree_node=False)


class DecoderBlock(nnx.Module):
    def __init__(self, width, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.attention = nnx.MultiHeadAttention(
            2, width, use_bias=False, dropout_rate=0.1, decode=False, keep_rngs=False, rngs=rngs
        )
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1)

    def __call__(self, x, mask, rngs):
        x = x + self.dropout(self.attention(self.norm1(x), mask=mask, rngs=rngs), rngs=rngs)
        return x + self.dropout(self.down(nnx.relu(self.up(self.norm2(x)))), rngs=rngs)


class TransformerLM(nnx.Module):
    def __init__(self, vocab, width, length, rngs):
        self.embed = nnx.Embed(vocab, width, rngs=rngs)
        self.positions = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, length, width)))
        self.blocks = nnx.List([DecoderBlock(width, rngs)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens, rngs):
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        mask = nnx.combine_masks(
            nnx.make_attention_mask(tokens > 0, tokens > 0), nnx.make_causal_mask(tokens)
        )
        x = self.embed(shifted) + self.positions[...]
        for block in self.blocks:
            x = block(x, mask, rngs)
        return self.embed.attend(self.norm(x))


def weighted_cross_entropy(logits, targets, weights, label_smoothing=0.0):
    """Summed, less its least value, and by how many it is to be divided."""
    vocab = logits.shape[-1]
    high, low = 1 - label_smoothing, label_smoothing / (vocab - 1)
    least = -(high * jnp.log(high) + (vocab - 1) * low * jnp.log(low + 1e-20))
    soft = jnp.where(jax.nn.one_hot(targets, vocab, dtype=bool), high, low)
    loss = -jnp.sum(soft * jax.nn.log_softmax(logits), axis=-1) - least
    return (loss * weights).sum(), weights.sum()


def train_lm1b(jit):
    def train_step(state, batch, learning_rate_fn, label_smoothing=0.0, dropout_rng=None):
        inputs, positions = (batch.get(k) for k in ("inputs", "inputs_position"))
        assert positions is None  # the examples are not packed
        weights = jnp.where(inputs > 0, 1, 0).astype(jnp.float32)
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)

        def loss_fn(params):
            module = nnx.merge(state.graphdef, params)
            module.set_attributes(deterministic=False)
            logits = module(inputs, nnx.Rngs(dropout=dropout_rng))
            loss, total = weighted_cross_entropy(logits, inputs, weights, label_smoothing)
            return loss / total, logits

        rate = learning_rate_fn(state.step)
        (_, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        loss, total = weighted_cross_entropy(logits, inputs, weights)
        hits = jnp.sum((jnp.argmax(logits, -1) == inputs) * weights)
        metrics = {"loss": loss, "accuracy": hits, "denominator": total, "learning_rate": rate}
        return state.apply_gradients(grads=grads), metrics

    step = jit(train_step, static_argnums=(2, 3))
    learning_rate = optax.join_schedules(
        [optax.linear_schedule(0, 0.01, 2), lambda count: 0.01 * (count + 2) ** -0.5 * 2**0.5], boundaries=[2]
    )
    graphdef, params = nnx.split(TransformerLM(32, 16, 8, nnx.Rngs(0)), nnx.Param)
    optimizer = optax.adamw(learning_rate, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1)
    state = TrainState.create(apply_fn=graphdef.apply, params=params, tx=optimizer, graphdef=graphdef)
    history, key = [], jax.random.key(1)
    for i in range(NUM_STEPS):
        state, metrics = step(state, {"inputs": sentences(i)}, learning_rate, 0.1, key)
        history.append(metrics)
    return history, state.step, nnx.to_pure_dict(state.params), jax.tree.leaves(state.opt_state)


# --- LM1B's state alone: one layer


def train_layer(jit):
    def train_step(state, batch, learning_rate_fn):
        def loss_fn(params):
            logits = nnx.merge(state.graphdef, params)(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "rate": learning_rate_fn(state.step)}

    step, learning_rate = jit(train_step, static_argnums=2), optax.linear_schedule(0.1, 0, 10)
    graphdef, params = nnx.split(nnx.Linear(256, 64, rngs=nnx.Rngs(0)), nnx.Param)
    optimizer = optax.sgd(learning_rate, momentum=0.9)
    state = TrainState.create(apply_fn=graphdef.apply, params=params, tx=optimizer, graphdef=graphdef)
    history = []
    for i in range(NUM_STEPS):
        rng = np.random.default_rng(i)
        batch = {"x": rng.standard_normal((256, 256), np.float32), "labels": rng.integers(64, size=256)}
        state, metrics = step(state, batch, learning_rate)
        history.append(metrics)
    return history, state.step, nnx.to_pure_dict(state.params), jax.tree.leaves(state.opt_state)


# --- Gemma: grouped heads, rotary positions, gated layers, tied tables; metrics with masks of their own


class RmsNorm(nnx.Module):
    def __init__(self, width):
        self.scale = nnx.Param(jnp.zeros(width))

    def __call__(self, x):
        return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * (1 + self.scale[...])


class Einsum(nnx.Module):
    def __init__(self, text, shape, rngs):
        self.text, self.w = text, nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.text, x, self.w[...])


def rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[..., None, None] / 10_000 ** (np.arange(half) / half)
    first, second = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class GemmaBlock(nnx.Module):
    def __init__(self, width, heads, kv_heads, rngs):
        size = width // heads
        self.groups = heads // kv_heads
        self.norm1, self.norm2, self.after = RmsNorm(width), RmsNorm(width), RmsNorm(width)
        self.query = Einsum("btd,ndh->btnh", (heads, width, size), rngs)
        self.key_value = Einsum("bsd,ckdh->cbskh", (2, kv_heads, width, size), rngs)
        self.out = Einsum("btnh,nhd->btd", (heads, size, width), rngs)
        self.gate = Einsum("btd,cdf->cbtf", (2, width, 4 * width), rngs)
        self.down = nnx.Linear(4 * width, width, use_bias=False, rngs=rngs)

    def __call__(self, x, positions, mask):
        y = self.norm1(x)
        (key, value), query = self.key_value(y), rotated(self.query(y), positions)
        b, t, n, h = query.shape
        grouped = query.reshape(b, t, n // self.groups, self.groups, h) * h**-0.5
        scores = jnp.einsum("btkgh,bskh->btkgs", grouped, rotated(key, positions))
        scores = 50.0 * jnp.tanh(scores / 50.0)
        shares = jax.nn.softmax(jnp.where(mask[:, :, None, None, :], scores, -2e38), axis=-1)
        mixed = jnp.einsum("btkgs,bskh->btkgh", shares, value).reshape(b, t, n, h)
        x = x + self.after(self.out(mixed))
        gate, up = self.gate(self.norm2(x))
        return x + self.down(nnx.gelu(gate) * up)


class Gemma(nnx.Module):
    def __init__(self, vocab, width, num_layers, rngs):
        self.table = nnx.Param(nnx.initializers.normal(0.1)(rngs.params(), (vocab, width)))
        self.layers = nnx.List([GemmaBlock(width, 4, 2, rngs) for _ in range(num_layers)])
        self.norm, self.dropout = RmsNorm(width), nnx.Dropout(0.1)

    def __call__(self, tokens, positions, mask, rngs):
        x = self.table[...][tokens] * self.table.shape[1] ** 0.5
        for layer in self.layers:
            x = self.dropout(layer(x, positions, mask), rngs=rngs)
        logits = self.norm(x) @ self.table[...].T
        return 30.0 * jnp.tanh(logits / 30.0), None


def train_gemma(jit):
    def train_step(model, optimizer, rngs, batch, metrics, label_smoothing=0.0, pad_id=0):
        tokens, targets = batch["inputs"], batch["targets"]
        mask = tokens > pad_id
        causal = jnp.tril(jnp.ones((tokens.shape[1],) * 2, bool))[None] & mask[:, None, :]
        positions = jnp.maximum(jnp.cumsum(mask, axis=-1) - 1, 0)

        def loss_fn(model, rngs):
            logits, _ = model(tokens, positions, causal, rngs)
            loss, total = weighted_cross_entropy(logits, targets, mask.astype(jnp.float32), label_smoothing)
            return loss / total, logits

        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, rngs.fork())
        optimizer.update(model, grads)
        metrics.update(loss=loss, logits=logits, labels=targets, mask={"accuracy": mask})

    step = jit(train_step, static_argnames=("label_smoothing", "pad_id"))
    model, rngs = Gemma(32, 16, 1, nnx.Rngs(0)), nnx.Rngs(dropout=1)
    # by default Adam takes a whole step along a gradient that is nothing but rounding
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2, eps=1e-6), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    for i in range(NUM_STEPS):
        tokens = sentences(i, length=9)
        batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
        step(model, optimizer, rngs, batch, metrics, label_smoothing=0.1)
    return metrics.compute(), states_of(model, optimizer, rngs)


# tests/executors/test_numerics.py trains a ResNet and attention, tests/autoshard/test_nnx_objects.py metrics in place and
# random streams, and `train_layer` has LM1B's state
SLOW = [train_imagenet, train_lm1b, train_gemma, train_mnist]


@pytest.mark.parametrize("train", [train_layer, *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW)])
def test_an_example_trains_as_under_nnx_jit(train):
    assert_trains_alike(train, nnx.jit)
