"""Devices that programs can be compiled for in this process, which sets the compiler's environment before it imports JAX."""

from collections.abc import Sequence
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.xla import compiler
from autoshard.cost_model.xla.gpu_targets import target_config


def compile_only_devices(cluster: Cluster) -> Sequence[Any]:
    """Compile-only devices of a cluster of a preset's GPUs, in its order."""
    compiler.check(cluster)
    return compiler.described_devices(compiler.topology(cluster), target_config(cluster.device.name))
