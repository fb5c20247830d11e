"""The collectives of a stage's devices in a step: inside its replicas, from the kernels of its programs, and between
replicas.

The collectives of tasks run once per microbatch of a replica. Replicas exchange nothing until all tasks are done. Then
sums are reduced; those that are split over replicas are reduce-scattered. Values that are split over replicas and that
tasks read whole are gathered: parameters that the prologue casts or cuts into layers, and results of the update.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from autoshard.cost_model.collectives import MeshModel
from autoshard.search.pipeline.stage_memory import StageMemory
from autoshard.search.pipeline.stage_sharding import MIN_BYTES, REPLICA
from autoshard.search.pipeline.task_memory import ProgramKernels
from autoshard.search.plan.collective_totals import EqualCollectives, added_up
from autoshard.search.plan.values import Collective
from autoshard.search.problem.costs import COMBINED_BYTES


def stage_collectives(
    stage: int, kernels: ProgramKernels, memory: StageMemory, mesh: MeshModel
) -> tuple[Collective, ...]:
    """All collectives of a stage in one step, by kind and axes."""
    programs = [program for program in kernels.programs.programs if program.stage == stage]
    inside = chain.from_iterable(map(kernels.collectives, programs))
    return added_up((*inside, *_between(stage, kernels.step.learned, memory, mesh)))


def _between(
    stage: int, learned: AbstractSet[int], memory: StageMemory, mesh: MeshModel
) -> Iterator[EqualCollectives]:
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
            yield EqualCollectives(kind, (REPLICA,), len(values), num_bytes, seconds)
