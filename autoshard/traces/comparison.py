"""A plan beside the trace of a real run."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autoshard.cost_model.errors import InputError, PlanError
from autoshard.cost_model.units import format_seconds
from autoshard.search.plan.edits import is_edited
from autoshard.search.plan.text_table import aligned, plural
from autoshard.search.plan.values import PlanValues
from autoshard.traces import measured, predictions
from autoshard.traces.kernel import TracedKernel
from autoshard.traces.predictions import BUSY, IDLE, Time
from autoshard.traces.profile_folder import traced_kernels
from autoshard.traces.steps import TracedStep, steps


@dataclass(frozen=True, slots=True)
class Measured:
    """A part of a step, or a kind of kernels: predicted and measured, for one device and step.

    Attributes:
      name: of the part or kind.
      predicted_s: seconds by the plan; None if the plan does not tell it apart.
      measured_s: seconds in the trace.
      predicted_runs: kernels by the plan; None if unknown. The compiler joins small collectives.
      measured_runs: kernels in the trace; None for a part of a step.
      over: of a collective, the mesh axes by the plan.
    """

    name: str
    predicted_s: float | None
    measured_s: float
    predicted_runs: float | None = None
    measured_runs: float | None = None
    over: str = ""

    @property
    def more_s(self) -> float:
        """Seconds that the trace has more than the plan."""
        return self.measured_s - (self.predicted_s or 0.0)


@dataclass(frozen=True, slots=True)
class TraceComparison:
    """A plan's predictions beside a trace.

    Attributes:
      step: the step function's name.
      cluster: the cluster's name.
      predicted_s: seconds per step by the plan.
      measured_s: seconds of the median step in the trace, to the beginning of the next one.
      num_steps: steps in the trace.
      num_devices: devices in the trace; numbers are their means.
      plan_devices: devices of the plan.
      parts: parts of a step that follow one another, and add up to it.
      kinds: kernels by class and collective, the largest differences first. Streams run side by side.

    Example:
      >>> print(trace_compare("plan.json", "profile"))  # doctest: +SKIP
    """

    step: str
    cluster: str
    predicted_s: float
    measured_s: float
    num_steps: int
    num_devices: int
    plan_devices: int
    parts: tuple[Measured, ...]
    kinds: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""
        return asdict(self)

    def __str__(self) -> str:
        devices = plural(self.num_devices, "device")
        of_all = "" if self.num_devices == self.plan_devices else f" of {self.plan_devices}"
        which = f"median of {self.num_steps} steps" if self.num_steps > 1 else "one step"
        whole = Measured("", self.predicted_s, self.measured_s)
        return "\n".join(
            [
                f"{self.step} on {self.cluster}: predicted {format_seconds(self.predicted_s)}, measured "
                f"{format_seconds(self.measured_s)} ({_percent(whole)})",
                f"{which}, mean of {devices}{of_all}",
                "",
                *_table([_HEAD[:4], *map(_row, self.parts)]),
                "",
                "kernels by class and collective, the largest differences first; streams run side by side",
                *_table([(*_HEAD, "runs"), *((*_row(one), _runs(one)) for one in self.kinds)]),
            ]
        )


_HEAD = ("", "predicted", "measured", "difference")


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    return aligned(rows, right=range(1, 5))


def _row(one: Measured) -> tuple[str, str, str, str]:
    name = f"{one.name} over {one.over}" if one.over else one.name
    predicted = "-" if one.predicted_s is None else format_seconds(one.predicted_s)
    percent = f" ({_percent(one)})" if one.predicted_s else ""
    return name, predicted, format_seconds(one.measured_s), f"{_signed(one.more_s)}{percent}"


def _signed(seconds: float) -> str:
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def _percent(one: Measured) -> str:
    return f"{one.more_s / one.predicted_s:+.0%}" if one.predicted_s else "not predicted"


def _runs(one: Measured) -> str:
    sides = (one.predicted_runs, one.measured_runs)
    return " / ".join(f"{runs:.4g}" if runs else "-" for runs in sides)


def compared(plan: PlanValues, profile: Path) -> TraceComparison:
    """A plan beside the trace of a run: see `autoshard.trace_compare`."""
    if is_edited(plan):
        raise PlanError(
            "the plan was edited by hand, and its estimates are older. Make new ones: autoshard show PLAN TARGET --json"
        )
    kernels = traced_kernels(profile)
    module = _module(plan, kernels, profile)
    of_devices = _steps_of(kernels, module)
    _check_devices(plan, len(of_devices), profile)
    chosen = _median(list(of_devices.values()))
    return TraceComparison(
        plan.step,
        str(plan.cluster.get("name", "a cluster")),
        plan.estimates.step_s,
        sum(step.seconds for step in chosen) / len(chosen),
        min(map(len, of_devices.values())),
        len(of_devices),
        plan.num_devices,
        _parts(plan, chosen, module),
        _kinds(plan, chosen, module),
    )


def _module(plan: PlanValues, kernels: Sequence[TracedKernel], profile: Path) -> str:
    """The HLO module of the step; empty if kernels name none, or stages have modules of their own."""
    own = f"jit_{re.sub(r'[^\w.-]', '_', plan.step)}"
    seen = sorted({kernel.module for kernel in kernels} - {""})
    if plan.is_pipeline or not seen:
        return ""
    if own not in seen:
        raise InputError(
            f"{profile} is a trace of other programs than the plan's step {plan.step!r}, which is {own}: it has "
            f"{', '.join(seen)}"
        )
    return own


def _steps_of(kernels: Sequence[TracedKernel], module: str) -> Mapping[str, tuple[TracedStep, ...]]:
    """By device that runs the step, its steps."""
    of_devices = dict[str, list[TracedKernel]]()
    for kernel in kernels:
        of_devices.setdefault(kernel.device, []).append(kernel)
    own = {device: [k for k in found if k.module == module] or found for device, found in of_devices.items()}
    runs_it = [device for device in sorted(own) if not module or own[device][0].module == module]
    return {device: steps(of_devices[device], own[device]) for device in runs_it}


def _check_devices(plan: PlanValues, num_devices: int, profile: Path) -> None:
    if num_devices > plan.num_devices:
        raise InputError(
            f"{profile} is a trace of {num_devices} devices, and the plan has {plan.num_devices}: give the trace of a run "
            "by this plan"
        )


def _median(of_devices: Sequence[Sequence[TracedStep]]) -> list[TracedStep]:
    """The step that takes the median time, on each device; the shorter one of two."""
    of_steps = list(zip(*of_devices, strict=False))
    ordered = sorted(of_steps, key=lambda step: sum(one.seconds for one in step))
    return list(ordered[(len(ordered) - 1) // 2])


def _parts(plan: PlanValues, chosen: Sequence[TracedStep], module: str) -> tuple[Measured, ...]:
    predicted = predictions.parts(plan)
    on_each = [measured.parts(step, module) for step in chosen]
    found = {name: sum(one[name] for one in on_each) / len(on_each) for name in on_each[0]}
    if BUSY in predicted:
        found[BUSY] = sum(found.values()) - found[IDLE]
    return tuple(Measured(name, predicted_s, found[name]) for name, predicted_s in predicted.items())


def _kinds(plan: PlanValues, chosen: Sequence[TracedStep], module: str) -> tuple[Measured, ...]:
    predicted = predictions.kinds(plan)
    found = measured.mean([measured.kinds(step, module) for step in chosen])
    names = dict.fromkeys([*predicted, *found])
    rows = (_kind(name, predicted.get(name), found.get(name, Time(0.0))) for name in names)
    return tuple(sorted(rows, key=lambda one: (-abs(one.more_s), one.name)))


def _kind(name: str, predicted: Time | None, found: Time) -> Measured:
    if predicted is None:
        return Measured(name, None, found.seconds, None, found.runs)
    return Measured(
        name, predicted.seconds, found.seconds, predicted.runs or None, found.runs, predicted.over
    )
