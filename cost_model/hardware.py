"""The cluster that the user names: by a preset's name, by a JSON file, or by a `Cluster` itself.

A preset counts devices: `"64xH100-80GB"`. A full node has eight, or as many as the preset says (72 GB200s share their
NVLinks). Up to a full node's devices share one node. More form full nodes, or, if the count does not divide, equal nodes
that are at least half full (12 H100s are two nodes of six). A node that is not full has its share of the host memory
and the network, as cloud providers and batch schedulers grant it.
Several presets joined by `+`, as in `"8xH100-80GB+16xA100-40GB"`, are the groups of a mixed cluster. The slowest of
their networks joins these groups.

See `cluster` and `mixed_cluster` for the types, `presets` for the numbers and `cluster_file` for the files.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoshard.cost_model.cluster import Cluster, Device, Link
from autoshard.cost_model.cluster_file import read_cluster
from autoshard.cost_model.errors import ClusterError, closest
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.presets import (
    DEVICE_KEYS,
    LINK_KEYS,
    NODE_DEVICES,
    PRESETS,
    SHORT_NAMES,
    node_devices,
)
from autoshard.cost_model.units import exact_bytes, exact_rate, parse_bytes, parse_rate

__all__ = ["AnyCluster", "Cluster", "Device", "Link", "MixedCluster", "parse_cluster", "parse_hardware"]

_COUNTED = re.compile(r"([1-9][0-9]{0,5})x(.+)", re.IGNORECASE | re.ASCII)


def parse_cluster(cluster: str | os.PathLike[str] | AnyCluster) -> Cluster:
    """The cluster, of one kind of node, that a name, a file or a `Cluster` stands for.

    Args:
      cluster: as for `parse_hardware`.

    Raises:
      ClusterError: as for `parse_hardware`, or the cluster has several kinds of node.

    Example:
      >>> parse_cluster("64xh100-80gb").num_nodes
      8
    """
    found = parse_hardware(cluster)
    if isinstance(found, MixedCluster):
        raise ClusterError(f"wanted a cluster of one kind of node, got {found.name}: {found}")
    return found


def parse_hardware(cluster: str | os.PathLike[str] | AnyCluster) -> AnyCluster:
    """The cluster, of one kind of node or several, that a name, a file or a cluster object stands for.

    Args:
      cluster: `"<count>x<GPU>"` or `"<count>x<GPU>-<network>"` in any case, several of them joined by `+`, the path of a
        JSON file, a `Cluster` or a `MixedCluster`.

    Raises:
      ClusterError: an unknown name or count, with the accepted ones; a file that cannot be read or describes
        no cluster, with its name and the key.

    Example:
      >>> parse_hardware("8xH100-80GB+16xL4").num_devices
      24
    """
    if isinstance(cluster, Cluster | MixedCluster):
        return cluster
    if isinstance(cluster, os.PathLike):
        return read_cluster(Path(cluster))
    if not isinstance(cluster, str):
        raise ClusterError(f"wanted a cluster as '<count>x<GPU>', a JSON file or a Cluster, got {cluster!r}")
    counted = _COUNTED.fullmatch(cluster.strip())
    if cluster.lower().endswith(".json") or (counted is None and os.path.isfile(cluster)):
        return read_cluster(Path(cluster))
    if "+" in cluster:
        return joined([parse_cluster(one.strip()) for one in cluster.split("+")])
    return _from_preset(cluster, counted)


def joined(groups: Sequence[Cluster]) -> MixedCluster:
    """The mixed cluster of groups of nodes, joined by the slowest of their networks.

    Raises:
      ClusterError: the groups cannot form one cluster.
    """
    links = [group.inter for group in groups]
    between = Link(
        min(link.bytes_per_s for link in links),
        max(link.latency_s for link in links),
        min(link.efficiency for link in links),
    )
    source = "the slowest of the networks that join nodes of its groups"
    name = "+".join(group.name for group in groups)
    return MixedCluster(name, tuple(groups), between, (("between", source),))


def _from_preset(text: str, counted: re.Match[str] | None) -> Cluster:
    names = preset_names()
    known = f"presets: {', '.join(names)}"
    if counted is None:
        hint = closest(
            f"{NODE_DEVICES}x{text}" if text else "", tuple(f"{NODE_DEVICES}x{name}" for name in names)
        )
        raise ClusterError(f"wanted a cluster as '<count>x<GPU>' or a JSON file, got {text!r}{hint}; {known}")
    num_devices, wanted = int(counted[1]), counted[2]
    spelled_out = {f"{gpu}-{network}": (gpu, network) for gpu, network in names.values()}
    short = {name: names[preset] for name, preset in SHORT_NAMES.items()}
    presets = {name.lower(): preset for name, preset in (names | spelled_out | short).items()}
    if wanted.lower() not in presets:
        raise ClusterError(f"unknown preset {wanted!r} in {text!r}{closest(wanted, tuple(names))}; {known}")
    gpu, network = presets[wanted.lower()]
    full = node_devices(gpu)
    devices_per_node = _devices_per_node(num_devices, full)
    if not devices_per_node:
        raise ClusterError(
            f"{num_devices} devices in {text!r} do not divide into equal nodes; {_nearest(num_devices, full)}"
        )
    return Cluster.of(_preset_json(gpu, network, num_devices, devices_per_node))


def preset_names() -> dict[str, tuple[str, str]]:
    """The names that may follow a count, each with its GPU and its network."""
    return {
        _name(gpu, network): (gpu, network)
        for gpu, preset in PRESETS.items()
        for network in preset["networks"]
    }


def _name(gpu: str, network: str) -> str:
    """The name of a preset, which leaves out the default network."""
    return gpu if network == next(iter(PRESETS[gpu]["networks"])) else f"{gpu}-{network}"


def _devices_per_node(num_devices: int, full: int) -> int:
    """Devices in each of the equal nodes, each at least half of a full node; 0 if the count does not divide so."""
    if num_devices <= full:
        return num_devices
    sizes = range(full, (full - 1) // 2, -1)
    return next((size for size in sizes if num_devices % size == 0), 0)


def _nearest(num_devices: int, full: int) -> str:
    lower = next(count for count in range(num_devices, 0, -1) if _devices_per_node(count, full))
    upper = next(count for count in range(num_devices, 2 * num_devices) if _devices_per_node(count, full))
    return f"the nearest counts that do: {lower}, {upper}"


def _preset_json(gpu: str, network: str, num_devices: int, devices_per_node: int) -> dict[str, Any]:
    preset = PRESETS[gpu]
    links = {"intra": preset["intra"], "inter": preset["networks"][network], "host_link": preset["host_link"]}
    share = devices_per_node, node_devices(gpu)
    host_bytes = parse_bytes(preset["host_memory"]["value"]) * share[0] // share[1]
    host_bytes_per_s = parse_rate(preset["host_bandwidth"]["value"]) * share[0] / share[1]
    return {
        "name": f"{num_devices}x{_name(gpu, network)}",
        "device": {"name": gpu} | {key: preset[key]["value"] for key in DEVICE_KEYS},
        "num_devices": num_devices,
        "devices_per_node": devices_per_node,
        **{key: {name: link[name] for name in LINK_KEYS} for key, link in links.items()},
        "host_memory_per_node": exact_bytes(host_bytes),
        "host_memory_bandwidth_per_node": exact_rate(host_bytes_per_s),
        "host_cores_per_node": preset["host_cores"]["value"] * share[0] // share[1],
        "sources": {
            **{f"device.{key}": preset[key]["source"] for key in DEVICE_KEYS},
            **{key: link["source"] for key, link in links.items()},
            "host_memory_per_node": preset["host_memory"]["source"],
            "host_memory_bandwidth_per_node": preset["host_bandwidth"]["source"],
            "host_cores_per_node": preset["host_cores"]["source"],
        },
    }
