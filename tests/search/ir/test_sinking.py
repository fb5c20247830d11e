"""Large constants of loops are made where they are read: the loops carry none, and the numbers are those of the step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from autoshard.executors.rewrite import evaluator
from autoshard.search.ir.graph import Step, walk
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.sinking import sunk
from autoshard.search.ir.trace import trace
from autoshard.search.memory.microbatches import microbatched

LAYERS, BATCH, SEQ, WIDTH = 3, 16, 256, 16
LARGE = BATCH * SEQ * SEQ
"""Elements of the scores, and of what is broadcast to their shape."""

FEW = BATCH // 2
"""Examples of which the numbers are compared: half of them still have scores of a mebibyte."""


def masked(x, w):
    """Attention of a sort."""
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    return x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ x


def scanned(layer):
    def step(params, x):
        def loss(params):
            return jnp.mean(jax.lax.scan(lambda x, w: (layer(x, w), None), x, params)[0] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return params - 0.1 * grads, value

    return step


def nested(x, w):
    """A loop inside each iteration."""
    return jax.lax.scan(lambda x, w: (masked(x, w), None), x, jnp.stack([w, -w]))[0]


def biased(x, w):
    """By a table that costs more than a light op to make."""
    table = jnp.exp(-jnp.abs(jnp.arange(SEQ)[:, None] - jnp.arange(SEQ)).astype(x.dtype))
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    return x + jax.nn.softmax(scores * jnp.exp(jnp.broadcast_to(table, scores.shape))) @ x


STEPS = {
    "plain": scanned(masked),
    "checkpoint": scanned(jax.checkpoint(masked)),
    "nested": scanned(nested),
}


def arguments(batch=BATCH):
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    return params, jax.ShapeDtypeStruct((batch, SEQ, WIDTH), jnp.float32)


def large_constants(step: Step) -> list[tuple[int, ...]]:
    """Shapes of what loops carry from the first iteration to the last."""
    loops = [(graph, op) for _, graph in walk(step.graph) for op in graph.ops if op.name == "scan"]
    shapes = [graph.value(a).shape for graph, op in loops for a in op.inputs[: op.loop_counts[0]]]
    return [shape for shape in shapes if np.prod(shape) >= LARGE]


@pytest.mark.parametrize("name", STEPS)
def test_no_loop_carries_what_light_ops_make(name):
    assert large_constants(trace(STEPS[name], *arguments())) == []


def numbers() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=s.shape).astype(s.dtype) / 4 for s in arguments(FEW)]


def results(step: Step, flat) -> list[np.ndarray]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    return jax.jit(evaluator(step.graph, StepSharding((1,), ("data",), {}, {}), mesh))(flat)


@pytest.mark.devices
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("name", STEPS)
def test_the_numbers_are_those_of_the_step(name, count):
    step = microbatched(trace(STEPS[name], *arguments(FEW)), count)
    wanted = jax.jit(STEPS[name])(*numbers())
    for one, other in zip(wanted, results(step, numbers()), strict=True):
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=1e-6)


def test_what_barriers_hold_is_none_of_it():
    step = trace(STEPS["checkpoint"], *arguments())
    barriers = [op for _, graph in walk(step.graph) for op in graph.ops if op.name == "optimization_barrier"]
    assert barriers
    assert not [v.shape for op in barriers for v in op.result_values if np.prod(v.shape) >= LARGE]


def test_what_costs_more_is_made_once():
    assert large_constants(trace(scanned(biased), *arguments())) != []


def test_arguments_are_read_where_they_are():
    """A mask that is an argument, and as large as what it masks."""

    def step(params, mask, x):
        layer = lambda x, w: jnp.where(mask, x, 0.0) @ w  # noqa: E731
        return scanned(layer)(params, x)

    w, x = arguments()
    wide = jax.ShapeDtypeStruct((BATCH, SEQ, 512), x.dtype)
    square = jax.ShapeDtypeStruct((LAYERS, 512, 512), w.dtype)
    traced = trace(step, square, jax.ShapeDtypeStruct(wide.shape, bool), wide)
    assert wide.shape in large_constants(traced)


def test_a_whole_mask_sinks_if_it_is_asked_for():
    """Broadcast over a batch of 64, a mask is much smaller than the scores, and still large: a mebibyte."""
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    step = trace(
        scanned(jax.checkpoint(masked_at_length)),
        params,
        jax.ShapeDtypeStruct((64, 1024, WIDTH), jnp.float32),
    )

    def square(graph):
        return any(op.name == "scan" and (1024, 1024) in shapes_read(graph, op) for op in graph.ops)

    def shapes_read(graph, op):
        return [graph.values[v].shape for v in op.operands]

    assert square(step.graph)
    assert not square(sunk(step.graph, is_whole=True))


def masked_at_length(x, w):
    """Attention of a sort, causal in as many positions as there are."""
    scores = jnp.einsum("bqd,bkd->bqk", x @ w, x)
    causal = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return x + jax.nn.softmax(jnp.where(causal, scores, -1e9)) @ x
