"""Parts of images and volumes that exchange halos have one device's numbers, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from autoshard.cost_model.hardware import parse_cluster
from autoshard.executors.jit import build
from autoshard.search.driver import find
from autoshard.search.ir.trace import trace
from autoshard.search.options import Options
from autoshard.search.problem.halos import Exchange

RTOL, NOISE = 1e-9, 1e-12
"""Tolerance, as a share of the largest element and absolute: some steps of rounding."""


class Images(nn.Module):
    """Down and up again, with all kinds of windows that halos serve."""

    @nn.compact
    def __call__(self, x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        skipped = x = nn.silu(nn.Conv(4, (3, 3), **types)(x))
        x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.silu(nn.Conv(4, (3, 3), kernel_dilation=2, **types)(x))
        x = nn.silu(nn.Conv(4, (3, 3), strides=2, padding=1, **types)(x))
        x = nn.silu(nn.ConvTranspose(4, (4, 4), strides=(2, 2), **types)(x))
        x = x.repeat(2, axis=1).repeat(2, axis=2)
        x = nn.silu(nn.Conv(4, (7, 7), **types)(jnp.concatenate([x, skipped], axis=-1)))
        return nn.Conv(1, (1, 1), **types)(nn.GroupNorm(2, epsilon=1e-3, **types)(x))


class Volumes(nn.Module):
    @nn.compact
    def __call__(self, x):
        types = {"dtype": x.dtype, "param_dtype": x.dtype}
        x = nn.silu(nn.Conv(4, (3, 3, 3), **types)(x))
        return nn.Conv(2, (5, 3, 1), strides=(2, 1, 1), **types)(x)


def step_of(model, shape):
    """A step of gradient descent, and its arguments in float64."""
    x = jax.random.normal(jax.random.key(1), shape, jnp.float64)
    params = model.init(jax.random.key(0), x)

    def step(params, x):
        loss, gradients = jax.value_and_grad(lambda p: (model.apply(p, x) ** 2).mean())(params)
        return jax.tree.map(lambda p, g: p - g, params, gradients), loss

    return step, (params, x)


CASES = {
    "rows": (Images(), (1, 64, 16, 3), (8,)),
    "rows and columns": (Images(), (1, 32, 64, 3), (2, 4)),
    "volumes": (Volumes(), (1, 32, 8, 8, 2), (8,)),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c == "rows and columns")) for c in CASES]
)
def test_parts_with_halos_have_one_devices_numbers(case, monkeypatch):
    """Messages cost nothing here, as small images are faster whole."""
    monkeypatch.setattr(Exchange, "seconds", lambda self, mesh: 0.0)
    model, shape, mesh = CASES[case]
    with jax.enable_x64():
        function, arrays = step_of(model, shape)
        found = find(trace(function, *arrays), parse_cluster("8xH100-80GB"), Options(2**40, mesh))
        assert "collective-permute" in {one.kind for one in found.plan.estimates.collectives}
        program = build(found.step, found.sharding, jax.devices())
        whole = jax.jit(function)(*arrays)
        ours = program.fn(*jax.device_put(jax.tree.map(jnp.copy, arrays), program.shardings))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, rtol=RTOL, atol=NOISE + RTOL * np.abs(other).max())
