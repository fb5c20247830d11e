"""Attention is recognised by its meaning, and what is not attention stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.search.ir._jax_kernels import cudnn_for
from autoshard.search.ir.attention import blocks
from autoshard.search.ir.attention.op import BACKWARD, FORWARD
from autoshard.search.ir.graph import Graph, walk
from autoshard.search.ir.trace import trace
from autoshard.search.memory.attention.rewriting import blockwise
from tests.attentions import (
    MASKS,
    by_hand,
    by_jax,
    by_softmax,
    causal,
    drawn,
    gradients,
    named,
    shapes,
)
from tests.search.memory.evaluation import evaluated

LENGTH = 24
HOPPER = (9, 0)

FORMS = {
    **{f"softmax, {name}": by_softmax(mask) for name, mask in MASKS.items()},
    **{f"by hand, {name}": by_hand(mask) for name, mask in MASKS.items()},
    "JAX": by_jax(),
    "JAX, causal": by_jax(is_causal=True),
    "JAX, window": by_jax(is_causal=True, local_window_size=(3, 0)),
}


def traced(function, heads=4, key_heads=2, length=LENGTH):
    with jax.enable_x64():
        return trace(function, *shapes(2, length, heads, key_heads, 8))


def counts(graph: Graph | None) -> tuple[int, int]:
    return (0, 0) if graph is None else (len(named(graph, FORWARD)), len(named(graph, BACKWARD)))


def scores_left(graph: Graph, length: int) -> bool:
    """Whether an op reads or makes scores; a mask alone has fewer dimensions."""
    used = [one.values[v] for _, one in walk(graph) for op in one.ops for v in (*op.operands, *op.outputs)]
    return any(len(v.shape) > 3 and v.shape.count(length) > 1 for v in used)


@pytest.mark.parametrize("form", FORMS)
def test_no_score_is_left(form):
    step = blockwise(traced(gradients(FORMS[form])))
    assert step is not None
    assert counts(step.graph) == (1, 1)
    assert not scores_left(step.graph, LENGTH)


@pytest.mark.parametrize("form", ["softmax, causal", "by hand, windowed", "JAX, causal"])
def test_a_single_example_in_bfloat16_is_recognised(form):
    step = blockwise(trace(gradients(FORMS[form]), *shapes(1, LENGTH, 8, 2, 16, "bfloat16")))
    assert counts(None if step is None else step.graph) == (1, 1)


def test_a_checkpoint_has_two_forward_ops():
    step = blockwise(traced(gradients(by_softmax(), recomputes=True)))
    assert step is not None
    assert counts(step.graph) == (2, 1)


@pytest.mark.parametrize("recomputes", [False, True])
def test_loops_over_layers_have_an_attention_each(recomputes):
    def run(x, weights):
        def layer(x, w):
            attend = jax.checkpoint(by_softmax()) if recomputes else by_softmax()
            q, k, v = ((x @ w[n]).reshape(*x.shape[:2], -1, 4) for n in range(3))
            return x + attend(q, k, v, None) @ w[3], None

        loss = lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)  # noqa: E731
        return jax.grad(loss)(weights)

    length = 512  # the mask is large enough to be made in the loop
    x, w = jax.ShapeDtypeStruct((2, length, 16), "float32"), jax.ShapeDtypeStruct((3, 4, 16, 16), "float32")
    step = blockwise(trace(run, x, w))
    assert step is not None
    assert counts(step.graph) == (2, 1)
    assert not scores_left(step.graph, length)


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"is_causal": True, "local_window_size": (3, 0)}]
)
def test_cudnns_attention_becomes_blockwise(options):
    with cudnn_for(HOPPER):
        function = gradients(by_jax(implementation="cudnn", **options))
        step = blockwise(trace(function, *shapes(2, 128, 4, 2, 64, "bfloat16")))
    assert step is not None
    assert counts(step.graph) == (1, 1)
    (scores,) = {op.params["scores"] for op in named(step.graph, FORWARD)}
    hidden = np.zeros((128, 128), bool) if scores.mask is None else scores.sampled(np.arange(128))
    i, j = np.arange(128)[:, None], np.arange(128)
    shown = np.full((128, 128), True) if not options else i >= j
    shown = shown & (i - j <= 3) if "local_window_size" in options else shown
    np.testing.assert_array_equal(hidden, ~shown)


def test_a_bias_stays_with_cudnn():
    def attend(q, k, v, segments):
        bias = jnp.zeros((1, 4, 128, 128), q.dtype)
        return jax.nn.dot_product_attention(q, k, v, bias=bias, implementation="cudnn")

    with cudnn_for(HOPPER):
        step = trace(gradients(attend), *shapes(2, 128, 4, 2, 64, "bfloat16"))
    assert blockwise(step) is None


def _dropping(scores, segments):
    keep = jax.random.bernoulli(jax.random.key(0), 0.9, scores.shape)
    return jnp.where(keep, causal(scores, segments), -1e30)


def _returning_weights(q, k, v, segments):
    p = jax.nn.softmax(jnp.einsum("bqhd,bshd->bhqs", q, q))
    return p, jnp.einsum("bhqs,bshd->bqhd", p, q)


def _through_the_maximum(q, k, v, segments):
    scores = jnp.einsum("bqhd,bshd->bhqs", q, q)
    e = jnp.exp(scores - scores.max(-1, keepdims=True) ** 2)
    return jnp.einsum("bhqs,bshd->bqhd", e / e.sum(-1, keepdims=True), q)


def _squared(q, k, v, segments):
    e = jnp.exp(jnp.einsum("bqhd,bshd->bhqs", q, q))
    return jnp.einsum("bhqs,bshd->bqhd", e / (e * e).sum(-1, keepdims=True), q)


@pytest.mark.parametrize(
    "function",
    [
        gradients(by_softmax(_dropping)),
        _returning_weights,
        gradients(_through_the_maximum),
        gradients(_squared),
        gradients(by_softmax(lambda scores, segments: 30 * jnp.tanh(scores / 30))),
    ],
    ids=["random mask", "weights are returned", "gradient of the shift", "no softmax", "capped"],
)
def test_what_is_no_attention_in_blocks_stays(function):
    assert blockwise(traced(function)) is None


@pytest.mark.devices
@pytest.mark.parametrize(
    "form",
    [
        "softmax, packed",
        *(pytest.param(f, marks=pytest.mark.slow) for f in ("by hand, biased", "softmax, windowed")),
    ],
)
def test_blocks_have_the_numbers_of_the_whole(form, monkeypatch):
    monkeypatch.setattr(blocks, "MAX_BLOCK", 16)
    function = gradients(FORMS[form])
    step = blockwise(traced(function, length=64))
    assert step is not None
    with jax.enable_x64():
        arrays = drawn(shapes(2, 64, 4, 2, 8))
        whole = jax.tree.leaves(jax.jit(function)(*arrays))
        for ours, theirs in zip(evaluated(step.graph, *arrays), whole, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)
