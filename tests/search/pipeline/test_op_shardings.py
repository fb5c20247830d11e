"""What a plan decides of an op holds wherever the op stands, and for what it still makes there."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.op_shardings import OpShardings
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stages import is_barrier

SPECS = ((0,), (1,), (2,))
"""Of the barrier's three results, each split along another dimension."""


def waiting_step(w, x):
    """Three arrays pass one barrier."""

    def loss(w):
        h = jnp.tanh(x @ w)
        return sum(jnp.mean(one**2) for one in jax.lax.optimization_barrier((h, h @ w, h[..., None] * w)))

    return w - 0.1 * jax.grad(loss)(w)


@pytest.mark.parametrize("passed_on", [(0, 1, 2), (1, 2), (2,), (0, 2)])
def test_a_barrier_that_passes_on_less_is_imposed_on_by_value(passed_on):
    w, x = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 8), (16, 8)))
    parts = PipelineStep.of(trace(waiting_step, w, x), 2)
    barrier = next(op for op in parts.body if is_barrier(op))
    places = [parts.place_of(v) for v in barrier.outputs]
    whole = StepSharding((2,), ("data",), dict(zip(places, [(s,) for s in SPECS], strict=True)), {})
    less = replace(
        barrier,
        inputs=tuple(barrier.inputs[n] for n in passed_on),
        outputs=tuple(barrier.outputs[n] for n in passed_on),
        result_values=tuple(barrier.result_values[n] for n in passed_on),
    )
    found = OpShardings.of(SimpleNamespace(sharding=whole), parts).on([barrier, less]).specs
    assert found == {("result", (0,), n): (s,) for n, s in enumerate(SPECS)} | {
        ("result", (1,), n): (SPECS[was],) for n, was in enumerate(passed_on)
    }
