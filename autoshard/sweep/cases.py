"""The combinations of a sweep: each cluster, in each size, under each memory cap.

A cap above the memory that a device has for programs is that memory, so that one list of caps suits several kinds of GPU.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.clusters import named
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.planning import given_bytes

_COUNTED = re.compile(r"(?:[1-9][0-9]*x)?([^+]+)", re.IGNORECASE)
"""A preset with or without its count; no mixed cluster."""


@dataclass(frozen=True, slots=True)
class Case:
    """A cluster, and the memory cap of each device.

    Attributes:
      cluster: its name, or the cluster itself.
      memory_bytes: the cap.
    """

    cluster: str | AnyCluster
    memory_bytes: int

    @property
    def name(self) -> str:
        """The cluster's name."""
        return self.cluster if isinstance(self.cluster, str) else self.cluster.name


def cases(
    clusters: Sequence[str | AnyCluster], memory: Sequence[str | int] = (), devices: Sequence[int] = ()
) -> tuple[Case, ...]:
    """The combinations, cluster by cluster; a combination that occurs twice counts once.

    Args:
      clusters: presets, files or clusters; with `devices`, presets of one kind of GPU.
      memory: caps per device; by default, all memory of each device.
      devices: numbers of devices, which replace those of the presets.

    Raises:
      InputError: there is no cluster, a cluster is unknown or cannot be scaled, or a cap makes no sense.

    Example:
      >>> [case.name for case in cases(["8xL4", "H200"], devices=[8, 16])]
      ['8xL4', '16xL4', '8xH200', '16xH200']
    """
    if not clusters:
        raise InputError("wanted at least one cluster, such as '8xH100-80GB', got none")
    known = [(cluster, named(cluster) if isinstance(cluster, str) else cluster) for cluster in clusters]
    return tuple(
        dict.fromkeys(
            Case(sized, cap)
            for given, cluster in known
            for sized in _sized(given, cluster, devices)
            for cap in _caps(cluster, memory)
        )
    )


def _caps(cluster: AnyCluster, memory: Sequence[str | int]) -> list[int]:
    """The caps in bytes; by default, all memory of a device."""
    own = cluster.device_memory_limit()
    return [min(given_bytes(cap, cluster), own) for cap in memory] or [own]


def _sized(
    given: str | AnyCluster, cluster: AnyCluster, devices: Sequence[int]
) -> Iterator[str | AnyCluster]:
    """The cluster in each size."""
    is_preset = isinstance(given, str) and not given.lower().endswith(".json") and _COUNTED.fullmatch(given)
    if not devices:
        yield cluster.name if is_preset else cluster
    elif not is_preset:
        raise InputError(
            f"devices= wants presets of one kind of GPU, such as '8xH100-80GB', got {cluster.name!r}"
        )
    else:
        yield from (f"{count}x{cluster.name.partition('x')[2]}" for count in devices)
