"""Frozen weights, and the stacks of a loop beside them, in the host's memory or split over all devices change no number."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.executors.jit import build
from autoshard.search.ir.graph import Phase, Role
from autoshard.search.ir.trace import trace_call
from autoshard.search.memory import offload
from tests.executors import plans
from tests.executors.agreement import assert_equal
from tests.search.lora import lora_chain

MESH = (2, 2)
NUM_STEPS = 2


def drawn_arrays(shapes):
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.standard_normal(s.shape) / 3, s.dtype), shapes)


def with_weights_inside(step):
    """The step with its frozen weights inside of the state, which hands them back."""

    def inside(state, x):
        trained, value = step(state["trained"], state["base"], x)
        return {"trained": trained, "base": state["base"]}, value

    return inside


def run(fn, state, others):
    state = jax.tree.map(jnp.copy, state)
    for _ in range(NUM_STEPS):
        state, value = fn(state, *others)
    return jax.tree.map(np.asarray, (state, value))


@pytest.mark.parametrize(
    ("is_inside", "is_scanned", "base_dtype", "roles"),
    [
        (True, True, None, {Role.FROZEN}),
        (False, True, None, {Role.FROZEN, Role.PARAMETER, Role.OPTIMIZER_STATE}),
        (False, False, jnp.float32, {Role.FROZEN}),
        pytest.param(
            False, False, None, {Role.FROZEN}, marks=pytest.mark.slow
        ),  # those above have each value of each
        pytest.param(True, False, None, {Role.FROZEN}, marks=pytest.mark.slow),
    ],
)
def test_on_the_host_they_equal_one_devices(is_inside, is_scanned, base_dtype, roles, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    with jax.enable_x64(True):
        step, state, base, x = lora_chain(2, 16, 8, jnp.float64, is_scanned=is_scanned, base_dtype=base_dtype)
        shapes = ({"trained": state, "base": base}, x) if is_inside else (state, base, x)
        step = with_weights_inside(step) if is_inside else step
        traced = trace_call("cpu", step, shapes, {})
        hosted = [i for i, role in offload.may_rest_on_host(traced).items() if role in roles]
        found = plans.drawn(traced, MESH, 0, frozenset(hosted))
        program = build(found.step, found.sharding, jax.devices())
        kinds = [s.memory_kind for s in jax.tree.leaves(program.shardings)]
        assert [i for i, kind in enumerate(kinds) if kind == "pinned_host"] == hosted
        assert len(hosted) >= len(roles) * len(jax.tree.leaves(base))
        start, *others = drawn_arrays(shapes)
        placed = jax.device_put((start, *others), program.shardings)
        assert_equal(run(program.fn, *_split(placed)), run(jax.jit(step), start, others))


def _split(args):
    return args[0], args[1:]


@pytest.mark.parametrize("is_fresh", [False, True])
def test_split_weights_of_a_narrower_type_equal_one_devices(is_fresh):
    """Each phase gathers them in their own type and converts them, or both share the converted ones."""
    with jax.enable_x64(True):
        step, *shapes = lora_chain(2, 128, 64, jnp.float64, base_dtype=jnp.float32)
        traced = trace_call("cpu", step, tuple(shapes), {})
        split = {a.name: jax.P("data") for a in traced.arguments if a.role in (Role.FROZEN, Role.BATCH)}
        sharding = plans.with_copies(traced, split, is_fresh=False)
        backward = {
            place: replace(reshard, phase=Phase.BACKWARD.value)
            for place, reshard in sharding.reshards.items()
            if any(step.is_narrowed for step in reshard.path)
            and traced.graph.ops[place[1][0]].phase is Phase.BACKWARD
        }
        assert backward
        if is_fresh:
            sharding = replace(sharding, reshards={**sharding.reshards, **backward})
        program = build(traced, sharding, jax.devices())
        start, *others = drawn_arrays(tuple(shapes))
        placed = jax.device_put((start, *others), program.shardings)
        assert_equal(run(program.fn, *_split(placed)), run(jax.jit(step), start, others))
