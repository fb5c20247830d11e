"""Every result of a step has a buffer of its own, in each executor: the next call may donate any of them.

A step returns values twice: as state and as a metric, as two states, as they came in and updated; and constants.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from autoshard.executors import jit, spmd
from autoshard.search.ir.graph import Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.trace import trace
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.spmd import written
from autoshard.search.plan.spmd_step import SpmdSharding
from tests.executors.pipelines import pipelined, schedule_of

LAYERS, WIDTH, BATCH = 2, 2, 4

TABLE = np.arange(4.0, dtype=np.float32).reshape(WIDTH, WIDTH) / 4

STATES: dict[str, Sequence[str]] = {
    "layers": ("new layers",),
    "head": ("new head", "head", "other", "table"),
    "other": ("new head", "head", "other", "table"),
    "seen": ("x", "seen"),
    "number": ("new number", "number", "zero"),
    "average": ("new average", "average"),
}
"""By state, the values that may replace it."""

METRICS = ("loss", "row", *dict.fromkeys(name for names in STATES.values() for name in names))


@dataclass(frozen=True, eq=False)
class Drawn:
    """Which values leave a step.

    Attributes:
        state: By name.
        metrics: In order.
        is_state_first: Whether it is returned ahead of the metrics.
    """

    state: dict[str, str]
    metrics: tuple[str, ...]
    is_state_first: bool

    def __call__(self, state: dict[str, jax.Array], x: jax.Array) -> tuple[Any, Any]:
        """The step."""

        def loss_fn(weights):
            y, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights["layers"])
            return jnp.mean((y @ weights["head"] - x) ** 2)

        weights = {name: state[name] for name in ("layers", "head")}
        loss, grads = jax.value_and_grad(loss_fn)(weights)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)
        values = state | {f"new {name}": w for name, w in new.items()} | {"x": x, "loss": loss}
        values |= {"new number": state["number"] + 1, "zero": np.int32(0), "table": TABLE}
        values |= {"new average": 0.9 * state["average"] + 0.1 * loss, "row": new["head"][0]}
        results = {name: values[v] for name, v in self.state.items()}, [values[v] for v in self.metrics]
        return results if self.is_state_first else results[::-1]

    def in_order(self, results: tuple[Any, Any]) -> tuple[Any, Any]:
        """The state, then the metrics."""
        return results if self.is_state_first else results[::-1]


DRAWN = st.builds(
    Drawn,
    st.fixed_dictionaries({name: st.sampled_from(values) for name, values in STATES.items()}),
    st.lists(st.sampled_from(METRICS), min_size=1, max_size=4).map(tuple),
    st.booleans(),
)


def as_one_program(step: Step) -> jit.Program:
    return jit.build(step, StepSharding((2,), ("data",), {}, {}), jax.devices())


def as_one_program_for_all_stages(step: Step) -> jit.Program:
    return spmd.build(written(step, PipelineStep.of(step, 2), 2, 1), SpmdSharding(1), jax.devices())


EXECUTORS: dict[str, Callable[[Step], Any]] = {
    "one program": as_one_program,
    "one program for all stages": as_one_program_for_all_stages,
    "1f1b": lambda step: pipelined(step, schedule_of("1f1b", 2, 2), sizes=(1, 1)),
    "interleaved": lambda step: pipelined(step, schedule_of("interleaved-1f1b", 2, 2), sizes=(2, 2)),
}


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"layers": (LAYERS, WIDTH, WIDTH), "head": (WIDTH, WIDTH), "other": (WIDTH, WIDTH)}
    state = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    return state | {
        "seen": np.zeros((BATCH, WIDTH), np.float32),
        "number": np.int32(3),
        "average": np.float32(0),
    }


def assert_results_are_kept(step: Drawn, executor: str) -> None:
    """Calls a step twice, and reads all that it returned and was given, but for the state given up, when both are done."""
    x = jax.random.normal(jax.random.key(0), (BATCH, WIDTH))
    program = EXECUTORS[executor](trace(step, start(), x))
    state, wanted = start(), start()
    state = jax.device_put(state, program.shardings[0], may_alias=False)
    kept, expected = [], []
    for _ in range(2):
        mine = jax.device_put(x, program.shardings[1])
        state, metrics = step.in_order(program.fn(state, mine))
        wanted, told = step.in_order(jax.jit(step)(wanted, x))
        assert_apart([mine, state, metrics])
        kept.append((mine, metrics))
        expected.append((x, told))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), (state, kept), (wanted, expected))


def assert_apart(arrays: Any) -> None:
    """No two arrays share a buffer."""
    leaves = jax.tree.leaves(arrays)
    buffers = [{s.data.unsafe_buffer_pointer() for s in x.addressable_shards} for x in leaves]
    assert len(set().union(*buffers)) == sum(map(len, buffers))


@pytest.mark.parametrize("executor", EXECUTORS)
def test_no_result_is_lost_to_a_later_call(executor):
    new = ("new layers", "new head", "new head", "x", "zero", "average")
    assert_results_are_kept(Drawn(dict(zip(STATES, new, strict=True)), 2 * METRICS, True), executor)


@given(DRAWN, st.sampled_from([*EXECUTORS]))
@settings(max_examples=3, phases=(Phase.generate,))  # each is compiled: to shrink one takes minutes
def test_no_result_of_a_drawn_step_is_lost_to_a_later_call(drawn, executor):
    assert_results_are_kept(drawn, executor)
