"""A pipeline for a step that shares its state with another step's pipeline, such as an evaluation beside its training.

Each stage of a pipeline has devices of its own, so the shared arguments decide where the new step's stages begin: a stage
begins with the first op that reads an argument of that stage. Loops over layers read stacks that rest at one stage; a stage
without arguments of its own begins at the share of the forward phase at which it begins in the other step. Replicas, meshes
and schedule are the other plan's. Strategies are searched, with the shared arguments pinned to their specs.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.units import format_bytes
from autoshard.pins import Counterparts
from autoshard.planning import given_bytes
from autoshard.search.ir.graph import Role, Step
from autoshard.search.memory.microbatches import batch_divisors
from autoshard.search.pipeline import planning
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.schedules.registry import FAMILIES
from autoshard.search.pipeline.split_loops import num_positions
from autoshard.search.plan.plan import Plan, Sharding
from autoshard.search.plan.recognition import outlined
from autoshard.search.plan.resting_places import without_place
from autoshard.search.problem.fingerprint import fingerprint


def planned_like(step: Step, other: Pipeline, memory: str | int | None = None) -> Pipeline:
    """The pipeline of a step whose arguments rest where another step's pipeline has them.

    Args:
      memory: the cap per device, as users say it; by default that of the other plan.

    Raises:
      InputError: the steps share no argument, the batch cannot be split as the pipeline needs, or the step cannot be cut so.
      InfeasibleError: a stage does not fit the cap.
    """
    shared = _shared(step, other.programs.step)
    if not shared:
        raise InputError(
            f"like= is a pipeline of {other.plan.step!r}, which shares no argument with {step.name!r}. Leave out like="
        )
    step = with_roles(step, shared)
    plan, microbatches = other.plan, _num_microbatches(step, other.plan)
    parts = PipelineStep.of(step, microbatches, plan.num_replicas)
    starts = _starts(parts, other, shared)
    like = replace(
        plan,
        step=step.name,
        fingerprint=fingerprint(step),
        outline=outlined(step),
        memory_bytes=plan.memory_bytes if memory is None else given_bytes(memory, other.devices[0].group),
        options={},
        retention={},
        microbatches=microbatches,
        stages=tuple(replace(s, first_op=at) for s, at in zip(plan.stages, starts, strict=True)),
        shardings=tuple(_only(sharding, shared) for sharding in plan.shardings),
        gap=None,
        marks="",
    )
    return _fitting(_left_alone(planning.apply(step, like, "like="), other, shared))


def _left_alone(found: Pipeline, other: Pipeline, shared: Mapping[str, str]) -> Pipeline:
    """The pipeline with the shared arguments that no op reads, such as an optimizer's state, as the other one has them."""
    programs, theirs = found.programs, dict(_inputs(other))
    read = {v for program in programs.programs for v in program.reads}
    unread = {v: theirs[shared[name]] for name, v in _inputs(found) if name in shared and v not in read}
    stage_of, values = other.programs.stage_of, list(programs.values)
    for v, there in unread.items():
        values[v] = replace(values[v], is_on_host=other.programs.values[there].is_on_host)
    homes = {v: stage_of[there] for v, there in unread.items()}
    return replace(
        found,
        programs=replace(programs, stage_of={**programs.stage_of, **homes}, values=tuple(values)),
        shardings=tuple(
            replace(
                mine,
                specs={**mine.specs, **{v: its.spec(there) for v, there in unread.items() if homes[v] == n}},
            )
            for n, (mine, its) in enumerate(zip(found.shardings, other.shardings, strict=True))
        ),
    )


def _inputs(pipeline: Pipeline) -> Iterator[tuple[str, int]]:
    """The arguments of a pipeline's step: path and value."""
    return ((a.name, v) for v, a in pipeline.programs.step.inputs)


