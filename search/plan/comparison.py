"""Two plans side by side: time, memory, communication, and the arguments that are sharded differently.

A plan is judged beside another one, such as one with an expert's pins. Both plan one step, mostly on one cluster, so their
numbers can be subtracted kind by kind. Equal parts are left out of the text, totals excepted. Arguments that are sharded
differently are folded as the summary folds them (`search.plan.argument_lines`), each with both of its specs. A spec that
names an axis is also another one if that axis has another size.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.summary import time_parts
from autoshard.search.plan.text_table import aligned, fitted, plural

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
class Comparison:
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

    plan: Plan
    against: Plan
    time: tuple[Amount, ...]
    memory: tuple[Amount, ...]
    collectives: tuple[Amount, ...]
    num_bytes: tuple[Amount, ...]
    arguments: Mapping[str, tuple[str, str]]

    @classmethod
    def of(cls, plan: Plan, against: Plan) -> "Comparison":
        """Compares two plans."""
        both = plan, against

        def amounts(parts_of: Callable[[Plan], Mapping[str, float]], *whole: Amount) -> tuple[Amount, ...]:
            ours, theirs = map(parts_of, both)
            return (*whole, *(Amount(n, ours.get(n, 0.0), theirs.get(n, 0.0)) for n in {**ours, **theirs}))

        step = Amount("step", plan.estimates.step_s, against.estimates.step_s)
        peak = Amount("peak", plan.estimates.peak_bytes, against.estimates.peak_bytes)
        return cls(
            plan,
            against,
            amounts(lambda p: time_parts(p.estimates), step),
            amounts(lambda p: p.estimates.residents, peak),
            amounts(lambda p: _collectives(p, lambda c: c.seconds)),
            amounts(lambda p: _collectives(p, lambda c: float(c.bytes))),
            _lying_otherwise(plan, against),
        )

    def to_json(self) -> dict[str, Any]:
        """The comparison as JSON-ready values."""

        def told(amounts: Sequence[Amount]) -> dict[str, Any]:
            return {amount.name: [amount.this, amount.other] for amount in amounts}

        return {
            "mesh": [dict(p.decisions.mesh) for p in (self.plan, self.against)],
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


def _collectives(plan: Plan, amount: Callable[[Any], float]) -> dict[str, float]:
    """Amounts by kind and axes, the axes with their sizes: two plans' axes of one name may differ."""
    mesh, total = plan.decisions.mesh, dict[str, float]()
    for one in plan.estimates.collectives:
        name = f"{one.kind} over {', '.join(f'{axis}={mesh[axis]}' for axis in one.axes)}"
        total[name] = total.get(name, 0.0) + amount(one)
    return total


def _lying_otherwise(plan: Plan, against: Plan) -> dict[str, tuple[str, str]]:
    ours, theirs = plan.decisions, against.decisions
    sizes = {**ours.mesh, **theirs.mesh}
    changed = {axis for axis in sizes if ours.mesh.get(axis, 1) != theirs.mesh.get(axis, 1)}
    specs = {
        path: (ours.arguments.get(path, ABSENT), theirs.arguments.get(path, ABSENT))
        for path in {**ours.arguments, **theirs.arguments}
    }
    return {
        path: (this, other)
        for path, (this, other) in specs.items()
        if this != other or changed & set(re.findall(r"\w+", this))
    }


# --- text


def _head(plan: Plan, against: Plan) -> list[str]:
    sides: dict[str, Callable[[Plan], str]] = {
        "mesh": _mesh,
        "cluster": lambda p: str(p.cluster.get("name")),
        "step": lambda p: f"{p.step} ({p.fingerprint})",
        "microbatches": lambda p: str(p.decisions.microbatches),
    }
    rows = [(name, said(plan), said(against)) for name, said in sides.items()]
    shown = [row for row in rows if row[0] == "mesh" or row[1] != row[2]]
    return [
        incomparable(plan, against) or _verdict(plan.estimates.step_s, against.estimates.step_s),
        *aligned([("", "this", "other"), *shown]),
    ]


def incomparable(plan: Plan, against: Plan) -> str:
    """The reason why the step times of two plans say nothing about which is better; empty if they do."""
    if plan.fingerprint != against.fingerprint:
        return (
            f"the plans are of different steps, {plan.step} and {against.step}: their times are not compared"
        )
    if plan.cluster != against.cluster:
        names = f"{plan.cluster.get('name')} and {against.cluster.get('name')}"
        return f"the plans are for different clusters, {names}: their times are not compared"
    if plan.is_edited or against.is_edited:
        return "a plan was edited by hand, and its estimates were made before: their times are not compared"
    return ""


def _verdict(this_s: float, other_s: float) -> str:
    more = this_s / other_s - 1 if other_s else 0.0
    if abs(more) < LEAST_SHARE:
        return "this plan is as fast as the other"
    return f"this plan is {abs(more):.1%} {'slower' if more > 0 else 'faster'} than the other"


def _mesh(plan: Plan) -> str:
    mesh = plan.decisions.mesh
    return f"{format_mesh(tuple(mesh.values()))} ({' x '.join(mesh)})"


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
