"""Layouts of values on the mesh of a pipeline that is one program: over stages, their replicas, and the devices of a
replica.

Along the first two axes messages are explicit; along the others the partitioner derives them from constraints.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.executors.jit import mesh_of
from autoshard.search.ir.spec import WHOLE, Spec, partition_spec
from autoshard.search.plan.spmd_resting import SpmdResting
from autoshard.search.plan.spmd_step import SpmdSharding, SpmdStep
from autoshard.search.plan.values import REPLICA, STAGE

EVERY = PartitionSpec((REPLICA, STAGE))
"""Parts of the batch, split over all replicas: the parts of the r-th replicas of all stages are neighbours."""


@dataclass(frozen=True, eq=False)
class SpmdLayout(SpmdResting):
    """The layout of values.

    Attributes:
      mesh: all devices.
    """

    mesh: Mesh | AbstractMesh

    @classmethod
    def on(cls, program: SpmdStep, sharding: SpmdSharding, devices: Sequence[Any] | None) -> "SpmdLayout":
        """The layout on the first of these devices; on an abstract mesh without devices.

        Raises:
          InputError: there are fewer devices than the mesh has.
        """
        shape, names = SpmdResting(program, sharding).mesh_shape, (STAGE, REPLICA, *sharding.axis_names)
        return cls(program, sharding, mesh_of(shape, names, devices))

    @property
    def parts(self) -> PartitionSpec:
        """The spec of parts of the batch between loops over layers."""
        return EVERY if self.is_shared_out else PartitionSpec(REPLICA)

    # --- outside of the loops over microbatches

    def resting(self, v: int) -> NamedSharding:
        """The sharding of a value between steps."""
        return self._named(self.resting_spec(v))

    def by_round(self, x: Any, v: int) -> Any:
        """A stack over layers as [rounds, layers of a round]: first with each layer at its stage, and then in the spec in
        which loops read it. (Given both at once, the compiler gathers the stack from all stages.)"""
        rounds, shape = self.program.stages_per_worker, self.program.values[v].shape
        apart = jnp.reshape(x, (rounds, shape[0] // rounds, *shape[1:]))
        for spec in (self.sharding.spec(v), self.sharding.entry_spec(v)):
            apart = jax.lax.with_sharding_constraint(apart, self._named((1, WHOLE, *_behind(spec))))
        return apart

    def put_together(self, rounds: Any, v: int) -> Any:
        """The stack over layers from its rounds, in its resting sharding."""
        apart = self._named(_behind(self.resting_spec(v)))
        return jnp.reshape(jax.lax.with_sharding_constraint(rounds, apart), self.program.values[v].shape)

    def _named(self, spec: Spec) -> NamedSharding:
        return NamedSharding(self.mesh, partition_spec(spec, self.mesh.axis_names))

    # --- within them

    @property
    def own_mesh(self) -> AbstractMesh:
        """The mesh inside the function of one replica of a stage: the axes of stages and replicas are manual."""
        mesh = self.mesh if isinstance(self.mesh, AbstractMesh) else self.mesh.abstract_mesh
        return mesh.update_axis_types({STAGE: AxisType.Manual, REPLICA: AxisType.Manual})

    def zeros(self, v: int, shape: tuple[int, ...], ahead: int = 1) -> Any:
        """Zeros for a value with `ahead` more dimensions in front, in the value's layout and memory."""
        value = self.program.values[v]
        zeros = jnp.zeros(shape, value.dtype)
        return self.held(
            jax.device_put(zeros, jax.memory.Space.Host) if value.is_on_host else zeros, v, ahead
        )

    def held(self, x: Any, v: int, ahead: int = 1) -> Any:
        """A value with `ahead` more dimensions in front (microbatches, rounds), in its spec over a replica's devices. A
        value on the host is left alone: a constraint would take it to the device."""
        if self.program.values[v].is_on_host:
            return x
        return self.constrained(x, _behind(self.sharding.spec(v), ahead))

    def entered(self, x: Any, v: int, ahead: int = 1) -> Any:
        """A value that all microbatches share, with `ahead` more dimensions in front, in the spec in which parts read it."""
        return self.constrained(x, _behind(self.sharding.entry_spec(v), ahead))

    def constrained(self, x: Any, spec: Spec) -> Any:
        """An array with a spec over the axes of a replica's devices."""
        if prod(self.sharding.mesh_shape) == 1:
            return x
        there = partition_spec(spec, self.sharding.axis_names)
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.own_mesh, there))


def _behind(spec: Spec, ahead: int = 1) -> Spec:
    """A spec with `ahead` more dimensions in front."""
    return tuple(d if d == WHOLE else d + ahead for d in spec)
