"""The explanation of a decision of a plan: its values and their text.

A decision is explained by its runner-up, the best plan in which it is anything else. Both plans are priced by one
model, so the difference is the price of the runner-up, and one of three reasons holds:

* CHEAPER ELSEWHERE: the runner-up takes longer. The decisions that change with it are listed, the largest differences
  first.
* TIE: the difference is smaller than the search's resolution.
* NOT POSSIBLE: a rule leaves no other choice: a dimension that does not divide, a pin, or the cap.

A solver that ends early knows the price between two bounds only, and the text then says so. Prices of recomputation and
of the host are estimates: these change the step that is planned, and no plan of the other step was searched.
"""

from dataclasses import asdict, dataclass
from typing import Any, cast

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import (
    LINES_OF_A_LIST,
    NAMES_IN_A_LINE,
    aligned,
    fitted,
    more_of,
    plural,
)

CHEAPER_ELSEWHERE, TIE, NOT_POSSIBLE = "cheaper elsewhere", "tie", "not possible"
"""The reasons."""

IMPROVABLE = "improvable"
"""In place of a reason: another choice is faster. So it is after an edit by hand, or if the search ended early."""

UNCERTAIN = "uncertain"
"""In place of a reason for an estimate by which the contrary is faster and fits: the search knows the peak better."""

PRECISE = 0.02
"""Bounds on a price that differ by less than this share are printed as one number. Source: the price of `explain` is
promised to 2%."""


@dataclass(frozen=True, slots=True)
class Change:
    """A decision that changes with the explained one.

    Attributes:
      name: its name in the plan.
      this: its value in the plan.
      other: its value with the runner-up.
      more_s: seconds that it adds to a step: its own, its reshards with unchanged neighbours, half of those with others.
    """

    name: str
    this: str
    other: str
    more_s: float


@dataclass(frozen=True, slots=True)
class Alternative:
    """The best plan found in which a decision is something else.

    Attributes:
      choice: the decision's value there.
      more_s: seconds that a step takes longer.
      at_least_s: a lower bound on these seconds, for all plans with another choice; -inf if nothing is proven.
      more_bytes: bytes by which the peak of a device is higher.
      own_bytes: bytes of the argument on a device, in the plan and there; None for other decisions.
      parts: seconds by which kinds of computation and communication differ, the largest differences first.
      changes: the other decisions that change, the largest differences first.
    """

    choice: str
    more_s: float
    at_least_s: float
    more_bytes: int
    own_bytes: tuple[int, int] | None
    parts: tuple[tuple[str, float], ...]
    changes: tuple[Change, ...]

    @property
    def is_precise(self) -> bool:
        """Whether the bounds are as close as the price is promised."""
        return self.more_s - self.at_least_s <= PRECISE * abs(self.more_s)


