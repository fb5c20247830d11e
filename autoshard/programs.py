"""From a plan to the program that runs it, on the devices at hand.

On GPUs the compiler has the last word. A program carries its plan's cap to XLA's scheduler, which otherwise trades all of a
larger device's memory for overlap. And it is compiled before its first step anyway: where its peak then lies above the cap,
XLA's own rematerialization may bring it down. Where that does not either, the search goes on under a lower limit, as
`search(..., verify=True)` does without the devices.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard import planning
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, first_line
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.compiler import options_for_cap
from autoshard.cost_model.xla.gpu_targets import AS_PLANNED, scheduler_options
from autoshard.executors import jit, pipeline, spmd
from autoshard.executors.jit import Program
from autoshard.executors.pipeline_jit import CompilerOptions
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.processes import Processes
from autoshard.progress import Progress
from autoshard.search.driver import SearchResult
from autoshard.search.ir.graph import Step
from autoshard.search.options import Options
from autoshard.search.pipeline.planning import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.pipeline_plan import PipelinePlan
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spmd_plan import SpmdPlan
from autoshard.verification import judge
from autoshard.verification.result import Verification

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""How XLA's runtime begins to say that an allocation failed."""


@dataclass(frozen=True, eq=False)
class Built:
    """What a search found, and its program."""

    found: SearchResult
    program: Program

    @property
    def plan(self) -> Plan:
        """What the search found."""
        return self.found.plan

    @property
    def saveable_s(self) -> float:
        """What a plan of another kind may save of a step at most."""
        return self.found.saveable_s

    def waited(self, part: str, seconds: float) -> "Built":
        """With what its user has waited for besides."""
        return replace(self, found=self.found.waited(part, seconds))


def built(
    found: SearchResult,
    cluster: Cluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
    given_up: AbstractSet[int] = frozenset(),
    besides: Mapping[str, str] = AS_PLANNED,
) -> Program:
    """A plan's program.

    Args:
      found: the plan on its step.
      cluster: what it was made for.
      devices: in the cluster's order: real, simulated or compile-only.
      on_retrace: as for `executors.jit.build`.
      given_up: as for `executors.jit.build`.
      besides: options of the compiler.
    """
    options = _options(found.plan, cluster, devices, besides)
    return jit.build(found.step, found.sharding, devices, on_retrace, options, given_up)


def applied(
    found: SearchResult,
    cluster: Cluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None],
    given_up: AbstractSet[int],
) -> Program:
    """The program of a plan that was found before."""
    if _are_gpus(devices):
        return _compiled(found, cluster, devices, on_retrace, given_up)[0]
    return built(found, cluster, devices, on_retrace, given_up)


def _compiled(
    found: SearchResult,
    cluster: Cluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None],
    given_up: AbstractSet[int],
) -> tuple[Program, Verification]:
    """A plan's program for GPUs at hand, and what became of it."""

    def verified(besides: Mapping[str, str]) -> tuple[Program, Verification]:
        program = built(found, cluster, devices, on_retrace, given_up, besides)
        return program, judge.verified_here(found, cluster, program)

    return judge.first_fitting(verified, lambda made: made[1].fits)


def _options(
    plan: Plan | SpmdPlan, cluster: Cluster, devices: Sequence[Any], besides: Mapping[str, str]
) -> Callable[[int], dict[str, str]]:
    """What the compiler is told of a program for all devices."""

    def compiler_options(resting_bytes: int) -> dict[str, str]:
        if not _are_gpus(devices):
            return {}
        for_cap = options_for_cap(plan.memory_bytes, resting_bytes, cluster.device.memory_bytes)
        return {**for_cap, **scheduler_options(cluster.device.name), **besides}

    return compiler_options


