"""The time of collectives on a logical mesh, as NCCL runs them.

A mesh `(n0, n1, n2)` covers the cluster's devices in device order, the last axis innermost (stride 1). A
collective over some of its axes runs in disjoint groups at once: the devices that differ only in those
coordinates. The *placement of a group* decides its bandwidth. Say n members stand in N nodes, g in each node:

  * rings run at the intra link's rate inside a node, and across nodes at min(intra, g x inter): several of them
    enter and leave a node through the network ports of all g members, while other groups use the other members'
    ports;
  * of a ring's n hops, N cross the network.

NCCL runs a collective by one of several algorithms, each under one of three protocols. Each pair costs a fixed
time and a time per byte, a straight line; NCCL estimates all and takes the best for the size at hand (its
`src/graph/tuning.cc`), and so does `MeshModel.time_s`. With B bytes per device, the larger of input and output:

  ==================  =========  ======================================  =========================================
  collective          algorithm  hops, of these across nodes             bytes per device and direction
  ==================  =========  ======================================  =========================================
  all-gather          ring       n-1, N-1                                (n-1)/n B
  reduce-scatter      ring       n-1, N-1                                (n-1)/n B
  all-reduce          ring       2 (n-1), 2 (N-1)                        2 (n-1)/n B
  all-reduce          tree       2 (g-1) + 2 log2 N, 2 log2 N            2 B in a node; B/g between two, else 2 B/g
  all-reduce          in switch  one, and 2 log2 N                       B in a node; between nodes as a tree
  all-to-all          pairwise   n-1, n-g                                (n-1)/n B, all between nodes by `inter`
  collective-permute  one send   1                                       B
  ==================  =========  ======================================  =========================================

Rings are bandwidth-optimal (Patarasuk & Yuan, "Bandwidth optimal all-reduce algorithms", 2009); double trees need
fewer hops (Sanders, Speck & Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan", 2009)
and fewer bytes between two nodes; NVLink SHARP sums and copies in the switch. The protocols trade latency for
bandwidth: LL sends a flag with every 4 bytes, LL128 with every 120, Simple synchronises per chunk.

The model leaves out three parts of NCCL's: PAT, the overhead of network proxies, and the plateau of rings across nodes.
NCCL's correction of trees for their size enters with its mean.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache, reduce
from math import ceil, log2, prod

import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError

type Amount = float | np.ndarray
"""A number, or an array of them: every function here works elementwise."""


@dataclass(frozen=True, slots=True)
class Protocol:
    """A protocol's hop times, relative to `Link.latency_s` (one hop under LL128 in a ring), and its shares of the bandwidth.

    Attributes:
      start_s: fixed time of a collective.
      intra: relative time of a hop inside a node; NCCL's table has 0.6, 1.9 and 3.4 us on NVLink.
      inter: of a hop between nodes in a ring with several members per node; 2.7, 4.0 and 14 us.
      lone: of a hop between nodes in trees, and in rings with one member per node; 5.0, 8.5 and 14 us.
      ring: share of the links' rate that rings reach.
      tree: share of the links' rate that trees reach.
      most_inter_bytes_per_s: upper bound on a group's bandwidth between nodes.
    """

    start_s: float
    intra: float
    inter: float
    lone: float
    ring: float
    tree: float
    most_inter_bytes_per_s: float = float("inf")


LL = Protocol(6.6e-6, 0.32, 0.68, 1.25, 0.38, 0.17, 20e9)
LL128 = Protocol(14e-6, 1.0, 1.0, 2.1, 0.92, 0.6)
SIMPLE = Protocol(8.4e-6, 1.8, 3.5, 3.5, 1.0, 0.83)
PROTOCOLS = (LL, LL128, SIMPLE)
"""Source: NCCL 2, `src/graph/tuning.cc`: baseLatencies, hwLatencies and the refinements of bandwidth. LL is limited
to 39 to 282 GB/s in a node, which is 0.33 to 0.39 of the links' rate from V100 to B200, and to 19 to 45 GB/s across
nodes. Trees: 0.92, times 1/3.8 (LL) or 7/9 (LL128), times the mean of treeCorrectionFactor above 64 KiB."""

SCHEDULED_RATIO = 1.3
"""Time of a collective inside a node in the table of XLA's scheduler, relative to this model: the median from 1 to 64 MiB.
Source: `xla/service/gpu/model/default_collective_perf_table.txtpb`, 2026, H100."""

SWITCH_START_S = 25e-6
"""Fixed time of an all-reduce in NVLink's switches. Source: NCCL 2, `src/graph/tuning.cc`, hwLatencies, NVLS."""

SWITCH_SHARE = 0.74
"""Rate of an all-reduce in the switch, in bytes reduced, as a share of the rate that rings sustain. Source: 275 of 370 GB/s
on eight H100s (S. Jeaugey of NVIDIA, github.com/NVIDIA/nccl-tests issue 212)."""

