"""A drawn step as users write them: state that is a Python number at first, or changes its dtype; arrays of no elements;
values that are returned twice; a named axis of `jax.vmap`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .dice import Dice
from .step import Drawn, draw_step

AXES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "nothing": lambda v: v,
    "pmean": lambda v: v - jax.lax.pmean(v, "rows"),
    "psum": lambda v: v + 0.01 * jax.lax.psum(v, "rows"),
    "pmax": lambda v: v - jax.lax.pmax(jax.lax.stop_gradient(v), "rows"),
    "pmin": lambda v: v - jax.lax.pmin(jax.lax.stop_gradient(v), "rows"),
    "all_gather": lambda v: v + jnp.mean(jax.lax.all_gather(v, "rows") ** 2, 0),
    "axis_index": lambda v: v * (1.0 + 0.1 * jax.lax.axis_index("rows")),
}
"""By name: a function of one example that reads others of its batch by the axis `rows`."""

TWICE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "new count": lambda old, new, batch: new["count"],
    "old count": lambda old, new, batch: old["count"],
    "new average": lambda old, new, batch: new["average"],
    "new weights": lambda old, new, batch: new["weights"],
    "old weights": lambda old, new, batch: old["weights"],
    "new state": lambda old, new, batch: new["drawn"],
    "old state": lambda old, new, batch: old["drawn"],
    "widened": lambda old, new, batch: new["narrow"],
    "empty": lambda old, new, batch: (old["empty"], new["empty"]),
    "batch": lambda old, new, batch: batch["x"],
}
"""By name: values that the step returns in its state or is given, as metrics once more."""


@dataclass(frozen=True)
class Mannered:
    """A step around a drawn one.

    Attributes:
        drawn: The step within.
        is_weak: Whether the count and the average are Python numbers at first.
        is_widened: Whether a leaf is float32 at first and float64 after a step.
        axis: Of `AXES`.
        twice: Of `TWICE`.
        is_metric_first: Whether the step returns its metrics before its state.
    """

    drawn: Drawn
    is_weak: bool
    is_widened: bool
    axis: str
    twice: tuple[str, ...]
    is_metric_first: bool

    def __str__(self) -> str:
        flags = [name for name in ("is_weak", "is_widened", "is_metric_first") if getattr(self, name)]
        return "\n".join((str(self.drawn), f"axis {self.axis}; twice {self.twice}; {flags}"))

    def state(self) -> Any:
        """The state before the first step; its Python numbers are weakly typed."""
        count, average = (0, 0.0) if self.is_weak else (jnp.array(0), jnp.array(0.0))
        return {
            "drawn": jax.jit(self.drawn.init)(),
            "count": count,
            "average": average,
            "narrow": jnp.ones(3, jnp.float32 if self.is_widened else jnp.float64),
            "empty": jnp.zeros((0, 4)),
            "weights": jnp.ones(self.drawn.inputs[0].shape[1:]),
        }

    def args(self, i: int) -> tuple[Any, ...]:
        """The arguments of step `i` but the state: the same in every process."""
        case = self.drawn.case()
        batch = case.batch(i)
        return {**batch, "nothing": jnp.zeros((len(batch["x"][0]), 0))}, *case.extra()

    def step(self, state: Any, batch: Any, *extra: Any) -> tuple[Any, Any]:
        """One step of training."""
        drawn, metrics = self.drawn.step(state["drawn"], batch, *extra)
        x = batch["x"][0]

        def objective(weights: jax.Array) -> jax.Array:
            rows = jax.vmap(AXES[self.axis], axis_name="rows")(jnp.tanh(x * weights))
            return jnp.mean(rows**2) + jnp.sum(batch["nothing"] ** 2)

        loss, gradient = jax.value_and_grad(objective)(state["weights"])
        new = {
            "drawn": drawn,
            "count": state["count"] + 1,
            "average": 0.9 * state["average"] + 0.1 * loss,
            "narrow": state["narrow"] + loss,
            "empty": state["empty"] * 2,
            "weights": state["weights"] - 0.1 * gradient,
        }
        metrics = {**metrics, "twice": [TWICE[name](state, new, batch) for name in self.twice]}
        return (metrics, new) if self.is_metric_first else (new, metrics)

    def parts(self, returned: tuple[Any, Any]) -> tuple[Any, Any]:
        """The state and the metrics of a step's results."""
        first, second = returned
        return (second, first) if self.is_metric_first else (first, second)


def draw_mannered(dice: Dice) -> Mannered:
    """A step of float64."""
    drawn = draw_step(dice)
    return Mannered(
        drawn=drawn,
        is_weak=dice.flip(),
        is_widened=dice.flip(0.3),
        axis=dice.pick(list(AXES)),
        twice=tuple(dict.fromkeys(dice.pick(list(TWICE)) for _ in range(3))),
        is_metric_first=dice.flip(0.3),
    )
