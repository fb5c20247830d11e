"""The pipelines that a user's options ask for, or allow."""

from dataclasses import replace
from typing import Any

from autoshard import planning
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.options import AUTO, NEVER, Options
from autoshard.search.ir.graph import Step
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.plan.executors import EXECUTORS, FORMER_NAMES, JIT, MPMD, SPMD


def are_allowed(options: Options) -> bool:
    """True if the user asks for a pipeline, or allows one. Without `stages=`, a mesh, pins, offloading, microbatches and
    options of another plan mean one program.

    Raises:
      InputError: the number of stages or the executor is invalid, or a schedule or an executor is given without stages.
    """
    stages, executor = options.stages, options.executor
    if executor is not None:
        _check_is_executor(executor)
    if executor == JIT:
        if stages not in (None, 1):
            raise InputError(
                f"executor={JIT!r} is one program, without a pipeline, and stages={stages!r} asks for one. Leave out one of "
                f"them, or choose {MPMD!r} or {SPMD!r}"
            )
        return False
    if options.num_stages is not None and options.num_stages < 1:
        raise InputError(f"wanted at least 1 stage, got {stages}")
    if stages not in (None, 1):
        return True
    for name, value in (("schedule", options.schedule), ("executor", executor)):
        if value is not None:
            raise InputError(
                f"{name}={value!r} is of a pipeline, and there is none with stages={stages}. Say how many stages, or "
                f"stages={AUTO!r}"
            )
    of_one = (options.mesh, options.pin, options.offload, options.microbatches)
    return stages is None and not any(
        one is not None for one in (*of_one, options.donate, options.like, options.plan)
    )


def _check_is_executor(name: str) -> None:
    if name in FORMER_NAMES:
        raise InputError(
            f"executor={name!r} is now called {FORMER_NAMES[name]!r}. Write executor={FORMER_NAMES[name]!r}"
        )
    if name not in EXECUTORS:
        known = ", ".join(f"{known!r} ({meaning})" for known, meaning in EXECUTORS.items())
        raise InputError(f"no executor is called {name!r}. Choose one of {known}", section="a-wrong-name")


def across_kinds(cluster: MixedCluster, options: Options) -> Options:
    """The options for several kinds of node, where every plan is a pipeline with a program per stage.

    Raises:
      InputError: the user asks for one program, or for options that only one program has.
    """
    is_pipeline = are_allowed(options)
    if not is_pipeline or options.executor == SPMD:
        only = "executor=" if is_pipeline else "stages=1, like="
        raise InputError(
            f"one program runs on devices of one kind, and {cluster.name} has several: {cluster}. Leave out what only one "
            f"program has ({only}), and say stages={AUTO!r} beside mesh=, pin=, donate=, offload= or microbatches=; or plan "
            "for devices of one kind"
        )
    return replace(options, executor=MPMD)


def refuse(**options: Any) -> None:
    """Refuses options that a pipeline does not have.

    Raises:
      InputError: one of them is not None.
    """
    if given := [name for name, value in options.items() if value is not None]:
        raise InputError(
            f"a pipeline is planned without {', '.join(f'{name}=' for name in given)}. Leave that out, or the pipeline"
        )


def allowed_executor(options: Options) -> str | None:
    """The executor that the options allow; None for the faster one.

    Raises:
      InputError: the user asks for one that the pins or the offloading exclude.
    """
    excluding = [name for name, value in (("pin", options.pin), ("offload", options.offload)) if value]
    if not excluding or (options.offload == NEVER and not options.pin):
        return options.executor
    if options.executor == SPMD:
        raise InputError(
            f"{excluding[0]}= is for stages with a program each, and executor={SPMD!r} is one program for all. Leave out "
            f"one of them, or ask for executor={MPMD!r}"
        )
    return MPMD


def requested(step: Step, cluster: AnyCluster, options: Options) -> PipelineOptions:
    """The options of a search for pipelines, from the user's.

    Raises:
      InputError: an option is out of its range.
    """
    mesh, microbatches = options.mesh, options.microbatches
    if options.remat not in (None, "never"):
        raise InputError(f'wanted remat="never", or nothing to have it searched, got {options.remat!r}')
    if microbatches is not None and microbatches < 1:
        raise InputError(f"wanted at least 1 microbatch, got {microbatches}")
    if mesh is not None and (len(mesh) not in (2, 3) or min(mesh) < 1):
        raise InputError(
            f"wanted the mesh of a stage as its number of replicas and 1 or 2 axes of each one's devices, such as (2, 4), "
            f"got {mesh}"
        )
    memory_bytes = planning.limit_bytes(cluster, options)
    rest = planning.stage_resting(step, options, cluster)
    asked = options.offload
    offload = rest.offload(asked if asked is None or isinstance(asked, str) else tuple(asked))
    return PipelineOptions(
        memory_bytes,
        options.num_stages,
        options.schedule,
        microbatches,
        None if mesh is None else tuple(mesh),
        options.remat,
        pins=rest.specs,
        hosted=planning.stage_hosted(step, cluster, memory_bytes, offload),
        offload=offload,
    )
