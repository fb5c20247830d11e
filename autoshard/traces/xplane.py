"""Reads the kernels of an `*.xplane.pb`, by JAX's own reader."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.profiler

from autoshard.cost_model.errors import InputError, first_line
from autoshard.traces.kernel import HOST_PLANE, IS_GPU, STREAM, TracedKernel, is_container

NANOSECONDS = 1e-9


def kernels(path: Path) -> list[TracedKernel]:
    """The kernels on all devices: on GPUs' streams, or on the threads that simulate devices.

    Raises:
      InputError: the file is no profile.
    """
    try:
        profile = jax.profiler.ProfileData.from_file(str(path))
    except (OSError, RuntimeError, ValueError) as e:
        raise InputError(f"{path} cannot be read as a profile: {first_line(e)}") from None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "builtin type event_stats", DeprecationWarning)  # JAX's own
        planes = {plane.name: plane for plane in profile.planes}
        found = [k for name, plane in planes.items() if name.startswith(IS_GPU) for k in _on_gpu(path, plane)]
        return found or [
            k for name, plane in planes.items() if name == HOST_PLANE for k in _simulated(path, plane)
        ]


def _on_gpu(path: Path, plane: Any) -> Iterator[TracedKernel]:
    for line in plane.lines:
        if line.name.startswith(STREAM):
            yield from (
                _kernel(f"{_host(path)}{plane.name}", event, dict(event.stats)) for event in line.events
            )


def _simulated(path: Path, plane: Any) -> Iterator[TracedKernel]:
    for line in plane.lines:
        for event in line.events:
            stats = dict(event.stats)
            if "hlo_op" in stats and "device_ordinal" in stats and not is_container(str(stats["hlo_op"])):
                yield _kernel(f"{_host(path)}/device:CPU:{stats['device_ordinal']}", event, stats)


def _kernel(device: str, event: Any, stats: dict[str, Any]) -> TracedKernel:
    start_s = event.start_ns * NANOSECONDS
    end_s = start_s + event.duration_ns * NANOSECONDS
    hlo_op, module = str(stats.get("hlo_op", "")), str(stats.get("hlo_module", ""))
    return TracedKernel(device, event.name, start_s, end_s, hlo_op, module)


def _host(path: Path) -> str:
    return path.name.removesuffix(".xplane.pb")
