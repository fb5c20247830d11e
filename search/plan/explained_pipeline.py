"""The answer to why a pipeline is as it is: values and their text.

Its stages, its schedule and its microbatches are explained by their runner-up: the fastest plan that other searches find
where this choice is one of its neighbours, under the plan's cap. An argument is explained by its place: the stage on which
it rests, and how the devices of that stage share it.
"""

from dataclasses import asdict, dataclass
from typing import Any

from autoshard.search.plan.explained import MoreMemory, finite, more_memory, signed_bytes, signed_s
from autoshard.search.plan.text_table import aligned, fitted

NOT_NEEDED = "slower than the runner-up, or does not fit"
"""The reason for a neighbour whose search ended at the runner-up's time."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """Another choice of a pipeline's stages, schedule or microbatches.

    Attributes:
      choice: in words.
      plan: the fastest plan with it, in words; empty if none was found that is faster than the runner-up.
      more_s: seconds that its step takes longer; None without a plan.
      more_bytes: bytes by which a device's peak is higher; None without a plan.
      why_not: the reason why there is no plan; empty with one.
    """

    choice: str
    plan: str = ""
    more_s: float | None = None
    more_bytes: int | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an argument of a pipeline.

    Attributes:
      stage: the number of its stage; None if all stages have a part of it.
      mesh: sizes of the axes of the devices that share it.
      spec: its spec on these axes.
    """

    stage: int | None
    mesh: dict[str, int]
    spec: str


@dataclass(frozen=True, slots=True)
class PipelineExplanation:
    """Why a pipeline is as it is; `print` it.

    Attributes:
      name: `stages`, `schedule` or `microbatches`, or the path of an argument.
      choice: the plan's.
      reason: `cheaper elsewhere`, `tie`, `improvable` or `not possible`; empty of an argument.
      runner_up: the fastest plan with a neighbouring choice; None if none fits, and of an argument.
      others: the other neighbours.
      place: the place of an argument; None for other decisions.
      more_memory: the worth of the next 10% of memory; None of an argument.
      step_s: seconds of a step of the plan.
    """

    name: str
    choice: str
    reason: str = ""
    runner_up: Neighbour | None = None
    others: tuple[Neighbour, ...] = ()
    place: Place | None = None
    more_memory: MoreMemory | None = None
    step_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON-ready values."""
        return finite(asdict(self))

    def __str__(self) -> str:
        lines = [self.name, f"  is {self.choice}"]
        if self.reason:
            lines.append(f"  {self.reason.upper()}")
        if self.runner_up:
            lines += _runner_up(self.runner_up, self.step_s)
        if self.others:
            lines += ["other neighbours:", *aligned([(one.choice, _price_text(one)) for one in self.others])]
        lines += [f"  {_place(self.place)}"] if self.place else []
        more = [more_memory(self.more_memory, self.step_s)] if self.more_memory else []
        return fitted("\n".join([*lines, *more]))


def _runner_up(one: Neighbour, step_s: float) -> list[str]:
    more_s, more_bytes = one.more_s or 0.0, one.more_bytes or 0
    return [
        f"runner-up: {one.choice}",
        f"  plan    {one.plan}",
        f"  time    {signed_s(more_s)} a step ({more_s / step_s:+.1%})",
        f"  memory  {signed_bytes(more_bytes)} at the peak of a device",
    ]


def _price_text(one: Neighbour) -> str:
    if one.more_s is None:
        return one.why_not
    return f"{signed_s(one.more_s)} a step: {one.plan}"


def _place(one: Place) -> str:
    shape = " x ".join(f"{axis}={size}" for axis, size in one.mesh.items())
    where = "on all stages" if one.stage is None else f"on stage {one.stage}"
    return f"rests {where}, on a mesh of {shape}"
