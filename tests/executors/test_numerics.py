"""A plan changes where numbers are computed, never which: 20 steps on simulated devices against one device.

Plans are fast ones, the smallest ones and some drawn at random, so that states are sharded every way, partial sums travel,
and copies are kept and made anew.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.trace import trace
from executors.jit import build
from tests import zoo
from tests.executors import plans
from tests.zoo import Case

NUM_STEPS = 20

NOISE = 1e-12
"""Absolute: entries of size 1 that cancel to nothing, and 20 steps of rounding on them."""

NOISE_GROWN_BY_ADAM = 1e-10
"""Attention does not see its keys' bias: the gradient is rounding, which Adam divides by its own size."""

MODELS = {
    "mlp": {},
    "gpt_linen": {},
    "gpt_nnx": {},
    "gpt_nnx_optimizer": {"num_layers": 1},
    "gpt_scan": {},
    "llama": {},
    "moe": {"num_layers": 1},
    "t5": {"num_layers": 1},
    "vit": {"num_layers": 1},
    "resnet": {},
    "autoencoder": {},
    "lstm": {},
    "dlrm": {},
    "evoformer": {"num_layers": 1},
}
"""Name in the zoo -> options of its maker."""

PLANS = {
    "8-smallest": lambda step: plans.smallest(step, (8,)),
    "2x4-fastest": lambda step: plans.fastest(step, (2, 4)),
    "2x4-drawn": lambda step: plans.drawn(step, (2, 4), seed=0),
    "2x2x2-smallest": lambda step: plans.smallest(step, (2, 2, 2)),
    "6-smallest": lambda step: plans.smallest(step, (6,)),
    "2x3-drawn": lambda step: plans.drawn(step, (2, 3), seed=1),
}


@functools.cache
def on_one_device(model: str, dtype: Any) -> tuple[Case, Any, list[Any]]:
    """The case, its final state and every step's metrics."""
    case = zoo.MAKERS[model](dtype=dtype, **MODELS[model])
    return case, *run(jax.jit(case.step), case, case.init())


def on_many_devices(case: Case, plan: str) -> tuple[Any, list[Any]]:
    step = trace(case.step, *case.abstract_args())
    program = build(step, PLANS[plan](step), jax.devices())
    return run(program.fn, case, jax.device_put(case.init(), program.shardings[0]))


def run(step: Any, case: Case, state: Any) -> tuple[Any, list[Any]]:
    history = []
    for i in range(NUM_STEPS):
        state, metrics = step(state, case.batch(i), *case.extra())
        history.append(metrics)
    return jax.tree.map(numbers, (state, history))


def numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_float64_losses_and_states_equal_one_devices(model, plan):
    with jax.enable_x64(True):
        case, state, history = on_one_device(model, jnp.float64)
        new_state, new_history = on_many_devices(case, plan)
    new_leaves = jax.tree.leaves((new_state, new_history))
    for (path, wanted), got in zip(jax.tree.leaves_with_path((state, history)), new_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        noise = NOISE_GROWN_BY_ADAM if _is_key_bias(name) else NOISE
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=noise, err_msg=name)


def _is_key_bias(name: str) -> bool:
    return name.endswith(("['key']['bias']", "['key']['bias'].value", "['key'].bias"))


@pytest.mark.parametrize("model", MODELS)
def test_float32_losses_equal_one_devices(model):
    case, _, history = on_one_device(model, jnp.float32)
    _, new_history = on_many_devices(case, "2x4-fastest")
    for wanted, got in zip(history, new_history, strict=True):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-4)
