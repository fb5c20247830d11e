"""State that the host updates in its own memory has one device's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.executors.jit import build
from autoshard.search.ir.graph import Role
from autoshard.search.ir.trace import trace_call
from autoshard.search.memory import host_updates, offload
from autoshard.search.memory.microbatches import microbatched
from tests.executors import plans

NUM_STEPS = 3

ADAMW, MOMENTUM = optax.adamw(1e-2), optax.sgd(1e-2, momentum=0.9, nesterov=True)
RMSPROP = optax.rmsprop(1e-2, centered=True)
"""Its update fills arrays with constants."""
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), ADAMW)


def two_layers(tx, skips=False):
    """A step of two layers; it may skip updates whose gradient is not finite."""

    def step(params, state, x, y):
        def loss(params):
            return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["u"] - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        changes, new_state = tx.update(gradients, state, params)
        new_params = optax.apply_updates(params, changes)
        if skips:
            is_finite = jnp.isfinite(value)
            new_params, new_state = jax.tree.map(
                lambda new, old: jnp.where(is_finite, new, old), (new_params, new_state), (params, state)
            )
        return new_params, new_state, value

    return step


def drawn_arrays(tx):
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 16), "b": (16,), "u": (16, 4)}
    params = {name: jnp.asarray(rng.standard_normal(shape) / 3) for name, shape in shapes.items()}
    return params, tx.init(params), *(jnp.asarray(rng.standard_normal((8, n))) for n in (8, 4))


def run(fn, params, state, *batch):
    params, state = jax.tree.map(jnp.copy, (params, state))
    for _ in range(NUM_STEPS):
        params, state, value = fn(params, state, *batch)
    return jax.tree.map(np.asarray, (params, state, value))


@pytest.mark.parametrize(
    ("tx", "skips", "roles", "mesh", "num_microbatches"),
    [
        pytest.param(CLIPPED, False, (Role.OPTIMIZER_STATE,), (2, 2), 1, id="clipped"),
        pytest.param(MOMENTUM, False, (Role.OPTIMIZER_STATE, Role.PARAMETER), (8,), 1, id="parameters, too"),
        pytest.param(RMSPROP, False, (Role.OPTIMIZER_STATE,), (2,), 1, id="constants"),
        pytest.param(ADAMW, True, (Role.OPTIMIZER_STATE,), (2,), 1, id="skipped unless finite"),
        pytest.param(ADAMW, False, (Role.OPTIMIZER_STATE,), (4,), 2, id="in microbatches"),
    ],
)
def test_updates_by_the_host_have_one_devices_numbers(tx, skips, roles, mesh, num_microbatches, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with jax.enable_x64(True):
        arrays, step = drawn_arrays(tx), two_layers(tx, skips)
        traced = microbatched(trace_call("cpu", step, arrays, {}), num_microbatches)
        may = offload.may_rest_on_host(traced).items()
        hosted = frozenset(i for i, role in may if role in roles and traced.arguments[i].name[-1] == "]")
        updated = host_updates.updatable(traced, hosted)
        assert updated == hosted
        found = plans.drawn(traced, mesh, 0, hosted, updated=updated)
        assert sum(op.is_host_update for op in found.step.graph.ops) == 3
        program = build(found.step, found.sharding, jax.devices())
        placed = jax.device_put(arrays, program.shardings)
        for own, single in zip(
            jax.tree.leaves(run(program.fn, *placed)),
            jax.tree.leaves(run(jax.jit(step), *arrays)),
            strict=True,
        ):
            np.testing.assert_allclose(own, single, rtol=1e-9, atol=1e-15)
