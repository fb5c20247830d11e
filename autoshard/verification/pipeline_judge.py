"""Verification of pipelines: each program of a stage is lowered over an abstract mesh and compiled for the stage's devices.

Programs with equal text, such as those of stages of equal layers, are compiled once, for the least memory among them. The
compiler gets the description of a device whose memory makes its scheduler aim at a target: the plan's cap, less the other
arrays on the device while the program runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla._jax import module_bytes
from autoshard.cost_model.xla.compiler import Compiled
from autoshard.cost_model.xla.process import Job, compile_all_apart
from autoshard.cost_model.xla.stats import CompiledStats, Traffic
from autoshard.executors import spmd
from autoshard.executors.pipeline import followed
from autoshard.executors.pipeline_jit import StageRun
from autoshard.progress import Progress
from autoshard.search.pipeline.intra_op import replica_cluster
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.stopwatch import Stopwatch
from autoshard.verification.judge import CompilerVerifier, lowered, telling
from autoshard.verification.pipeline_result import PipelineVerification
from autoshard.verification.records import Footprint, ProgramProof, StageProof, beside


def verified_for_all(verifier: CompilerVerifier, found: SpmdPipeline, full: bool) -> PipelineVerification:
    """The predictions for a pipeline that is one program, beside the statistics of the compiled one.

    Raises:
      CompilerError: it cannot be lowered without devices, or the compiler failed on it.
    """
    del full  # all of it is always compiled
    plan, (cluster,) = found.plan, verifier.cluster.groups
    step = found.program.step
    watch = Stopwatch(step.trace_s)
    program = spmd.build(found.program, found.sharding, None)
    tell = telling(verifier.progress, "", watch)
    stats = verifier.stats(step, program, plan.memory_bytes, watch, tell)
    run = ProgramProof(
        program.name, 0, 0, 1, stats.argument_bytes, stats.fresh_output_bytes, stats.temporary_bytes
    )
    stage = StageProof(
        Footprint(plan.estimates.peak_bytes, plan.estimates.host_bytes, {}),
        _footprint(run, stats.host_bytes),
        run.name,
        plan.memory_bytes,
        cluster.host_bytes_per_device,
        beside(plan.estimates.collectives, stats.collectives),
    )
    return PipelineVerification(
        plan.step, cluster.name, plan.schedule, plan.memory_bytes, (stage,), (run,), 1, watch.seconds
    )


def verified_per_stage(verifier: CompilerVerifier, found: Pipeline, full: bool) -> PipelineVerification:
    """A pipeline's predictions beside the statistics of its stages' compiled programs.

    Raises:
      CompilerError: a program cannot be lowered without devices, or the compiler failed on it.
    """
    del full  # all different programs are always compiled
    step, plan = found.programs.step, found.plan
    watch = Stopwatch(step.trace_s)
    tell = telling(verifier.progress, "", watch)
    tell("lowering")
    runs = followed(found.programs, found.schedule, found.shardings, None).runs
    lots = _lots(found, runs)
    watch.lap("lower")
    answers = _compiled(lots, verifier, tell)
    meshes = [plan.mesh_of(stage) for stage in plan.stages]
    compiled = {
        run.program: CompiledStats.of(answer, meshes[run.location[0]])
        for lot, answer in zip(lots, answers, strict=True)
        for run in lot.runs
    }
    watch.lap("compile")
    programs = tuple(_proof(run, compiled[run.program]) for run in runs)
    stages = tuple(
        _stage(found, n, programs, [(run, compiled[run.program]) for run in runs if run.location[0] == n])
        for n in range(len(plan.stages))
    )
    return PipelineVerification(
        plan.step,
        verifier.cluster.name,
        plan.schedule,
        plan.memory_bytes,
        stages,
        programs,
        len(lots),
        watch.seconds,
    )


@dataclass(frozen=True, slots=True)
class _Lot:
    """Programs of equal text, which are compiled once."""

    runs: tuple[StageRun, ...]
    job: Job


def _lots(found: Pipeline, runs: Sequence[StageRun]) -> list[_Lot]:
    alike: dict[tuple[str, int, Cluster], list[tuple[StageRun, bytes]]] = {}
    for run in runs:
        program = lowered(found.programs.step, run.program)
        _, _, text = program.as_text().partition("\n")  # its first line has the program's name
        num_devices = found.plan.devices_of(found.plan.stages[run.location[0]])
        group = found.devices[run.location[0]].group
        alike.setdefault((text, num_devices, group), []).append((run, module_bytes(program)))
    return [
        _Lot(
            tuple(run for run, _ in lot),
            Job(
                lot[0][1],
                replica_cluster(group, num_devices),
                min(_memory_bytes(found, run) for run, _ in lot),
            ),
        )
        for (_, num_devices, group), lot in alike.items()
    ]


def _compiled(lots: Sequence[_Lot], verifier: CompilerVerifier, tell: Progress) -> list[Compiled]:
    """Compiles each lot; one process compiles for GPUs of one kind."""
    answers = dict[int, Compiled]()
    for kind in dict.fromkeys(lot.job.cluster.device.name for lot in lots):
        here = [i for i, lot in enumerate(lots) if lot.job.cluster.device.name == kind]
        compiled = compile_all_apart([lots[i].job for i in here], verifier.compiler, tell)
        answers |= zip(here, compiled, strict=True)
    return [answers[i] for i in range(len(lots))]


def _memory_bytes(found: Pipeline, run: StageRun) -> int:
    """Memory of the device that is described to the compiler."""
    cap_bytes = found.devices[run.location[0]].cap_bytes - run.beside_bytes
    return compiler.memory_for_cap(cap_bytes, run.program.resting_bytes)


def _proof(run: StageRun, stats: CompiledStats) -> ProgramProof:
    return ProgramProof(
        run.program.name,
        *run.location,
        run.count,
        run.held_bytes,
        stats.fresh_output_bytes,
        stats.temporary_bytes,
    )


def _stage(
    found: Pipeline, n: int, programs: Sequence[ProgramProof], runs: Sequence[tuple[StageRun, CompiledStats]]
) -> StageProof:
    workers = found.schedule.workers_of(n)
    highest = max((one for one in programs if one.worker in workers), key=lambda one: one.peak_bytes)
    estimates = found.plan.estimates.stages[n]
    moved: dict[tuple[str, tuple[str, ...]], Traffic] = {}
    for run, stats in runs:
        for key, (count, num_bytes) in stats.collectives.items():
            before = moved.get(key, (0, 0))
            moved[key] = before[0] + run.count * count, before[1] + run.count * num_bytes
    return StageProof(
        Footprint(estimates.peak_bytes, estimates.host_bytes, {}),
        _footprint(highest, sum(stats.host_bytes for _, stats in runs)),
        highest.name,
        found.devices[n].cap_bytes,
        found.devices[n].group.host_bytes_per_device,
        beside(estimates.collectives, moved),
    )


def _footprint(highest: ProgramProof, host_bytes: int) -> Footprint:
    residents = {
        "held": highest.held_bytes,
        "outputs not aliased": highest.fresh_bytes,
        "temporaries": highest.temporary_bytes,
    }
    return Footprint(highest.peak_bytes, host_bytes, residents)
