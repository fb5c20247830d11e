"""A plan changes where numbers are computed, never which: 20 steps on simulated devices against one device.

Plans are fast ones, the smallest ones and some drawn at random, so that states are sharded every way, partial sums travel,
and copies are kept and made anew.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from executors.jit import build
from search.ir.graph import Step
from search.ir.trace import trace
from tests import zoo
from tests.executors import plans
from tests.zoo import Case

NUM_STEPS = 20

NOISE = 1e-12
"""Absolute: 20 steps of rounding on entries of size 1 that cancel to nothing."""

NOISE_GROWN_BY_ADAM = 1e-10
"""Absolute, of what a loss does not see, such as the bias of attention's keys: its gradient is rounding, which Adam divides
by its own size. Such a leaf holds nothing larger on one device either."""

MODELS = {
    "mlp": {},
    "gpt_linen": {"num_layers": 1},
    "gpt_nnx": {},
    "gpt_scan": {},
    "moe": {"num_layers": 1},
    "resnet": {},
    "autoencoder": {},
    "lstm": {},
    "dlrm": {},
    "evoformer": {"num_layers": 1},
    "gpt_nnx_optimizer": {"num_layers": 1},
    "llama": {"num_layers": 1},
    "megatron": {"num_layers": 1, "vocab": 257, "seq": 63},  # no axis divides these: padded
    "t5": {"num_layers": 1},
    "vit": {"num_layers": 1},
}
"""Name in the zoo -> options of its maker."""

PLANS = {
    "8-smallest": lambda step: plans.smallest(step, (8,)),
    "2x4-fastest": lambda step: plans.fastest(step, (2, 4)),
    "2x4-drawn": lambda step: plans.drawn(step, (2, 4), seed=0),
    "2x2x2-fastest": lambda step: plans.fastest(step, (2, 2, 2)),
    "2x2x2-smallest": lambda step: plans.smallest(step, (2, 2, 2)),
    "6-smallest": lambda step: plans.smallest(step, (6,)),
    "2x3-fastest": lambda step: plans.fastest(step, (2, 3)),
    "2x3-drawn": lambda step: plans.drawn(step, (2, 3), seed=1),
}

MOST = ("8-smallest", "2x4-drawn", "2x2x2-fastest", "2x3-fastest")
FEW_OR_ALL = {
    **dict.fromkeys(("mlp", "dlrm", "resnet"), tuple(PLANS)),  # they compile fast
    **dict.fromkeys(("gpt_nnx_optimizer", "llama", "megatron"), ("2x4-drawn",)),  # others have their ops
    **dict.fromkeys(("evoformer", "t5", "vit"), ("2x2x2-fastest",)),  # and these take minutes as drawn
    "lstm": ("2x4-drawn", "2x3-fastest"),
}
"""The plans to run for models that do not get `MOST`."""

RUNS = [(model, plan) for model in MODELS for plan in FEW_OR_ALL.get(model, MOST)]


@functools.cache
def on_one_device(model: str, dtype: Any) -> "Reference":
    case = zoo.MAKERS[model](dtype=dtype, **MODELS[model])
    state = case.init()
    return Reference(
        case, trace(case.step, *case.abstract_args()), state, *run(jax.jit(case.step), case, state)
    )


@dataclass(frozen=True)
class Reference:
    """A case, traced; the state that it starts from, and what one device makes of it."""

    case: Case
    step: Step
    start: Any
    state: Any
    history: list[Any]

    def on_many_devices(self, plan: str) -> tuple[Any, list[Any]]:
        program = build(self.step, PLANS[plan](self.step).sharding, jax.devices())
        # A copy: the step donates its state.
        start = jax.device_put(jax.tree.map(jnp.copy, self.start), program.shardings[0])
        return run(program.fn, self.case, start)


def run(step: Any, case: Case, state: Any) -> tuple[Any, list[Any]]:
    history = []
    for i in range(NUM_STEPS):
        state, metrics = step(state, case.batch(i), *case.extra())
        history.append(metrics)
    return jax.tree.map(numbers, (state, history))


def numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


@pytest.mark.parametrize(("model", "plan"), RUNS)
def test_float64_losses_and_states_equal_one_devices(model, plan):
    with jax.enable_x64(True):
        single = on_one_device(model, jnp.float64)
        leaves = jax.tree.leaves(single.on_many_devices(plan))
    for (path, wanted), got in zip(
        jax.tree.leaves_with_path((single.state, single.history)), leaves, strict=True
    ):
        name = jax.tree_util.keystr(path)
        noise = NOISE_GROWN_BY_ADAM if np.abs(wanted).max(initial=0) < NOISE_GROWN_BY_ADAM else NOISE
        np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=noise, err_msg=name)


@pytest.mark.parametrize("model", [m for m in MODELS if len(FEW_OR_ALL.get(m, MOST)) > 1])
def test_float32_losses_equal_one_devices(model):
    single = on_one_device(model, jnp.float32)
    _, history = single.on_many_devices("2x4-fastest")
    for wanted, got in zip(single.history, history, strict=True):
        np.testing.assert_allclose(got["loss"], wanted["loss"], rtol=1e-4)
