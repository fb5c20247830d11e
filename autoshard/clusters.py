"""The presets, and every number of a cluster with its source: the output of `autoshard clusters`."""

from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.cluster_file import number_paths, source_of
from autoshard.cost_model.hardware import parse_cluster, parse_hardware
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.presets import PRESETS, SHORT_NAMES, node_devices
from autoshard.cost_model.units import format_bytes, format_flops, format_rate
from autoshard.search.plan.text_table import aligned, fitted


def presets() -> dict[str, Cluster]:
    """A full node of each preset, by name."""
    return {name: parse_cluster(f"{node_devices(name)}x{name}") for name in PRESETS}


def preset_table() -> str:
    """One line per preset, with the vendors' peak numbers."""
    head = ("preset", "memory", "bandwidth", "bfloat16 peak", "link in a node", "networks, per device")
    rows = [_row(name, cluster) for name, cluster in presets().items()]
    note = "Use one as COUNTxPRESET or COUNTxPRESET-NETWORK: 64xH100-80GB, 16xA100-80GB-Ethernet."
    return fitted("\n".join([*aligned([head, *rows], indent=0, right=(1, 2, 3, 4)), note]))


def named(text: str) -> AnyCluster:
    """The cluster that a command line names; a preset's name alone means a full node of it."""
    names = {name: name for name in PRESETS} | SHORT_NAMES
    bare = {name.lower(): preset for name, preset in names.items()}.get(text.lower())
    return parse_hardware(f"{node_devices(bare)}x{bare}" if bare else text)


def description(cluster: AnyCluster) -> str:
    """Every number of a cluster with its source; a cluster with several kinds of node is listed group by group."""
    parts = [*cluster.groups, cluster] if len(cluster.groups) > 1 else [cluster]
    return fitted("\n".join(line for part in parts for line in _described(part)))


def _described(cluster: AnyCluster) -> list[str]:
    data = cluster.to_json()
    rows = [(key, str(_at(data, key)), source_of(cluster, key) or "default") for key in number_paths(data)]
    return [f"{cluster.name}: {cluster}", *aligned([("number", "value", "source"), *rows])]


def _row(name: str, cluster: Cluster) -> tuple[str, ...]:
    networks = (
        f"{network} {format_rate(parse_cluster(f'{node_devices(name)}x{name}-{network}').inter.bytes_per_s)}"
        for network in PRESETS[name]["networks"]
    )
    device = cluster.device
    return (
        name,
        format_bytes(device.memory_bytes),
        format_rate(device.memory_bytes_per_s),
        format_flops(device.peak_flops_per_s("bfloat16")),
        format_rate(cluster.intra.bytes_per_s),
        ", ".join(networks),
    )


def _at(data: dict[str, Any], path: str) -> Any:
    for key in path.split("."):
        data = data[key]
    return data
