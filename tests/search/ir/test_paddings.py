"""Paddings that windows take over: the numbers of the step as it was written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

from autoshard.search.ir.trace import trace
from tests.search.memory.evaluation import evaluated

IMAGES = np.linspace(-1, 1, 2 * 8 * 8 * 3, dtype=np.float32).reshape(2, 8, 8, 3) ** 3
KERNEL = np.linspace(-1, 2, 3 * 3 * 3 * 4, dtype=np.float32).reshape(3, 3, 3, 4) ** 2


def conv(x, kernel, stride=2, base=1):
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), [(0, 0)] * 2, lhs_dilation=(base, base), dimension_numbers=dims
    )


def at_the_end(x, kernel):
    """As diffusion models step down (`diffusers`)."""
    return conv(jnp.pad(x, ((0, 0), (0, 1), (0, 1), (0, 0))), kernel)


def around(x, kernel):
    return conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), kernel, 1)


def between_rows(x, kernel):
    return conv(lax.pad(x, 0.0, ((0, 0, 0), (2, 1, 1), (2, 1, 1), (0, 0, 0))), kernel, 1)


def before_a_transposed_convolution(x, kernel):
    return conv(jnp.pad(x, ((0, 0), (1, 0), (0, 1), (0, 0))), kernel, 1, base=2)


def averages(x, kernel):
    return nn.avg_pool(x, (3, 3), (2, 2), "SAME") + kernel.sum()


FOLDED = [at_the_end, around, between_rows, before_a_transposed_convolution, averages]


def with_gradients(function):
    return lambda x, kernel: jax.value_and_grad(lambda *a: (function(*a) ** 2).sum(), (0, 1))(x, kernel)


@pytest.mark.devices
@pytest.mark.parametrize("function", FOLDED)
def test_numbers_stay(function):
    step = trace(with_gradients(function), IMAGES, KERNEL)
    assert "pad" not in {op.name for op in step.graph.ops}
    expected = jax.tree.leaves(jax.jit(with_gradients(function))(IMAGES, KERNEL))
    for one, other in zip(evaluated(step.graph, IMAGES, KERNEL), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def ones_around(x, kernel):
    return conv(jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1), kernel, 1)


def more_channels(x, kernel):
    return conv(jnp.pad(x[..., :2], ((0, 0), (0, 0), (0, 0), (0, 1))), kernel)


def read_twice(x, kernel):
    padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    return conv(padded, kernel, 1), padded


def maxima(x, kernel):
    padded = jnp.pad(x, ((0, 0), (1, 0), (1, 0), (0, 0)))
    return lax.reduce_window(padded, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "VALID") + kernel.sum()


@pytest.mark.parametrize("function", [ones_around, more_channels, read_twice, maxima])
def test_other_paddings_stay(function):
    step = trace(function, IMAGES, KERNEL)
    assert "pad" in {op.name for op in step.graph.ops}


def test_a_padding_inside_a_loop_is_folded_too():
    def step(x, kernel):
        return lax.scan(lambda x, _: (around(x, kernel)[..., :3], None), x, None, length=3)[0]

    (loop,) = [op for op in trace(step, IMAGES, KERNEL).graph.ops if op.name == "scan"]
    (body,) = loop.bodies["jaxpr"]
    assert "pad" not in {op.name for op in body.ops}
