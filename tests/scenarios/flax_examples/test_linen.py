"""The training loops of Flax's Linen examples, in their style and tiny: https://github.com/google/flax/tree/main/examples.

Decorated and nothing else changed, they train as under `jax.jit`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import struct
from flax.training import dynamic_scale, train_state

from tests.scenarios.flax_examples.numbers import NUM_STEPS, assert_trains_alike

pytestmark = pytest.mark.devices


def numbers_of(state, *others):
    return others, state.step, state.params, jax.tree.leaves(state.opt_state)


# --- WMT: an encoder and a decoder that share a table, smoothed labels, a loss scale that undoes steps


class Block(nn.Module):
    """Of the encoder, or, where there is something encoded to attend to, of the decoder."""

    width: int
    dropout: float = 0.1

    @nn.compact
    def __call__(self, x, mask, encoded=None, encoded_mask=None):
        attention = partial(
            nn.MultiHeadDotProductAttention,
            num_heads=2,
            use_bias=False,
            dropout_rate=self.dropout,
            deterministic=False,
        )
        dropout = nn.Dropout(self.dropout, deterministic=False)
        x = x + dropout(attention()(nn.LayerNorm()(x), mask=mask))
        if encoded is not None:
            x = x + dropout(attention()(nn.LayerNorm()(x), encoded, mask=encoded_mask))
        y = nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(x)))
        return x + dropout(nn.Dense(self.width)(y))


class Translator(nn.Module):
    vocab: int
    width: int

    @nn.compact
    def __call__(self, inputs, targets):
        table = nn.Embed(self.vocab, self.width)
        encoded = Block(self.width, name="encoder")(
            table(inputs), nn.make_attention_mask(inputs > 0, inputs > 0)
        )
        causal = nn.combine_masks(
            nn.make_attention_mask(targets > 0, targets > 0), nn.make_causal_mask(targets)
        )
        decoded = Block(self.width, name="decoder")(
            table(jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1]),
            causal,
            nn.LayerNorm()(encoded),
            nn.make_attention_mask(targets > 0, inputs > 0),
        )
        return table.attend(nn.LayerNorm()(decoded)) / self.width**0.5


class ScaledState(train_state.TrainState):
    dynamic_scale: dynamic_scale.DynamicScale


def train_wmt(jit):
    model = Translator(32, 16)

    def train_step(state, batch, learning_rate_fn, label_smoothing=0.0, dropout_rng=None):
        inputs, targets = batch["inputs"], batch["targets"]
        weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
        dropout_rng = jax.random.fold_in(dropout_rng, state.step)

        def loss_fn(params):
            logits = model.apply({"params": params}, inputs, targets, rngs={"dropout": dropout_rng})
            soft = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), label_smoothing)
            losses = optax.softmax_cross_entropy(logits, soft)
            return (losses * weights).sum() / weights.sum(), logits

        rate = learning_rate_fn(state.step)
        grad_fn = state.dynamic_scale.value_and_grad(loss_fn, has_aux=True)
        scale, is_finite, (loss, logits), grads = grad_fn(state.params)
        new = state.replace(dynamic_scale=scale).apply_gradients(grads=grads)
        either = partial(jax.tree.map, partial(jnp.where, is_finite))
        new = new.replace(
            opt_state=either(new.opt_state, state.opt_state), params=either(new.params, state.params)
        )
        hits = ((jnp.argmax(logits, -1) == targets) * weights).sum()
        return new, {"loss": loss, "accuracy": hits, "learning_rate": rate, "scale": scale.scale}

    step = jit(train_step, static_argnames=("learning_rate_fn", "label_smoothing"))
    params = jax.jit(model.init)(jax.random.key(0), *(jnp.ones((1, 8), jnp.int32),) * 2)["params"]
    state = ScaledState.create(
        apply_fn=model.apply,
        params=params,
        tx=optax.adamw(1e-2, b2=0.98, eps=1e-9),
        dynamic_scale=dynamic_scale.DynamicScale(
            growth_interval=2, fin_steps=jnp.int32(0), scale=jnp.float32(65536)
        ),
    )
    history, schedule = [], optax.linear_schedule(0, 1e-2, 10)
    for i in range(NUM_STEPS):
        rng = np.random.default_rng(i)
        tokens = rng.integers(1, 32, size=(2, 8, 8)) * (np.arange(8) < rng.integers(3, 9, size=(2, 8, 1)))
        batch = {"inputs": tokens[0].astype(np.int32), "targets": tokens[1].astype(np.int32)}
        state, metrics = step(
            state, batch, learning_rate_fn=schedule, label_smoothing=0.1, dropout_rng=jax.random.key(1)
        )
        history.append(metrics)
    return numbers_of(state, history, state.dynamic_scale.fin_steps)


# --- WMT's loss scale alone


def train_scaled(jit):
    @jit
    def train_step(state, x, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, x)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        scale, is_finite, loss, grads = state.dynamic_scale.value_and_grad(loss_fn)(state.params)
        new = state.replace(dynamic_scale=scale).apply_gradients(grads=grads)
        params = jax.tree.map(partial(jnp.where, is_finite), new.params, state.params)
        return new.replace(params=params), {"loss": loss, "scale": scale.scale}

    model = nn.Dense(64)
    state = ScaledState.create(
        apply_fn=model.apply,
        params=model.init(jax.random.key(0), jnp.ones((1, 256)))["params"],
        tx=optax.sgd(0.1, momentum=0.9),
        dynamic_scale=dynamic_scale.DynamicScale(
            growth_interval=2, fin_steps=jnp.int32(0), scale=jnp.float32(2.0**127)
        ),
    )
    history = []
    for i in range(NUM_STEPS):
        rng = np.random.default_rng(i)
        x, labels = (
            4 * rng.standard_normal((256, 256), np.float32),
            rng.integers(64, size=256, dtype=np.int32),
        )
        state, metrics = train_step(state, x, labels)
        history.append(metrics)
    return numbers_of(state, history)


# --- PPO: convolutions over bytes, several updates in one step, a static batch size


class ActorCritic(nn.Module):
    num_actions: int

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32) / 255.0
        x = nn.relu(nn.Conv(8, (4, 4), strides=(2, 2), name="conv1")(x))
        x = nn.relu(nn.Conv(16, (3, 3), strides=(1, 1), name="conv2")(x))
        x = nn.relu(nn.Dense(32, name="hidden")(x.reshape((x.shape[0], -1))))
        logits = nn.Dense(self.num_actions, name="logits")(x)
        return nn.log_softmax(logits), nn.Dense(1, name="value")(x)


def ppo_loss(params, apply_fn, minibatch, clip_param, value_weight, entropy_weight):
    states, actions, old_log_probs, returns, advantages = minibatch
    log_probs, values = apply_fn({"params": params}, states)
    entropy = jnp.sum(-jnp.exp(log_probs) * log_probs, axis=1).mean()
    taken = jax.vmap(lambda row, action: row[action])(log_probs, actions)
    ratios = jnp.exp(taken - old_log_probs)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = advantages * jax.lax.clamp(1.0 - clip_param, ratios, 1.0 + clip_param)
    policy = -jnp.mean(jnp.minimum(ratios * advantages, clipped))
    return policy + value_weight * jnp.mean((returns - values[:, 0]) ** 2) - entropy_weight * entropy


def train_ppo(jit):
    @partial(jit, static_argnums=(2,))
    def train_step(state, trajectories, batch_size, *, clip_param, value_weight, entropy_weight):
        count = trajectories[0].shape[0] // batch_size
        trajectories = jax.tree.map(lambda x: x.reshape((count, batch_size, *x.shape[1:])), trajectories)
        total = 0.0
        for minibatch in zip(*trajectories, strict=True):
            loss, grads = jax.value_and_grad(ppo_loss)(
                state.params, state.apply_fn, minibatch, clip_param, value_weight, entropy_weight
            )
            total += loss
            state = state.apply_gradients(grads=grads)
        return state, total

    model, history = ActorCritic(4), []
    params = jax.jit(model.init)(jax.random.key(0), jnp.ones((1, 12, 12, 4)))["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
    for i in range(NUM_STEPS):
        rng = np.random.default_rng(i)
        trajectories = (
            rng.integers(256, size=(32, 12, 12, 4), dtype=np.uint8),
            rng.integers(4, size=32, dtype=np.int32),
            np.log(rng.uniform(0.2, 0.3, size=32)).astype(np.float32),
            *rng.standard_normal((2, 32), np.float32),
        )
        share = 0.1 * (1 - i / NUM_STEPS)
        state, loss = train_step(
            state, trajectories, 16, clip_param=share, value_weight=0.5, entropy_weight=0.01
        )
        history.append(loss)
    return numbers_of(state, history)


# --- VAE: losses under `vmap`, noise by a key that is an argument; only the state comes back


class Vae(nn.Module):
    latents: int

    def setup(self):
        self.encoder, self.mean, self.log_variance = (
            nn.Dense(64),
            nn.Dense(self.latents),
            nn.Dense(self.latents),
        )
        self.decoder = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(128)])

    def __call__(self, x, key):
        hidden = nn.relu(self.encoder(x))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = jax.random.normal(key, log_variance.shape)
        return self.decoder(mean + noise * jnp.exp(0.5 * log_variance)), mean, log_variance


@jax.vmap
def kl_divergence(mean, log_variance):
    return -0.5 * jnp.sum(1 + log_variance - jnp.square(mean) - jnp.exp(log_variance))


@jax.vmap
def binary_cross_entropy(logits, labels):
    logits = nn.log_sigmoid(logits)
    return -jnp.sum(labels * logits + (1.0 - labels) * jnp.log(-jnp.expm1(logits)))


def train_vae(jit):
    def train_step(state, batch, z_rng, latents):
        def loss_fn(params):
            made, mean, log_variance = Vae(latents).apply({"params": params}, batch, z_rng)
            return binary_cross_entropy(made, batch).mean() + kl_divergence(mean, log_variance).mean()

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    step, rng = jit(train_step, static_argnames="latents"), jax.random.key(0)
    params = jax.jit(Vae(4).init)(rng, jnp.ones((64, 128)), rng)["params"]
    state = train_state.TrainState.create(apply_fn=Vae(4).apply, params=params, tx=optax.adam(1e-3))
    for i in range(NUM_STEPS):
        rng, key = jax.random.split(rng)
        batch = np.random.default_rng(i).integers(2, size=(64, 128)).astype(np.float32)
        state = step(state, batch, key, 4)
    return numbers_of(state)


# --- seq2seq: recurrent cells under `scan`, tokens drawn inside of it, lengths, an id that is traced


class DecoderCell(nn.RNNCellBase):
    features: int
    vocab: int

    @nn.compact
    def __call__(self, carry, _):
        state, latest = carry
        state, y = nn.LSTMCell(self.features)(state, latest)
        logits = nn.Dense(self.vocab)(y)
        token = jax.random.categorical(self.make_rng("lstm"), logits)
        drawn = jax.nn.one_hot(token, self.vocab, dtype=jnp.float32)
        return (state, drawn), (logits, drawn)

    @property
    def num_feature_axes(self):
        return 1


class Seq2seq(nn.Module):
    features: int
    vocab: int

    @nn.compact
    def __call__(self, query, answer):
        encoder = nn.RNN(nn.LSTMCell(self.features), return_carry=True, name="encoder")
        cell = DecoderCell(self.features, self.vocab)
        decoder = nn.RNN(cell, split_rngs={"params": False, "lstm": True}, name="decoder")
        state, _ = encoder(query, seq_lengths=jnp.argmax(jnp.argmax(query, -1) == 1, axis=-1))
        return decoder(answer[:, :-1], initial_carry=(state, answer[:, 0]))


def train_seq2seq(jit):
    @jit
    def train_step(state, batch, lstm_rng, eos_id):
        labels = batch["answer"][:, 1:]
        key = jax.random.fold_in(lstm_rng, state.step)
        ends = jnp.argmax(labels[:, :, eos_id], axis=-1)
        mask = jnp.arange(labels.shape[1]) <= ends[:, None]

        def loss_fn(params):
            logits, _ = state.apply_fn(
                {"params": params}, batch["query"], batch["answer"], rngs={"lstm": key}
            )
            return -jnp.mean(mask * jnp.sum(nn.log_softmax(logits) * labels, axis=-1)), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        is_right = jnp.argmax(logits, -1) == jnp.argmax(labels, -1)
        accuracy = jnp.mean(jnp.sum(is_right * mask, axis=-1) == ends + 1)
        return state.apply_gradients(grads=grads), {"loss": loss, "accuracy": accuracy}

    vocab, model, rng = 16, Seq2seq(16, 16), jax.random.key(0)
    params = model.init({"params": rng, "lstm": rng}, jnp.ones((1, 6, vocab)), jnp.ones((1, 5, vocab)))[
        "params"
    ]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(3e-3))
    history = []
    for i in range(NUM_STEPS):
        tokens = np.random.default_rng(i).integers(2, vocab, size=(16, 11))
        tokens[:, [5, 10]] = 1
        one_hot = np.eye(vocab, dtype=np.float32)[tokens]
        state, metrics = train_step(state, {"query": one_hot[:, :6], "answer": one_hot[:, 6:]}, rng, 1)
        history.append(metrics)
    return numbers_of(state, history)


# --- ogbg_molpcba: a graph network over ragged neighbourhoods, labels that are missing, metrics as a pytree


class Graphs(NamedTuple):
    """A batch of graphs, one after the other; the last one is padding."""

    nodes: Any
    edges: Any
    globals: Any
    senders: Any
    receivers: Any
    n_node: Any
    n_edge: Any


class GraphNet(nn.Module):
    width: int
    num_classes: int

    @nn.compact
    def __call__(self, graphs):
        def mlp(*inputs):
            x = nn.relu(nn.Dense(self.width)(jnp.concatenate(inputs, axis=-1)))
            return nn.Dropout(0.1, deterministic=False)(x)

        num_nodes, num_edges, num_graphs = len(graphs.nodes), len(graphs.edges), len(graphs.n_node)
        numbers = jnp.arange(num_graphs)
        graph_of_node = jnp.repeat(numbers, graphs.n_node, total_repeat_length=num_nodes)
        graph_of_edge = jnp.repeat(numbers, graphs.n_edge, total_repeat_length=num_edges)
        nodes, edges = nn.Dense(self.width)(graphs.nodes), nn.Dense(self.width)(graphs.edges)
        whole = nn.Dense(self.width)(graphs.globals)
        new_edges = mlp(edges, nodes[graphs.senders], nodes[graphs.receivers], whole[graph_of_edge])
        received = jax.ops.segment_sum(new_edges, graphs.receivers, num_nodes)
        sent = jax.ops.segment_sum(new_edges, graphs.senders, num_nodes)
        new_nodes = mlp(nodes, sent, received, whole[graph_of_node])
        pooled_nodes = jax.ops.segment_sum(new_nodes, graph_of_node, num_graphs)
        pooled_edges = jax.ops.segment_sum(new_edges, graph_of_edge, num_graphs)
        whole = nn.LayerNorm()(mlp(whole, pooled_nodes, pooled_edges) + whole)
        return graphs._replace(globals=nn.Dense(self.num_classes)(whole))


@struct.dataclass
class Metrics:
    total: jax.Array
    count: jax.Array
    hits: jax.Array


def draw_graphs(seed, num_graphs=8, num_nodes=64, num_edges=128):
    rng = np.random.default_rng(seed)
    n_node = rng.multinomial(num_nodes - 2 * num_graphs, [1 / num_graphs] * num_graphs) + 2
    n_edge = rng.multinomial(num_edges, n_node / num_nodes)
    starts = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    ends = starts + rng.integers(np.repeat(n_node, n_edge), size=(2, num_edges))
    labels = rng.integers(2, size=(num_graphs, 6)).astype(np.float32)
    labels[rng.random(labels.shape) < 0.3] = np.nan
    return Graphs(
        rng.standard_normal((num_nodes, 9), np.float32),
        rng.standard_normal((num_edges, 3), np.float32),
        labels,
        *ends.astype(np.int32),
        n_node.astype(np.int32),
        n_edge.astype(np.int32),
    )


def train_graph(jit):
    @jit
    def train_step(state, graphs, rngs):
        def loss_fn(params, graphs):
            labels = graphs.globals
            blank = graphs._replace(globals=jnp.ones([graphs.n_node.shape[0], 1]))
            logits = state.replace(params=params).apply_fn(params, blank, rngs=rngs).globals
            is_padding = jnp.arange(len(labels)) == len(labels) - 1
            mask = ~jnp.isnan(labels) & ~is_padding[:, None]
            labels = jnp.where(mask, labels, -1)
            losses = jnp.maximum(logits, 0) - logits * labels + jnp.log(1 + jnp.exp(-jnp.abs(logits)))
            return jnp.sum(jnp.where(mask, losses, 0)) / jnp.sum(mask), (losses, logits, labels, mask)

        (_, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, graphs)
        losses, logits, labels, mask = aux
        hits = jnp.sum(((logits > 0) == labels) & mask)
        return state.apply_gradients(grads=grads), Metrics(jnp.sum(losses, where=mask), jnp.sum(mask), hits)

    model, rng, history = GraphNet(16, 6), jax.random.key(0), []
    blank = draw_graphs(0)._replace(globals=jnp.ones((8, 1)))
    params = jax.jit(model.init)({"params": rng, "dropout": rng}, blank)
    tx = optax.sgd(0.01, momentum=0.9)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for i in range(NUM_STEPS):
        rng, dropout_rng = jax.random.split(rng)
        state, metrics = train_step(state, draw_graphs(i), {"dropout": dropout_rng})
        history.append(metrics)
    return numbers_of(state, history)


# `train_scaled` is a train state of Linen with WMT's loss scale. Loops, attention and convolutions are trained by
# tests/executors/test_numerics.py; keys, look-ups and custom gradients by tests/autoshard/test_trace_any_step.py; static
# arguments are those of tests/autoshard/test_signatures.py
SLOW = [train_seq2seq, train_wmt, train_ppo, train_vae, train_graph]


@pytest.mark.parametrize(
    "train",
    [
        train_scaled,
        *(pytest.param(t, marks=pytest.mark.slow) for t in SLOW),
    ],
)
def test_an_example_trains_as_under_jit(train):
    assert_trains_alike(train, jax.jit)
