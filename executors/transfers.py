"""Transfers of values between submeshes, within a process or between processes.

Within a process, `jax.device_put` takes a value to any sharding. Each step makes the same transfers, so their kind is
found once. A value that keeps its split and goes to other devices is copied shard by shard, without `device_put`. A value
that stays on its submesh is copied by a program: `device_put` would return the same buffer where it can, and either array
may be donated.

Between processes, `jax.device_put` takes each shard to one device: source and target must have the same split, over as
many devices. Otherwise the source first lays the value out on groups of devices whose size divides both numbers of
devices. Each group of the target gets the value, and the target then lays it out in its own sharding.

All processes make the same calls in the same order. A process without devices in a submesh holds an array without shards.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.search.ir._jax import copied, is_extended

DEVICES = "devices"
"""The axis of a mesh that is only a row of devices."""


@dataclass(frozen=True, eq=False)
class RepeatedTransfer:
    """The transfer of values to their target shardings, repeated in each step.

    Attributes:
      sources: the shapes, dtypes and shardings of the values.
      targets: the shardings of the values after the transfer.
    """

    sources: Sequence[jax.ShapeDtypeStruct]
    targets: Sequence[NamedSharding]

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The values in their target shardings."""
        if len(self._parts) == 1:
            return self._parts[0][1](values)
        there: dict[int, Any] = {}
        for numbers, bring in self._parts:
            there.update(zip(numbers, bring([values[n] for n in numbers]), strict=True))
        return [there[n] for n in range(len(values))]

    @cached_property
    def _parts(self) -> tuple[tuple[list[int], Callable[[Sequence[Any]], Sequence[Any]]], ...]:
        """Groups of values by their numbers, each with the function that transfers the group."""
        alike: dict[Any, list[int]] = {}
        for n, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            kind = target.mesh if source.sharding.mesh == target.mesh else _is_copy(source, target)
            alike.setdefault(kind, []).append(n)
        return tuple(
            (numbers, _bringing(kind, [self.targets[n] for n in numbers])) for kind, numbers in alike.items()
        )


