"""Whether many devices come to one device's numbers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.executors.jit import build
from autoshard.search.ir.graph import Step
from autoshard.search.ir.trace import trace_call
from autoshard.search.result import SearchResult
from tests.zoo import Case

NOISE = 1e-12
"""Absolute: some steps of rounding on entries of size 1 that cancel to nothing."""

NOISE_GROWN_BY_ADAM = 1e-10
"""Absolute, of what a loss does not see, such as the bias of attention's keys: its gradient is rounding, which Adam divides
by its own size. Such a leaf holds nothing larger on one device either."""


@dataclass(frozen=True)
class Reference:
    """A case, traced; the state that it starts from, and what one device makes of it.

    Attributes:
        case: The model.
        step: Its step, traced.
        num_steps: How many are taken.
        start: The state before, in the host's memory.
        results: The state after, and each step's metrics.
    """

    case: Case
    step: Step
    num_steps: int
    start: Any
    results: tuple[Any, list[Any]]

    @classmethod
    def of(cls, case: Case, num_steps: int, start: Any = None) -> "Reference":
        """One device's results, from a state of the case's own or from this one."""
        start = case.start() if start is None else start
        results = run_steps(jax.jit(case.step), case, start, num_steps)
        return cls(
            case, trace_call("cpu", case.step, case.abstract_args(), {}), num_steps, _on_host(start), results
        )

    def on_many_devices(self, found: SearchResult) -> tuple[Any, list[Any]]:
        """The same steps along a plan."""
        program = build(found.step, found.sharding, jax.devices())
        return run_steps(program.fn, self.case, self.placed(program.shardings[0]), self.num_steps)

    def placed(self, shardings: Any) -> Any:
        """A copy of the state before, to be given up."""
        return jax.device_put(self.start, shardings, may_alias=False)


def assert_equal(got: Any, wanted: Any) -> None:
    """Asserts that float64 results are equal but for the order of sums."""
    for (path, one), many in zip(jax.tree.leaves_with_path(wanted), jax.tree.leaves(got), strict=True):
        noise = NOISE_GROWN_BY_ADAM if np.abs(one).max(initial=0) < NOISE_GROWN_BY_ADAM else NOISE
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(many, one, rtol=1e-9, atol=noise, err_msg=name)


def run_steps(step: Callable[..., Any], case: Case, state: Any, num_steps: int) -> tuple[Any, list[Any]]:
    history = []
    for i in range(num_steps):
        state, metrics = step(state, case.batch(i), *case.extra())
        history.append(metrics)
    return jax.tree.map(_numbers, (state, history))


def _on_host(state: Any) -> Any:
    return jax.tree.map(lambda x: x if _is_key(x) else np.asarray(x), state)


def _numbers(x: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(x) if _is_key(x) else x)


def _is_key(x: Any) -> bool:
    return jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
