"""A verification as a table, which `print(autoshard.verify(...))` shows."""

from collections.abc import Mapping, Sequence

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import Row, aligned, fitted
from autoshard.verification.result import Moved, Verification

MARK = "differs"
"""The mark of rows that differ."""


def side_by_side(v: Verification) -> str:
    """Predicted and compiled figures as text, side by side, and the verdict."""
    mesh = " x ".join(f"{name}={size}" for name, size in v.mesh.items())
    parts = [
        [f"step {v.step} on {v.cluster}, mesh {mesh}", *_extent(v)],
        _memory(v),
        _residents("predicted residents at the peak", v.predicted.residents),
        _residents("compiled residents at the peak", v.compiled.residents),
        _collectives(v.collectives),
        _copies(v),
        [f"verification time: {', '.join(f'{name} {format_seconds(s)}' for name, s in v.seconds.items())}"],
        verdict(v.fits, v.differences),
    ]
    return fitted("\n".join(line for lines in parts for line in lines))


def _extent(v: Verification) -> list[str]:
    extent = v.extent
    if v.is_extrapolated:
        return [
            f"compiled {extent.compiled_blocks} of {extent.num_blocks} repeated blocks; the rest is extrapolated, and the "
            "compiled peak an estimate (--full compiles them all)"
        ]
    return [f"compiled whole: {extent.reason}"] if extent.reason else []


def _memory(v: Verification) -> list[str]:
    device = (v.predicted.peak_bytes, v.compiled.peak_bytes, v.cap_bytes)
    host = (v.predicted.host_bytes, v.compiled.host_bytes, v.host_cap_bytes)
    return numbers_right(
        [
            ("memory per device", "predicted", "compiled", "cap"),
            ("  device peak", *map(format_bytes, device)),
            ("  host peak", *map(format_bytes, host)),
        ]
    )


def _residents(title: str, residents: Mapping[str, int]) -> list[str]:
    ordered = sorted(residents.items(), key=lambda item: -item[1])
    return [title, *numbers_right([(f"  {name.replace('_', ' ')}", format_bytes(b)) for name, b in ordered])]


def _collectives(collectives: tuple[Moved, ...]) -> list[str]:
    if not collectives:
        return ["collectives per step: none, as predicted"]
    rows = [("collectives per step (bytes per device)", "predicted", "", "compiled", "", "")]
    ordered = sorted(collectives, key=lambda c: -max(c.predicted_bytes, c.compiled_bytes))
    for c in ordered:
        rows.append(
            (
                f"  {c.kind} over {', '.join(c.axes)}",
                f"{c.predicted_count}x",
                format_bytes(c.predicted_bytes),
                f"{c.compiled_count}x",
                format_bytes(c.compiled_bytes),
                MARK if c.differs else "",
            )
        )
    return numbers_right(rows)


def _copies(v: Verification) -> list[str]:
    if not v.host_copies:
        return ["copies to and from the host: none"]
    rows = [(f"  {c.direction}", f"{c.count}x", format_bytes(c.bytes)) for c in v.host_copies]
    return ["copies to and from the host per step (bytes per device)", *numbers_right(rows)]


def verdict(is_fitting: bool, differences: Sequence[str]) -> list[str]:
    """The lines of the verdict."""
    fits = "fits" if is_fitting else "does not fit"
    if not differences:
        return [f"verdict: {fits}, as predicted"]
    return [f"verdict: {fits}; these differ", *(f"  {sentence}" for sentence in differences)]


def numbers_right(rows: Sequence[Row]) -> list[str]:
    """Rows as lines: names to the left, numbers to the right."""
    return aligned(rows, indent=0, right=range(1, 6))
