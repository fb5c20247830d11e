"""The collectives of a stage's devices in a step: inside its replicas, from the kernels of its programs, and between
replicas.

The collectives of tasks run once per microbatch of a replica. Replicas exchange nothing until all tasks are done. Then
sums are reduced; those that are split over replicas are reduce-scattered. Values that are split over replicas and that
tasks read whole are gathered: parameters that the prologue casts or cuts into layers, and results of the update.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet

from autoshard.cost_model.collectives import MeshModel
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.pipeline.stage_sharding import MIN_BYTES, REPLICA
from autoshard.search.pipeline.task_memory import ProgramKernels
from autoshard.search.plan.plan import Collective
from autoshard.search.problem.costs import COMBINED_BYTES

Entry = tuple[str, tuple[str, ...], float, float, float]
"""Kind, mesh axes, number, bytes of a device, and seconds."""


def stage_collectives(
    stage: int, kernels: ProgramKernels, memory: StageMemory, mesh: MeshModel
) -> tuple[Collective, ...]:
    """All collectives of a stage in one step, by kind and axes.

    Args:
      stage: the stage.
      kernels: the kernels of a replica's device, by program.
      memory: the memory of the stages, which knows the specs of values.
      mesh: the mesh of the stage: replicas, and the devices of each.
    """
    total: dict[tuple[str, tuple[str, ...]], tuple[float, float, float]] = {}
    for kind, axes, count, num_bytes, seconds in (
        *_inside(stage, kernels),
        *_between(stage, kernels.step.learned, memory, mesh),
    ):
        before = total.get((kind, axes), (0.0, 0.0, 0.0))
        total[kind, axes] = before[0] + count, before[1] + num_bytes, before[2] + seconds
    return tuple(
        Collective(kind, axes, round(count), round(num_bytes), seconds)
        for (kind, axes), (count, num_bytes, seconds) in sorted(total.items())
    )


def _inside(stage: int, kernels: ProgramKernels) -> Iterator[Entry]:
    """The collectives between a replica's devices."""
    names = AXIS_NAMES[len(kernels.intra_op.mesh_shape)]
    programs = [program for program in kernels.programs.programs if program.stage == stage]
    for program in programs:
        for kind, axes, count, num_bytes, seconds in kernels.collectives(program):
            yield kind, tuple(names[a] for a in axes), count, num_bytes, seconds


def _between(stage: int, learned: AbstractSet[int], memory: StageMemory, mesh: MeshModel) -> Iterator[Entry]:
    """The collectives between replicas."""
    programs = memory.programs
    if programs.num_replicas == 1:
        return
    sums = [v for v in sorted(programs.sums) if programs.stage_of[v] == stage]
    prepared = [v for p in programs.prologue if p.stage == stage for v in p.makes if v in learned]
    updated = [v for p in programs.epilogue if p.stage == stage for v in p.makes]
    whole = [v for v in dict.fromkeys((*prepared, *updated)) if programs.values[v].num_bytes >= MIN_BYTES]
    kinds: Sequence[tuple[str, list[int], bool]] = (
        ("reduce-scatter", [v for v in sums if not memory.is_whole(v, stage)], True),
        ("all-reduce", [v for v in sums if memory.is_whole(v, stage)], True),
        ("all-gather", [v for v in whole if memory.is_whole(v, stage)], False),
    )
    for kind, values, is_own in kinds:
        num_bytes = sum(memory.bytes_of(v, stage, is_own) for v in values)
        if num_bytes:
            seconds = float(mesh.time_s(kind, (0,), num_bytes, COMBINED_BYTES))
            yield kind, (REPLICA,), len(values), num_bytes, seconds
