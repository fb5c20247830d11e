"""From a plan to its program on the attached devices.

On GPUs the compiler decides the memory in the end. A program passes its plan's cap to XLA's scheduler, which otherwise
spends all of a larger device's memory on overlap. It is compiled before its first step. If its peak exceeds the cap, XLA's
own rematerialization may reduce it. If that fails too, the search continues under a lower limit, as
`search(..., verify="auto")` does without the devices.
"""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard import compiled_peaks, planning
from autoshard.compiled_peaks import Judgement
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, first_line
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.units import format_bytes
from autoshard.cost_model.xla.compiler import options_for_cap
from autoshard.cost_model.xla.gpu_targets import attempts, scheduler_options
from autoshard.executors import jit, pipeline, spmd
from autoshard.executors.jit import Program
from autoshard.executors.pipeline_jit import CompilerOptions
from autoshard.executors.pipeline_program import PipelineProgram
from autoshard.options import NEVER, Options
from autoshard.processes import Processes
from autoshard.progress import Progress
from autoshard.search.ir.graph import Step
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.options import Options as SearchOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.time_share import TimeShare
from autoshard.verification import judge
from autoshard.verification.result import Verification

BY_DEFAULT = Options()
"""The options of a user who gives none."""

OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"
"""The status in XLA's error message when an allocation fails."""


@dataclass(frozen=True, eq=False)
class Built:
    """The result of a search, and its program."""

    found: SearchResult
    program: Program

    @property
    def plan(self) -> Plan:
        """The plan that the search found."""
        return self.found.plan

    @property
    def on_mesh(self) -> MeshProblem:
        """The problem that the plan solves."""
        return self.found.on_mesh

    def waited(self, part: str, seconds: float) -> "Built":
        """A copy whose search times also hold these seconds under the name `part`."""
        return replace(self, found=self.found.waited(part, seconds))


def built(
    found: SearchResult,
    cluster: Cluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
    given_up: AbstractSet[int] = frozenset(),
    besides: Mapping[str, str] | None = None,
) -> Program:
    """A plan's program.

    Args:
      devices: in the cluster's order: real, simulated or compile-only.
      on_retrace: as for `executors.jit.build`.
      given_up: as for `executors.jit.build`.
      besides: further options of the compiler; those of the plan if there are none.
    """
    as_planned = attempts(found.plan.overlap)[0]
    options = _options(found.plan, cluster, devices, as_planned if besides is None else besides)
    return jit.build(found.step, found.sharding, devices, on_retrace, options, given_up)


def emitted(found: SearchResult, hardware: AnyCluster, devices: Sequence[Any]) -> Program:
    """The program of a plan on the cluster that it is for."""
    return built(found, hardware.groups[0], devices)


def applied(
    found: SearchResult,
    hardware: AnyCluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None],
    given_up: AbstractSet[int],
) -> Program:
    """The program of a given plan, compiled if the devices are GPUs."""
    cluster = hardware.groups[0]
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
    """A plan's program for the attached GPUs, and its verification as compiled."""

    def verified(besides: Mapping[str, str]) -> tuple[Program, Verification]:
        program = built(found, cluster, devices, on_retrace, given_up, besides)
        return program, judge.verified_here(found, cluster, program)

    return judge.first_fitting(verified, lambda made: made[1], found.plan.overlap)


def _options(
    plan: Plan, cluster: Cluster, devices: Sequence[Any], besides: Mapping[str, str]
) -> Callable[[int], dict[str, str]]:
    """The compiler's options for a program of all devices, by its resting bytes per device."""

    def compiler_options(resting_bytes: int) -> dict[str, str]:
        if not _are_gpus(devices):
            return {}
        device_bytes = cluster.device.memory_bytes
        for_cap = options_for_cap(plan.memory_bytes, resting_bytes, device_bytes, plan.overlap)
        return {**for_cap, **scheduler_options(cluster.device.name), **besides}

    return compiler_options


