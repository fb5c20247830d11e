"""XLA's own GPU compiler, on a machine without a GPU: the judge of what the cost model predicts.

The wheels `jax-cuda13-plugin` and `jax-cuda13-pjrt` (the extra `autoshard[verify]`) can describe a GPU that
is not there and compile for it: real fusions, real NCCL collectives, real buffers. They need a process of
their own:

* `JAX_PLATFORMS=cpu` must be in the environment before JAX is imported, or the plugin looks for a driver;
* so must `XLA_FLAGS` (see `ENVIRONMENT`): without a device, the autotuner has nothing to measure on.

XLA's scheduler trades memory for overlap up to a budget for temporaries of `0.95 x (0.8 x device memory -
arguments - outputs + aliased)`: a program compiled for a device that is larger than the cap tells nothing
about the cap. So `memory_bytes` can be given, and `memory_for_cap` says which.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from jax.experimental import topologies

from autoshard.errors import InputError
from cost_model.cluster import Cluster

ENVIRONMENT = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false",
    }
)
"""What must be in the environment before JAX is imported."""

MEMORY_SHARE = 0.8
"""Of the device's memory, what XLA's scheduler plans with. Source: measured;
`xla_gpu_memory_limit_slop_factor` is 95."""

BUDGET_SHARE = 0.95
"""Of what then is left beside arguments and outputs, the budget for temporaries. Source: as above, to the
byte."""

_HOPPER = {
    "shared_memory_per_core": "233472",
    "core_count": "132",
    "fpus_per_core": "128",
    "l2_cache_size": "52428800",
    "clock_rate_ghz": "1.98",
    "shared_memory_per_block_optin": "232448",
}

_TARGETS = MappingProxyType(
    {
        "A100-40GB": ("A100", 42949672960, "1555200000000"),
        "A100-80GB": ("A100", 85100068864, "2039040000000"),
        "H100-80GB": ("H100", 84929347584, "3352320000000"),
        "H200": ("H100", 151397597184, "4800000000000"),
        "B200": ("B200", 191514411008, "7672320000000"),
    }
)
"""By device name: chip, memory in bytes, memory bandwidth in bytes/s. Source: XLA, `target_config/specs`."""

_CHIPS = MappingProxyType(
    {
        "A100": {
            **_HOPPER,
            "shared_memory_per_core": "167936",
            "core_count": "108",
            "fpus_per_core": "64",
            "l2_cache_size": "41943040",
            "clock_rate_ghz": "1.41",
            "shared_memory_per_block_optin": "166912",
            "cuda_compute_capability": "{ major: 8 }",
        },
        "H100": {**_HOPPER, "cuda_compute_capability": "{ major: 9 }"},
        "B200": {
            **_HOPPER,
            "core_count": "148",
            "l2_cache_size": "132644864",
            "clock_rate_ghz": "1.965",
            "cuda_compute_capability": "{ major: 10 }",
        },
    }
)
"""What XLA knows of a chip. Source: as above."""

_EVERY_CHIP = MappingProxyType(
    {
        "threads_per_block_limit": "1024",
        "threads_per_warp": "32",
        "shared_memory_per_block": "49152",
        "threads_per_core_limit": "2048",
        "block_dim_limit_x": "2147483647",
        "block_dim_limit_y": "65535",
        "block_dim_limit_z": "65535",
        "registers_per_core_limit": "65536",
        "registers_per_block_limit": "65536",
    }
)


class Lowerable(Protocol):
    """What the oracle compiles: an `executors.Program`, or anything with a jitted function and its arguments."""

    @property
    def fn(self) -> Any: ...

    @property
    def args(self) -> tuple[Any, ...]: ...


@dataclass(frozen=True, slots=True)
class Compiled:
    """What XLA made of a program.

    Attributes:
      text: its optimised HLO.
      argument_bytes: per device, as are all others.
      output_bytes: results, aliased ones included.
      alias_bytes: results that take over an argument's buffer.
      temporary_bytes: everything else, at its highest.
      host_bytes: temporaries in host memory.
    """

    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Device memory at its highest."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def compile_only_devices(cluster: Cluster, memory_bytes: int | None = None) -> Sequence[Any]:
    """Devices to compile for, in the cluster's order. See the module for what the process must be like.

    Args:
      cluster: of A100, H100, H200 or B200.
      memory_bytes: the memory of each, as the compiler is told; by default what the GPU has.

    Raises:
      InputError: the plugin is not installed, or the GPU is unknown.
    """
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise InputError(
            "compiling for GPUs that are not there needs NVIDIA's JAX plugin: pip install 'autoshard[verify]'"
        )
    topology = f"1x{cluster.num_nodes}x{cluster.devices_per_node}"
    config = target_config(cluster.device.name, memory_bytes)
    return topologies.get_topology_desc(platform="cuda", topology=topology, target_config=config).devices


def compile_for(program: Lowerable) -> Compiled:
    """Compiles a program that was built for compile-only devices."""
    compiled = program.fn.trace(*program.args).lower(lowering_platforms=("cuda",)).compile()
    memory = compiled.memory_analysis()
    return Compiled(
        text=compiled.as_text(),
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        host_bytes=memory.host_temp_size_in_bytes,
    )


def memory_for_cap(cap_bytes: int, resting_bytes: int) -> int:
    """The device memory with which XLA's scheduler aims at a cap.

    Args:
      cap_bytes: what the program may use.
      resting_bytes: its arguments and outputs, aliased ones once.

    Example:
      >>> memory_for_cap(8_000_000_000, 2_000_000_000)
      10394736842
    """
    return int(((cap_bytes - resting_bytes) / BUDGET_SHARE + resting_bytes) / MEMORY_SHARE)


def target_config(gpu: str, memory_bytes: int | None = None) -> str:
    """XLA's description of a GPU, a `GpuTargetConfigProto` as text.

    Raises:
      InputError: the GPU is not among those described here.
    """
    if gpu not in _TARGETS:
        raise InputError(f"the compiler can be asked about {', '.join(_TARGETS)}, not about {gpu!r}")
    chip, own_bytes, bandwidth = _TARGETS[gpu]
    fields = {
        **_EVERY_CHIP,
        **_CHIPS[chip],
        "memory_bandwidth": bandwidth,
        "device_memory_size": str(own_bytes if memory_bytes is None else memory_bytes),
    }
    dnn = "{ major: 8 minor: 9 patch: 4 }" if chip == "A100" else "{ major: 9 minor: 7 }"
    info = " ".join(f"{k} {v}" if v.startswith("{") else f"{k}: {v}" for k, v in fields.items())
    return (
        f'gpu_device_info {{ {info} }} platform_name: "CUDA" dnn_version_info {dnn} '
        f'runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{gpu}"'
    )
