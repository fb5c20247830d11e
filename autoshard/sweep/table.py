"""The rows of a sweep as text: a table for those that fit, and a sentence for each that does not."""

from collections.abc import Sequence

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import Row, aligned, fitted, plural
from autoshard.sweep.rows import WhatIf

HEAD = ("", "cluster", "cap", "step", "MFU", "peak", "GPU hours", "cost")
RIGHT = (2, 3, 4, 5, 6, 7)


def table(rows: Sequence[WhatIf]) -> str:
    """All rows in plain text."""
    fitting = [row for row in rows if row.plan is not None]
    others = [row for row in rows if row.plan is None]
    lines = [_what_for(fitting), *_columns([HEAD, *map(_cells, fitting)])] if fitting else []
    if others:
        lines += [
            "no plan for",
            *aligned([(row.cluster, format_bytes(row.memory_bytes), row.reason) for row in others]),
        ]
    return fitted("\n".join(lines))


def _columns(rows: Sequence[Row]) -> list[str]:
    """The rows without columns that have a title only."""
    kept = [n for n in range(len(HEAD)) if any(row[n] for row in rows[1:])]
    return aligned(
        [tuple(row[n] for n in kept) for row in rows], right=[i for i, n in enumerate(kept) if n in RIGHT]
    )


def _what_for(fitting: Sequence[WhatIf]) -> str:
    """What times and prices are for; a row's steps may differ by its tokens only, which all have alike."""
    price = "cost" if any(row.cost is not None for row in fitting) else "GPU hours"
    return f"{price} of {plural(fitting[0].steps, 'step')}; * no other is as fast and as cheap"


def _cells(row: WhatIf) -> Row:
    return "*" * row.is_on_front, row.cluster, format_bytes(row.memory_bytes), *numbers(row)


def numbers(row: WhatIf) -> tuple[str, ...]:
    """A row's step time, MFU, peak, GPU hours and cost, as people read them."""
    return (
        "" if row.step_s is None else format_seconds(row.step_s),
        "" if row.mfu is None else f"{100 * row.mfu:.2g}%",
        "" if row.peak_bytes is None else format_bytes(row.peak_bytes),
        "" if row.gpu_hours is None else f"{row.gpu_hours:,.3g}",
        "" if row.cost is None else _money(row.cost),
    )


def _money(cost: float) -> str:
    """Two decimals, or two digits of less than 1.

    Example:
      >>> _money(1234.5), _money(0.0123)
      ('1,234.50', '0.012')
    """
    return f"{cost:,.2f}" if cost >= 1 else f"{cost:.2g}"