def searched(
    step: Step,
    cluster: Cluster,
    options: Options,
    devices: Sequence[Any],
    on_retrace: Callable[[], None],
    progress: Progress = lambda line: None,
    given_up: AbstractSet[int] = frozenset(),
) -> Built:
    """The fastest plan that fits, and its program; on GPUs it is compiled, and fits as compiled.

    Raises:
      InfeasibleError: nothing fits; says what would.

    Warns:
      AutoshardWarning: a plan before this one was compiled to more than the cap.
    """
    processes = Processes.of(devices)

    def find(options: Options, progress: Progress) -> SearchResult:
        return processes.found_by_the_first(
            lambda: planning.find(step, cluster, options, progress),
            lambda data, place: planning.applied(step, Plan.from_json(data, place), place),
        )

    if not _are_gpus(devices):
        found = find(options, progress)
        return Built(found, built(found, cluster, devices, on_retrace, given_up))
    programs: list[Program] = []

    def verified(found: SearchResult, full: bool) -> Verification:
        del full  # it is compiled whole in any case
        progress("compiling")
        program, proof = _compiled(found, cluster, devices, on_retrace, given_up)
        programs.append(program)
        return proof

    found = judge.fitting(
        lambda limit, said: find(replace(options, memory_bytes=limit), said),
        verified,
        options.memory_bytes,
        progress,
    )
    return Built(found, programs[-1])


def pipelined(
    found: Pipeline | SpmdPipeline,
    cluster: AnyCluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
) -> PipelineProgram | Program:
    """A pipeline's programs, or its one program.

    Args:
      found: the pipeline on its step.
      cluster: what it was made for.
      devices: in the cluster's order: real or simulated.
      on_retrace: as for `executors.pipeline.build`.
    """
    if isinstance(found, SpmdPipeline):
        of_all = _options(found.plan, cluster.groups[0], devices, {})
        return spmd.build(found.program, found.sharding, devices, on_retrace, of_all)
    devices, options = _as_stages_stand(found.plan, cluster, devices), _stage_options(found, devices)
    return pipeline.build(found.programs, found.schedule, found.shardings, devices, on_retrace, options)


def emitted(
    found: Pipeline | SpmdPipeline, cluster: AnyCluster, devices: Sequence[Any]
) -> tuple[Program, ...] | Program:
    """What `pipelined` runs, program by program, each once for each worker that runs it.

    Args:
      found: the pipeline on its step.
      cluster: what it was made for.
      devices: in the cluster's order: real, simulated or compile-only.
    """
    if isinstance(found, SpmdPipeline):
        of_all = _options(found.plan, cluster.groups[0], devices, {})
        return spmd.build(found.program, found.sharding, devices, compiler_options=of_all)
    devices, options = _as_stages_stand(found.plan, cluster, devices), _stage_options(found, devices)
    agenda = pipeline.followed(found.programs, found.schedule, found.shardings, devices, options)
    return tuple(run.program for run in agenda.runs)


def _as_stages_stand(plan: PipelinePlan, cluster: AnyCluster, devices: Sequence[Any]) -> Sequence[Any]:
    """The devices of a cluster, as stages stand on them one after another."""
    return cluster.in_order(devices, plan.groups) if isinstance(cluster, MixedCluster) else devices


def _stage_options(found: Pipeline, devices: Sequence[Any]) -> CompilerOptions:
    """What the compiler is told of a stage's programs: that they share the cap with what else lies there."""

    def compiler_options(stage: int, beside_bytes: int, resting_bytes: int) -> dict[str, str]:
        if not _are_gpus(devices):
            return {}
        here = found.devices[stage]
        device, cap_bytes = here.group.device, here.cap_bytes - beside_bytes
        for_cap = options_for_cap(cap_bytes, resting_bytes, device.memory_bytes)
        return for_cap | scheduler_options(device.name)

    return compiler_options


@contextlib.contextmanager
def room_for(plan: Plan | PipelinePlan | SpmdPlan) -> Generator[None]:
    """What is placed and run inside has its memory, or a message that says what to do.

    Raises:
      InfeasibleError: a device ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if OUT_OF_MEMORY not in str(e):
            raise
        said = f"{plan.step} ran out of device memory at its first step ({first_line(e)})"
        raise InfeasibleError(
            f"{said}. Its plan needs {format_bytes(plan.estimates.peak_bytes)} a device by prediction, under a cap of "
            f"{format_bytes(plan.memory_bytes)}: something else holds memory there, or JAX was given less "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION). Free it, or pass a lower memory="
        ) from e


def _are_gpus(devices: Sequence[Any]) -> bool:
    return bool(devices) and devices[0].platform in ("gpu", "cuda", "rocm")