Line = tuple[float, float]
"""Fixed seconds, and seconds per byte."""


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """The placement of a collective's groups on the nodes; the worst group represents all of them.

    Attributes:
      size: members.
      members_per_node: fewest members in a node that a crossing group touches; `size` when no group crosses.
    """

    size: int
    members_per_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.members_per_node < self.size

    @property
    def num_nodes(self) -> int:
        """Nodes that the group would touch if each held `members_per_node` members."""
        return ceil(self.size / self.members_per_node)


@dataclass(frozen=True, slots=True)
class MeshModel:
    """Collective times on one logical mesh of one cluster.

    `axes` are always indices into `shape`, in any order and without repetition; `num_bytes` are bytes per device,
    the larger of input and output. Times are seconds, of the same form as `num_bytes`.

    Attributes:
      cluster: the hardware; the mesh takes its first devices.
      shape: the sizes of the axes, outermost first.

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> mesh = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))
      >>> mesh.axis_link(1), mesh.axis_link(0)
      ((450000000000.0, 1.9e-06), (50000000000.0, 4e-06))
      >>> f"{mesh.time_s('all-gather', (1,), 2**30) * 1e3:.2f} ms"
      '2.57 ms'
    """

    cluster: Cluster
    shape: tuple[int, ...]
    _lines: dict[tuple, tuple[Line, ...]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1 or prod(self.shape) > self.cluster.num_devices:
            raise InputError(
                f"wanted a mesh of positive sizes on at most {self.cluster.num_devices} devices "
                f"({self.cluster.name}), got {self.shape}"
            )

    def axis_link(self, axis: int) -> tuple[float, float]:
        """(Peak bytes per second, latency in seconds) of the wires that collectives over one axis use."""
        return self.link((axis,))

    def link(self, axes: Collection[int]) -> tuple[float, float]:
        """(Peak bytes per second, latency in seconds) of the wires that rings over the product of axes use."""
        group = self.group(axes)
        intra, inter = self.cluster.intra, self.cluster.inter
        if not group.crosses_nodes:
            return intra.bytes_per_s, intra.latency_s
        return min(intra.bytes_per_s, group.members_per_node * inter.bytes_per_s), inter.latency_s

    def group(self, axes: Collection[int]) -> DeviceGroup:
        """The placement on the nodes of the groups over these axes."""
        return _group(self.shape, tuple(sorted(axes)), self.cluster.devices_per_node)

    def time_s(
        self, kind: str, axes: Collection[int], num_bytes: Amount, combined_bytes: float = 0.0
    ) -> Amount:
        """Seconds of one collective, by XLA's name for its kind.

        Args:
          kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
          axes: the axes that it runs over.
          num_bytes: per device.
          combined_bytes: the size to which the compiler combines many small collectives of this kind; a smaller
            one costs its share of the combined collective.
        """
        lines = self.lines(kind, axes)
        if not lines:
            return 0.0 * num_bytes
        if combined_bytes <= 0:
            return _lowest(lines, num_bytes)
        whole = np.maximum(num_bytes, combined_bytes)
        return _lowest(lines, whole) * (num_bytes / whole)

    def lines(self, kind: str, axes: Collection[int]) -> tuple[Line, ...]:
        """The cost line of each algorithm and protocol; empty for a group of one device."""
        key = (kind, *sorted(axes))
        if key not in self._lines:
            if kind not in _ALGORITHMS:
                raise InputError(f"wanted a collective among {', '.join(_ALGORITHMS)}, got {kind!r}")
            group, launch_s = self.group(axes), self.cluster.device.launch_s
            made = _ALGORITHMS[kind](self.cluster, group) if group.size > 1 else []
            self._lines[key] = tuple((launch_s + fixed_s, s_per_byte) for fixed_s, s_per_byte in made)
        return self._lines[key]


def _lowest(lines: tuple[Line, ...], num_bytes: Amount) -> Amount:
    return reduce(np.minimum, [fixed_s + s_per_byte * num_bytes for fixed_s, s_per_byte in lines])


def _half_ring(cluster: Cluster, group: DeviceGroup) -> list[Line]:
    return _ring(cluster, group, 1)


def _all_reduce(cluster: Cluster, group: DeviceGroup) -> list[Line]:
    lines = _ring(cluster, group, 2)
    if group.crosses_nodes:
        lines += _tree(cluster, group)
    if cluster.intra.sums_in_switch and group.members_per_node > 1:
        lines.append(_in_switch(cluster, group))
    return lines


def _ring(cluster: Cluster, group: DeviceGroup, rounds: int) -> list[Line]:
    """In each of the `rounds`, every member sends its neighbour all parts but one."""
    intra, inter = cluster.intra, cluster.inter
    num_inter = group.num_nodes - 1
    num_intra = group.size - 1 - num_inter
    share = (group.size - 1) / group.size
    lines = []
    for protocol in PROTOCOLS:
        inter_hop = protocol.lone if group.members_per_node == 1 else protocol.inter
        hops_s = num_intra * protocol.intra * intra.latency_s + num_inter * inter_hop * inter.latency_s
        bytes_per_s = protocol.ring * intra.sustained_bytes_per_s
        if group.crosses_nodes:
            bytes_per_s = min(bytes_per_s, _inter_bytes_per_s(cluster, group, protocol, protocol.ring))
        lines.append((protocol.start_s + rounds * hops_s, rounds * share / bytes_per_s))
    return lines


def _tree(cluster: Cluster, group: DeviceGroup) -> list[Line]:
    """Chains inside nodes and double trees between them, each passed up and down."""
    lines = []
    for protocol in PROTOCOLS:
        chain_s = 2 * (group.members_per_node - 1) * protocol.intra * cluster.intra.latency_s
        across_s = _tree_hops(group) * protocol.lone * cluster.inter.latency_s
        in_node = (
            2 / (protocol.tree * cluster.intra.sustained_bytes_per_s) if group.members_per_node > 1 else 0.0
        )
        between = _tree_copies(group) / _inter_bytes_per_s(cluster, group, protocol, protocol.tree)
        lines.append((protocol.start_s + chain_s + across_s, max(in_node, between)))
    return lines


def _in_switch(cluster: Cluster, group: DeviceGroup) -> Line:
    """The switch adds the contributions of a node's members and sends the sum to all of them."""
    s_per_byte = 1 / (SWITCH_SHARE * cluster.intra.sustained_bytes_per_s)
    if not group.crosses_nodes:
        return SWITCH_START_S, s_per_byte
    across_s = _tree_hops(group) * SIMPLE.lone * cluster.inter.latency_s
    between = _tree_copies(group) / _inter_bytes_per_s(cluster, group, SIMPLE, 1.0)
    return SWITCH_START_S + across_s, max(s_per_byte, between)


def _inter_bytes_per_s(cluster: Cluster, group: DeviceGroup, protocol: Protocol, share: float) -> float:
    """Bandwidth of a group into or out of a node, through the ports of all its members there."""
    ports = group.members_per_node * cluster.inter.sustained_bytes_per_s
    return min(share * ports, protocol.most_inter_bytes_per_s)


def _tree_hops(group: DeviceGroup) -> int:
    return 2 * ceil(log2(group.num_nodes))


def _tree_copies(group: DeviceGroup) -> int:
    """How often a node sends the data: to its parent and to two children, in two trees that carry half the data each."""
    return 1 if group.num_nodes == 2 else 2


def _pairwise(cluster: Cluster, group: DeviceGroup) -> list[Line]:
    """Every member sends an equal part to every other, through its own port; hops have LL's latency."""
    intra, inter = cluster.intra, cluster.inter
    num_local = group.members_per_node - 1
    num_remote = group.size - group.members_per_node
    hops_s = num_local * LL.intra * intra.latency_s + num_remote * LL.inter * inter.latency_s
    wire_s_per_byte = num_local / intra.sustained_bytes_per_s + num_remote / inter.sustained_bytes_per_s
    return [(SIMPLE.start_s + hops_s, wire_s_per_byte / group.size)]


def _one_send(cluster: Cluster, group: DeviceGroup) -> list[Line]:
    """Every member sends its bytes to one other, at worst in another node."""
    link = cluster.inter if group.crosses_nodes else cluster.intra
    lines = []
    for protocol in (LL, SIMPLE):
        hop_s = (protocol.lone if group.crosses_nodes else protocol.intra) * link.latency_s
        lines.append((protocol.start_s + hop_s, 1 / (protocol.ring * link.sustained_bytes_per_s)))
    return lines


_ALGORITHMS = {
    "all-reduce": _all_reduce,
    "all-gather": _half_ring,
    "reduce-scatter": _half_ring,
    "all-to-all": _pairwise,
    "collective-permute": _one_send,
}


@lru_cache(maxsize=4096)
def _group(shape: tuple[int, ...], axes: tuple[int, ...], devices_per_node: int) -> DeviceGroup:
    if len(set(axes)) < len(axes) or not all(0 <= axis < len(shape) for axis in axes):
        raise InputError(f"wanted distinct axes of the mesh {shape}, numbered from 0, got {axes}")
    size = prod(shape[axis] for axis in axes)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    boundaries = [prod(shape), *strides]
    if any(max(stride, devices_per_node) % min(stride, devices_per_node) for stride in boundaries):
        return DeviceGroup(size, _count_members_per_node(shape, axes, devices_per_node))
    reaches = (min(shape[axis], max(1, devices_per_node // strides[axis])) for axis in axes)
    return DeviceGroup(size, prod(reaches))


def _count_members_per_node(shape: tuple[int, ...], axes: tuple[int, ...], devices_per_node: int) -> int:
    """For meshes that straddle nodes: the fewest members that any group has in any node that it touches."""
    size = prod(shape[axis] for axis in axes)
    nodes = np.arange(prod(shape)).reshape(shape) // devices_per_node
    rest = tuple(axis for axis in range(len(shape)) if axis not in axes)
    rows = nodes.transpose(*rest, *axes).reshape(-1, size)
    num_nodes = int(nodes.max()) + 1
    members = np.bincount((np.arange(len(rows))[:, None] * num_nodes + rows).ravel())
    return int(members[members > 0].min())
