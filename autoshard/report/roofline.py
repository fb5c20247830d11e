"""The heavy ops under the roofline of the device: how near each comes to what the device can do.

An op that does many FLOPs per byte is limited by the arithmetic, one that does few by the memory (Williams et al. 2009). A
dot is the ops under one name of the plan; the roof is the device's peak for their dtype and its memory's bandwidth.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.cost_model.hardware import Device
from autoshard.cost_model.units import format_flops, format_rate, format_seconds
from autoshard.report.markup import Html, bar, element, joined, table
from autoshard.search.plan.number_ranges import ranges
from autoshard.search.plan.profile import OpTime
from autoshard.search.plan.text_table import percent

TERA = 1e12
"""FLOP/s in a TFLOP/s."""

NEAR = 5.0
"""Dots that lie nearer to each other than this, in percent of the chart, are drawn as one."""


@dataclass(frozen=True, slots=True)
class DecadeAxis:
    """A logarithmic axis over whole decades.

    Attributes:
      least: the value at its beginning.
      decades: how many.
    """

    least: float
    decades: int

    @classmethod
    def over(cls, values: Sequence[float]) -> "DecadeAxis":
        """The axis that has room for some values."""
        first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(1.001 * max(values)))
        return cls(10.0**first, max(1, last - first))

    def at(self, value: float) -> float:
        """The place of a value, in percent of the axis."""
        return 100 * math.log10(value / self.least) / self.decades

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places of the decades, with their values."""
        return [(100 * n / self.decades, f"{self.least * 10**n:g}") for n in range(self.decades + 1)]


def roofline(ops: Sequence[OpTime], device: Device, step_s: float) -> Html:
    """The chart, if ops have FLOPs, and their table."""
    has_rates = any(op.flops and op.moved_bytes and op.seconds for op in ops)
    return joined((_chart(ops, device) if has_rates else None, _table(ops, step_s)))


def _chart(ops: Sequence[OpTime], device: Device) -> Html:
    """A dot for each op; rates in TFLOP/s."""
    peak, bandwidth = max(op.peak_flops_per_s for op in ops) / TERA, device.memory_bytes_per_s / TERA
    found = {
        n: (op.flops / op.moved_bytes, op.flops / op.seconds / TERA)
        for n, op in enumerate(ops, 1)
        if op.flops and op.moved_bytes and op.seconds
    }
    across = DecadeAxis.over([*(density for density, _ in found.values()), peak / bandwidth])
    up = DecadeAxis.over([*(rate for _, rate in found.values()), peak])
    places = {n: (across.at(density), up.at(rate)) for n, (density, rate) in found.items()}
    start = max(across.least, up.least / bandwidth)
    roof = f"M{across.at(start):.1f} {100 - up.at(start * bandwidth):.1f}"
    roof += f"L{across.at(peak / bandwidth):.1f} {100 - up.at(peak):.1f}H100"
    path = element("path", d=roof, vector_effect="non-scaling-stroke")
    drawing = element("svg", path, viewBox="0 0 100 100", preserveAspectRatio="none", aria_hidden="true")
    rates = (
        element("span", text, class_="rate", style=f"bottom:{at:.1f}%", aria_hidden="true")
        for at, text in up.ticks[1:]
    )
    dots = (
        element("span", ranges(sorted(group)), class_="dot", style=f"left:{x:.1f}%;bottom:{y:.1f}%")
        for (x, y), group in _together(places)
    )
    roofs = f"{format_flops(TERA * peak)} and {format_rate(TERA * bandwidth)} of memory"
    label = f"Roofline under {roofs}. The table below has the numbers of each dot"
    return element(
        "figure",
        element(
            "p",
            f"TFLOP/s of a device. The roof is {roofs}; a dot's numbers are those of the table",
            class_="axis",
        ),
        element("div", drawing, *rates, *dots, class_="roof", role="img", aria_label=label),
        element(
            "div", *(element("span", text) for _, text in across.ticks), class_="ticks", aria_hidden="true"
        ),
        element("p", "FLOP per byte read or written", class_="axis end"),
    )


def _together(
    places: Mapping[int, tuple[float, float]],
) -> list[tuple[tuple[float, float], list[int]]]:
    """The dots that lie near each other, at the place of the first one."""
    found: list[tuple[tuple[float, float], list[int]]] = []
    for n, (x, y) in places.items():
        near = next((group for (u, v), group in found if abs(u - x) < NEAR and abs(v - y) < 2 * NEAR), None)
        if near is None:
            found.append(((x, y), [n]))
        else:
            near.append(n)
    return found


def _table(ops: Sequence[OpTime], step_s: float) -> Html:
    rows = [
        (
            str(n + 1),
            element("code", op.name),
            f"{op.runs}x",
            format_seconds(op.seconds),
            percent(op.seconds, step_s),
            format_flops(op.flops / op.seconds) if op.flops and op.seconds else "-",
            *_of_peak(op),
        )
        for n, op in enumerate(ops)
    ]
    head = ("", "op", "runs", "time", "of the step", "rate", "of the peak", "")
    title = "Products, convolutions and lookups that take longest, per device and step"
    return table(title, head, rows, right=(0, 2, 3, 4, 5, 6))


def _of_peak(op: OpTime) -> tuple[str, str]:
    if not op.flops or not op.seconds:
        return "-", ""
    share = op.flops / op.seconds / op.peak_flops_per_s
    return percent(share), bar(share)
