"""Two plans side by side: time, memory, communication, and the decisions that differ.

A plan is judged beside another one, such as one with an expert's pins. Both plan one step, mostly on one cluster, so their
numbers can be subtracted kind by kind. Equal parts are left out of the text, totals excepted. Decisions are listed by group
(`search.plan.differences`), each with both of its values and a sign: `~` changed, `+` in this plan only, `-` in the other
only. Arguments are folded as the summary folds them (`search.plan.argument_lines`).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from autoshard.cost_model.units import format_bytes, format_mesh, format_seconds
from autoshard.search.plan.argument_lines import argument_lines
from autoshard.search.plan.differences import SIGNS, Difference, differences
from autoshard.search.plan.edits import is_edited
from autoshard.search.plan.plan_meshes import collectives, stage_meshes, whole_mesh
from autoshard.search.plan.summary import time_parts
from autoshard.search.plan.text_table import LINES_OF_A_LIST, aligned, fitted, more_of, plural
from autoshard.search.plan.values import Collective, PlanValues

LEAST_SHARE = 1e-3
"""Smallest share of a total by which a part must differ to be shown. Derived: the smallest that is printed, with one
decimal of a percentage."""

ABSENT = "-"
"""The text for a decision that a plan does not have."""

BAR = "\\|"
"""A bar inside a cell of a Markdown table."""


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
      decisions: all that the plans decide differently, group by group.
    """

    plan: Kind
    against: Kind
    time: tuple[Amount, ...]
    memory: tuple[Amount, ...]
    collectives: tuple[Amount, ...]
    num_bytes: tuple[Amount, ...]
    decisions: tuple[Difference, ...]

    @property
    def arguments(self) -> dict[str, tuple[str, str]]:
        """By pytree path, both specs of the arguments that are sharded differently."""
        found = [one for one in self.decisions if one.is_argument]
        return {one.name: (one.this or ABSENT, one.other or ABSENT) for one in found}

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
            differences(plan, against),
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
            "decisions": [
                {"group": d.group, "name": d.name, "kind": d.kind, "this": d.this, "other": d.other}
                for d in self.decisions
            ],
        }

    def to_markdown(self) -> str:
        """The comparison in Markdown, for a pull request: the numbers, and a folded table for each group of decisions."""
        groups: dict[str, list[Difference]] = {}
        for one in self.decisions:
            groups.setdefault(one.group, []).append(one)
        parts = [
            [f"**{incomparable(self.plan, self.against) or _verdict(*_step_times(self))}**"],
            _markdown_table("time per step", self.time, format_seconds),
            _markdown_table("memory at the peak, per device", self.memory, format_bytes),
            _markdown_table("collectives, by time", self.collectives, format_seconds, self.time[0]),
            *(_markdown_group(group, members) for group, members in groups.items()),
            [] if groups else ["", "The plans decide alike."],
        ]
        return "\n".join(line for lines in parts for line in lines)

    def __str__(self) -> str:
        parts = [
            _head(self.plan, self.against),
            _table("time per step", self.time, format_seconds),
            _table("memory at the peak, per device", self.memory, format_bytes),
            _table("collectives, by time", self.collectives, format_seconds, self.time[0]),
            _table("collectives, by bytes per device", self.num_bytes, format_bytes),
            _decisions(self.decisions),
        ]
        return fitted("\n".join("\n".join(lines) for lines in parts if lines))


def _collectives(plan: PlanValues, amount: Callable[[Collective], float]) -> dict[str, float]:
    """Amounts by kind and axes, the axes with their sizes, as two plans' axes of one name may differ. If stages have their
    own programs, the mean of all devices."""
    total = dict[str, float]()
    for share, mesh, moved in collectives(plan):
        for one in moved:
            name = f"{one.kind} over {', '.join(f'{axis}={mesh[axis]}' for axis in one.axes)}"
            total[name] = total.get(name, 0.0) + share * amount(one)
    return total


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
    rows = [(name, as_text(plan), as_text(against)) for name, as_text in sides.items()]
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
    meshes = [f"{format_mesh(tuple(mesh.values()))} ({' x '.join(mesh)})" for mesh in stage_meshes(plan)]
    text = " or ".join(dict.fromkeys(meshes))
    return f"{plural(len(plan.stages), 'stage')} of {text}" if plan.is_pipeline else text


