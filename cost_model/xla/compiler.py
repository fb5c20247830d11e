"""XLA's own GPU compiler, on a machine without a GPU: the judge of what the cost model predicts.

The wheels `jax-cuda13-plugin` and `jax-cuda13-pjrt` (the extra `autoshard[verify]`), or those of CUDA 12, can
describe a GPU that is not there and compile for it: real fusions, real NCCL collectives, real buffers. They need
a process of their own:

* `JAX_PLATFORMS=cpu` must be in the environment before JAX is imported, or the plugin looks for a driver;
* so must `XLA_FLAGS` (see `ENVIRONMENT`): without a device, the autotuner has nothing to measure on.

`cost_model.xla.process` starts one. What is here runs inside it, but for the checks of what is asked.

XLA's scheduler trades memory for overlap up to a budget for temporaries of `0.95 x (0.8 x device memory -
arguments - outputs + aliased)`: a program compiled for a device that is larger than the cap tells nothing
about the cap. So `memory_bytes` can be given, and `memory_for_cap` says which. As the scheduler overshoots its budget, it is
given a little less than the cap leaves (`gpu_targets.budget_bytes`).
"""

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from jax.experimental import topologies

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.xla import _jax
from autoshard.cost_model.xla.gpu_targets import budget_bytes, target_config

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

SLOP_FACTOR = "xla_gpu_memory_limit_slop_factor"
"""XLA's option for that budget, in percent."""

PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
"""The wheels that hold the compiler's kernels, each with its `-pjrt` half, in the order in which JAX takes them."""


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
      host_bytes: what lies in host memory: arguments, results and temporaries.
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


def check(cluster: Cluster, description: str | None = None) -> None:
    """Whether the compiler is there and can be asked about a cluster.

    Args:
      cluster: what to compile for.
      description: XLA's target config in text, for a GPU that is not known here.

    Raises:
      InputError: no plugin, one that does not suit this JAX, or an unknown GPU.
    """
    _check_plugin()
    if cluster.device.name == "CPU":
        raise InputError(f"XLA's GPU compiler cannot be asked about {cluster.name}: its devices are no GPUs")
    target_config(cluster.device.name, 1, description)


def _check_plugin() -> None:
    versions = {name: version for name in PLUGINS if (version := _version(name)) is not None}
    if not versions:
        raise InputError(
            "compiling for GPUs that are not there needs NVIDIA's JAX plugin: pip install 'autoshard[verify]'"
        )
    plugin, version = next(iter(versions.items()))
    pjrt, jaxlib = plugin.replace("-plugin", "-pjrt"), _version("jaxlib") or ""
    for name, found in ((plugin, version), (pjrt, _version(pjrt))):
        if found is None or _minor(found) != _minor(jaxlib):
            raise InputError(
                f"jaxlib {jaxlib} needs {name} of the same version, and {found or 'none'} is installed: "
                f"pip install '{name}=={jaxlib}'"
            )


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def topology(cluster: Cluster) -> str:
    """Slices x hosts x GPUs per host, as the plugin wants it."""
    return f"1x{cluster.num_nodes}x{cluster.devices_per_node}"


def described_devices(topology: str, config: str) -> Sequence[Any]:
    """Devices to compile for, in the cluster's order. See the module for what the process must be like."""
    return topologies.get_topology_desc(platform="cuda", topology=topology, target_config=config).devices


def compile_only_devices(cluster: Cluster, memory_bytes: int | None = None) -> Sequence[Any]:
    """Devices to compile for, in the cluster's order. See the module for what the process must be like.

    Args:
      cluster: of GPUs that are known here.
      memory_bytes: the memory of each, as the compiler is told; by default what the GPU has.

    Raises:
      InputError: as `check`.
    """
    check(cluster)
    return described_devices(topology(cluster), target_config(cluster.device.name, memory_bytes))


def compile_for(program: Lowerable) -> Compiled:
    """Compiles a program that was built for compile-only devices."""
    executable = program.fn.trace(*program.args).lower(lowering_platforms=("cuda",)).compile()
    return read(executable)


def compile_module(module: bytes, devices: Sequence[Any], cuda_folder: str) -> Compiled:
    """Compiles a program that was lowered elsewhere: what `_jax.module_bytes` gave; CUDA's tools are those in the folder."""
    return _read(*_jax.compile_module(module, devices, cuda_folder))


def read(executable: Any) -> Compiled:
    """What XLA says of a program that it compiled: a `jax.stages.Compiled`."""
    return _read(executable.as_text(), executable.memory_analysis())


def _read(text: str, memory: Any) -> Compiled:
    m = memory
    return Compiled(
        text=text,
        argument_bytes=m.argument_size_in_bytes,
        output_bytes=m.output_size_in_bytes,
        alias_bytes=m.alias_size_in_bytes,
        temporary_bytes=m.temp_size_in_bytes,
        host_bytes=m.host_argument_size_in_bytes
        + m.host_output_size_in_bytes
        - m.host_alias_size_in_bytes
        + m.host_temp_size_in_bytes,
    )


def options_for_cap(cap_bytes: int, resting_bytes: int, device_bytes: int) -> dict[str, str]:
    """The compiler's options with which its scheduler aims at a cap, on a device that has more.

    Args:
      cap_bytes: what the program may use.
      resting_bytes: its arguments and outputs, aliased ones once.
      device_bytes: what the device has.

    Example:
      >>> options_for_cap(8_000_000_000, 2_000_000_000, 80_000_000_000)
      {'xla_gpu_memory_limit_slop_factor': '8'}
    """
    room_bytes = MEMORY_SHARE * device_bytes - resting_bytes
    percent = int(100 * budget_bytes(cap_bytes, resting_bytes) / room_bytes) if room_bytes > 0 else 100
    return {SLOP_FACTOR: str(max(percent, 1))} if percent < 100 * BUDGET_SHARE else {}


def memory_for_cap(cap_bytes: int, resting_bytes: int) -> int:
    """The device memory with which XLA's scheduler aims at a cap.

    Args:
      cap_bytes: what the program may use.
      resting_bytes: its arguments and outputs, aliased ones once.

    Example:
      >>> memory_for_cap(8_000_000_000, 2_000_000_000)
      9605263157
    """
    return int((budget_bytes(cap_bytes, resting_bytes) / BUDGET_SHARE + resting_bytes) / MEMORY_SHARE)
