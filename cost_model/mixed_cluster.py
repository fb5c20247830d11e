"""Clusters of several kinds of node, or of islands that a slower network joins.

Each group is a cluster of its own, with one kind of device, node and links. Devices are numbered group by group, in
the order of the groups. Devices of different groups talk over one more link. One program runs on devices of one kind,
so a plan for such a cluster is a pipeline, and each stage of it runs on nodes of one group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations
from typing import Annotated, Any

from autoshard.cost_model.cluster import Cluster, Link, check_name
from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.file_forms import Records, Table, file_config, write_record

MAX_GROUPS = 4
"""Most groups: the search tries pipelines with the groups in every order. Source: a choice of ours; four have 24 orders."""


@dataclass(frozen=True, slots=True)
class MixedCluster:
    """Groups of nodes that a pipeline may span.

    Example:
      >>> from autoshard.cost_model.hardware import parse_hardware
      >>> mixed = parse_hardware("8xH100-80GB+16xA100-40GB")
      >>> mixed.num_devices, [group.num_nodes for group in mixed.groups]
      (24, [1, 2])
    """

    __pydantic_config__ = file_config()

    name: str
    """The user's name for it."""
    groups: Annotated[tuple[Cluster, ...], Records(Cluster)]
    """Groups of equal nodes, with distinct names."""
    between: Link
    """The link between devices of different groups: the share of each device when all send at once."""
    sources: Annotated[tuple[tuple[str, str], ...], Table(str)] = ()
    """The sources of `between`'s numbers; each group has the sources of its own numbers."""

    def __post_init__(self) -> None:
        check_name(self.name, "cluster name")
        names = [group.name for group in self.groups]
        if not 2 <= len(names) <= MAX_GROUPS:
            raise ClusterError(f"wanted 2 to {MAX_GROUPS} groups of nodes, got {len(names)}")
        if len(set(names)) < len(names):
            raise ClusterError(f"wanted a name of its own for each group of nodes, got {', '.join(names)}")
        if len(platforms := {group.platform for group in self.groups}) > 1:
            raise ClusterError(
                f"wanted groups of one platform, got {' and '.join(sorted(platforms))} devices"
            )

    @property
    def platform(self) -> str:
        """The platform that JAX lowers programs for."""
        return self.groups[0].platform

    @property
    def num_devices(self) -> int:
        """Devices of all groups."""
        return sum(group.num_devices for group in self.groups)

    @property
    def caveat(self) -> str:
        """The end of a line with a predicted time: empty, unless the numbers of a group are invented."""
        return next(filter(None, (group.caveat for group in self.groups)), "")

    def device_memory_limit(self) -> int:
        """Bytes that a program can use on the device with most memory, which is the default memory cap."""
        return max(group.device_memory_limit() for group in self.groups)

    def caps(self, memory_bytes: int) -> tuple[int, ...]:
        """Bytes per device of each group under a common cap, limited to the group's usable memory."""
        return tuple(min(memory_bytes, group.device_memory_limit()) for group in self.groups)

    def locate(self, device: int) -> tuple[Cluster, int]:
        """The group of a device, and the device's number in it."""
        for group in self.groups:
            if device < group.num_devices:
                return group, device
            device -= group.num_devices
        raise AssertionError(f"{self.name} has {self.num_devices} devices")

    def node_of(self, device: int) -> tuple[str, int]:
        """The node of a device, as (name of its group, number in the group)."""
        group, number = self.locate(device)
        return group.node_of(number)

    def link(self, first: int, second: int) -> Link:
        """The link between two devices."""
        (group, one), (other, two) = self.locate(first), self.locate(second)
        return group.link(one, two) if group is other else self.between

    @property
    def orders(self) -> "tuple[MixedCluster, ...]":
        """This cluster with its groups in every order, the given order first."""
        return tuple(
            MixedCluster(self.name, groups, self.between, self.sources)
            for groups in permutations(self.groups)
        )

    def ordered(self, names: tuple[str, ...]) -> "MixedCluster":
        """This cluster with its groups in the given order.

        Raises:
          ClusterError: the names are not those of its groups.
        """
        for order in self.orders:
            if tuple(group.name for group in order.groups) == names:
                return order
        raise ClusterError(
            f"wanted the groups {', '.join(repr(group.name) for group in self.groups)} in some order, got "
            f"{', '.join(map(repr, names)) or 'none'}"
        )

    def in_order[Device](self, devices: Sequence[Device], names: Sequence[str]) -> list[Device]:
        """Its devices, group by group in the order of `names`."""
        ends = accumulate(group.num_devices for group in self.groups)
        of_group = {
            g.name: devices[end - g.num_devices : end] for g, end in zip(self.groups, ends, strict=True)
        }
        return [device for name in names for device in of_group[name]]

    def __str__(self) -> str:
        return " and ".join(map(str, self.groups))

    def to_json(self) -> dict[str, Any]:
        """A JSON object with units in the numbers; `from_json` is its exact inverse."""
        return write_record(self)


AnyCluster = Cluster | MixedCluster
"""The hardware of a plan."""


def from_json(data: Any, place: str = "cluster") -> AnyCluster:
    """The cluster that a JSON object describes, of one kind of node or several.

    Args:
      data: the result of `json.loads`.
      place: the file's name, for messages.

    Raises:
      ClusterError: naming the place and the key.
    """
    from autoshard.cost_model.cluster_schema import checked  # it takes a while to import

    if isinstance(data, dict) and "groups" in data:
        return checked(data, place, MixedCluster)
    return checked(data, place, Cluster)