def _step_times(comparison: Comparison[Any]) -> tuple[float, float]:
    return comparison.time[0].this, comparison.time[0].other


def _table(
    title: str, amounts: Sequence[Amount], as_text: Callable[[float], str], whole: Amount | None = None
) -> list[str]:
    """The differing parts, the largest difference first, behind the total."""
    if not amounts:
        return []
    rows = _rows(amounts, as_text, whole)
    return [title if rows else f"{title}: no difference", *aligned(rows, right=(1, 2, 3))]


def _rows(
    amounts: Sequence[Amount], as_text: Callable[[float], str], whole: Amount | None
) -> list[tuple[str, str, str, str]]:
    if not amounts:
        return []
    largest = max(whole.this, whole.other) if whole else max(max(a.this, a.other) for a in amounts)
    head, parts = (amounts[:1], amounts[1:]) if amounts[0].name in ("step", "peak") else ((), amounts)
    shown = [a for a in parts if abs(a.more) > LEAST_SHARE * largest]
    ordered = [*head, *sorted(shown, key=lambda a: -abs(a.more))]
    return [
        (a.name.replace("_", " "), as_text(a.this), as_text(a.other), _signed(a.more, as_text))
        for a in ordered
    ]


def _signed(amount: float, as_text: Callable[[float], str]) -> str:
    return f"{'-' if amount < 0 else '+'}{as_text(abs(amount))}"


def _decisions(found: Sequence[Difference]) -> list[str]:
    """The decisions that differ, group by group, each line with its sign."""
    groups: dict[str, list[Difference]] = {}
    for one in found:
        groups.setdefault(one.group, []).append(one)
    lines = [] if any(one.is_argument for one in found) else ["arguments: all sharded alike"]
    for group, members in groups.items():
        lines += _group_of_arguments(group, members) if members[0].is_argument else _group(group, members)
    return lines


def _group(group: str, members: Sequence[Difference]) -> list[str]:
    shown = members[:LINES_OF_A_LIST]
    rows = [(f"{SIGNS[one.kind]} {one.name}", _pair(one)) for one in shown]
    return [
        f"{group} (this | other): {_counts(members)}",
        *aligned(rows, indent=0),
        *more_of(len(members) - len(shown), "decision"),
    ]


def _group_of_arguments(group: str, members: Sequence[Difference]) -> list[str]:
    """Arguments of one role, folded as the summary folds them."""
    lines = [f"{group} sharded differently (this | other): {plural(len(members), 'array')}"]
    for kind, sign in SIGNS.items():
        pairs = {one.name: _pair(one) for one in members if one.kind == kind}
        lines += [sign + line[1:] for line in argument_lines(pairs)[1:]] if pairs else []
    return lines


def _pair(one: Difference) -> str:
    return f"{ABSENT if one.this is None else one.this} | {ABSENT if one.other is None else one.other}"


def _counts(members: Sequence[Difference]) -> str:
    """`2 changed, 1 added`."""
    counts = Counter(one.kind for one in members)
    return ", ".join(f"{counts[kind]} {kind}" for kind in SIGNS if counts[kind])


# --- Markdown


def _markdown_table(
    title: str, amounts: Sequence[Amount], as_text: Callable[[float], str], whole: Amount | None = None
) -> list[str]:
    rows = _rows(amounts, as_text, whole)
    if not rows:
        return []
    cells = [f"| {' | '.join(row)} |" for row in rows]
    return ["", f"| {title} | this | other | difference |", "|---|---:|---:|---:|", *cells]


def _markdown_group(group: str, members: Sequence[Difference]) -> list[str]:
    """A table that is folded until a reader opens it."""
    rows = [
        f"| {SIGNS[one.kind]} | {_code(one.name)} | {_code(one.this)} | {_code(one.other)} |"
        for one in members
    ]
    return [
        "",
        f"<details><summary>{group}: {_counts(members)}</summary>",
        "",
        "| | decision | this | other |",
        "|---|---|---|---|",
        *rows,
        "",
        "</details>",
    ]


def _code(text: str | None) -> str:
    """Text as code in a cell of a table, where a bar would end the cell."""
    return "" if text is None else f"`{text.replace('|', BAR)}`"
