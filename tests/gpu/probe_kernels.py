"""Compiles the probes of calibration for H100s that are not there, and prints the kernels of their loops, as JSON.

Run by `test_probes` as `python -m tests.gpu.probe_kernels`, in a process of its own, as `compiled` is.
"""

import json
import re
from collections import Counter

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.cost_model.calibration.machine import AXES, attached_mesh
from autoshard.cost_model.calibration.measure import looped, program_of
from autoshard.cost_model.calibration.probes import (
    MIB,
    CollectiveProbe,
    LaunchProbe,
    Probe,
    ProductProbe,
    StreamProbe,
)
from autoshard.cost_model.hardware import parse_cluster
from tests.gpu.compile_only import compile_only_devices

PROBES = {
    "launch": LaunchProbe(),
    "scale": StreamProbe("scale", MIB),
    "sum": StreamProbe("sum", MIB),
    "product": ProductProbe("bfloat16", 1024, 64, 1024, batch=8),
    "all-reduce": CollectiveProbe("all-reduce", (1,), 4 * MIB),
    "all-gather": CollectiveProbe("all-gather", (1,), 4 * MIB),
}

KERNEL = re.compile(
    r" (fusion|fusion-start|custom-call|copy|dynamic-update-slice|all-reduce|all-gather)(?:-start)?\("
)


def kernels(probe: Probe, devices: list) -> Counter:
    """Kernels in the body of the probe's loop, by kind."""
    mesh = attached_mesh(devices)
    program = program_of(probe, mesh)
    everywhere = NamedSharding(mesh, P(AXES))
    args = [
        jax.ShapeDtypeStruct((mesh.size * x.shape[0], *x.shape[1:]), x.dtype, sharding=everywhere)
        for x in program.operands
    ]
    lowered = looped(program, 40, mesh).trace(*args).lower(lowering_platforms=("cuda",))
    text = lowered.compile().as_text()
    body = re.search(r"body=%?([\w.]+)", text)
    assert body is not None
    lines = text.split(f"\n%{body[1]} (", 1)[1].split("\n}", 1)[0]
    return Counter(found[1].removesuffix("-start") for found in KERNEL.finditer(lines))


if __name__ == "__main__":
    h100s = list(compile_only_devices(parse_cluster("4xH100-80GB")))
    print(json.dumps({name: kernels(probe, h100s) for name, probe in PROBES.items()}))
