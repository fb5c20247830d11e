"""A drawn step, decorated and called as a user would: what a seed stands for, and what must hold of it.

Wants `jax_enable_x64`.
"""

import itertools
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import autoshard
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.hardware import parse_cluster
from tests.executors.agreement import assert_equal
from tests.zoo.drawn import Dice, Mannered, draw_mannered

NUM_STEPS = 3

MODES: dict[str, dict[str, Any]] = {
    "fastest": {},
    "split": {"cluster": "slow"},
    "on a mesh": {"mesh": (2, 4)},
    "microbatches": {"microbatches": 2},
    "1f1b": {"stages": 2, "microbatches": 2},
    "gpipe": {"stages": 2, "microbatches": 2, "schedule": "gpipe"},
}
"""Options of `parallelize`."""

SEARCH_S = 4.0


@dataclass(frozen=True)
class Called:
    """A drawn step and the options that it is decorated with."""

    drawn: Mannered
    mode: str

    @classmethod
    def of(cls, seed: int) -> "Called":
        """Draws them."""
        dice = Dice(seed)
        return cls(draw_mannered(dice), dice.pick(list(MODES)))

    def __str__(self) -> str:
        return f"{self.drawn}\n{self.mode}"

    def hold(self) -> None:
        """Asserts one device's numbers, in results that are all still there after the last call; one search for each
        shape and dtype of the state; and that no array was deleted but state that was given up.

        A step whose examples depend on each other, or are no multiple of the microbatches, is refused where it has to be
        split; it is then tried in one piece.
        """
        wanted = self._run(jax.jit(self.drawn.step))
        heard: list[str] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autoshard.AutoshardWarning)
            try:
                got = self._run(
                    autoshard.parallelize(self.drawn.step, progress=heard.append, **_options(self.mode))
                )
            except autoshard.InputError:
                heard.clear()
                got = self._run(
                    autoshard.parallelize(self.drawn.step, progress=heard.append, **_options("fastest"))
                )
        assert_equal(got, wanted)
        assert _num_searches(heard) <= 1 + self.drawn.is_widened, f"searched too often: {heard}"

    def _run(self, step: Any) -> Any:
        """The numbers of the last state, and of all metrics, which are read after the last call."""
        state, metrics, given = self.drawn.state(), [], []
        for i in range(NUM_STEPS):
            given.append(self.drawn.args(i))
            state, told = self.drawn.parts(step(state, *given[-1]))
            metrics.append(told)
        deleted = [x for x in jax.tree.leaves(given) if isinstance(x, jax.Array) and x.is_deleted()]
        assert not deleted, "an array of a batch was deleted"
        return jax.tree.map(_numbers, (state, metrics))


def _options(mode: str) -> dict[str, Any]:
    """A good plan is enough; pipelines are planned without a limit."""
    options = MODES[mode]
    if "cluster" in options:
        options = {**options, "cluster": slow_cluster()}
    return options if "stages" in options else {**options, "time_limit_s": SEARCH_S}


def slow_cluster() -> Cluster:
    """Eight simulated devices so slow, behind a network so fast, that small steps are split as large ones would be."""
    fast = parse_cluster("8xCPU")
    speeds = (("float32", 2e8), ("float64", 1e8), ("vector", 5e7))
    device = replace(fast.device, launch_s=1e-9, memory_bytes_per_s=2e8, flops_per_s=speeds)
    link = replace(fast.intra, latency_s=1e-9)
    return replace(fast, name="8xSlow", device=device, intra=link, inter=link)


def _num_searches(heard: list[str]) -> int:
    """Traces that something but compilation followed."""
    return sum(a == "tracing" and b not in ("tracing", "compiling") for a, b in itertools.pairwise(heard))


def _numbers(x: Any) -> np.ndarray:
    is_key = jax.dtypes.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)
