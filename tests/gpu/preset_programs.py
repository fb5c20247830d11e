"""Compiles one small program for a full node of each preset, and prints the collectives and the peak of each, as JSON.

Run by `test_presets` as `python -m tests.gpu.preset_programs PRESET...`, in one process for all presets.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.clusters import named
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.xla import compiler, process
from autoshard.cost_model.xla._jax import module_bytes
from tests.gpu.compile_only import compile_only_devices

ROWS, WIDTH = 8, 256
"""Rows per device, and the width, of the product."""


def compiled(cluster: Cluster, cuda_folder: str) -> compiler.Compiled:
    """A product of rows that are split over all devices, summed over the rows."""
    devices = compile_only_devices(cluster)
    mesh = Mesh(np.array(devices), ("data",))

    def shape(spec: P, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    rows, weights = shape(P("data"), ROWS * len(devices), WIDTH), shape(P(), WIDTH, WIDTH)
    program = jax.jit(lambda x, w: (x @ w).sum(0), out_shardings=NamedSharding(mesh, P()))
    lowered = program.trace(rows, weights).lower(lowering_platforms=("cuda",))
    return compiler.compile_module(module_bytes(lowered), devices, cuda_folder)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        process._write_stand_ins(Path(folder))
        found = {name: compiled(named(name), folder) for name in sys.argv[1:]}
    print(
        json.dumps(
            {
                name: (
                    re.findall(r"= \S+ (all-reduce|all-gather|reduce-scatter)(?:-start)?\(", one.text),
                    one.peak_bytes,
                )
                for name, one in found.items()
            }
        )
    )