def searched(
    step: Step,
    cluster: Cluster,
    options: SearchOptions,
    devices: Sequence[Any],
    on_retrace: Callable[[], None],
    progress: Progress = lambda line: None,
    given_up: AbstractSet[int] = frozenset(),
    asked: Options = BY_DEFAULT,
) -> Built:
    """Searches for the fastest plan that fits, and builds its program. On GPUs the program is compiled, and the compiled one
    fits, unless the user's `verify=` says "never". On simulated devices the compiler is asked as by `autoshard.search`.

    Raises:
      InfeasibleError: nothing fits; the message tells how it could.

    Warns:
      AutoshardWarning: an earlier plan's program exceeded the cap as compiled.
    """
    processes = Processes.of(devices)

    def find(options: SearchOptions, progress: Progress, verify: str | None) -> SearchResult:
        judged = replace(asked, verify=verify)
        return processes.found_by_the_first(
            lambda: compiled_peaks.one_program(step, cluster, options, judged, progress),
            lambda data, place: planning.applied(step, Plan.from_json(data, place), place),
        )

    if not _are_gpus(devices) or asked.verify == NEVER:
        found = find(options, progress, asked.verify)
        return Built(found, built(found, cluster, devices, on_retrace, given_up))
    programs: list[tuple[SearchResult, Program]] = []

    def judged(found: SearchResult, _: float | None) -> Judgement:
        progress("compiling")
        program, proof = _compiled(found, cluster, devices, on_retrace, given_up)
        programs.append((found, program))
        return Judgement.of(proof)

    share = TimeShare(options)

    def search(limit_bytes: int, limit_s: float | None, report: Progress) -> SearchResult:
        return find(share.options(limit_bytes, limit_s), report, NEVER)

    found = compiled_peaks.kept(
        search, judged, options.memory_bytes, progress, time_limit_s=options.time_limit_s
    )
    return Built(found, next(program for judged, program in programs if judged.chosen is found.chosen))


def run_per_stage(
    found: Pipeline,
    hardware: AnyCluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
    given_up: AbstractSet[int] = frozenset(),
) -> PipelineProgram:
    """A pipeline's executable, with a program per stage.

    Args:
      devices: in the cluster's order: real or simulated.
      on_retrace: as for `executors.pipeline.build`.
      given_up: as for `executors.pipeline.build`.
    """
    devices, options = _as_stages_stand(found.plan, hardware, devices), _stage_options(found, devices)
    return pipeline.build(
        found.programs, found.schedule, found.shardings, devices, on_retrace, options, given_up
    )


def emitted_per_stage(found: Pipeline, hardware: AnyCluster, devices: Sequence[Any]) -> tuple[Program, ...]:
    """The programs that `run_per_stage` runs, each once for every worker that runs it; devices may be compile-only."""
    devices, options = _as_stages_stand(found.plan, hardware, devices), _stage_options(found, devices)
    agenda = pipeline.followed(found.programs, found.schedule, found.shardings, devices, options)
    return tuple(run.program for run in agenda.runs)


def run_for_all(
    found: SpmdPipeline,
    hardware: AnyCluster,
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
    given_up: AbstractSet[int] = frozenset(),
) -> Program:
    """A pipeline's one program for all stages; the arguments are those of `run_per_stage`."""
    options = _options(found.plan, hardware.groups[0], devices, {})
    return spmd.build(found.program, found.sharding, devices, on_retrace, options, given_up)


def emitted_for_all(found: SpmdPipeline, hardware: AnyCluster, devices: Sequence[Any]) -> Program:
    """The program that `run_for_all` runs; devices may be compile-only."""
    return run_for_all(found, hardware, devices)


def _as_stages_stand(plan: Plan, cluster: AnyCluster, devices: Sequence[Any]) -> Sequence[Any]:
    """The devices of a cluster, in the order of the pipeline's stages."""
    return cluster.in_order(devices, plan.groups) if isinstance(cluster, MixedCluster) else devices


def _stage_options(found: Pipeline, devices: Sequence[Any]) -> CompilerOptions:
    """The compiler's options for a stage's programs; other arrays on the stage's devices reduce their memory cap."""

    def compiler_options(stage: int, beside_bytes: int, resting_bytes: int) -> dict[str, str]:
        if not _are_gpus(devices):
            return {}
        here = found.devices[stage]
        device, cap_bytes = here.group.device, here.cap_bytes - beside_bytes
        for_cap = options_for_cap(cap_bytes, resting_bytes, device.memory_bytes)
        return for_cap | scheduler_options(device.name)

    return compiler_options


@contextlib.contextmanager
def room_for(plan: Plan) -> Generator[None]:
    """A context that turns XLA's out-of-memory errors into a message with a remedy.

    Raises:
      InfeasibleError: a device ran out of memory.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as e:
        if OUT_OF_MEMORY not in str(e):
            raise
        report = f"{plan.step} ran out of device memory at its first step ({first_line(e)})"
        raise InfeasibleError(
            f"{report}. Its plan needs {format_bytes(plan.estimates.peak_bytes)} a device by prediction, under a cap of "
            f"{format_bytes(plan.memory_bytes)}: something else holds memory there, or JAX was given less "
            "(XLA_PYTHON_CLIENT_MEM_FRACTION). Free it, or pass a lower memory=",
            section="out-of-memory-at-the-first-step",
        ) from e


def _are_gpus(devices: Sequence[Any]) -> bool:
    return bool(devices) and devices[0].platform in ("gpu", "cuda", "rocm")
