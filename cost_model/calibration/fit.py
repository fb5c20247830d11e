"""From measured times to a cluster: fits the numbers with which the cost model predicts the measured times.

A *fit* finds a few numbers of a `Cluster`, such as the bandwidth and latency of a link, from the probes of one
group. The numbers minimise the sum of squares of ln(predicted / measured), the relative error. The cost model itself
predicts (`Probe.model_s`), so the numbers also absorb the effects that it leaves out. The fits run one after the
other, each with the earlier fits' numbers in place:

    launch -> memory bandwidth -> vector speed -> speed per dtype -> intra link, inter link, host link

The model is piecewise (a product is bound by arithmetic, by memory or by its launch), so small changes of a number
that is far off may change nothing. Each number is therefore first tried at many scales, a thousandth to a
thousandfold. Then compass search refines all numbers of the fit together (Hooke & Jeeves, "Direct search solution
of numerical and statistical problems", JACM 8(2), 1961): it tries each number a factor up and down, keeps the best
step, and takes the square root of the factor if no step is better.

Measured rates are sustained rates, so their shares in the cluster become 1. A number without measurements comes
from the nearest preset, times its share, and its source says so.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cost_model.calibration.probes import Timing
from autoshard.cost_model.cluster import VECTOR, Cluster
from autoshard.cost_model.cluster_file import number_paths, source_of

_SCALES = tuple(10 ** (tenth / 10) for tenth in sorted(range(-30, 31), key=abs))
"""Scales at which a number is tried, nearest to 1 first. Source: presets of simulated devices on two slow cores are off
by a hundred."""

_FIRST_FACTOR, _LAST_FACTOR = 1.25, 1.001
"""Factors of the compass search: first a step of `_SCALES`, last a change below the accuracy of any measurement."""

_LEAST_GAIN = 1e-6
"""Least share of the loss that a step must gain: in narrow valleys the search would take thousands of steps."""

_LEAST_S = 1e-9
"""The least time that is fitted: the resolution of a clock."""

_DIGITS = 4
"""Significant digits of a fitted number; a measurement has fewer."""

NOT_MEASURED = "not measured"
"""The beginning of the source of a preset's number in a calibrated file."""

Path = tuple[str, ...]
"""The attributes from the cluster down to a number; in a table of pairs, the key."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Numbers of the cluster, found from the times of one group of probes.

    Attributes:
      group: the probes' group.
      keys: the numbers' keys in a cluster file, such as "intra.bandwidth".
      before: the numbers of the preset, its shares applied.
      after: the fitted numbers.
      errors: |predicted / measured - 1| of each probe, with the fitted numbers.
    """

    group: str
    keys: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    errors: tuple[float, ...]

    @property
    def median_error(self) -> float:
        return statistics.median(self.errors)

    def __str__(self) -> str:
        return (
            f"fit residual median {100 * self.median_error:.1f}%, worst {100 * max(self.errors):.1f}% "
            f"over {len(self.errors)} sizes"
        )


def calibrated(preset: Cluster, timings: Sequence[Timing]) -> tuple[Cluster, tuple[Fit, ...]]:
    """The preset with every number fitted that has measured times, and the fits in their order.

    The cluster keeps the preset's sources: see `sourced`.
    """
    groups: dict[str, list[Timing]] = {}
    for timing in timings:
        groups.setdefault(timing.probe.group, []).append(timing)
    cluster = _sustained(preset, [name for name in _LINKS if name in groups])
    fits = []
    for group in sorted(groups, key=_turn):
        paths = _paths(group)
        cluster = _with_speed(cluster, group) if paths[0][-1] == group else cluster
        before = tuple(_number(cluster, path) for path in paths)
        cluster = fitted(cluster, groups[group], paths)
        after = tuple(_number(cluster, path) for path in paths)
        errors = tuple(abs(t.probe.model_s(cluster) / t.seconds - 1) for t in groups[group])
        fits.append(Fit(group, tuple(_file_key(path) for path in paths), before, after, errors))
    return cluster, tuple(fits)


def fitted(cluster: Cluster, timings: Sequence[Timing], paths: Sequence[Path]) -> Cluster:
    """The cluster with the numbers at `paths` fitted to the times."""

    def loss(candidate: Cluster) -> float:
        return sum(math.log(t.probe.model_s(candidate) / t.seconds) ** 2 for t in timings)

    for path in paths:
        cluster = min((_scaled(cluster, path, scale) for scale in _SCALES), key=loss)
    factor, lowest = _FIRST_FACTOR, loss(cluster)
    while factor > _LAST_FACTOR:
        steps = [_scaled(cluster, path, scale) for path in paths for scale in (factor, 1 / factor)]
        losses = [loss(candidate) for candidate in steps]
        if min(losses) < lowest * (1 - _LEAST_GAIN):
            lowest = min(losses)
            cluster = steps[losses.index(lowest)]
        else:
            factor = math.sqrt(factor)
    return _rounded(cluster, paths)


