"""A pipeline's verification as a table, which `print(autoshard.verify(...))` shows."""

from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.plan.text_table import fitted, plural
from autoshard.verification.pipeline_result import PipelineVerification, ProgramProof
from autoshard.verification.table import MARK, numbers_right, verdict


def stage_by_stage(v: PipelineVerification) -> str:
    """Predicted and compiled figures as text, stage by stage, and the verdict."""
    parts = [
        [
            f"step {v.step} on {v.cluster}: {_stages(v)}, schedule {v.schedule}",
            f"compiled {v.num_compiled} of {plural(len(v.programs), 'program')}{_others(v)}",
        ],
        _memory(v),
        _programs(v),
        _collectives(v),
        [f"verification time: {', '.join(f'{name} {format_seconds(s)}' for name, s in v.seconds.items())}"],
        verdict(v.fits, v.differences),
    ]
    return fitted("\n".join(line for lines in parts for line in lines))


def _stages(v: PipelineVerification) -> str:
    return "all stages in one program" if v.is_one_program else plural(len(v.stages), "stage")


def _others(v: PipelineVerification) -> str:
    return "; the others are like one of these" if v.num_compiled < len(v.programs) else ""


def _memory(v: PipelineVerification) -> list[str]:
    rows = [("peak of each stage (per device)", "predicted", "compiled", "cap", "in")]
    for n, stage in enumerate(v.stages):
        predicted = format_bytes(stage.predicted.peak_bytes)
        compiled, cap = format_bytes(stage.compiled.peak_bytes), format_bytes(stage.cap_bytes)
        rows.append((f"  stage {n}", predicted, compiled, cap, stage.peak_at))
    return numbers_right(rows)


def _programs(v: PipelineVerification) -> list[str]:
    rows = [("programs (per device)", "runs", "held", "made", "temporaries", "peak")]
    return numbers_right([*rows, *map(_row, sorted(v.programs, key=lambda one: (one.stage, one.worker)))])


def _row(one: ProgramProof) -> tuple[str, ...]:
    sizes = (one.held_bytes, one.fresh_bytes, one.temporary_bytes, one.peak_bytes)
    return (f"  {one.name}", f"{one.count}x", *map(format_bytes, sizes))


def _collectives(v: PipelineVerification) -> list[str]:
    rows = [("collectives per step (bytes per device)", "predicted", "", "compiled", "", "")]
    for n, stage in enumerate(v.stages):
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
