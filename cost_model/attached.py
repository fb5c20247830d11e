"""The cluster that the attached devices form."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.hardware import joined, parse_cluster
from autoshard.cost_model.mixed_cluster import AnyCluster

_GPU_NAMES = (
    ("V100-SXM2-16GB", "V100-16GB"),
    ("V100-SXM2-32GB", "V100-32GB"),
    ("V100-SXM3-32GB", "V100-32GB"),
    ("A100-SXM4-40GB", "A100-40GB"),
    ("A100-SXM4-80GB", "A100-80GB"),
    ("A100 80GB", "A100-80GB"),
    ("A10G", "A10G"),
    ("L4", "L4"),
    ("L40S", "L40S"),
    ("RTX 4090(?! )", "RTX-4090"),
    ("RTX 6000 Ada Generation(?! )", "RTX-6000-Ada"),
    ("H100 PCIe", "H100-PCIe"),
    ("H100 NVL", "H100-NVL"),
    ("H100", "H100-80GB"),
    ("GH200 480GB", "GH200"),
    ("H200", "H200"),
    ("B200", "B200"),
    ("GB200", "GB200-NVL72"),
    ("B300", "B300"),
    ("GB300", "GB300-NVL72"),
)
"""Words in the CUDA driver's name of a device kind -> the preset; the first that fit. A laptop's GPU and a reduced one have
words more ("RTX 4090 Laptop GPU", "RTX 4090 D")."""


def attached_hardware(devices: Sequence[Any]) -> AnyCluster:
    """The attached devices, of one kind or several.

    Raises:
      ClusterError: devices of an unknown kind, or of several kinds that are not sorted by kind.
    """
    runs = [list(run) for _, run in groupby(devices, key=lambda device: device.device_kind)]
    if len({run[0].device_kind for run in runs}) < len(runs):
        kinds = ", ".join(f"{len(run)} {run[0].device_kind}" for run in runs)
        raise ClusterError(f"wanted devices of a kind side by side, got {kinds}: pass devices= kind by kind")
    clusters = [attached_cluster(run) for run in runs]
    return clusters[0] if len(clusters) == 1 else joined(clusters)


def attached_cluster(devices: Sequence[Any]) -> Cluster:
    """The cluster of attached devices of one kind: their preset, with their actual nodes and the memory that JAX may use.

    If nodes have unequal numbers of devices, or the backend reports no nodes, the preset's name decides the nodes.

    Raises:
      ClusterError: devices of an unknown kind.
    """
    cluster = _in_nodes(devices)
    limits = [limit for device in devices if (limit := limit_bytes(device))]
    if not limits:
        return cluster
    whole_bytes, reserve_bytes = cluster.device.memory_bytes, cluster.device.reserve_bytes
    withheld_bytes = max(reserve_bytes, whole_bytes - min(limits))
    return replace(cluster, device=replace(cluster.device, reserve_bytes=withheld_bytes))


def _in_nodes(devices: Sequence[Any]) -> Cluster:
    nodes = Counter(map(node_of, devices))
    if None in nodes or len(set(nodes.values())) > 1:
        return parse_cluster(cluster_name(devices))
    one, per_node = parse_cluster(cluster_name(devices[:1])), len(devices) // len(nodes)
    return replace(
        one,
        name=cluster_name(devices),
        num_devices=len(devices),
        devices_per_node=per_node,
        host_bytes_per_node=one.host_bytes_per_node * per_node,
        host_bytes_per_s=one.host_bytes_per_s * per_node,
        host_cores=one.host_cores * per_node,
    )


def cluster_name(devices: Sequence[Any]) -> str:
    """The preset that describes the attached devices, such as `8xCPU`.

    Raises:
      ClusterError: devices of an unknown kind.
    """
    first = devices[0]
    if first.platform == "cpu":
        return f"{len(devices)}xCPU"
    for words, preset in _GPU_NAMES:
        if re.search(rf"\b{words}\b", first.device_kind):
            return f"{len(devices)}x{preset}"
    raise ClusterError(
        f"no preset describes the attached {first.device_kind!r} devices: pass cluster=, a preset of a similar device or a "
        "JSON file that describes yours"
    )


def node_of(device: Any) -> int | None:
    """The node of a device; None if the backend does not report it.

    A slice in XLA:GPU is a set of GPUs joined by NVLink (`pjrt/gpu/gpu_topology.proto`); JAX renames it to partition.
    """
    told = (getattr(device, name, None) for name in ("partition_index", "slice_index"))
    return None if device.platform == "cpu" else next((index for index in told if index is not None), None)


def limit_bytes(device: Any) -> int | None:
    """Bytes of a device's memory that JAX's allocator may use; None if unknown, as for another process's devices.

    On GPUs it is the share `XLA_PYTHON_CLIENT_MEM_FRACTION`, three quarters by default."""
    stats = device.memory_stats() if device.process_index == jax.process_index() else None
    return (stats or {}).get("bytes_limit")
