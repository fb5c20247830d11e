"""From a traced step to a pipeline of it: searched, or decided by a plan.

Both ways lead to the same values: the step in parts, with its recomputation; a solution for each mesh of a replica; and the
stages. The programs of the stages, the specs of their values and all estimates follow from these.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, prod
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import ClusterError, InfeasibleError, InputError, PlanError
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster, from_json
from autoshard.cost_model.units import format_bytes
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import read_partition_spec
from autoshard.search.memory.microbatches import looped
from autoshard.search.mesh_problem import StepProblem
from autoshard.search.pipeline.intra_op import IntraOp, decided, replica_choices
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.programs import made_ready, stage_programs
from autoshard.search.pipeline.proposals import Parts, Placed, Proposal, StageProposal
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.search import PipelineOptions, PipelineSearch
from autoshard.search.pipeline.split_loops import num_positions
from autoshard.search.pipeline.stage_collectives import stage_collectives
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.pipeline.stage_pins import marks_of as marks_of_pins
from autoshard.search.pipeline.stage_sharding import stage_sharding
from autoshard.search.pipeline.task_memory import ProgramKernels
from autoshard.search.plan.decisions import apart, hosted
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.executors import MPMD
from autoshard.search.plan.measured_shares import measured_shares
from autoshard.search.plan.plan import Collective, Estimates, Plan, Sharding, Stage, StageEstimates
from autoshard.search.plan.recognition import check_is_for, outlined
from autoshard.search.plan.retention import RetentionCodec
from autoshard.search.plan.schedule import Schedule
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms, StageSharding
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.stopwatch import Stopwatch
from autoshard.search.tightening import Round, tightened

MAX_ROUNDS = 4
"""Largest number of searches under ever lower limits, if programs need more memory than layers' costs show. Source: a choice
of ours."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """A plan on its step.

    Attributes:
      plan: the plan.
      programs: the programs of all stages.
      schedule: the order of their tasks.
      shardings: per stage, the specs of its values.
      devices: the devices of each stage.
    """

    plan: Plan
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


@uncollected()
def find(
    step: Step,
    cluster: AnyCluster,
    options: PipelineOptions,
    progress: Callable[[str], None] = lambda line: None,
    cutoff_s: float = inf,
    prepared: Prepared | None = None,
) -> Pipeline:
    """Searches for the fastest pipeline that fits.

    Args:
      step: the traced step.
      cluster: the cluster that it will run on.
      options: the options of the search.
      progress: called with one line per stage of the work.
      cutoff_s: seconds of the plan to beat.
      prepared: as for `PipelineSearch`.

    Raises:
      InputError: there are more stages than layers, the devices or the batch do not divide, or no schedule has this name.
      NotSplittableError: the step has no microbatches; the message says why.
      InfeasibleError: nothing fits, or nothing is so fast; the message names the nearest.
    """
    watch = Stopwatch(step.trace_s)
    refused, prepared = list[InfeasibleError](), prepared or Prepared.within()

    def propose(limit_bytes: float, _: object) -> Round[Pipeline] | None:
        try:
            lower = replace(options, memory_share=limit_bytes / options.memory_bytes)
            search = PipelineSearch(
                step, marks_of_pins(step, options.pins), cluster, lower, progress, prepared
            )
            found = search.run(cutoff_s)
            watch.lap("search")
        except InfeasibleError as e:
            refused.append(e)
            return None
        pipeline = _pipeline(step, found, options.memory_bytes, options.offload)
        watch.lap("plan")
        promised_bytes = found.fullness(options.memory_bytes) * options.memory_bytes
        return Round(pipeline, promised_bytes, _needed_bytes(pipeline))

    smallest_bytes, usable_bytes = inf, options.memory_share * options.memory_bytes
    for latest in tightened(propose, usable_bytes, MAX_ROUNDS):
        if latest.needed_bytes <= usable_bytes:
            plan = replace(latest.proposal.plan, cluster=cluster.to_json(), search_s=watch.seconds)
            return replace(latest.proposal, plan=plan)
        smallest_bytes = min(smallest_bytes, latest.needed_bytes)
    if smallest_bytes == inf:
        raise refused[0]
    raise InfeasibleError(
        f"no pipeline of {step.name} on {cluster.name} fits {format_bytes(options.memory_bytes)} a device: the nearest that "
        f"was found needs {format_bytes(smallest_bytes)}. Allow that, more microbatches or more stages, or use more devices"
    )


def apply(step: Step, plan: Plan, place: str = "the plan") -> Pipeline:
    """Applies a loaded plan to its step.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
    """
    schedule, cluster, parts = _read(step, plan, place)
    placed = _placed(parts, plan, cluster, schedule, place)
    for sharding in plan.shardings:
        here, shape = parts.on(_group(cluster, sharding, place)), tuple(sharding.mesh.values())
        here.solutions[shape] = decided(here.step_problem, here.cluster, sharding, place)
    for n, one in enumerate(placed):
        group, _ = cluster.locate(one.first_device)
        if one.shape not in parts.on(group).solutions:
            raise PlanError(
                f"{place}: stages[{n}] stands on {group.name}, and its sharding is for another group of nodes"
            )
    found = Proposal.of([parts] * len(placed), cluster, plan.num_replicas, placed, schedule)
    again = _pipeline(step, found, plan.memory_bytes)
    return replace(again, plan=replace(again.plan, cluster=plan.cluster))


def choices(step: Step, plan: Plan, name: str, place: str = "the plan") -> tuple[str, ...]:
    """The possible values of a decision in each sharding of a plan, whatever the other decisions are.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
    """
    _, cluster, parts = _read(step, plan, place)
    there = [(sharding, parts.on(_group(cluster, sharding, place))) for sharding in plan.shardings]
    first, *others = (replica_choices(p.step_problem, p.cluster, s, name, place) for s, p in there)
    return tuple(text for text in first if all(text in other for other in others))


# --- from a proposal to a plan


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


def _pipeline(step: Step, found: Proposal, memory_bytes: int, offload: Any = None) -> Pipeline:
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
    plan = replace(plan, marks=marks_of(plan))
    devices = tuple(map(StageDevices, groups, found.caps(memory_bytes)))
    return Pipeline(plan, programs, found.schedule, shardings, devices)


def _needed_bytes(pipeline: Pipeline) -> float:
    """Bytes that the fullest device needs; if caps differ, scaled to the plan's cap."""
    taken, cap_bytes = pipeline.plan.estimates.stages, pipeline.plan.memory_bytes
    needed = zip(taken, pipeline.devices, strict=True)
    return max(stage.peak_bytes * (cap_bytes / place.cap_bytes) for stage, place in needed)


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
    problem = found.parts.step_problem
    starts = found.parts.layers.starts
    solutions = {_kind(stage): stage.intra_op for stage in found.stages}
    kinds = sorted(solutions)
    sites, names = problem.sites, [group.name for group in found.cluster.groups]
    is_mixed = len(names) > 1
    return Plan(
        step=step.name,
        fingerprint=fingerprint(step),
        jax=jax.__version__,
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
        retention=RetentionCodec(problem.traced_program).decisions(sites) if sites else {},
        shardings=tuple(
            replace(_sharding(solutions[kind]), group=kind[0] if is_mixed else "") for kind in kinds
        ),
        estimates=replace(
            _estimates(found, taken),
            shares=tuple(
                measured_shares(solutions[kind].on_mesh.memory.costed, solutions[kind].labels)
                for kind in kinds
            ),
        ),
        outline=outlined(step),
    )


