"""How values lie on the mesh of a pipeline that is one program: along its stages, their replicas, and the devices of these.

Along the first two axes every message is said; along the others the partitioner finds them, from constraints.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from cost_model.errors import InputError
from search.ir.spec import WHOLE, Spec, divides, partition_spec
from search.plan.spmd_step import SpmdSharding, SpmdStep

STAGE, REPLICA = "stage", "replica"
"""The first axes: of stages, and of the replicas of each, which take other examples."""

EVERY = PartitionSpec((REPLICA, STAGE))
"""Parts of the batch, split over all replicas: those of one replica of each stage are neighbours."""


@dataclass(frozen=True, eq=False)
class Layout:
    """How values lie.

    Attributes:
      program: the step.
      sharding: how a replica's devices have its values.
      mesh: of all devices.
    """

    program: SpmdStep
    sharding: SpmdSharding
    mesh: Mesh | AbstractMesh

    @classmethod
    def on(cls, program: SpmdStep, sharding: SpmdSharding, devices: Sequence[Any] | int) -> "Layout":
        """On these devices, or on so many.

        Raises:
          InputError: they cannot be dealt to the stages, or the batch to them.
        """
        num, stages = devices if isinstance(devices, int) else len(devices), program.num_workers
        size = prod(sharding.mesh_shape)
        replicas, rest = divmod(num, stages * size)
        if rest or not replicas or program.num_parts % replicas:
            raise InputError(
                f"{num} devices cannot be dealt to {stages} stages with replicas of {size} that go through the batch in "
                f"{program.num_parts} parts, as many to each. Use a multiple of {stages * size} whose quotient divides these"
            )
        shape, names = (stages, replicas, *sharding.mesh_shape), (STAGE, REPLICA, *sharding.axis_names)
        if isinstance(devices, int):
            return cls(
                program, sharding, AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
            )
        return cls(program, sharding, Mesh(np.array(devices).reshape(shape), names))

    @property
    def num_microbatches(self) -> int:
        """Of each replica."""
        return self.program.num_parts // self.mesh.shape[REPLICA]

    @property
    def is_shared_out(self) -> bool:
        """Whether stages split microbatches between loops over layers."""
        return self.num_microbatches % self.mesh.shape[STAGE] == 0

    @property
    def parts(self) -> PartitionSpec:
        """How parts of the batch lie between loops over layers."""
        return EVERY if self.is_shared_out else PartitionSpec(REPLICA)

    # --- outside of the loops over microbatches

    def resting(self, v: int) -> NamedSharding:
        """How a value lies in between steps."""
        return self._named(self._resting(v))

    def by_round(self, x: Any, v: int) -> Any:
        """A stack over layers as [rounds, layers of a round], at its stages."""
        rounds, shape = self.program.stages_per_worker, self.program.values[v].shape
        there = self._named((1, WHOLE, *_behind(self.sharding.spec(v))))
        return jax.lax.with_sharding_constraint(
            jnp.reshape(x, (rounds, shape[0] // rounds, *shape[1:])), there
        )

    def put_together(self, rounds: Any, v: int) -> Any:
        """The stack again, as it rests."""
        apart = self._named(_behind(self._resting(v)))
        return jnp.reshape(jax.lax.with_sharding_constraint(rounds, apart), self.program.values[v].shape)

    def _named(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec, self.mesh.axis_names))

    def _resting(self, v: int) -> Spec:
        """Over all axes. A stack over layers is split by layers, if those of a stage are neighbours, else along a dim from
        which they get to their stages at once; examples are split over replicas where they divide."""
        shape, spec = self.program.values[v].shape, self.sharding.spec(v)
        along: list[Spec] = []
        if v in self.program.layered:
            first = 0 if self.program.stages_per_worker == 1 else 1
            along = [(d, WHOLE, *spec) for d in range(first, len(shape))]
        elif v in self.program.batch and self._is_dealt_evenly(shape[0]):
            whole = (WHOLE,) * len(spec)
            along = [(WHOLE, 0, *spec), (WHOLE, 0, *whole)]
        found = (s for s in along if divides(s, shape, tuple(self.mesh.shape.values())))
        return next(found, (WHOLE, WHOLE, *spec))

    def _is_dealt_evenly(self, num_examples: int) -> bool:
        return num_examples % (self.program.num_parts * self.mesh.shape[REPLICA]) == 0

    # --- within them

    @property
    def own_mesh(self) -> AbstractMesh:
        """The mesh, as what one replica of a stage runs sees it."""
        mesh = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
        return mesh.update_axis_types({STAGE: AxisType.Manual, REPLICA: AxisType.Manual})

    def held(self, x: Any, v: int, ahead: int = 1) -> Any:
        """A value as its devices hold it, with dims ahead of its own: of microbatches, of rounds."""
        return self.imposed(x, tuple(d if d == WHOLE else d + ahead for d in self.sharding.spec(v)))

    def imposed(self, x: Any, spec: Spec) -> Any:
        """An array with a spec over the axes of a replica's devices."""
        if max(spec, default=WHOLE) == WHOLE:
            return x
        there = partition_spec(spec, self.sharding.axis_names)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.own_mesh, there))


def _behind(spec: Spec) -> Spec:
    """The same with one more dim ahead."""
    return tuple(d if d == WHOLE else d + 1 for d in spec)
