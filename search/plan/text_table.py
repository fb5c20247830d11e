"""Tables in plain text."""

from collections.abc import Container, Sequence

Row = tuple[str, ...]


def aligned(rows: Sequence[Row], indent: int = 2, right: Container[int] = ()) -> list[str]:
    """Rows in aligned columns; those in `right` are right-aligned."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Row) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells).rstrip()

    return [" " * indent + line(row) for row in rows]


def more_of(count: int, what: str, indent: int = 2) -> list[str]:
    """A line for what is not shown, if anything is not."""
    return [f"{' ' * indent}... and {count} more {what}{'' if count == 1 else 's'}"] if count else []


def plural(count: int, what: str) -> str:
    """`1 array`, `2 arrays`."""
    return f"{count} {what}{'' if count == 1 else 's'}"