def _given_options(pins: Mapping[str, Any], offload: Any) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    given: dict[str, Any] = {"pin": {name: str(spec) for name, spec in sorted(pins.items())}} if pins else {}
    if offload is not None:
        given["offload"] = offload if isinstance(offload, str) else [*offload]
    return given


def _sharding(solution: IntraOp) -> Sharding:
    return solution.on_mesh.codec.decisions(solution.labels).sharding


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
            peak_bytes=round(taken.peak_bytes[n]),
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


# --- from a plan to its parts


def _read(step: Step, plan: Plan, place: str) -> tuple[Schedule, AnyCluster, Parts]:
    """A plan's schedule, its cluster, and the step in parts.

    Raises:
      PlanError: the plan is for another step, or is impossible.
    """
    check_is_for(plan, step, place)
    try:
        schedule = build_schedule(plan.schedule, len(plan.stages), plan.microbatches, plan.workers)
        given = from_json(plan.cluster, f"{place}: cluster")
        return schedule, _ordered(given, plan, place), _parts(step, plan, given.groups[0], place)
    except InputError as e:
        raise PlanError(f"{place}: {e}") from e


def _ordered(cluster: AnyCluster, plan: Plan, place: str) -> AnyCluster:
    """The cluster of a plan, with its groups of nodes in the order of the stages on them."""
    if not isinstance(cluster, MixedCluster):
        return cluster
    try:
        return cluster.ordered(plan.groups)
    except ClusterError as e:
        raise ClusterError(f"{place}: groups: {e}") from e


