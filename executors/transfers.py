"""Values on their way from one submesh to another, of the same process or of others.

Inside of one process, `jax.device_put` takes a value wherever it is to go. What it is to do is the same in each step, so it
is found out once: values that only go to other devices, split as they are, are copied shard by shard without it. A value
that stays on its submesh is copied by a program: `device_put` hands out the same buffer again where it can, and either
may be donated.

Between processes `jax.device_put` takes each shard to the one device that is to have it: source and target must be split
alike, over as many devices. Where they are not, the value is laid out for the way first, on as many devices as divide both
numbers; each of the target's groups of so many devices gets it, and the target lays it out as it wants it.

All processes make the same calls in the same order; one that has no device of a submesh holds an array without shards.
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
"""The axis of a mesh that is no more than a row of devices."""


@dataclass(frozen=True, eq=False)
class Way:
    """What takes values to where they shall lie, in each step anew.

    Attributes:
      sources: the values' shapes, types and shardings.
      targets: the shardings that they are to have.
    """

    sources: Sequence[jax.ShapeDtypeStruct]
    targets: Sequence[NamedSharding]

    def __call__(self, *values: Any) -> Sequence[Any]:
        """The values there."""
        if len(self._parts) == 1:
            return self._parts[0][1](values)
        there: dict[int, Any] = {}
        for numbers, bring in self._parts:
            there.update(zip(numbers, bring([values[n] for n in numbers]), strict=True))
        return [there[n] for n in range(len(values))]

    @cached_property
    def _parts(self) -> tuple[tuple[list[int], Callable[[Sequence[Any]], Sequence[Any]]], ...]:
        """The values by their numbers, and what brings these there."""
        alike: dict[Any, list[int]] = {}
        for n, (source, target) in enumerate(zip(self.sources, self.targets, strict=True)):
            kind = target.mesh if source.sharding.mesh == target.mesh else _is_copy(source, target)
            alike.setdefault(kind, []).append(n)
        return tuple(
            (numbers, _bringing(kind, [self.targets[n] for n in numbers])) for kind, numbers in alike.items()
        )


def _bringing(kind: Any, targets: Sequence[NamedSharding]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What brings values to shardings: on their submesh, shard by shard, or in any other way."""
    if isinstance(kind, bool):
        return lambda values: copied(values, targets) if kind else sent(targets, *values)
    laid_out = jax.jit(_all_same, out_shardings=list(targets))
    return lambda values: laid_out(*values)


def sent(shardings: Sequence[NamedSharding], *values: Any) -> list[Any]:
    """Values on other shardings."""
    ways = list(zip(values, shardings, strict=True))
    direct = [(x, s) for x, s in ways if _is_direct(x.sharding, s)]
    there = iter(jax.device_put([x for x, _ in direct], [s for _, s in direct]))
    return [next(there) if _is_direct(x.sharding, s) else _by_groups(x, s) for x, s in ways]


def is_sent(x: Any, target: NamedSharding) -> bool:
    """Whether an argument has to go from processes to others."""
    lies = x.sharding if isinstance(x, jax.Array) and x.committed else None
    return isinstance(lies, NamedSharding) and are_of_several_processes((lies.mesh, target.mesh))


def are_of_several_processes(meshes: Sequence[Any]) -> bool:
    """Whether submeshes belong to more than one process; abstract ones have none."""
    return len(frozenset[int]().union(*(_processes(mesh) for mesh in meshes if isinstance(mesh, Mesh)))) > 1


def everywhere(*copies: Any) -> list[Any]:
    """One value of which several submeshes have a copy each, whole on all of their devices."""
    there = on_all([x.sharding.mesh for x in copies])
    return [_of_shards(copies[0], there, [shard.data for x in copies for shard in x.addressable_shards])]


def on_all(meshes: Sequence[Any]) -> NamedSharding:
    """How a value lies that is whole on all devices of several submeshes."""
    return NamedSharding(_row([d for mesh in meshes for d in mesh.devices.flat]), PartitionSpec())


def spread(shape: tuple[int, ...], sharding: NamedSharding, devices: Sequence[Any]) -> NamedSharding:
    """How a value of one process lies on the devices of several: split, if its shape allows. Others stay as they are."""
    mesh = _row(devices)
    if len(_processes(sharding.mesh)) > 1 or len(_processes(mesh)) == 1:
        return sharding
    dim = next((d for d, size in enumerate(shape) if size and size % mesh.size == 0), None)
    return NamedSharding(mesh, PartitionSpec(*(None,) * dim, DEVICES) if dim is not None else PartitionSpec())


def _is_copy(value: jax.ShapeDtypeStruct, target: NamedSharding) -> bool:
    """Whether all happens in this process, and nothing is split otherwise. Arrays of extended dtypes (random
    keys) are none to the runtime."""
    source = value.sharding
    here = source.is_fully_addressable and target.is_fully_addressable and not is_extended(value.dtype)
    return here and _shape(source) == _shape(target) and source.spec == target.spec


def _is_direct(source: NamedSharding, target: NamedSharding) -> bool:
    """Whether `device_put` knows the way."""
    if source.is_fully_addressable and target.is_fully_addressable:
        return True
    is_alike = _shape(source) == _shape(target) and source.spec == target.spec
    return is_alike and _processes(source.mesh) != _processes(target.mesh)


def _by_groups(x: Any, target: NamedSharding) -> Any:
    """A value on a submesh of another size, or that is split otherwise."""
    source = x.sharding
    if _processes(source.mesh) == _processes(target.mesh):  # all of it happens elsewhere
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
    """A sharding, on the g-th of the groups of as many devices that another one has."""
    devices = _devices(there)[g * like.mesh.size :][: like.mesh.size]
    return NamedSharding(Mesh(devices.reshape(_shape(like)), like.mesh.axis_names), like.spec)


def _in_groups(like: NamedSharding, there: NamedSharding) -> NamedSharding:
    """A sharding, in each of those groups."""
    devices = _devices(there).reshape(-1, *_shape(like))
    return NamedSharding(Mesh(devices, ("groups", *like.mesh.axis_names)), like.spec)


def _laid_out(x: Any, sharding: NamedSharding) -> Any:
    """A value as it is to lie, on the devices where it is."""
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
