"""The time of collectives on a logical mesh: latency and bandwidth of the slowest link.

A mesh `(n0, n1, n2)` lies over the cluster's devices in device order, the last axis innermost (stride 1). A
collective over some of its axes runs in disjoint groups at once: the devices that differ only in those
coordinates. *Where a group lies* decides what it gets:

  * inside a node: the intra link;
  * across nodes, with at least g members in each node that it touches: min(intra, g x inter). Several rings
    enter and leave a node through the network ports of all g members, while other groups use the other
    members' ports.

The time is alpha-beta (Thakur, Rabenseifner & Gropp, "Optimization of Collective Communication Operations
in MPICH", 2005): steps x latency + bytes on the wire / bandwidth. With n members and B bytes per device,
the larger of input and output:

  ==================  =======================  =============================
  collective          bytes on the wire        steps
  ==================  =======================  =============================
  all-gather          (n-1)/n B                min(n-1, 2 ceil(log2 n))
  reduce-scatter      (n-1)/n B                min(n-1, 2 ceil(log2 n))
  all-reduce          2 (n-1)/n B              min(2 (n-1), 2 ceil(log2 n))
  all-to-all          (n-1)/n B                min(n-1, 2 ceil(log2 n))
  collective-permute  B                        1
  ==================  =======================  =============================

The bytes are those of rings, which are bandwidth-optimal (Patarasuk & Yuan, "Bandwidth optimal all-reduce
algorithms", 2009) and NCCL's choice for large messages; the steps those of a ring or a double tree,
whichever is shorter, as NCCL chooses for small ones. An all-to-all and a permute send each device's own
data through its own port: between nodes they get `inter`, whatever g is.

Links count at their peak: NCCL sustains about 0.8 of NVLink's (20.6 of 25 GB/s per link on Hopper, its
`src/graph/topo.h`), and the fixed cost of a kernel launch is left out.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, prod

import numpy as np

from autoshard.errors import InputError
from cost_model.cluster import Cluster

type Amount = float | np.ndarray
"""A number, or an array of them: every function here works elementwise."""


@dataclass(frozen=True, slots=True)
class Group:
    """How the groups of a collective lie on the nodes; the worst group stands for all.

    Attributes:
      size: members.
      members_per_node: fewest members in a node that a crossing group touches; `size` when no group crosses.
    """

    size: int
    members_per_node: int

    @property
    def crosses_nodes(self) -> bool:
        return self.members_per_node < self.size


@dataclass(frozen=True, slots=True)
class MeshModel:
    """Collective times on one logical mesh of one cluster.

    `axes` are always indices into `shape`, in any order and without repetition; `num_bytes` (and its like)
    are bytes per device, the larger of input and output. Times are seconds, of the same form as
    `num_bytes`.

    Attributes:
      cluster: the hardware; the mesh takes its first devices.
      shape: the sizes of the axes, outermost first.

    Example:
      >>> from cost_model.hardware import parse_cluster
      >>> mesh = MeshModel(parse_cluster("16xH100-80GB"), (2, 8))
      >>> mesh.axis_link(1), mesh.axis_link(0)
      ((450000000000.0, 1.9e-06), (50000000000.0, 4e-06))
    """

    cluster: Cluster
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1 or prod(self.shape) > self.cluster.num_devices:
            raise InputError(
                f"wanted a mesh of positive sizes on at most {self.cluster.num_devices} devices "
                f"({self.cluster.name}), got {self.shape}"
            )

    def axis_link(self, axis: int) -> tuple[float, float]:
        """(bytes per second, latency in seconds) that collectives over one axis get."""
        return self.link((axis,))

    def link(self, axes: Collection[int]) -> tuple[float, float]:
        """(bytes per second, latency in seconds) that ring collectives over the product of axes get."""
        group = self.group(axes)
        intra, inter = self.cluster.intra, self.cluster.inter
        if not group.crosses_nodes:
            return intra.bytes_per_s, intra.latency_s
        return min(intra.bytes_per_s, group.members_per_node * inter.bytes_per_s), inter.latency_s

    def group(self, axes: Collection[int]) -> Group:
        """How the groups over these axes lie on the nodes."""
        return _group(self.shape, tuple(sorted(axes)), self.cluster.devices_per_node)

    def time_s(self, kind: str, axes: Collection[int], num_bytes: Amount) -> Amount:
        """Seconds of one collective, by XLA's name for its kind."""
        if kind not in _TIMES:
            raise InputError(f"wanted a collective among {', '.join(_TIMES)}, got {kind!r}")
        return _TIMES[kind](self, num_bytes, axes)

    def all_gather_s(self, out_bytes: Amount, axes: Collection[int]) -> Amount:
        """Every device gets all shards; `out_bytes` is the gathered size."""
        return self._ring_s(out_bytes, axes)

    def reduce_scatter_s(self, in_bytes: Amount, axes: Collection[int]) -> Amount:
        """Every device gets one shard of the sum; `in_bytes` is the size of what is summed."""
        return self._ring_s(in_bytes, axes)

    def all_reduce_s(self, num_bytes: Amount, axes: Collection[int]) -> Amount:
        """Every device gets the sum: in bytes, a reduce-scatter and then an all-gather."""
        size = self.group(axes).size
        bytes_per_s, latency_s = self.link(axes)
        steps = min(2 * (size - 1), _tree_steps(size))
        return steps * latency_s + 2 * (size - 1) / size * num_bytes / bytes_per_s

    def all_to_all_s(self, local_bytes: Amount, axes: Collection[int]) -> Amount:
        """Every device sends an equal part of its bytes to every member, through its own port."""
        group = self.group(axes)
        intra, inter = self.cluster.intra, self.cluster.inter
        num_remote = group.size - group.members_per_node
        num_local = group.members_per_node - 1
        wire_s_per_byte = num_local / intra.bytes_per_s + num_remote / inter.bytes_per_s
        return _steps(group.size) * self.link(axes)[1] + local_bytes / group.size * wire_s_per_byte

    def permute_s(self, num_bytes: Amount, axes: Collection[int]) -> Amount:
        """Every device sends its bytes to one other member, at worst in another node."""
        group = self.group(axes)
        link = self.cluster.inter if group.crosses_nodes else self.cluster.intra
        return 0.0 * num_bytes if group.size == 1 else link.latency_s + num_bytes / link.bytes_per_s

    def _ring_s(self, num_bytes: Amount, axes: Collection[int]) -> Amount:
        size = self.group(axes).size
        bytes_per_s, latency_s = self.link(axes)
        return _steps(size) * latency_s + (size - 1) / size * num_bytes / bytes_per_s