def _fitting(found: Pipeline) -> Pipeline:
    """A pipeline that keeps to its caps.

    Raises:
      InfeasibleError: a stage does not.
    """
    for n, (stage, there) in enumerate(zip(found.plan.estimates.stages, found.devices, strict=True)):
        if stage.peak_bytes > there.cap_bytes:
            raise InfeasibleError(
                f"stage {n} of {found.plan.step} needs {format_bytes(stage.peak_bytes)} a device where like= has it, and "
                f"the cap is {format_bytes(there.cap_bytes)}. Give it a smaller batch or more memory",
                stage.peak_bytes,
            )
    return found


def with_roles(step: Step, shared: Collection[str]) -> Step:
    """The step with the shared arguments as parameters, which each microbatch reads. No result replaces them here, so that
    they seem to be examples, or inputs of which all may be computed first."""
    arguments = (replace(a, role=Role.PARAMETER) if a.name in shared else a for a in step.arguments)
    return replace(step, arguments=tuple(arguments))


def _shared(step: Step, other: Step) -> dict[str, str]:
    """By argument of the step, the argument of the other step that it is; examples and random keys are not shared."""
    theirs = zip(other.arguments, other.abstract_inputs(), strict=True)
    shapes = {a.name: x.shape for a, x in theirs if a.role not in (Role.BATCH, Role.KEY)}
    others, found = Counterparts(shapes), dict[str, str]()
    for argument, own in zip(step.arguments, step.abstract_inputs(), strict=True):
        if len(names := others.of(argument.name, own.shape)) == 1:
            (found[argument.name],) = names
    return found


def _num_microbatches(step: Step, plan: Plan) -> int:
    """The largest number of microbatches up to the plan's that suits the step's batch and the schedule.

    Raises:
      InputError: there is none.
    """
    divisors, family = {*batch_divisors(step)}, FAMILIES[plan.schedule]
    for count in range(plan.microbatches, 0, -1):
        if count * plan.num_replicas in divisors and family.suits(plan.workers, count):
            return count
    raise InputError(
        f"the batch of {step.name} cannot be split over the {plan.num_replicas} replicas of a stage that like= has. Take a "
        "batch size that they divide"
    )


def _starts(parts: PipelineStep, other: Pipeline, shared: Mapping[str, str]) -> list[int]:
    """The positions at which stages begin."""
    stage_of = {name: other.programs.stage_of[v] for name, v in _inputs(other)}
    read = list(_stages_read(parts, {mine: stage_of[theirs] for mine, theirs in shared.items()}))
    *positions, total = accumulate((num for num, _ in read), initial=0)
    last_read = [max(stages, default=-1) for _, stages in read]
    share, starts = total / _num_positions(other), [0]
    for n, stage in enumerate(other.plan.stages[1:], start=1):
        own = (at for at, last in zip(positions, last_read, strict=True) if last >= n)
        starts.append(max(next(own, round(stage.first_op * share)), starts[-1] + 1))
    return starts


def _num_positions(other: Pipeline) -> int:
    """Positions of the forward phase of a pipeline's step."""
    parts = PipelineStep.of_loop(other.programs.step, other.plan.num_replicas)
    return sum(num_positions(parts, op) for op in parts.forward_ops)


def _stages_read(parts: PipelineStep, stage_of: Mapping[str, int]) -> Iterator[tuple[int, frozenset[int]]]:
    """By forward op: the positions that it takes in a cut, and the stages of the shared arguments that it reads."""
    found = {v: frozenset({stage_of[a.name]}) for v, a in parts.step.inputs if a.name in stage_of}
    for op in parts.prologue:
        stages = frozenset[int]().union(*(found.get(v, ()) for v in op.operands))
        found.update(dict.fromkeys(op.outputs, stages))
    for op in parts.forward_ops:
        yield num_positions(parts, op), frozenset[int]().union(*(found.get(v, ()) for v in op.operands))


def _only(sharding: Sharding, shared: Mapping[str, str]) -> Sharding:
    """A sharding that decides on shared arguments only."""
    texts = {mine: without_place(sharding.arguments.get(theirs, "")) for mine, theirs in shared.items()}
    return replace(
        sharding, arguments={name: text for name, text in texts.items() if text}, ops={}, copies={}
    )