def _bringing(kind: Any, targets: Sequence[NamedSharding]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A function that transfers values to shardings: by a program on their submesh, shard by shard, or by `sent`."""
    if isinstance(kind, bool):
        return lambda values: copied(values, targets) if kind else sent(targets, *values)
    laid_out = jax.jit(_all_same, out_shardings=list(targets))
    return lambda values: laid_out(*values)


def sent(shardings: Sequence[NamedSharding], *values: Any) -> list[Any]:
    """Transfers values to other shardings."""
    ways = list(zip(values, shardings, strict=True))
    direct = [(x, s) for x, s in ways if _is_direct(x.sharding, s)]
    there = iter(jax.device_put([x for x, _ in direct], [s for _, s in direct]))
    return [next(there) if _is_direct(x.sharding, s) else _by_groups(x, s) for x, s in ways]


def is_sent(x: Any, target: NamedSharding) -> bool:
    """Whether the transfer of an argument involves several processes."""
    lies = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return isinstance(lies, NamedSharding) and are_of_several_processes((lies.mesh, target.mesh))


def are_of_several_processes(meshes: Sequence[Any]) -> bool:
    """Whether submeshes belong to more than one process; an abstract mesh belongs to none."""
    return len(frozenset[int]().union(*(_processes(mesh) for mesh in meshes if isinstance(mesh, Mesh)))) > 1


def everywhere(*copies: Any) -> list[Any]:
    """Joins the copies of a value, one per submesh, into one array that is whole on all devices."""
    there = on_all([x.sharding.mesh for x in copies])
    return [_of_shards(copies[0], there, [shard.data for x in copies for shard in x.addressable_shards])]


def on_all(meshes: Sequence[Any]) -> NamedSharding:
    """The sharding of a value that is whole on all devices of several submeshes."""
    return NamedSharding(_row([d for mesh in meshes for d in mesh.devices.flat]), PartitionSpec())


def spread(shape: tuple[int, ...], sharding: NamedSharding, devices: Sequence[Any]) -> NamedSharding:
    """The sharding of a process's value on the devices of several: split, if a dimension divides evenly, else whole.
    Other values keep their sharding."""
    mesh = _row(devices)
    if len(_processes(sharding.mesh)) > 1 or len(_processes(mesh)) == 1:
        return sharding
    dim = next((d for d, size in enumerate(shape) if size and size % mesh.size == 0), None)
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, DEVICES) if dim is not None else PartitionSpec())


def _is_copy(value: jax.ShapeDtypeStruct, target: NamedSharding) -> bool:
    """Whether a transfer stays in this process and keeps the split. The runtime has no arrays of extended dtypes (random
    keys)."""
    source = value.sharding
    here = source.is_fully_addressable and target.is_fully_addressable and not is_extended(value.dtype)
    return here and _shape(source) == _shape(target) and source.spec == target.spec


def _is_direct(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether `jax.device_put` can make the transfer."""
    if source.is_fully_addressable and target.is_fully_addressable:
        return True
    is_alike = _shape(source) == _shape(target) and source.spec == target.spec
    return is_alike and _processes(source.mesh) != _processes(target.mesh)


def _by_groups(x: Any, target: NamedSharding) -> Any:
    """Transfers a value between processes to a submesh of another size, or to another split."""
    source = x.sharding
    if _processes(source.mesh) == _processes(target.mesh):  # other processes make the transfer
        return _of_shards(x, target, [])
    size = gcd(source.mesh.size, target.mesh.size)
    like = next(
        (s for s in (target, source) if s.mesh.size == size),
        NamedSharding(_row(_devices(source)[:size]), PartitionSpec()),
    )
    ready, first = _laid_out(x, _in_groups(like, source)), _group(like, source, 0)
    own = set(_devices(first))
    part = _of_shards(x, first, [s.data for s in ready.addressable_shards if s.device in own])
    parts = [sent([_group(like, target, g)], part)[0] for g in range(target.mesh.size // size)]
    arrived = [shard.data for one in parts for shard in one.addressable_shards]
    return _laid_out(_of_shards(x, _in_groups(like, target), arrived), target)


def _group(like: NamedSharding, there: NamedSharding, g: int) -> NamedSharding:
    """The sharding `like` on the g-th group of the devices of `there`; a group has as many devices as `like`."""
    devices = _devices(there)[g * like.mesh.size :][: like.mesh.size]
    return NamedSharding(Mesh(devices.reshape(_shape(like)), like.mesh.axis_names), like.spec)


def _in_groups(like: NamedSharding, there: NamedSharding) -> NamedSharding:
    """The sharding `like` on every group of the devices of `there`; a group has as many devices as `like`."""
    devices = _devices(there).reshape(-1, *_shape(like))
    return NamedSharding(Mesh(devices, ("groups", *like.mesh.axis_names)), like.spec)


def _laid_out(x: Any, sharding: NamedSharding) -> Any:
    """A value in another sharding over its own devices."""
    return x if x.sharding == sharding else jax.jit(_same, out_shardings=sharding)(x)


def _same(x: Any) -> Any:
    return x


def _all_same(*values: Any) -> list[Any]:
    return list(values)


def _of_shards(like: Any, sharding: NamedSharding, shards: list[Any]) -> Any:
    return jax.make_array_from_single_device_arrays(like.shape, sharding, shards, dtype=like.dtype)


def _row(devices: Any) -> Mesh:
    return Mesh(np.array(devices), (DEVICES,))


def _devices(sharding: Any) -> np.ndarray:
    return sharding.mesh.devices.reshape(-1)


def _shape(sharding: Any) -> tuple[int, ...]:
    return sharding.mesh.devices.shape


def _processes(mesh: Any) -> frozenset[int]:
    return frozenset(d.process_index for d in mesh.devices.flat)
