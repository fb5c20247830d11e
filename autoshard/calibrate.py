"""A cluster file from measurements of the attached devices: the command `autoshard calibrate`."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autoshard.cost_model.attached import cluster_name
from autoshard.cost_model.calibration.fit import NOT_MEASURED, Fit, calibrated, sourced
from autoshard.cost_model.calibration.machine import attached_mesh, described
from autoshard.cost_model.calibration.measure import FULL, QUICK, measure_all
from autoshard.cost_model.calibration.probes import ladder
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import ClusterError, InputError, first_line
from autoshard.cost_model.hardware import parse_cluster
from autoshard.cost_model.units import format_flops, format_rate, format_seconds
from autoshard.cost_model.whole_file import write_whole
from autoshard.search.plan.text_table import Row, aligned, fitted

_UNKNOWN = "1xL4"
"""The preset for devices that no preset describes. Source: the GPU preset with the least memory bandwidth."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The attached devices as a cluster, and the cost model's errors against the measurements.

    Attributes:
      cluster: the cluster; numbers that were not measured are those of the nearest preset.
      fits: the measured numbers, with their errors.
      seconds: duration of the calibration.
    """

    cluster: Cluster
    fits: tuple[Fit, ...]
    seconds: float

    def __str__(self) -> str:
        head = ("measured", "preset", "sustained", "residual: median", "worst", "sizes")
        rows: list[Row] = [head]
        for fit in self.fits:
            errors = f"{100 * fit.median_error:.1f}%", f"{100 * max(fit.errors):.1f}%", str(len(fit.errors))
            for i, (key, before, after) in enumerate(zip(fit.keys, fit.before, fit.after, strict=True)):
                rows.append(
                    (key, _format(key, before), _format(key, after), *(errors if i == 0 else ("",) * 3))
                )
        missing = [key for key, source in self.cluster.sources if source.startswith(NOT_MEASURED)]
        name = f"{self.cluster.name}: {self.cluster.num_devices} x {self.cluster.device.name}"
        lines = [f"{name}, in {format_seconds(self.seconds)}", *aligned(rows, right=(1, 2, 3, 4, 5))]
        return fitted("\n".join([*lines, f"from the nearest preset: {', '.join(missing)}"]))

    def save(self, path: Path) -> None:
        """Writes the cluster file atomically.

        Raises:
          InputError: the file cannot be written.
        """
        write_whole(path, json.dumps(self.cluster.to_json(), indent=1) + "\n", "the cluster file")


def calibrate(
    name: str,
    quick: bool = False,
    num_devices: int | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Measures the attached devices and fits the cost model to them.

    Every process of a distributed job must call it; all return an equal result.

    Args:
      name: the cluster's name.
      quick: measures fewer and smaller sizes.
      num_devices: measures this many of the first devices; by default all.
      progress: called with one line per measurement.

    Raises:
      InputError: there are fewer devices, or JAX finds none.
    """
    start = time.perf_counter()
    devices = _devices(num_devices)
    mesh = attached_mesh(devices)
    preset = parse_cluster(_UNKNOWN)
    with contextlib.suppress(ClusterError):
        preset = parse_cluster(cluster_name(devices[:1]))
    form, facts = described(mesh, preset, name)
    timings = measure_all(ladder(form, quick), form, mesh, QUICK if quick else FULL, progress)
    cluster, fits = calibrated(form, timings)
    today = time.strftime("%Y-%m-%d")
    kind = devices[0].device_kind
    cluster = sourced(
        cluster, preset, fits, facts, f"{len(devices)} x {kind}, {today}, JAX {jax.__version__}"
    )
    return Calibration(cluster, fits, time.perf_counter() - start)


def _devices(num_devices: int | None) -> Sequence[Any]:
    try:
        attached = jax.devices()
    except (
        RuntimeError,
        AssertionError,
    ) as error:  # the latter for a plugin without its driver
        raise InputError(f"JAX finds no devices to measure: {first_line(error)}") from None
    if num_devices is None:
        return attached
    if not 1 <= num_devices <= len(attached):
        raise InputError(f"wanted between 1 and {len(attached)} devices, as JAX sees here, got {num_devices}")
    return attached[:num_devices]


def _format(key: str, value: float) -> str:
    if key.startswith("device.flops"):
        return format_flops(value)
    return format_seconds(value) if key.endswith(("latency", "launch")) else format_rate(value)
