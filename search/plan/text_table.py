"""Tables in plain text, and text as wide as the terminal.

What is printed is made of rows in columns, the last of which may be long: pytree paths, specs, sources. `fitted` breaks a
line that is too long where it may be broken, and goes on below its last column, so that the others stay columns.
"""

import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence

from autoshard.cost_model.units import format_seconds

Row = tuple[str, ...]

WIDTH = 80
"""Columns of text where there is no terminal."""

LEAST_WIDTH = 40
"""Columns below which nothing is broken any further."""

LEAST_SHARE = 0.25
"""Of the width, what a last column must have to be gone on below; otherwise a broken line goes on near the left."""

_BREAKS = re.compile(r"(?<=[|/,])|(?=\[)")
"""Where a long word may be broken: behind an alternative, a scope or a comma, and before a key."""


def aligned(rows: Sequence[Row], indent: int = 2, right: Container[int] = ()) -> list[str]:
    """Rows in aligned columns; those in `right` are right-aligned."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Row) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells).rstrip()

    return [" " * indent + line(row) for row in rows]


def fitted(text: str) -> str:
    """Text that fits the terminal, or `WIDTH` columns where there is none."""
    width = max(LEAST_WIDTH, shutil.get_terminal_size((WIDTH, 1)).columns)
    return "\n".join(part for line in text.split("\n") for part in _broken(line, width))


def _broken(line: str, width: int) -> list[str]:
    """A line in parts that fit."""
    if len(line) <= width:
        return [line]
    indent = " " * _below(line, width)
    parts, part = list[str](), ""
    for piece in _pieces(line, width - len(indent)):
        if part.strip() and len(part) + len(piece.rstrip()) > width:
            parts.append(part.rstrip())
            part = indent
        part += piece
    return [*parts, part.rstrip()]


def _pieces(line: str, room: int) -> Iterator[str]:
    """What is not broken: words with the space behind them; of those that are longer than the room, parts."""
    for word in re.findall(r"\s*\S+ *", line):
        if len(word.strip()) <= room:
            yield word
            continue
        for part in _BREAKS.split(word):
            yield from (part[i : i + room] for i in range(0, len(part), room))


def _below(line: str, width: int) -> int:
    """Where a broken line goes on: below its last column, if there is room."""
    text = len(line) - len(line.lstrip())
    columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line)]
    with_room = [start for start in columns if start <= (1 - LEAST_SHARE) * width]
    return with_room[-1] if with_room else text + 2


def more_of(count: int, what: str, indent: int = 2) -> list[str]:
    """A line for what is not shown, if anything is not."""
    return [f"{' ' * indent}... and {count} more {what}{'' if count == 1 else 's'}"] if count else []


def plural(count: int, what: str, ending: str = "s") -> str:
    """`1 array`, `2 arrays`; `2 microbatches` with "es"."""
    return f"{count} {what}{'' if count == 1 else ending}"


def search_time(search_s: Mapping[str, float]) -> list[str]:
    """A line on how long a search took, in all and by part; none of a plan that was loaded."""
    if not search_s:
        return []
    split = ", ".join(f"{name} {format_seconds(s)}" for name, s in search_s.items())
    return [f"search time: {format_seconds(sum(search_s.values()))} ({split})"]
