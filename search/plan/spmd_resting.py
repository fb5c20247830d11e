"""The layouts of values between steps, in a pipeline that is one program: over the axes of stages, of replicas, and of
a replica's devices."""

from autoshard.search.ir.spec import WHOLE, Spec, divides
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep


def num_microbatches(program: SpmdStep, sharding: SpmdSharding) -> int:
    """Number of microbatches of each replica."""
    return program.num_parts // sharding.num_replicas


def is_shared_out(program: SpmdStep, sharding: SpmdSharding) -> bool:
    """True if stages split microbatches between loops over layers."""
    return num_microbatches(program, sharding) % program.num_workers == 0


def mesh_shape(program: SpmdStep, sharding: SpmdSharding) -> tuple[int, ...]:
    """Sizes of all axes."""
    return (program.num_workers, sharding.num_replicas, *sharding.mesh_shape)


def resting_spec(program: SpmdStep, sharding: SpmdSharding, v: int) -> Spec:
    """The spec of a value between steps.

    A stack over layers is split by layers, if a stage's layers are neighbours. Otherwise it is split along a dim from
    which its parts reach their stages in one transfer. Examples are split over replicas if they divide evenly.
    """
    shape, spec = program.values[v].shape, sharding.spec(v)
    along: list[Spec] = []
    if v in program.layered:
        along = [(d, WHOLE, *spec) for d in _dims_for_stages(program, sharding, v)]
    elif v in program.batch and shape[0] % (program.num_parts * sharding.num_replicas) == 0:
        whole = (WHOLE,) * len(spec)
        along = [(WHOLE, 0, *spec), (WHOLE, 0, *whole)]
    found = (s for s in along if divides(s, shape, mesh_shape(program, sharding)))
    return next(found, (WHOLE, WHOLE, *spec))


def _dims_for_stages(program: SpmdStep, sharding: SpmdSharding, v: int) -> list[int]:
    """The dims along which stages may split a stack over layers, the best first.

    If stages have several rounds, the best dims are those that no array of this shape splits among a replica's devices.
    An array that is split twice is transferred twice, and moments have their parameter's layout.
    """
    shape = program.values[v].shape
    if program.stages_per_worker == 1:
        return [*range(len(shape))]
    alike = (u for u in program.layered if program.values[u].shape == shape)
    taken = {d for u in alike for d in sharding.spec(u)}
    return sorted(range(1, len(shape)), key=lambda d: (d in taken, d))