def sourced(
    cluster: Cluster, preset: Cluster, fits: Sequence[Fit], facts: Mapping[str, str], measured_on: str
) -> Cluster:
    """The calibrated cluster with a source for each of its numbers.

    Args:
      cluster: the result of `calibrated`.
      preset: the preset that the calibration started from.
      fits: the fits of the measured numbers.
      facts: the sources of the numbers that the machine reported, by key in the file.
      measured_on: devices, date, versions.
    """
    told = dict(facts)
    told |= {key: f"measured on {measured_on}: {fit}" for fit in fits for key in fit.keys}
    measured_links = {key.split(".")[0] for key in told}
    told |= {f"device.{share}": _WHOLE for share in _SHARES}
    told |= {f"{link}.efficiency": _WHOLE for link in _LINKS if link in measured_links}
    sources = {}
    for key in number_paths(cluster.to_json()):
        share = "sustained share of " if key.startswith("device.flops.") else ""
        unmeasured = f"{NOT_MEASURED}: {share}preset {preset.device.name}: {source_of(preset, key)}"
        sources[key] = told.get(key, unmeasured)
    return replace(cluster, sources=tuple(sources.items()))


# --- numbers of a cluster, by path

_DEVICE_PATHS: Mapping[str, Path] = {
    "launch": ("device", "launch_s"),
    "memory": ("device", "memory_bytes_per_s"),
    "vector": ("device", "flops_per_s", VECTOR),
}

_LINKS = ("intra", "inter", "host_link")

_SHARES = ("matmul_efficiency", "vector_efficiency", "memory_efficiency")
_WHOLE = "1, as the rates are what programs sustain"

_FILE_KEYS = {
    "launch_s": "launch",
    "memory_bytes_per_s": "memory_bandwidth",
    "flops_per_s": "flops",
    "bytes_per_s": "bandwidth",
    "latency_s": "latency",
}


def _turn(group: str) -> int:
    """The position of a group among the fits: dtypes after the rest of the device, links last."""
    order = (*_DEVICE_PATHS, "dtypes", *_LINKS)
    return order.index(group if group in order else "dtypes")


def _paths(group: str) -> tuple[Path, ...]:
    """The numbers that a group of probes fits."""
    if group in _LINKS:
        return (group, "bytes_per_s"), (group, "latency_s")
    return (_DEVICE_PATHS.get(group, ("device", "flops_per_s", group)),)


def _file_key(path: Path) -> str:
    return ".".join(_FILE_KEYS.get(name, name) for name in path)


def _number(cluster: Cluster, path: Path) -> float:
    value: Any = cluster
    for name in path:
        value = dict(value)[name] if isinstance(value, tuple) else getattr(value, name)
    return value


def _changed(record: Any, path: Path, change: Callable[[float], float]) -> Any:
    """The record with the number at `path` changed."""
    if not path:
        return change(record)
    name, rest = path[0], path[1:]
    if isinstance(record, tuple):
        return tuple((key, change(value) if key == name else value) for key, value in record)
    return replace(record, **{name: _changed(getattr(record, name), rest, change)})


def _scaled(cluster: Cluster, path: Path, scale: float) -> Cluster:
    least = _LEAST_S if path[-1].endswith(("launch_s", "latency_s")) else 0.0
    return _changed(cluster, path, lambda value: max(value * scale, least))


def _rounded(cluster: Cluster, paths: Sequence[Path]) -> Cluster:
    for path in paths:
        cluster = _changed(cluster, path, lambda value: float(f"{value:.{_DIGITS}g}"))
    return cluster


def _sustained(preset: Cluster, links: Sequence[str]) -> Cluster:
    """The preset at its sustained rates: the shares of the device and of `links` are 1, their rates reduced accordingly."""
    device = preset.device
    shares = {VECTOR: device.vector_efficiency}
    speeds = ((k, v * shares.get(k, device.matmul_efficiency)) for k, v in device.flops_per_s)
    device = replace(
        device,
        flops_per_s=tuple(speeds),
        memory_bytes_per_s=device.memory_bytes_per_s * device.memory_efficiency,
        **dict.fromkeys(_SHARES, 1.0),
    )
    changed = {name: getattr(preset, name) for name in links}
    return replace(
        preset,
        device=device,
        **{k: replace(v, bytes_per_s=v.sustained_bytes_per_s, efficiency=1.0) for k, v in changed.items()},
    )


def _with_speed(cluster: Cluster, dtype: str) -> Cluster:
    """The cluster with an entry for this dtype, at the speed of its stand-in if the preset has none."""
    device = cluster.device
    speeds = {dtype: device.peak_flops_per_s(dtype)} | dict(device.flops_per_s)
    return replace(cluster, device=replace(device, flops_per_s=tuple(speeds.items())))