@dataclass(frozen=True, slots=True)
class Estimated:
    """The contrary choice of recomputation, or of resting on the host, by its own seconds and bytes.

    Attributes:
      choice: the plan's choice.
      other: the contrary choice.
      more_s: estimated seconds that a step would take longer; negative if it would be faster.
      more_bytes: estimated bytes that a device would hold besides; negative if fewer.
      reason: one of the three reasons, or `uncertain`.
    """

    choice: str
    other: str
    more_s: float
    more_bytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class MoreMemory:
    """A higher cap and its worth.

    Attributes:
      more_bytes: bytes that the cap is higher.
      less_s: seconds that a step would take less.
      how: the use of that memory; empty if there is none.
      is_estimate: whether no plan was searched for it.
    """

    more_bytes: int
    less_s: float
    how: str
    is_estimate: bool


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a decision; `print` it.

    Attributes:
      name: the decision's name in the plan, the path of an argument or the name of an op.
      choice: the decision; empty for an op of which the plan decides only the recomputation.
      reason: `cheaper elsewhere`, `tie` or `not possible`; empty without a choice.
      rules: the rules that exclude other choices, a sentence each.
      runner_up: the best plan with another choice that fits; None if there is none.
      beyond_cap: the best plan with another choice that the cap rules out, if it is faster than the runner-up.
      retention: whether the op is recomputed or offloaded, and the price of the contrary.
      host: whether the argument rests on the host, and the price of the contrary.
      more_memory: the worth of the next 10% of memory.
      step_s: seconds of a step of the plan.
      is_upper: whether other recomputation or offloading may make the runner-up cheaper than it is here.
    """

    name: str
    choice: str
    reason: str
    rules: tuple[str, ...]
    runner_up: Alternative | None
    beyond_cap: Alternative | None
    retention: Estimated | None
    host: Estimated | None
    more_memory: MoreMemory
    step_s: float
    is_upper: bool

    def to_json(self) -> dict[str, Any]:
        """The explanation as JSON-ready values; an unknown bound is None."""
        return finite(asdict(self))

    def __str__(self) -> str:
        lines = [self.name]
        if self.choice:
            lines += [f"  is {self.choice}", f"  {self._why()}"]
            lines += [f"  {rule}" for rule in self.rules]
        if self.runner_up:
            lines += self._runner_up_lines(self.runner_up)
        if self.beyond_cap:
            lines += self._without_cap(self.beyond_cap)
        lines += _estimated("recomputation", self.retention)
        lines += _estimated("host", self.host)
        return fitted("\n".join([*lines, more_memory(self.more_memory, self.step_s)]))

    def _why(self) -> str:
        if self.reason == TIE:
            return "TIE: another choice is as fast, within what the search tells apart"
        if self.reason == IMPROVABLE:
            return "IMPROVABLE: another choice is faster. Undo the edit, or search again"
        if self.reason == CHEAPER_ELSEWHERE:
            return "CHEAPER ELSEWHERE: every other choice makes the step longer"
        return "NOT POSSIBLE: there is no other choice"

    def _without_cap(self, one: Alternative) -> list[str]:
        """The choice that the cap rules out."""
        return [
            f"the cap rules out {one.choice}",
            f"  time    {_plain_price(one, self.step_s)}",
            f"  memory  {signed_bytes(one.more_bytes)} at the peak of a device{_own(one)}",
        ]

    def _runner_up_lines(self, one: Alternative) -> list[str]:
        is_tie = self.reason == TIE
        price = _plain_price(one, self.step_s) if is_tie else _price(one, self.step_s, self.is_upper)
        lines = [f"runner-up: {one.choice}", f"  time    {price}"]
        if one.parts:
            parts = ", ".join(f"{name} {signed_s(seconds)}" for name, seconds in one.parts[:NAMES_IN_A_LINE])
            lines.append(f"  of that {parts}")
        lines.append(f"  memory  {signed_bytes(one.more_bytes)} at the peak of a device{_own(one)}")
        return [*lines, *_changes(one.changes)]


def _plain_price(one: Alternative, step_s: float) -> str:
    """`+1.2 ms a step (+3.4%)`."""
    return f"{signed_s(one.more_s)} a step ({one.more_s / step_s:+.1%})"


def _price(one: Alternative, step_s: float, is_upper: bool) -> str:
    """The price, with its bounds if they are not close."""
    price = _plain_price(one, step_s)
    if one.is_precise:
        return f"{price}{' or less: other recomputation was not searched' * is_upper}"
    least_s = one.at_least_s
    least = f", and at least {signed_s(least_s)}" if least_s > -step_s and not is_upper else ""
    return f"at most {price}{least}: the search ended before it was certain"


def _own(one: Alternative) -> str:
    if one.own_bytes is None:
        return ""
    this, other = map(format_bytes, one.own_bytes)
    return f"; the argument takes {other} instead of {this}"


def _changes(changes: tuple[Change, ...]) -> list[str]:
    if not changes:
        return ["  no other decision changes"]
    rows = [(signed_s(c.more_s), c.name, f"{c.this} => {c.other}") for c in changes[:LINES_OF_A_LIST]]
    return [
        f"  {plural(len(changes), 'other decision')} would change:",
        *aligned(rows, indent=4, right=(0,)),
        *more_of(len(changes) - len(rows), "decision", indent=4),
    ]


def _estimated(title: str, one: Estimated | None) -> list[str]:
    if one is None:
        return []
    time, memory = signed_s(one.more_s), signed_bytes(one.more_bytes)
    return [
        f"{title}: {one.choice}",
        f"  {one.reason.upper()}: {one.other} would cost {time} a step and {memory} a device (estimate)",
    ]


def more_memory(more: MoreMemory, step_s: float) -> str:
    """The line on the worth of more memory."""
    start = f"10% more memory ({format_bytes(more.more_bytes)} a device) would buy"
    if not more.how:
        return f"{start} nothing"
    estimate = " (estimate)" * more.is_estimate
    return f"{start} {format_seconds(more.less_s)} a step ({more.less_s / step_s:.1%}): {more.how}{estimate}"


def signed_s(seconds: float) -> str:
    """`+1.2 ms`."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def signed_bytes(num_bytes: float) -> str:
    """`-3 MiB`."""
    return f"{'-' if num_bytes < 0 else '+'}{format_bytes(abs(num_bytes))}"


def finite(value: Any) -> Any:
    """JSON-ready values: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in cast(dict[str, Any], value).items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in cast(list[Any], value)]
    return None if isinstance(value, float) and abs(value) == float("inf") else value
