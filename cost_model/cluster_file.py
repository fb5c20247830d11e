"""Clusters from JSON files: what `to_json` of a cluster writes, with a source for every number.

A cost model is only as good as its figures, so a file must say where each comes from: `"sources"` maps the
path of a number (`"device.memory"`), or of an object around it (`"device"`), to text. Numbers that a file leaves
out have the defaults of `cluster`. Of several kinds of node, each group has its own sources.
"""

import json
from pathlib import Path
from typing import Any

from autoshard.cost_model.errors import ClusterError, closest
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster, from_json

_PLAIN_KEYS = frozenset({"name", "num_devices", "devices_per_node", "sources", "groups"})
"""What needs no source, or has its own."""


def read_cluster(path: Path) -> AnyCluster:
    """The cluster that a JSON file describes.

    Raises:
      ClusterError: the file cannot be read, is not JSON, or does not make sense; with its name and the key.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repeats)
    except OSError as error:
        raise ClusterError(f"cannot read the cluster file {str(path)!r}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ClusterError(f"the cluster file {str(path)!r} is not valid JSON: {error}") from None
    cluster = from_json(data, str(path))
    _check_sources(cluster, number_paths(data), str(path))
    if isinstance(cluster, MixedCluster):
        for n, (group, said) in enumerate(zip(cluster.groups, data["groups"], strict=True)):
            _check_sources(group, number_paths(said), f"{path}: groups.{n}")
    return cluster


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {repeated!r} stands twice in one object")
    return values


def _check_sources(cluster: AnyCluster, numbers: list[str], place: str) -> None:
    paths = {path: None for number in numbers for path in _and_above(number)}
    for path, source in cluster.sources:
        if path not in paths:
            raise ClusterError(
                f"{place}: sources: {path!r} is no number of the file{closest(path, tuple(paths))}"
            )
        if not source.strip():
            raise ClusterError(f"{place}: sources: {path!r} is empty; say where the number comes from")
    sourced = dict(cluster.sources)
    bare = [number for number in numbers if not any(path in sourced for path in _and_above(number))]
    if bare:
        raise ClusterError(f"{place}: sources: wanted one for each number, missing: {', '.join(bare)}")


def number_paths(data: dict[str, Any], above: str = "") -> list[str]:
    """Paths of what was measured or looked up: all but names and the counts of devices."""
    paths = []
    for key, value in data.items():
        if isinstance(value, dict) and key != "sources":
            paths += number_paths(value, f"{above}{key}.")
        elif key not in _PLAIN_KEYS:
            paths.append(f"{above}{key}")
    return paths


def source_of(cluster: AnyCluster, path: str) -> str:
    """Where the number at a path of the cluster's file comes from; nothing where that is not said."""
    sources = dict(cluster.sources)
    return next((sources[above] for above in reversed(_and_above(path)) if above in sources), "")


def _and_above(path: str) -> list[str]:
    """`"a.b.c"` gives `["a", "a.b", "a.b.c"]`."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
