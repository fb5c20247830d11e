"""Tables in plain text."""

from collections.abc import Sequence

Row = tuple[str, ...]


def aligned(rows: Sequence[Row], indent: int = 2, right: tuple[int, ...] = ()) -> list[str]:
    """Rows in aligned columns; those in `right` are right-aligned."""
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Row) -> str:
        cells = enumerate(zip(row, widths, strict=True))
        return "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in cells).rstrip()

    return [" " * indent + line(row) for row in rows]
