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

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import format_mesh
from autoshard.search.ir.spec import WHOLE, Spec, partition_spec
from autoshard.search.plan.spmd_resting import is_shared_out, num_microbatches, resting_spec
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep

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
        """On the first of these devices, or on so many.

        Raises:
          InputError: they are too few.
        """
        shape = (program.num_workers, sharding.num_replicas, *sharding.mesh_shape)
        names, wanted = (STAGE, REPLICA, *sharding.axis_names), prod(shape)
        if (num := devices if isinstance(devices, int) else len(devices)) < wanted:
            raise InputError(
                f"the plan's mesh {format_mesh(shape)} needs {wanted} devices, and there are {num}. Plan again for "
                "the devices at hand, or run on more"
            )
        if isinstance(devices, int):
            mesh = AbstractMesh(shape, names, axis_types=(AxisType.Auto,) * len(names))
        else:
            mesh = Mesh(np.array(devices[:wanted]).reshape(shape), names)
        return cls(program, sharding, mesh)

    @property
    def num_microbatches(self) -> int:
        """Of each replica."""
        return num_microbatches(self.program, self.sharding)

    @property
    def is_shared_out(self) -> bool:
        """Whether stages split microbatches between loops over layers."""
        return is_shared_out(self.program, self.sharding)

    @property
    def parts(self) -> PartitionSpec:
        """How parts of the batch lie between loops over layers."""
        return EVERY if self.is_shared_out else PartitionSpec(REPLICA)

    # --- outside of the loops over microbatches

    def resting(self, v: int) -> NamedSharding:
        """How a value lies in between steps."""
        return self._named(resting_spec(self.program, self.sharding, v))

    def by_round(self, x: Any, v: int) -> Any:
        """A stack over layers as [rounds, layers of a round], at its stages: there first, and then as loops read it. (Asked
        for both at once, the compiler gathers the stack from all stages.)"""
        rounds, shape = self.program.stages_per_worker, self.program.values[v].shape
        apart = jnp.reshape(x, (rounds, shape[0] // rounds, *shape[1:]))
        for spec in (self.sharding.spec(v), self.sharding.entry_spec(v)):
            apart = jax.lax.with_sharding_constraint(apart, self._named((1, WHOLE, *_behind(spec))))
        return apart

    def put_together(self, rounds: Any, v: int) -> Any:
        """The stack again, as it rests."""
        apart = self._named(_behind(resting_spec(self.program, self.sharding, v)))
        return jnp.reshape(jax.lax.with_sharding_constraint(rounds, apart), self.program.values[v].shape)

    def _named(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec, self.mesh.axis_names))

    # --- within them

    @property
    def own_mesh(self) -> AbstractMesh:
        """The mesh, as what one replica of a stage runs sees it."""
        mesh = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
        return mesh.update_axis_types({STAGE: AxisType.Manual, REPLICA: AxisType.Manual})

    def zeros(self, v: int, shape: tuple[int, ...], ahead: int = 1) -> Any:
        """What is to become a value with dims ahead of its own, where its devices hold it."""
        value = self.program.values[v]
        zeros = jnp.zeros(shape, value.dtype)
        return self.held(
            jax.device_put(zeros, jax.memory.Space.Host) if value.is_on_host else zeros, v, ahead
        )

    def held(self, x: Any, v: int, ahead: int = 1) -> Any:
        """A value as its devices hold it, with dims ahead of its own: of microbatches, of rounds. One on the host is left
        alone: a constraint would take it to the device."""
        if self.program.values[v].is_on_host:
            return x
        return self.imposed(x, _behind(self.sharding.spec(v), ahead))

    def entered(self, x: Any, v: int, ahead: int = 1) -> Any:
        """A value that is the same for all microbatches, likewise."""
        return self.imposed(x, _behind(self.sharding.entry_spec(v), ahead))

    def imposed(self, x: Any, spec: Spec) -> Any:
        """An array with a spec over the axes of a replica's devices."""
        if prod(self.sharding.mesh_shape) == 1:
            return x
        there = partition_spec(spec, self.sharding.axis_names)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.own_mesh, there))


def _behind(spec: Spec, ahead: int = 1) -> Spec:
    """The same with more dims ahead."""
    return tuple(d if d == WHOLE else d + ahead for d in spec)