def _group(cluster: AnyCluster, sharding: Sharding, place: str) -> Cluster:
    """The nodes of a sharding."""
    groups = {group.name: group for group in cluster.groups}
    if len(groups) == 1:
        return cluster.groups[0]
    if sharding.group not in groups:
        raise PlanError(
            f"{place}: wanted shardings for a group of nodes, {' or '.join(map(repr, groups))}, got {sharding.group!r}"
        )
    return groups[sharding.group]


def _parts(step: Step, plan: Plan, first: Cluster, place: str) -> Parts:
    """The step in a plan's parts, with its recomputation and its state on the host; layers begin where stages do."""
    num_replicas = {stage.replicas for stage in plan.stages}
    if len(num_replicas) != 1:
        raise PlanError(f"{place}: wanted as many replicas of each stage, got {sorted(num_replicas)}")
    count = plan.microbatches * plan.num_replicas
    sites, pins = frozenset(), {n: read_partition_spec(s) for n, s in plan.options.get("pin", {}).items()}
    marks = marks_of_pins(step, pins)
    if plan.retention:
        sites, _ = RetentionCodec(fold(flatten(looped(step, count)), marks)).read(plan.retention, place)
    borders = [stage.first_op for stage in plan.stages]
    _check_borders(PipelineStep.of(step, count), borders, place)
    decided = tuple(zip(*(apart(step, sharding) for sharding in plan.shardings), strict=True))
    on_host = [hosted(step, sharding, place) for sharding in plan.shardings]
    if len({*on_host}) != 1:
        raise PlanError(f"{place}: all of its shardings must rest the same arguments on the host")
    return Parts.of(step, marks, first, count, sites, borders, pins=pins, decided=decided, hosted=on_host[0])


def _check_borders(step: PipelineStep, borders: Sequence[int], place: str) -> None:
    """Refuses stages that do not begin one after another, the first one at op 0."""
    end = sum(num_positions(step, op) for op in step.forward_ops)
    if borders[0] or sorted({*borders}) != [*borders] or borders[-1] >= end:
        raise PlanError(
            f"{place}: wanted stages that begin at op 0 and then at ascending ones below {end}, got {[*borders]}"
        )


def _placed(parts: Parts, plan: Plan, cluster: AnyCluster, schedule: Schedule, place: str) -> list[Placed]:
    """The places of a plan's stages. Workers have the devices one after another."""
    starts = [parts.layers.starts.index(stage.first_op) for stage in plan.stages]
    sizes = [plan.devices_of(plan.stages[schedule.stages_of(w)[0]]) for w in range(schedule.num_workers)]
    firsts = [sum(sizes[: schedule.workers_of(n)[0]]) for n in range(len(plan.stages))]
    if (total := sum(sizes)) != cluster.num_devices:
        raise PlanError(f"{place}: its stages have {total} devices, its cluster {cluster.num_devices}")
    for n, (first, stage) in enumerate(zip(firsts, plan.stages, strict=True)):
        last = first + plan.devices_of(stage) - 1
        if cluster.locate(first)[0] != cluster.locate(last)[0]:
            raise PlanError(
                f"{place}: stage {n} would stand on devices {first} to {last}, which are not all "
                f"of one kind; the groups of nodes are {cluster}"
            )
    ends = [*starts[1:], parts.layers.num_layers]
    shapes = [tuple(plan.sharding_of(stage).mesh.values()) for stage in plan.stages]
    return [Placed(*one) for one in zip(starts, ends, firsts, shapes, strict=True)]
