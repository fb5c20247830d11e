"""One device over the time of a step: a lane for each stream, and below them, over one axis, the memory by kind of
array.

Drawings have no text of their own: they stretch to the width of the page, and the text beside them stays as it is. A slider
moves a line over both, and says in words what is there; it is all that the pointer can ask, for the keyboard.
"""

import json
from collections.abc import Mapping, Sequence

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.report.markup import Html, bar, behind, element, joined, table
from autoshard.report.stacked import HEIGHT, areas, drawing
from autoshard.search.plan.profile import Profile
from autoshard.search.plan.summary import time_parts
from autoshard.search.plan.text_table import percent
from autoshard.search.plan.values import PlanValues

LANES = ("forward", "recomputation", "backward", "update")
"""The order of the lanes that compute; the others follow by name."""

KINDS = (
    "parameters",
    "frozen_weights",
    "optimizer_state",
    "other_state",
    "batch",
    "gradients",
    "residuals",
    "temporaries",
)
"""Kinds of residents from the bottom of the chart to its top: first those that are there before the step and after it."""

SHOWN_CAP = 1.6
"""A cap is drawn if it is no more than this multiple of the highest point."""


def step_chart(plan: PlanValues, profile: Profile) -> Html:
    """Lanes and memory of a profile, and the slider over both."""
    data = {
        "seconds": profile.seconds,
        "busy": {name: shares for name, shares in _lanes(profile)},
        "held": {name.replace("_", " "): held for name, held in _stack(profile)},
    }
    script = element("script", Html(json.dumps(data).replace("<", "\\u003c")), type="application/json")
    last = len(next(iter(profile.busy.values()), (0,))) - 1
    slider = element("input", type="range", min=0, max=last, value=_peak_slice(profile), id="moment")
    output = element("output", "", for_="moment", aria_live="polite")
    ask = element("div", element("label", "Moment of the step", for_="moment"), slider, output, class_="ask")
    lanes = (
        lane(
            name,
            shares,
            "computes" if name in LANES else "moves",
            format_seconds(_busy_s(shares, profile.seconds)),
        )
        for name, shares in _lanes(profile)
    )
    return element(
        "figure",
        element("div", *lanes, class_="lanes"),
        ticks(profile.seconds),
        _memory(plan, profile),
        ticks(profile.seconds),
        ask,
        script,
        behind("Table of the streams", _streams(profile)),
        class_="step",
        data_chart="step",
    )


def _lanes(profile: Profile) -> list[tuple[str, tuple[float, ...]]]:
    names = [*filter(profile.busy.__contains__, LANES), *sorted({*profile.busy} - {*LANES})]
    return [(name, profile.busy[name]) for name in names]


def _busy_s(shares: Sequence[float], seconds: float) -> float:
    return sum(shares) * seconds / len(shares)


def lane(name: str, shares: Sequence[float], kind: str, took: str) -> Html:
    """A lane of slices, each as dark as it is busy.

    Args:
      name: of the stream.
      shares: of each slice, between 0 and 1.
      kind: `computes` or `moves`.
      took: how long it is busy, in words.
    """
    rects = joined(
        element("rect", x=start, width=end - start, y=0, height=1, opacity=f"{share:g}")
        for start, end, share in _runs([round(share, 1) if share >= 0.05 else 0 for share in shares])
    )
    strip = drawing(len(shares), 1, f"{name}: busy for {took}", rects)
    label = element("span", took, class_="number")
    return element("div", element("span", name), strip, label, class_=f"lane {kind}")


def _runs(values: Sequence[float]) -> list[tuple[int, int, float]]:
    """Stretches of one value that is not zero: their beginning, end and value."""
    edges = [n for n in range(len(values)) if n == 0 or values[n] != values[n - 1]]
    ends = [*edges[1:], len(values)]
    return [(start, end, values[start]) for start, end in zip(edges, ends, strict=True) if values[start]]


def ticks(seconds: float, count: int = 4) -> Html:
    """Times below a drawing; the first and the last are at its ends."""
    each = (element("span", format_seconds(n * seconds / count) if n else "0") for n in range(count + 1))
    return element("div", *each, class_="ticks", aria_hidden="true")


# --- memory


def _stack(profile: Profile) -> list[tuple[str, tuple[int, ...]]]:
    """The kinds that are ever there, from the bottom up."""
    names = [*KINDS, *sorted({*profile.held_bytes} - {*KINDS})]
    return [(name, profile.held_bytes[name]) for name in names if any(profile.held_bytes.get(name, ()))]


def _totals(profile: Profile) -> list[int]:
    return [sum(column) for column in zip(*(held for _, held in _stack(profile)), strict=True)]


def _peak_slice(profile: Profile) -> int:
    totals = _totals(profile)
    return totals.index(max(totals)) if totals else 0


def _memory(plan: PlanValues, profile: Profile) -> Html | None:
    """The bytes of each kind over time, one above another, with the peak and the cap."""
    totals, stack = _totals(profile), _stack(profile)
    if not totals:
        return None
    highest, cap = max(totals), plan.memory_bytes
    top = max(highest, cap if cap <= SHOWN_CAP * highest else 0) * 1.04
    at = _peak_slice(profile)
    label = f"memory over the step: at most {format_bytes(highest)}, by kind {', '.join(name for name, _ in stack)}"
    chart = drawing(len(totals), HEIGHT, label, areas(stack, top))
    peak = element(
        "span",
        element("span", f"peak {format_bytes(highest)}"),
        class_="peak" + " from-right" * (at > 0.6 * len(totals)),
        style=f"left:{100 * (at + 0.5) / len(totals):.2f}%;bottom:{100 * highest / top:.2f}%",
    )
    line = element(
        "span",
        element("span", f"cap {format_bytes(cap)}"),
        class_="cap",
        style=f"bottom:{100 * cap / top:.2f}%",
    )
    keys = (element("li", name.replace("_", " "), class_=f"kind-{name}") for name, _ in reversed(stack))
    return joined(
        (
            element("div", chart, peak, line if cap <= top else None, class_="memory"),
            element("ul", *keys, class_="keys", aria_label="kinds of memory, from the top down"),
        )
    )


# --- tables


def _streams(profile: Profile) -> Html:
    rows = [
        (name, format_seconds(taken := _busy_s(shares, profile.seconds)), percent(taken, profile.seconds))
        for name, shares in _lanes(profile)
    ]
    return table("Streams of a device", ("stream", "busy", "of the step"), rows, right=(1, 2))


def time_table(plan: PlanValues) -> Html:
    """Seconds of a step by kind, as the solver adds them up."""
    step_s = plan.estimates.step_s
    rows = [
        (name, format_seconds(s), percent(s, step_s), bar(abs(s) / step_s))
        for name, s in time_parts(plan).items()
    ]
    total = ("step", format_seconds(step_s), "100%", bar(1.0))
    return table("Time of a step by kind", ("part", "time", "of the step", ""), [*rows, total], right=(1, 2))


def residents_table(residents: Mapping[str, int], peak_bytes: int) -> Html:
    """Bytes at the peak by kind."""
    ordered = sorted(residents.items(), key=lambda item: -item[1])
    rows = [
        (name.replace("_", " "), format_bytes(b), percent(b, peak_bytes), bar(b / peak_bytes))
        for name, b in ordered
    ]
    title = "Memory at the peak, per device"
    return table(title, ("kind", "bytes", "of the peak", ""), rows, right=(1, 2))
