"""Drawings over time without text: the memory of several kinds, one above another, in slices of equal time."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from autoshard.report.markup import Html, element, joined

HEIGHT = 100
"""Units of a drawing of memory, from bottom to top."""


def drawing(width: int, height: int, label: str, *children: str) -> Html:
    """A drawing that stretches to the width of the page; the label says its content to those who do not see it."""
    box = f"0 0 {width} {height}"
    return element("svg", *children, viewBox=box, preserveAspectRatio="none", role="img", aria_label=label)


def areas(stack: Sequence[tuple[str, Sequence[float]]], top: float) -> Html:
    """A band for each kind that is ever there, from the bottom up.

    Args:
      stack: kinds with their bytes in each slice.
      top: bytes at the upper edge of the drawing.
    """
    return joined(_bands(stack, top))


def _bands(stack: Sequence[tuple[str, Sequence[float]]], top: float) -> Iterator[Html]:
    below = [0.0] * len(stack[0][1])
    for kind, held in stack:
        above = [a + b for a, b in zip(below, held, strict=True)]
        if any(held):
            yield element("path", d=_outline(below, above, top), class_=f"kind-{kind}")
        below = above


def _outline(below: Sequence[float], above: Sequence[float], top: float) -> str:
    """A band forwards along its upper edge, and backwards along its lower one; level parts are one line."""
    there = "".join(f"V{_y(level, top)}H{end}" for _, end, level in _levels(above))
    back = "".join(f"V{_y(level, top)}H{start}" for start, _, level in reversed(_levels(below)))
    return f"M0 {HEIGHT}{there}{back}Z"


def _levels(values: Sequence[float]) -> list[tuple[int, int, float]]:
    runs = [[n for n, _ in run] for _, run in groupby(enumerate(values), key=lambda one: one[1])]
    return [(run[0], run[-1] + 1, values[run[0]]) for run in runs]


def _y(num_bytes: float, top: float) -> str:
    return f"{HEIGHT * (1 - num_bytes / top):.1f}".removesuffix(".0")
