"""The parts of a verification as lines of text, of which `print(autoshard.verify(...))` is made."""

from collections.abc import Mapping, Sequence

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import Row, aligned, fitted
from autoshard.verification.records import Copied, Extent, Footprint, Moved, ProgramProof, StageProof


def text(*parts: Sequence[str]) -> str:
    """The lines of all parts, no wider than the terminal."""
    return fitted("\n".join(line for lines in parts for line in lines))


def extent(part: Extent) -> list[str]:
    """The part of the step that was compiled, if that needs saying."""
    if part.is_partial:
        return [
            f"compiled {part.compiled_blocks} of {part.num_blocks} repeated blocks; the rest is extrapolated, and the "
            "compiled peak an estimate (--full compiles them all)"
        ]
    return [f"compiled whole: {part.reason}"] if part.reason else []


def memory(predicted: Footprint, compiled: Footprint, cap_bytes: int, host_cap_bytes: int) -> list[str]:
    """The peaks of device and host beside their caps."""
    device = (predicted.peak_bytes, compiled.peak_bytes, cap_bytes)
    host = (predicted.host_bytes, compiled.host_bytes, host_cap_bytes)
    return numbers_right(
        [
            ("memory per device", "predicted", "compiled", "cap"),
            ("  device peak", *map(format_bytes, device)),
            ("  host peak", *map(format_bytes, host)),
        ]
    )


def residents(title: str, num_bytes: Mapping[str, int]) -> list[str]:
    """The parts of a peak, the largest first."""
    ordered = sorted(num_bytes.items(), key=lambda item: -item[1])
    return [title, *numbers_right([(f"  {name.replace('_', ' ')}", format_bytes(b)) for name, b in ordered])]


def stages(proven: Sequence[StageProof]) -> list[str]:
    """Each stage's peak beside its cap; also on the host, if a stage has arrays there."""
    rows: list[Row] = [("peak of each stage (per device)", "predicted", "compiled", "cap", "in")]
    for n, stage in enumerate(proven):
        device = (stage.predicted.peak_bytes, stage.compiled.peak_bytes, stage.cap_bytes)
        host = (stage.predicted.host_bytes, stage.compiled.host_bytes, stage.host_cap_bytes)
        rows.append((f"  stage {n}", *map(format_bytes, device), stage.peak_at))
        if any(host[:2]):
            rows.append((f"  stage {n}", *map(format_bytes, host), "its host"))
    return numbers_right(rows)


def programs(compiled: Sequence[ProgramProof]) -> list[str]:
    """The memory of each program."""
    rows: list[Row] = [("programs (per device)", "runs", "held", "made", "temporaries", "peak")]
    for one in sorted(compiled, key=lambda one: (one.stage, one.worker)):
        sizes = (one.held_bytes, one.fresh_bytes, one.temporary_bytes, one.peak_bytes)
        rows.append((f"  {one.name}", f"{one.count}x", *map(format_bytes, sizes)))
    return numbers_right(rows)


def collectives(moved: Mapping[str, Sequence[Moved]]) -> list[str]:
    """The traffic by kind and axes, the largest first.

    Args:
      moved: of each part, by the words that stand before its collectives.
    """
    rows = [("collectives per step (bytes per device)", "predicted", "", "compiled", "", "")]
    for where, found in moved.items():
        for c in sorted(found, key=lambda c: -max(c.predicted_bytes, c.compiled_bytes)):
            rows.append(
                (
                    f"  {where}{c.kind} over {', '.join(c.axes)}",
                    f"{c.predicted_count}x",
                    format_bytes(c.predicted_bytes),
                    f"{c.compiled_count}x",
                    format_bytes(c.compiled_bytes),
                    "differs" if c.differs else "",
                )
            )
    return numbers_right(rows) if len(rows) > 1 else ["collectives per step: none, as predicted"]


def copies(copied: Sequence[Copied]) -> list[str]:
    """The copies between device and host."""
    if not copied:
        return ["copies to and from the host: none"]
    rows = [(f"  {c.direction}", f"{c.count}x", format_bytes(c.bytes)) for c in copied]
    return ["copies to and from the host per step (bytes per device)", *numbers_right(rows)]


def times(seconds: Mapping[str, float]) -> list[str]:
    """The duration of the verification, by part."""
    return [f"verification time: {', '.join(f'{name} {format_seconds(s)}' for name, s in seconds.items())}"]


def verdict(is_fitting: bool, differences: Sequence[str]) -> list[str]:
    """The lines of the verdict."""
    fits = "fits" if is_fitting else "does not fit"
    if not differences:
        return [f"verdict: {fits}, as predicted"]
    return [f"verdict: {fits}; these differ", *(f"  {sentence}" for sentence in differences)]


def numbers_right(rows: Sequence[Row]) -> list[str]:
    """Rows as lines: names to the left, numbers to the right."""
    return aligned(rows, indent=0, right=range(1, 6))
