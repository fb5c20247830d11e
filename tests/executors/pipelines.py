"""Pipelines to run: a step cut where the search cuts it, or by hand, under a schedule of any family."""

from collections.abc import Sequence

import jax

from autoshard.executors.pipeline import build
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.layers import Layers
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.programs import made_ready, stage_programs
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.split_loops import num_positions
from autoshard.search.pipeline.stage_cut import StageCut
from autoshard.search.plan.schedule import Schedule
from autoshard.search.plan.stage_programs import StagePrograms, StageSharding
from tests.executors.agreement import Reference, run_steps


def cut_of(parts: PipelineStep, num_stages: int) -> StageCut:
    """Stages of as many layers, or nearly so."""
    starts = Layers.of(parts).starts
    return StageCut(tuple(starts[n * len(starts) // num_stages] for n in range(1, num_stages)))


def programs_of(
    step: Step, schedule: Schedule, shares: Sequence[float] = (), num_replicas: int = 1
) -> tuple[PipelineStep, StagePrograms]:
    """A step's parts, and its stages' programs; cut behind such shares of its positions, if they are given."""
    parts = PipelineStep.of(step, schedule.num_microbatches, num_replicas)
    num = sum(num_positions(parts, op) for op in parts.forward_ops)
    cut = (
        StageCut(tuple(int(share * num) for share in shares))
        if shares
        else cut_of(parts, schedule.num_stages)
    )
    parts, cut = made_ready(parts, cut)
    return parts, stage_programs(parts, cut, schedule.splits_backward)


def pipelined(
    step: Step,
    schedule: Schedule,
    sizes: Sequence[int] = (),
    shares: Sequence[float] = (),
    num_replicas: int = 1,
) -> PipelineProgram:
    """A step as a pipeline on the simulated devices.

    Args:
        step: Traced.
        schedule: When what runs.
        sizes: How many devices each stage has; by default as many for each worker.
        shares: Where it is cut; by default where the search does.
        num_replicas: Of each stage.
    """
    _, programs = programs_of(step, schedule, shares, num_replicas)
    sizes = sizes or [8 // schedule.num_workers] * schedule.num_stages
    return build(programs, schedule, [alike(size, num_replicas) for size in sizes], jax.devices())


def alike(num_devices: int, num_replicas: int) -> StageSharding:
    """A stage whose replicas' devices all do the same."""
    return StageSharding((num_replicas, num_devices // num_replicas), ("replica", "data"), {}, {})


def schedule_of(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """A family's schedule; two stages on each worker where it has virtual ones."""
    is_virtual = name in ("circular", "interleaved-1f1b", "zb-v", "dualpipe-v")
    return build_schedule(name, num_stages, num_microbatches, num_stages // 2 if is_virtual else num_stages)


def trained(reference: Reference, program: PipelineProgram):
    """What a pipeline makes of a reference's training run."""
    # A copy: the step donates its state.
    start = reference.placed(program.shardings[0])
    return run_steps(program.fn, reference.case, start, reference.num_steps)
