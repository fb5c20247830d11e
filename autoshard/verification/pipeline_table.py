"""The parts of a pipeline's verification as lines of text, of which `print(autoshard.verify(...))` is made."""

from collections.abc import Sequence

from autoshard.cost_model.units import format_bytes
from autoshard.verification.records import ProgramProof, StageProof
from autoshard.verification.table import MARK, numbers_right


def memory(stages: Sequence[StageProof]) -> list[str]:
    """Each stage's peak beside its cap; also on the host, if a stage has arrays there."""
    rows = [("peak of each stage (per device)", "predicted", "compiled", "cap", "in")]
    for n, stage in enumerate(stages):
        predicted = format_bytes(stage.predicted.peak_bytes)
        compiled, cap = format_bytes(stage.compiled.peak_bytes), format_bytes(stage.cap_bytes)
        rows.append((f"  stage {n}", predicted, compiled, cap, stage.peak_at))
        if stage.predicted.host_bytes or stage.compiled.host_bytes:
            predicted = format_bytes(stage.predicted.host_bytes)
            compiled, cap = format_bytes(stage.compiled.host_bytes), format_bytes(stage.host_cap_bytes)
            rows.append((f"  stage {n}", predicted, compiled, cap, "its host"))
    return numbers_right(rows)


def programs(compiled: Sequence[ProgramProof]) -> list[str]:
    """The memory of each program."""
    rows = [("programs (per device)", "runs", "held", "made", "temporaries", "peak")]
    return numbers_right([*rows, *map(_row, sorted(compiled, key=lambda one: (one.stage, one.worker)))])


def _row(one: ProgramProof) -> tuple[str, ...]:
    sizes = (one.held_bytes, one.fresh_bytes, one.temporary_bytes, one.peak_bytes)
    return (f"  {one.name}", f"{one.count}x", *map(format_bytes, sizes))


def collectives(stages: Sequence[StageProof]) -> list[str]:
    """The traffic of each stage, the largest first."""
    rows = [("collectives per step (bytes per device)", "predicted", "", "compiled", "", "")]
    for n, stage in enumerate(stages):
        for c in sorted(stage.collectives, key=lambda c: -max(c.predicted_bytes, c.compiled_bytes)):
            rows.append(
                (
                    f"  stage {n}: {c.kind} over {', '.join(c.axes)}",
                    f"{c.predicted_count}x",
                    format_bytes(c.predicted_bytes),
                    f"{c.compiled_count}x",
                    format_bytes(c.compiled_bytes),
                    MARK if c.differs else "",
                )
            )
    return numbers_right(rows) if len(rows) > 1 else ["collectives per step: none, as predicted"]
