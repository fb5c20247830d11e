"""The plan of a pipeline, made from a proposal.

The stages of a proposal become programs with their specs, and the estimates are those of these programs: their times come
from the proposal, and their memory and collectives from their kernels. `Pipeline` holds all of it for the executor.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import InfeasibleError
from autoshard.cost_model.units import format_bytes
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.programs import made_ready, stage_programs
from autoshard.search.pipeline.proposals import Proposal, StageProposal
from autoshard.search.pipeline.stage_collectives import stage_collectives
from autoshard.search.pipeline.stage_decisions import decided_sharding, written_down
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.pipeline.stage_sharding import stage_sharding
from autoshard.search.pipeline.task_memory import ProgramKernels
from autoshard.search.plan.executors import MPMD
from autoshard.search.plan.plan import Collective, Estimates, Plan, PlanOnStep, Stage, StageEstimates
from autoshard.search.plan.schedule import Schedule
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms, StageSharding
from autoshard.search.step_problem import StepProblem


@dataclass(frozen=True, eq=False)
class Pipeline(PlanOnStep):
    """A plan on its step, as a program per stage.

    Attributes:
      programs: the programs of all stages.
      schedule: the order of their tasks.
      shardings: per stage, the specs of its values.
      devices: the devices of each stage.
    """

    programs: StagePrograms
    schedule: Schedule
    shardings: tuple[StageSharding, ...]
    devices: tuple["StageDevices", ...]


@dataclass(frozen=True, slots=True)
class StageDevices:
    """The devices of a stage.

    Attributes:
      group: the nodes of one kind to which they belong.
      cap_bytes: the cap of each device.
    """

    group: Cluster
    cap_bytes: int


def _check_hosts(step: Step, memory: StageMemory, groups: Sequence[Cluster]) -> None:
    """Refuses stages that need more of their hosts' memory than there is.

    Raises:
      InfeasibleError: a stage does.
    """
    for n, group in enumerate(groups):
        needed_bytes, there_bytes = memory.host_bytes(n), group.host_bytes_per_device
        if needed_bytes > there_bytes:
            raise InfeasibleError(
                f"stage {n} of {step.name} needs {format_bytes(needed_bytes)} of host memory for each device of "
                f"{group.name}, and the host has {format_bytes(there_bytes)} for each. Offload less, use more devices, or "
                "say how much memory they have (host_memory_per_node)"
            )


def planned(step: Step, found: Proposal, memory_bytes: int, offload: Any = None) -> Pipeline:
    """A proposal as a plan on its step.

    Raises:
      InfeasibleError: a stage needs more of its hosts' memory than there is.
    """
    opened = _with_fusions(
        PipelineStep.of_loop(found.parts.step_problem.step, found.num_replicas), found.parts.step_problem
    )
    cut = found.parts.layers.stage_cut([stage.placed.first_layer for stage in found.stages])
    parts, cut = made_ready(opened, cut)
    programs = stage_programs(parts, cut, found.schedule.splits_backward)
    shardings = tuple(
        stage_sharding(s.intra_op, parts, programs, n, found.parts.pins) for n, s in enumerate(found.stages)
    )
    memory = StageMemory(programs, found.schedule, shardings)
    groups = [stage.group for stage in found.stages]
    _check_hosts(step, memory, groups)
    plan = _plan(step, found, memory_bytes, _Stages.of(found, parts, memory, memory_bytes), offload)
    devices = tuple(map(StageDevices, groups, found.caps(memory_bytes)))
    return Pipeline(plan, programs, found.schedule, shardings, devices)


@dataclass(frozen=True, slots=True)
class _Stages:
    """The memory and the collectives of each stage's programs.

    Attributes:
      peak_bytes: peak of a device.
      collectives: in a step.
      host_bytes: on the host, for each device.
    """

    peak_bytes: tuple[float, ...]
    collectives: tuple[tuple[Collective, ...], ...]
    host_bytes: tuple[float, ...]

    @classmethod
    def of(cls, found: Proposal, step: PipelineStep, memory: StageMemory, memory_bytes: int) -> "_Stages":
        programs, shapes = memory.programs, [stage.placed.shape for stage in found.stages]
        alike = {_kind(s): ProgramKernels(s.intra_op, step, programs) for s in found.stages}
        kernels, caps = [alike[_kind(stage)] for stage in found.stages], found.caps(memory_bytes)

        def needed_bytes(program: StageProgram) -> float:
            return kernels[program.stage].temporary_bytes(program, caps[program.stage])

        of_tasks = memory.task_peaks({job: needed_bytes(program) for job, program in programs.tasks.items()})
        before, behind = [0.0] * len(shapes), [0.0] * len(shapes)
        for needed, once in ((before, programs.prologue), (behind, programs.epilogue)):
            for program in once:
                needed[program.stage] = max(needed[program.stage], needed_bytes(program))
        workers, stages = found.schedule.workers_of, range(len(shapes))
        peaks = [
            max(
                memory.prologue_peak(n, before[n]),
                memory.update_peak(n, behind[n]),
                *(of_tasks[worker] for worker in workers(n)),
            )
            for n in stages
        ]
        meshes = [MeshModel(s.group, (found.num_replicas, prod(s.placed.shape))) for s in found.stages]
        return cls(
            tuple(peaks),
            tuple(stage_collectives(n, kernels[n], memory, meshes[n]) for n in stages),
            tuple(map(memory.host_bytes, stages)),
        )


def _kind(stage: StageProposal) -> tuple[str, tuple[int, ...]]:
    """A key of the stages that run alike: their nodes and their mesh."""
    return stage.group.name, stage.placed.shape


def _with_fusions(step: PipelineStep, problem: StepProblem) -> PipelineStep:
    """The step with the values that the compiler computes where they are read."""
    fusion, program = problem.live_ranges.fusion, problem.graph.folded.program
    on_the_fly = {
        place
        for op in program.ops
        if op.op is not None
        for v, places in zip(op.results, op.result_places, strict=True)
        if not fusion.is_stored(v)
        for place in places
    }
    return replace(
        step, on_the_fly=frozenset(v for v in step.of_microbatch if step.place_of(v) in on_the_fly)
    )


def _plan(step: Step, found: Proposal, memory_bytes: int, taken: _Stages, offload: Any) -> Plan:
    starts = found.parts.layers.starts
    solutions = {_kind(stage): stage.intra_op for stage in found.stages}
    kinds = sorted(solutions)
    names = [group.name for group in found.cluster.groups]
    is_mixed = len(names) > 1
    shardings = (
        replace(decided_sharding(solutions[kind]), group=kind[0] if is_mixed else "") for kind in kinds
    )
    return written_down(
        step,
        found.parts.step_problem,
        [solutions[kind] for kind in kinds],
        _estimates(found, taken),
        cluster=found.cluster.to_json(),
        options=_given_options(found.parts.pins, offload),
        groups=tuple(names) if is_mixed else (),
        memory_bytes=memory_bytes,
        executor=MPMD,
        schedule=found.schedule.name,
        workers=found.schedule.num_workers,
        microbatches=found.schedule.num_microbatches,
        stages=tuple(
            Stage(starts[s.placed.first_layer], found.num_replicas, kinds.index(_kind(s)))
            for s in found.stages
        ),
        shardings=tuple(shardings),
    )


def _given_options(pins: Mapping[str, Any], offload: Any) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    given: dict[str, Any] = {"pin": {name: str(spec) for name, spec in sorted(pins.items())}} if pins else {}
    if offload is not None:
        given["offload"] = offload if isinstance(offload, str) else [*offload]
    return given


def _estimates(found: Proposal, taken: _Stages) -> Estimates:
    stages = tuple(
        StageEstimates(
            forward_s=stage.cost.forward_s,
            backward_s=stage.cost.backward_s,
            weight_gradient_s=stage.cost.weight_gradient_s,
            send_s=stage.cost.activation_transfer_s,
            return_s=stage.cost.gradient_transfer_s,
            update_s=stage.once_s,
            residual_bytes=round(stage.cost.residual_bytes),
            state_bytes=round(stage.state_bytes),
            workspace_bytes=round(stage.workspace_bytes),
            peak_bytes=ceil(taken.peak_bytes[n]),
            host_bytes=round(taken.host_bytes[n]),
            collectives=taken.collectives[n],
        )
        for n, stage in enumerate(found.stages)
    )
    peak_bytes = round(max(taken.peak_bytes))
    host_bytes = round(max(taken.host_bytes))
    return Estimates(
        step_s=found.step_s,
        peak_bytes=peak_bytes,
        host_bytes=host_bytes,
        bubble=found.idle_share,
        stages=stages,
    )
