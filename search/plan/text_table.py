"""Tables in plain text, and text as wide as the terminal.

Reports print rows in columns. The last column may be long: pytree paths, specs, sources. `fitted` breaks long lines at
certain characters and continues them below their last column, so that the columns stay visible.
"""

import re
import shutil
from collections.abc import Container, Iterator, Mapping, Sequence

from autoshard.cost_model.units import format_seconds

Row = tuple[str, ...]

WIDTH = 80
"""Columns of text if there is no terminal."""

NAMES_IN_A_LINE = WIDTH // 20
"""Names in a line or a message before it is cut short. Derived: names of some 20 characters in `WIDTH` columns."""

LINES_OF_A_LIST = 24 // 3
"""Lines of a list before it is cut short. Derived: three lists in the 24 lines of a VT100."""

LEAST_WIDTH = 40
"""Smallest width to which text is broken."""

LEAST_SHARE = 0.25
"""Smallest share of the width that a last column needs for a broken line to continue below it. Otherwise the line
continues near the left."""

_BREAKS = re.compile(r"(?<=[|/,])|(?=\[)")
"""Places where a long word may be broken: behind an alternative, a scope or a comma, and before a key."""


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
    """Text that fits the terminal, or `WIDTH` columns if there is none."""
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
    """Pieces that are not broken: words with the space behind them, and parts of words that are longer than the room."""
    for word in re.findall(r"\s*\S+ *", line):
        if len(word.strip()) <= room:
            yield word
            continue
        for part in _BREAKS.split(word):
            yield from (part[i : i + room] for i in range(0, len(part), room))


def _below(line: str, width: int) -> int:
    """The column at which a broken line continues: below its last column, if there is room."""
    text = len(line) - len(line.lstrip())
    columns = [found.end() for found in re.finditer(r"\S {2,}(?=\S)", line)]
    with_room = [start for start in columns if start <= (1 - LEAST_SHARE) * width]
    return with_room[-1] if with_room else text + 2


def more_of(count: int, what: str, indent: int = 2) -> list[str]:
    """A line on the number of rows that are not shown; no line if all are shown."""
    return [f"{' ' * indent}... and {count} more {what}{'' if count == 1 else 's'}"] if count else []


def few(names: Sequence[str]) -> str:
    """Names in a line: the first few, and the number of others."""
    shown, left = ", ".join(names[:NAMES_IN_A_LINE]), len(names) - NAMES_IN_A_LINE
    return f"{shown} and {left} more" if left > 0 else shown


def plural(count: int, what: str, ending: str = "s") -> str:
    """A count with its noun: `1 array`, `2 arrays`; `2 microbatches` with "es"."""
    return f"{count} {what}{'' if count == 1 else ending}"


def percent(part: float, whole: float = 1.0) -> str:
    """A share as a whole percentage: `45%`, `<1%` of a small one, `-` of nothing."""
    if whole <= 0:
        return "-"
    return "<1%" if 0 < part < 0.005 * whole else f"{100 * part / whole:.0f}%"


def search_time(search_s: Mapping[str, float]) -> list[str]:
    """A line on the time of a search, in all and by part; no line for a loaded plan."""
    if not search_s:
        return []
    split = ", ".join(f"{name} {format_seconds(s)}" for name, s in search_s.items())
    return [f"search time: {format_seconds(sum(search_s.values()))} ({split})"]
