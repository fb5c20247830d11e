"""The layouts of values between steps, in a pipeline that is one program: over the axes of stages, of replicas, and of
a replica's devices."""

from dataclasses import dataclass

from autoshard.search.ir.spec import WHOLE, Spec, divides
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep


@dataclass(frozen=True, eq=False)
class SpmdResting:
    """A program on its devices.

    Attributes:
      program: the program of all stages.
      sharding: the specs of its values on a replica's devices.
    """

    program: SpmdStep
    sharding: SpmdSharding

    @property
    def num_microbatches(self) -> int:
        """Number of microbatches of each replica."""
        return self.program.num_parts // self.sharding.num_replicas

    @property
    def is_shared_out(self) -> bool:
        """True if stages split microbatches between loops over layers."""
        return self.num_microbatches % self.program.num_workers == 0

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of all axes."""
        return (self.program.num_workers, self.sharding.num_replicas, *self.sharding.mesh_shape)

    def resting_spec(self, v: int) -> Spec:
        """The spec of a value between steps.

        A stack over layers is split by layers, if a stage's layers are neighbours. Otherwise it is split along a dim from
        which its parts reach their stages in one transfer. Examples are split over replicas if they divide evenly.
        """
        program, shape, spec = self.program, self.program.values[v].shape, self.sharding.spec(v)
        along: list[Spec] = []
        if v in program.layered:
            along = [(d, WHOLE, *spec) for d in self._dims_for_stages(v)]
        elif v in program.batch and shape[0] % (program.num_parts * self.sharding.num_replicas) == 0:
            whole = (WHOLE,) * len(spec)
            along = [(WHOLE, 0, *spec), (WHOLE, 0, *whole)]
        found = (s for s in along if divides(s, shape, self.mesh_shape))
        return next(found, (WHOLE, WHOLE, *spec))

    def _dims_for_stages(self, v: int) -> list[int]:
        """The dims along which stages may split a stack over layers, the best first.

        If stages have several rounds, the best dims are those that no array of this shape splits among a replica's devices.
        An array that is split twice is transferred twice, and moments have their parameter's layout.
        """
        values, shape = self.program.values, self.program.values[v].shape
        if self.program.stages_per_worker == 1:
            return [*range(len(shape))]
        taken = {d for u in self.program.layered if values[u].shape == shape for d in self.sharding.spec(u)}
        return sorted(range(1, len(shape)), key=lambda d: (d in taken, d))
