"""Reads the kernels of a `*.trace.json.gz`, which has the planes of the `*.xplane.pb` as processes and its lines as threads.

The JSON ends after a million events. So it is read only where the other file is missing.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoshard.cost_model.errors import InputError, first_line
from autoshard.traces.kernel import HOST_PLANE, IS_GPU, STREAM, TracedKernel, is_container

MICROSECONDS = 1e-6
ENDING = ".trace.json.gz"


def kernels(path: Path) -> list[TracedKernel]:
    """The kernels on all devices: on GPUs' streams, or on the threads that simulate devices.

    Raises:
      InputError: the file is no trace.
    """
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as e:
        raise InputError(f"{path} cannot be read as a trace: {first_line(e)}") from None
    planes = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    lines = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    complete = [e for e in events if e.get("ph") == "X"]
    host = path.name.removesuffix(ENDING)
    return [*_on_gpus(host, complete, planes, lines)] or [*_simulated(host, complete, planes)]


def _on_gpus(
    host: str, events: list[dict[str, Any]], planes: Mapping[int, str], lines: Mapping[tuple[int, int], str]
) -> Iterator[TracedKernel]:
    for event in events:
        plane, line = planes.get(event["pid"], ""), lines.get((event["pid"], event["tid"]), "")
        if plane.startswith(IS_GPU) and line.startswith(STREAM):
            yield _kernel(f"{host}{plane}", event)


def _simulated(host: str, events: list[dict[str, Any]], planes: Mapping[int, str]) -> Iterator[TracedKernel]:
    for event in events:
        args = event.get("args", {})
        is_on_host = planes.get(event["pid"]) == HOST_PLANE
        if is_on_host and {"hlo_op", "device_ordinal"} <= {*args} and not is_container(args["hlo_op"]):
            yield _kernel(f"{host}/device:CPU:{args['device_ordinal']}", event)


def _kernel(device: str, event: Mapping[str, Any]) -> TracedKernel:
    args, start_s = event.get("args", {}), event["ts"] * MICROSECONDS
    end_s = start_s + event.get("dur", 0.0) * MICROSECONDS
    return TracedKernel(
        device, event["name"], start_s, end_s, args.get("hlo_op", ""), args.get("hlo_module", "")
    )
