"""Facts that the attached machine reports without any timing: nodes, memory, host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard.cost_model.attached import limit_bytes, node_of
from autoshard.cost_model.cluster import Cluster

AXES = ("node", "local")
"""The axes of the measured mesh: nodes, and the devices of each node."""

_MEMINFO = Path("/proc/meminfo")
_KIB = 1024


def attached_mesh(devices: Sequence[Any]) -> Mesh:
    """The devices as (nodes, devices of a node), in their order.

    A node is a set of devices with a fast interconnect if the backend reports it, else the devices of one process. If
    nodes have unequal numbers of devices, all devices count as one node.
    """
    nodes: dict[int, list[Any]] = {}
    for device in devices:
        node = node_of(device)
        nodes.setdefault(device.process_index if node is None else node, []).append(device)
    rows = list(nodes.values())
    grid = rows if len({len(row) for row in rows}) == 1 else [list(devices)]
    return Mesh(np.array(grid), AXES)


def described(mesh: Mesh, preset: Cluster, name: str) -> tuple[Cluster, Mapping[str, str]]:
    """The preset with the nodes and the memory of the attached devices.

    Args:
      mesh: the result of `attached_mesh`.
      preset: the preset of one device of the nearest kind.
      name: the cluster's name.

    Returns:
      The cluster, and the sources of the numbers that the machine reported, by key in a cluster file.
    """
    num_nodes, per_node = mesh.devices.shape
    cluster = replace(
        preset,
        name=name,
        num_devices=num_nodes * per_node,
        devices_per_node=per_node,
        host_bytes_per_node=preset.host_bytes_per_node * per_node,
        host_bytes_per_s=preset.host_bytes_per_s * per_node,
        host_cores=preset.host_cores * per_node,
    )
    sources = {}
    host_bytes, share = _host_bytes(), min(1.0, per_node / jax.local_device_count())
    if host_bytes:
        cluster = replace(cluster, host_bytes_per_node=int(host_bytes * share))
        sources["host_memory_per_node"] = f"MemTotal of /proc/meminfo, {per_node} devices' share"
    device = mesh.local_devices[0]
    usable_bytes = limit_bytes(device)
    if usable_bytes:
        told = "bytes_limit of memory_stats(): XLA_PYTHON_CLIENT_MEM_FRACTION of the device's memory"
        sources["device.memory"] = told
        sources["device.reserve"] = "none, as the runtime's own memory is outside of bytes_limit"
    elif host_bytes and device.platform == "cpu":
        usable_bytes = host_bytes // jax.local_device_count()
        sources["device.memory"] = "a simulated device's share of the host's memory"
    if usable_bytes:
        cluster = replace(cluster, device=replace(cluster.device, memory_bytes=usable_bytes, reserve_bytes=0))
    return cluster, sources


def _host_bytes() -> int:
    """Bytes of the host's memory, or 0 if the system does not report them."""
    lines = _MEMINFO.read_text().splitlines() if _MEMINFO.is_file() else []
    return next((int(line.split()[1]) * _KIB for line in lines if line.startswith("MemTotal:")), 0)
