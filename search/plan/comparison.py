"""Two plans side by side: time, memory, communication, and the arguments that are sharded differently.

A plan is judged beside another one, such as one with an expert's pins. Both plan one step, mostly on one cluster, so their
numbers can be subtracted kind by kind. Equal parts are left out of the text, totals excepted. Arguments that are sharded
differently are folded as the summary folds them (`search.plan.argument_lines`), each with both of its specs. A spec that
names an axis is also another one if that axis has another size.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.edits import is_edited
from autoshard.search.plan.summary import stage_meshes, time_parts, whole_mesh
from autoshard.search.plan.text_table import aligned, fitted, plural
from autoshard.search.plan.values import Collective, PlanValues

LEAST_SHARE = 1e-3
"""Of a total, by how much a part must differ to be shown. Source: a choice of ours."""

ABSENT = "-"
"""In place of the spec of an argument that a plan does not have."""


@dataclass(frozen=True, slots=True)
class Amount:
    """One quantity under both plans.

    Attributes:
      name: its name.
      this: under the plan that is compared.
      other: under the plan that it is compared with.
    """

    name: str
    this: float
    other: float

    @property
    def more(self) -> float:
        """The difference: this plan's amount less the other's."""
        return self.this - self.other


@dataclass(frozen=True, slots=True)
class Comparison[Kind: PlanValues]:
    """The differences between two plans; `print` it.

    Attributes:
      plan: the plan.
      against: the plan that it is compared with.
      time: seconds of a step by kind; the first is the whole step.
      memory: bytes per device at the peak, by kind; the first is the peak.
      collectives: seconds by kind and axes, with sizes where plans have axes of one name but not of one size.
      num_bytes: bytes per device of collectives, by kind and axes.
      arguments: by pytree path, both specs of those that are sharded differently.
    """

    plan: Kind
    against: Kind
    time: tuple[Amount, ...]
    memory: tuple[Amount, ...]
    collectives: tuple[Amount, ...]
    num_bytes: tuple[Amount, ...]
    arguments: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, plan: Kind, against: Kind) -> Self:
        """Compares two plans."""
        both = plan, against

        def amounts(parts_of: Callable[[Kind], Mapping[str, float]], *whole: Amount) -> tuple[Amount, ...]:
            ours, theirs = map(parts_of, both)
            return (*whole, *(Amount(n, ours.get(n, 0.0), theirs.get(n, 0.0)) for n in {**ours, **theirs}))

        step = Amount("step", plan.estimates.step_s, against.estimates.step_s)
        peak = Amount("peak", plan.estimates.peak_bytes, against.estimates.peak_bytes)
        has_residents = all(p.estimates.residents for p in both)
        return cls(
            plan,
            against,
            amounts(time_parts, step),
            amounts(lambda p: p.estimates.residents if has_residents else {}, peak),
            amounts(lambda p: _collectives(p, lambda c: c.seconds)),
            amounts(lambda p: _collectives(p, lambda c: float(c.bytes))),
            _lying_otherwise(plan, against),
        )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""

        def told(amounts: Sequence[Amount]) -> dict[str, Any]:
            return {amount.name: [amount.this, amount.other] for amount in amounts}

        return {
            "mesh": [whole_mesh(p) for p in (self.plan, self.against)],
            "seconds": told(self.time),
            "bytes": told(self.memory),
            "collective_seconds": told(self.collectives),
            "collective_bytes": told(self.num_bytes),
            "arguments": {path: list(specs) for path, specs in self.arguments.items()},
        }

    def __str__(self) -> str:
        parts = [
            _head(self.plan, self.against),
            _table("time per step", self.time, format_seconds),
            _table("memory at the peak, per device", self.memory, format_bytes),
            _table("collectives, by time", self.collectives, format_seconds, self.time[0]),
            _table("collectives, by bytes per device", self.num_bytes, format_bytes),
            _arguments(self.arguments),
        ]
        return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _collectives(plan: PlanValues, amount: Callable[[Collective], float]) -> dict[str, float]:
    """Amounts by kind and axes, the axes with their sizes, as two plans' axes of one name may differ. If stages have their
    own programs, the mean of all devices."""
    total = dict[str, float]()
    for share, mesh, collectives in _moved(plan):
        for one in collectives:
            name = f"{one.kind} over {', '.join(f'{axis}={mesh[axis]}' for axis in one.axes)}"
            total[name] = total.get(name, 0.0) + share * amount(one)
    return total


def _moved(plan: PlanValues) -> Iterator[tuple[float, Mapping[str, int], Sequence[Collective]]]:
    """The share of the devices that take part, their mesh, and their collectives."""
    yield 1.0, whole_mesh(plan), plan.estimates.collectives
    num_devices = sum(map(plan.devices_of, plan.stages))
    for stage, taken in zip(plan.stages, plan.estimates.stages, strict=False):
        yield plan.devices_of(stage) / num_devices, plan.mesh_of(stage), taken.collectives


def _lying_otherwise(plan: PlanValues, against: PlanValues) -> dict[str, tuple[str, str]]:
    ours, theirs = _specs(plan), _specs(against)
    sizes, other_sizes = _axis_sizes(plan), _axis_sizes(against)
    axes = {**sizes, **other_sizes}
    changed = {axis for axis in axes if sizes.get(axis, {1}) != other_sizes.get(axis, {1})}
    specs = {path: (ours.get(path, ABSENT), theirs.get(path, ABSENT)) for path in {**ours, **theirs}}
    return {
        path: (this, other)
        for path, (this, other) in specs.items()
        if this != other or changed & set(re.findall(r"\w+", this))
    }


def _specs(plan: PlanValues) -> dict[str, str]:
    """By argument, its spec; the specs on all meshes, if these differ."""
    said: dict[str, dict[str, None]] = {}
    for sharding in plan.shardings:
        for path, spec in sharding.arguments.items():
            said.setdefault(path, {})[spec] = None
    return {path: " or ".join(specs) for path, specs in said.items()}


def _axis_sizes(plan: PlanValues) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for sharding in plan.shardings:
        for axis, size in sharding.mesh.items():
            found.setdefault(axis, set()).add(size)
    return found


# --- text


def _head(plan: PlanValues, against: PlanValues) -> list[str]:
    sides: dict[str, Callable[[PlanValues], str]] = {
        "mesh": _mesh,
        "cluster": lambda p: str(p.cluster.get("name")),
        "step": lambda p: f"{p.step} ({p.fingerprint})",
        "executor": lambda p: p.executor,
        "schedule": lambda p: p.schedule or ABSENT,
        "microbatches": lambda p: str(p.microbatches),
    }
    rows = [(name, said(plan), said(against)) for name, said in sides.items()]
    shown = [row for row in rows if row[0] == "mesh" or row[1] != row[2]]
    return [
        incomparable(plan, against) or _verdict(plan.estimates.step_s, against.estimates.step_s),
        *aligned([("", "this", "other"), *shown]),
    ]


def incomparable(plan: PlanValues, against: PlanValues) -> str:
    """The reason why the step times of two plans say nothing about which is better; empty if they do."""
    if plan.fingerprint != against.fingerprint:
        return (
            f"the plans are of different steps, {plan.step} and {against.step}: their times are not compared"
        )
    if plan.cluster != against.cluster:
        names = f"{plan.cluster.get('name')} and {against.cluster.get('name')}"
        return f"the plans are for different clusters, {names}: their times are not compared"
    if is_edited(plan) or is_edited(against):
        return "a plan was edited by hand, and its estimates were made before: their times are not compared"
    return ""


def _verdict(this_s: float, other_s: float) -> str:
    more = this_s / other_s - 1 if other_s else 0.0
    if abs(more) < LEAST_SHARE:
        return "this plan is as fast as the other"
    return f"this plan is {abs(more):.1%} {'slower' if more > 0 else 'faster'} than the other"


def _mesh(plan: PlanValues) -> str:
    """`2x4 (data x model)`; `2 stages of 1x4 (replica x data)`."""
    said = [f"{format_mesh(tuple(mesh.values()))} ({' x '.join(mesh)})" for mesh in stage_meshes(plan)]
    text = " or ".join(dict.fromkeys(said))
    return f"{plural(len(plan.stages), 'stage')} of {text}" if plan.is_pipeline else text


def _table(
    title: str, amounts: Sequence[Amount], said: Callable[[float], str], whole: Amount | None = None
) -> list[str]:
    """What differs, the largest difference first, behind the total."""
    if not amounts:
        return []
    largest = max(whole.this, whole.other) if whole else max(max(a.this, a.other) for a in amounts)
    head, parts = (amounts[:1], amounts[1:]) if amounts[0].name in ("step", "peak") else ((), amounts)
    shown = [a for a in parts if abs(a.more) > LEAST_SHARE * largest]
    ordered = [*head, *sorted(shown, key=lambda a: -abs(a.more))]
    rows = [(a.name.replace("_", " "), said(a.this), said(a.other), _signed(a.more, said)) for a in ordered]
    return [title if rows else f"{title}: no difference", *aligned(rows, right=(1, 2, 3))]


def _signed(amount: float, said: Callable[[float], str]) -> str:
    return f"{'-' if amount < 0 else '+'}{said(abs(amount))}"


def _arguments(arguments: Mapping[str, tuple[str, str]]) -> list[str]:
    if not arguments:
        return ["arguments: all sharded alike"]
    lines = argument_lines({path: f"{this} | {other}" for path, (this, other) in arguments.items()})
    return [f"arguments sharded differently (this | other): {plural(len(arguments), 'array')}", *lines[1:]]
