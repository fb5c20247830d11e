"""Pipelines to run: a step cut where the search cuts it, or by hand, under a schedule of any family."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from executors.pipeline import build
from executors.pipeline_program import PipelineProgram
from search.ir.graph import Step
from search.pipeline.batch_sharding import batch_sharding
from search.pipeline.pipeline_step import PipelineStep
from search.pipeline.programs import stage_programs
from search.pipeline.schedules.registry import build_schedule
from search.pipeline.split_loops import num_positions
from search.pipeline.stage_cut import StageCut, balanced_cut
from search.pipeline.stages import forward_ops
from search.plan.schedule import Schedule
from search.plan.stage_programs import StagePrograms
from tests.executors.agreement import Reference, run_steps


def cut_of(parts: PipelineStep, num_stages: int) -> StageCut:
    """Where the search cuts a step."""
    ops = forward_ops(parts)
    return balanced_cut(ops, parts.values, [num_positions(parts, op) for op in ops], num_stages)


def programs_of(
    step: Step, schedule: Schedule, shares: Sequence[float] = ()
) -> tuple[PipelineStep, StagePrograms]:
    """A step's parts, and its stages' programs; cut behind such shares of its positions, if they are given."""
    parts = PipelineStep.of(step, schedule.num_microbatches)
    num = sum(num_positions(parts, op) for op in forward_ops(parts))
    cut = (
        StageCut(tuple(int(share * num) for share in shares))
        if shares
        else cut_of(parts, schedule.num_stages)
    )
    return parts, stage_programs(parts, cut, schedule.splits_backward)


def pipelined(
    step: Step, schedule: Schedule, sizes: Sequence[int] = (), shares: Sequence[float] = ()
) -> PipelineProgram:
    """A step as a pipeline on the simulated devices.

    Args:
        step: Traced.
        schedule: When what runs.
        sizes: How many devices each stage has; by default as many for each worker.
        shares: Where it is cut; by default where the search does.
    """
    parts, programs = programs_of(step, schedule, shares)
    sizes = sizes or [8 // schedule.num_workers] * schedule.num_stages
    return build(programs, schedule, [batch_sharding(parts, size) for size in sizes], jax.devices())


def schedule_of(name: str, num_stages: int, num_microbatches: int) -> Schedule:
    """A family's schedule; two stages on each worker where it has virtual ones."""
    is_virtual = name in ("circular", "interleaved-1f1b", "zb-v", "dualpipe-v")
    return build_schedule(name, num_stages, num_microbatches, num_stages // 2 if is_virtual else num_stages)


def trained(reference: Reference, program: PipelineProgram):
    """What a pipeline makes of a reference's training run."""
    # A copy: the step donates its state.
    start = jax.device_put(jax.tree.map(jnp.copy, reference.start), program.shardings[0])
    return run_steps(program.fn, reference.case, start, reference.num_steps)