_TIMES = {
    "all-reduce": MeshModel.all_reduce_s,
    "all-gather": MeshModel.all_gather_s,
    "reduce-scatter": MeshModel.reduce_scatter_s,
    "all-to-all": MeshModel.all_to_all_s,
    "collective-permute": MeshModel.permute_s,
}


def _tree_steps(size: int) -> int:
    return 2 * ceil(log2(size))


def _steps(size: int) -> int:
    return min(size - 1, _tree_steps(size))


@lru_cache(maxsize=4096)
def _group(shape: tuple[int, ...], axes: tuple[int, ...], devices_per_node: int) -> Group:
    if len(set(axes)) < len(axes) or not all(0 <= axis < len(shape) for axis in axes):
        raise InputError(f"wanted distinct axes of the mesh {shape}, numbered from 0, got {axes}")
    size = prod(shape[axis] for axis in axes)
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    boundaries = [prod(shape), *strides]
    if any(max(stride, devices_per_node) % min(stride, devices_per_node) for stride in boundaries):
        return Group(size, _count_members_per_node(shape, axes, devices_per_node))
    reaches = (min(shape[axis], max(1, devices_per_node // strides[axis])) for axis in axes)
    return Group(size, prod(reaches))


def _count_members_per_node(shape: tuple[int, ...], axes: tuple[int, ...], devices_per_node: int) -> int:
    """For meshes that straddle nodes: the fewest members that any group has in any node that it touches."""
    size = prod(shape[axis] for axis in axes)
    nodes = np.arange(prod(shape)).reshape(shape) // devices_per_node
    rest = tuple(axis for axis in range(len(shape)) if axis not in axes)
    rows = nodes.transpose(*rest, *axes).reshape(-1, size)
    num_nodes = int(nodes.max()) + 1
    members = np.bincount((np.arange(len(rows))[:, None] * num_nodes + rows).ravel())
    return int(members[members > 0].min())
