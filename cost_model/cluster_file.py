"""Clusters from JSON files in the form of a cluster's `to_json`, with a source for every number.

A cost model is only as good as its figures, so a file must name the source of each: `"sources"` maps the
path of a number (`"device.memory"`), or of an object around it (`"device"`), to text. Numbers that a file leaves
out have the defaults of `cluster`. In a mixed cluster each group has its own sources.
"""

import json
from pathlib import Path
from typing import Any

from autoshard.cost_model.errors import ClusterError, closest
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster, from_json

_PLAIN_KEYS = frozenset({"name", "num_devices", "devices_per_node", "sources", "groups"})
"""Keys that need no source, or whose values have their own sources."""


def read_cluster(path: Path) -> AnyCluster:
    """The cluster that a JSON file describes.

    Raises:
      ClusterError: the file cannot be read, is not JSON, or describes no cluster; names the file and the key.
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
        for n, (group, written) in enumerate(zip(cluster.groups, data["groups"], strict=True)):
            _check_sources(group, number_paths(written), f"{path}: groups.{n}")
    return cluster


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a cluster file."""
    from autoshard.cost_model.cluster_schema import described  # it takes a while to import

    return described(AnyCluster)


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
    """The paths of all numbers that need a source: those that were measured or looked up, not names or device counts."""
    paths = []
    for key, value in data.items():
        if isinstance(value, dict) and key != "sources":
            paths += number_paths(value, f"{above}{key}.")
        elif key not in _PLAIN_KEYS:
            paths.append(f"{above}{key}")
    return paths


def source_of(cluster: AnyCluster, path: str) -> str:
    """The source of the number at a path of the cluster's file; empty if there is none."""
    sources = dict(cluster.sources)
    return next((sources[above] for above in reversed(_and_above(path)) if above in sources), "")


def _and_above(path: str) -> list[str]:
    """`"a.b.c"` gives `["a", "a.b", "a.b.c"]`."""
    parts = path.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
