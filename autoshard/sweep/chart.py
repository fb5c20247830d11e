"""The rows of a sweep as one HTML file that loads nothing: a scatter plot of time and price, and a table of all rows.

Both axes are logarithmic, as times and prices differ by factors. The points of the Pareto front are filled and joined.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import PurePath

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.headline import headline
from autoshard.sweep.rows import WhatIf
from autoshard.sweep.table import HEAD, numbers

WIDTH, HEIGHT, MARGIN = 860, 460, 70
"""Pixels of the drawing, and around the plot."""

RIGHT = 0.7
"""Share of the width. The names of points further right stand on their left, where there is room."""

STYLE = """
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 900px; margin: 2em auto; padding: 0 1em }
svg { width: 100%; height: auto }
text { fill: currentColor; font-size: 13px }
.frame { stroke: currentColor; opacity: .4; fill: none }
.grid { stroke: currentColor; opacity: .12 }
.front { stroke: #1a7f64; stroke-width: 2; fill: none }
circle { stroke: #1a7f64; stroke-width: 2; fill: Canvas }
circle.best { fill: #1a7f64 }
div { overflow-x: auto }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; padding: .25em .8em .25em 0; border-bottom: 1px solid #8884; vertical-align: top }
td:not(:last-child) { white-space: nowrap }
tr.best td { font-weight: 600 }
"""


@dataclass(frozen=True, slots=True)
class LogAxis:
    """A logarithmic axis.

    Attributes:
      least: the smallest value.
      most: the largest value.
      start: the pixel of the smallest.
      end: the pixel of the largest.
    """

    least: float
    most: float
    start: float
    end: float

    @classmethod
    def of(cls, values: Sequence[float], start: float, end: float) -> "LogAxis":
        """The axis of these values, with some room on both sides."""
        return cls(min(values) / 1.3, max(values) * 1.3, start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = math.log(value / self.least) / math.log(self.most / self.least)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        """The values of 1, 2 and 5 times a power of ten that the axis has."""
        powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
        return [
            v for p in powers for v in (10.0**p, 2 * 10.0**p, 5 * 10.0**p) if self.least <= v <= self.most
        ]


def page(step: str, rows: Sequence[WhatIf]) -> str:
    """The file's text."""
    shown = [row for row in rows if row.time_s and 0 < row.price < math.inf]
    heading = f"Which cluster for {escape(PurePath(step).name)}?"
    parts = [f"<h1>{heading}</h1>", *(_drawing(shown) if shown else ()), *_table(rows)]
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{heading}</title>'
    )
    return f'<!doctype html>\n<html lang="en">\n<head>{head}<style>{STYLE}</style></head>\n<body>\n' + (
        "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _drawing(shown: Sequence[WhatIf]) -> Iterator[str]:
    what = "cost" if all(row.cost is not None for row in shown) else "GPU hours"
    yield f"<p>{_key(shown, what)}</p>"
    across = LogAxis.of([row.time_s or 0 for row in shown], MARGIN, WIDTH - MARGIN)
    up = LogAxis.of([row.price for row in shown], HEIGHT - MARGIN, MARGIN / 2)
    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{what} over time, one point per cluster">'
    yield from _grid(across, up, what)
    best = sorted((row for row in shown if row.is_on_front), key=lambda row: row.time_s or 0)
    points = " ".join(f"{across.at(row.time_s or 0)},{up.at(row.price)}" for row in best)
    yield f'<polyline class="front" points="{points}"/>'
    for row in shown:
        x, y = across.at(row.time_s or 0), up.at(row.price)
        words = escape(f"{row.cluster}, cap {format_bytes(row.memory_bytes)}")
        yield f'<circle class="{"best" * row.is_on_front}" cx="{x}" cy="{y}" r="6"><title>{words}</title></circle>'
    for (x, y), named in _labels(shown, across, up).items():
        is_right = x > WIDTH * RIGHT
        place = (
            f'x="{x - 10 if is_right else x + 10}" y="{y - 8}" text-anchor="{"end" if is_right else "start"}"'
        )
        yield f"<text {place}>{escape(named)}</text>"
    yield "</svg>"


def _key(shown: Sequence[WhatIf], what: str) -> str:
    """The meaning of a point, in a sentence."""
    steps = round((shown[0].time_s or 0.0) / (shown[0].step_s or 1.0))
    paid = "cost less" if what == "cost" else "take fewer GPU hours"
    return (
        f"Each point is the best plan for a cluster under a cap, for {steps:,} steps. Filled points are worth a "
        f"look: no other is as fast and as cheap. Points further left are faster, points further down {paid}."
    )


def _labels(shown: Sequence[WhatIf], across: LogAxis, up: LogAxis) -> dict[tuple[float, float], str]:
    """A name for each point: its cluster, with the caps if other caps of that cluster lie elsewhere."""
    points: dict[tuple[float, float], list[WhatIf]] = {}
    for row in shown:
        points.setdefault((across.at(row.time_s or 0), up.at(row.price)), []).append(row)
    spread = Counter(name for rows in points.values() for name in {row.cluster for row in rows})
    return {point: ", ".join(_names(rows, spread)) for point, rows in points.items()}


def _names(rows: Sequence[WhatIf], spread: Mapping[str, int]) -> list[str]:
    caps = {
        name: [format_bytes(r.memory_bytes) for r in rows if r.cluster == name]
        for name in dict.fromkeys(r.cluster for r in rows)
    }
    return [f"{name} ({', '.join(own)})" if spread[name] > 1 else name for name, own in caps.items()]


def _grid(across: LogAxis, up: LogAxis, what: str) -> Iterator[str]:
    top, bottom, left, right = up.end, up.start, across.start, across.end
    yield f'<path class="frame" d="M{left} {top}V{bottom}H{right}"/>'
    for value in across.ticks():
        x = across.at(value)
        yield f'<path class="grid" d="M{x} {top}V{bottom}"/>'
        yield f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{format_seconds(value)}</text>'
    for value in up.ticks():
        y = up.at(value)
        yield f'<path class="grid" d="M{left} {y}H{right}"/>'
        yield f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{value:,g}</text>'
    yield f'<text x="{(left + right) / 2}" y="{HEIGHT - 15}" text-anchor="middle">time of all steps</text>'
    yield f'<text x="{left - 50}" y="{top - 10}">{what}</text>'


def _table(rows: Sequence[WhatIf]) -> Iterator[str]:
    titles = "".join(f'<th scope="col">{one or "best"}</th>' for one in (*HEAD, "plan"))
    yield f"<div><table><thead><tr>{titles}</tr></thead><tbody>"
    for row in rows:
        outcome = row.reason if row.plan is None else headline(row.plan)
        cells = ("*" * row.is_on_front, row.cluster, format_bytes(row.memory_bytes), *numbers(row), outcome)
        yield (
            f'<tr class="{"best" * row.is_on_front}">'
            + "".join(f"<td>{escape(c)}</td>" for c in cells)
            + "</tr>"
        )
    yield "</tbody></table></div>"
