"""Where values of a pipeline that is one program are while nothing runs: over the axes of stages, replicas and a replica's
devices.
"""

from search.ir.spec import WHOLE, Spec, divides
from search.plan.spmd_step import SpmdSharding, SpmdStep


def num_microbatches(program: SpmdStep, sharding: SpmdSharding) -> int:
    """Of each replica."""
    return program.num_parts // sharding.num_replicas


def is_shared_out(program: SpmdStep, sharding: SpmdSharding) -> bool:
    """Whether stages split microbatches between loops over layers."""
    return num_microbatches(program, sharding) % program.num_workers == 0


def mesh_shape(program: SpmdStep, sharding: SpmdSharding) -> tuple[int, ...]:
    """Of all axes."""
    return (program.num_workers, sharding.num_replicas, *sharding.mesh_shape)


def resting_spec(program: SpmdStep, sharding: SpmdSharding, v: int) -> Spec:
    """How a value lies between steps. A stack over layers is split by layers, if those of a stage are neighbours, else along
    a dim from which they get to their stages at once; examples are split over replicas where they divide."""
    shape, spec = program.values[v].shape, sharding.spec(v)
    along: list[Spec] = []
    if v in program.layered:
        first = 0 if program.stages_per_worker == 1 else 1
        along = [(d, WHOLE, *spec) for d in range(first, len(shape))]
    elif v in program.batch and shape[0] % (program.num_parts * sharding.num_replicas) == 0:
        whole = (WHOLE,) * len(spec)
        along = [(WHOLE, 0, *spec), (WHOLE, 0, *whole)]
    found = (s for s in along if divides(s, shape, mesh_shape(program, sharding)))
    return next(found, (WHOLE, WHOLE, *spec))
