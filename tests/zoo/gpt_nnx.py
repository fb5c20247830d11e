"""A GPT in Flax NNX, trained in both styles that NNX users write.

`make_gpt_nnx` carries the parameters and the optax state; `make_gpt_nnx_optimizer` splits and merges
the model, its `nnx.Optimizer` and its dropout keys as one state.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights

from .case import Case, Integers


def attention(query, key, value, mask=None, **_):
    weights = dot_product_attention_weights(query, key, mask=mask)
    return jnp.einsum("...hqk,...khd->...qhd", weights, value)


class Block(nnx.Module):
    def __init__(self, hidden, heads, dropout, **options):
        # NNX's default takes the softmax in float32 even in a float64 model.
        own = {"attention_fn": attention} if options["dtype"] == jnp.float64 else {}
        self.norm1 = nnx.LayerNorm(hidden, **options)
        self.attn = nnx.MultiHeadAttention(heads, hidden, decode=False, **own, **options)
        self.norm2 = nnx.LayerNorm(hidden, **options)
        self.fc1 = nnx.Linear(hidden, 4 * hidden, **options)
        self.fc2 = nnx.Linear(4 * hidden, hidden, **options)
        self.dropout = nnx.Dropout(dropout, rngs=options["rngs"] if dropout else None)

    def __call__(self, x, mask):
        x = x + self.dropout(self.attn(self.norm1(x), mask=mask))
        return x + self.dropout(self.fc2(nnx.gelu(self.fc1(self.norm2(x)))))


class GPT(nnx.Module):
    def __init__(self, num_layers, hidden, heads, vocab, seq, dropout, **options):
        self.embed = nnx.Embed(vocab, hidden, **options)
        self.positions = nnx.Embed(seq, hidden, **options)
        self.blocks = nnx.List(Block(hidden, heads, dropout, **options) for _ in range(num_layers))
        self.norm = nnx.LayerNorm(hidden, **options)
        self.head = nnx.Linear(hidden, vocab, use_bias=False, **options)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def next_token_loss(model, batch):
    logits = model(batch["tokens"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def make_gpt_nnx(num_layers=2, hidden=32, heads=8, vocab=64, seq=16, batch=24, dtype=jnp.float32) -> Case:
    """State is `{"params", "opt_state"}`; the graph definition is a constant of the step."""
    optimizer = optax.adamw(1e-3)

    def create_model():
        return GPT(
            num_layers, hidden, heads, vocab, seq, 0.0, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)
        )

    graphdef, _, abstract_rest = nnx.split(nnx.eval_shape(create_model), nnx.Param, ...)
    assert not jax.tree.leaves(abstract_rest), "without dropout, parameters are the whole state"

    def init():
        params = nnx.state(create_model(), nnx.Param)
        return {"params": params, "opt_state": optimizer.init(params)}

    def step(state, batch):
        def loss_fn(params):
            return next_token_loss(nnx.merge(graphdef, params), batch)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt_state": opt_state}, {"loss": loss}

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("gpt_nnx", step, init, inputs)


def make_gpt_nnx_optimizer(
    num_layers=2, hidden=32, heads=8, vocab=64, seq=16, batch=24, dropout=0.1, dtype=jnp.float32
) -> Case:
    """State is the `nnx.State` of `(model, optimizer)`, dropout counters included."""

    def create():
        model = GPT(
            num_layers, hidden, heads, vocab, seq, dropout, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0)
        )
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    graphdef = nnx.graphdef(nnx.eval_shape(create))

    def init():
        return nnx.state(create())

    def step(state, batch):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = nnx.value_and_grad(next_token_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), {"loss": loss}

    inputs = {"tokens": Integers((batch, seq), vocab), "targets": Integers((batch, seq), vocab)}
    return Case("gpt_nnx_optimizer", step, init, inputs)
