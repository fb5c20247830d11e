"""A drawn step on a drawn mesh along a drawn kind of plan: what a seed stands for, and what must hold of it.

Wants `jax_enable_x64`.
"""

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

import autoshard
from autoshard.search.ir.graph import Step
from autoshard.search.result import SearchResult
from tests.executors import plans
from tests.executors.agreement import Reference, assert_equal
from tests.zoo.drawn import Dice, Drawn, draw_step

NUM_STEPS = 3

MESHES = ((8,), (2, 4), (4, 2), (2, 2, 2), (6,), (2, 3), (3, 2))

PLANS: dict[str, Callable[[Step, tuple[int, ...], int], SearchResult]] = {
    "fastest": lambda step, mesh, seed: plans.fastest(step, mesh),
    "smallest": lambda step, mesh, seed: plans.smallest(step, mesh),
    "drawn": plans.drawn,
}


@dataclass(frozen=True)
class Trial:
    """What a seed stands for.

    Attributes:
        seed: Of all the others, and of the plan where that is drawn.
        mesh: Sizes of the mesh axes.
        plan: Of `PLANS`.
        drawn: The step.
    """

    seed: int
    mesh: tuple[int, ...]
    plan: str
    drawn: Drawn

    @classmethod
    def of(cls, seed: int) -> "Trial":
        """Draws them."""
        dice = Dice(seed)
        return cls(seed, dice.pick(MESHES), dice.pick(list(PLANS)), draw_step(dice))

    def planned(self) -> "Planned":
        """Takes the steps on one device, and plans them for many."""
        reference = Reference.of(self.drawn.case(), NUM_STEPS)
        return Planned(reference, PLANS[self.plan](reference.step, self.mesh, self.seed))


@dataclass(frozen=True)
class Planned:
    """A plan of a trial's step."""

    reference: Reference
    found: SearchResult

    def assert_numbers_equal(self) -> None:
        """Many devices along the plan come to one device's numbers."""
        assert_equal(self.reference.on_many_devices(self.found), self.reference.results)

    def assert_plan_survives_its_file(self) -> None:
        """Saved, loaded and given to its step, the plan decides the same."""
        case = self.reference.case
        with TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore", autoshard.AutoshardWarning)
            path = Path(folder) / "plan.json"
            self.found.plan.save(path)
            parallel = autoshard.parallelize(case.step, plan=path, devices=jax.devices()[: self.num_devices])
            parallel.lower(*case.abstract_args())
        for wanted, got in zip(_decisions(self.found.plan), _decisions(parallel.plan), strict=True):
            assert got == wanted, f"wanted {wanted}, got {got}"

    @property
    def num_devices(self) -> int:
        """Of the plan's mesh."""
        return self.found.plan.num_devices


def _decisions(plan: autoshard.Plan) -> list[str]:
    """The plan's bytes, by line."""
    return json.dumps(plan.to_json()["shardings"], indent=1).splitlines()
