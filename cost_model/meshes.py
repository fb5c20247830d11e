"""The logical meshes that are worth a search.

A mesh in device order is a chain of boundaries: the strides at which one axis ends and the next begins. All
ordered factorizations of the device count are too many (67 up to three axes of 4,096 devices), and most of
them cost equally much or straddle nodes. We keep the boundaries that matter to the hardware, or to a model's
usual degrees of parallelism:

  * the divisors of `devices_per_node`: axes inside a node, and the node boundary itself;
  * two or four whole nodes (the two smallest divisors of the node count where those do not divide it), so
    that an inner axis can be larger than a node.

Two meshes whose axes have equal placements on the nodes, up to the axes' order, cost nearly equally much: the
first is kept. The number of meshes therefore does not grow with the number of devices: at most 6 of up to two
axes with nodes of eight.
"""

from itertools import combinations, pairwise, permutations
from math import isqrt

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.collectives import MeshModel
from autoshard.cost_model.errors import InputError

MAX_BOUNDARIES = 7
"""Boundaries considered, powers of two first: at most 8 meshes of two axes or one. Source: ours."""

_NUM_NODE_BOUNDARIES = 2
"""Boundaries beyond one node. Source: a choice of ours."""


def mesh_shapes(cluster: Cluster, max_axes: int = 2) -> tuple[tuple[int, ...], ...]:
    """The candidate meshes over all devices of a cluster, fewest axes first, in a deterministic order.

    Args:
      cluster: the hardware.
      max_axes: 1, 2 or 3.

    Returns:
      Shapes whose product is `num_devices`, every size above 1 (a single device has `(1,)`).

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> mesh_shapes(parse_cluster("16xH100-80GB"))
      ((16,), (2, 8), (4, 4), (8, 2))
    """
    if max_axes not in (1, 2, 3):
        raise InputError(f"wanted at most 1, 2 or 3 mesh axes, got {max_axes}")
    shapes = {}
    for num_boundaries in range(max_axes):
        for strides in combinations(_boundaries(cluster), num_boundaries):
            chain = (cluster.num_devices, *strides, 1)
            pairs = tuple(pairwise(chain))
            if all(outer % inner == 0 for outer, inner in pairs):
                shape = tuple(outer // inner for outer, inner in pairs)
                shapes.setdefault(_placement(cluster, shape), shape)
    return tuple(shapes.values())


def finer_shapes(cluster: Cluster, *coarser: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The meshes of three axes that split one axis of a two-axis mesh in two, those at the node boundary first.

    The refinements of the first mesh precede those of the second. A mesh of one or three axes has none.

    Args:
      cluster: the hardware.
      coarser: the meshes to split.

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> finer_shapes(parse_cluster("64xH100-80GB"), (8, 8))
      ((2, 4, 8), (8, 2, 4))
      >>> finer_shapes(parse_cluster("64xH100-80GB"), (8, 8), (32, 2))
      ((2, 4, 8), (8, 2, 4), (2, 16, 2), (4, 8, 2), (16, 2, 2))
    """
    node, shapes = cluster.devices_per_node, dict[tuple, tuple[int, ...]]()
    strides = sorted(_boundaries(cluster), key=lambda stride: (stride != node, -stride))
    for outer, inner in (shape for shape in coarser if len(shape) == 2):
        for stride in strides:
            if stride > inner and (outer * inner) % stride == stride % inner == 0:
                split = outer * inner // stride, stride // inner, inner
            elif stride < inner and inner % stride == 0:
                split = outer, inner // stride, stride
            else:
                continue
            shapes.setdefault(_placement(cluster, split), split)
    return tuple(shapes.values())


def _boundaries(cluster: Cluster) -> list[int]:
    """The strides at which an axis may end, largest first."""
    inside = [stride for stride in divisors(cluster.devices_per_node) if stride > 1]
    node_counts = [count for count in divisors(cluster.num_nodes) if 1 < count < cluster.num_nodes]
    across = [cluster.devices_per_node * count for count in node_counts[:_NUM_NODE_BOUNDARIES]]
    strides = [stride for stride in inside + across if stride < cluster.num_devices]
    preferred = sorted(
        strides, key=lambda stride: (stride != cluster.devices_per_node, stride.bit_count(), stride)
    )
    return sorted(preferred[:MAX_BOUNDARIES], reverse=True)


def divisors(number: int) -> list[int]:
    """All divisors of a number, in ascending order; none of zero.

    Example:
      >>> divisors(12)
      [1, 2, 3, 4, 6, 12]
    """
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _placement(cluster: Cluster, shape: tuple[int, ...]) -> tuple:
    """The placement of all groups of a mesh on the nodes, independent of the order of its axes."""
    mesh = MeshModel(cluster, shape)
    subsets = [axes for size in range(1, len(shape) + 1) for axes in combinations(range(len(shape)), size)]

    def seen_as(order: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        groups = [mesh.group([order[axis] for axis in axes]) for axes in subsets]
        return tuple((group.size, group.members_per_node) for group in groups)

    return min(seen_as(order) for order in permutations(range(len(shape))))
