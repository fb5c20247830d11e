"""XLA's own GPU compiler, on a machine without a GPU: it checks the cost model's predictions.

The wheels `jax-cuda13-plugin` and `jax-cuda13-pjrt`, or those of CUDA 12 (`cost_model.xla.plugin` has them), can describe an
absent GPU and compile for it: real fusions, real NCCL collectives, real buffers. They need a process of their own:

* `JAX_PLATFORMS=cpu` must be in the environment before JAX is imported, or the plugin looks for a driver;
* so must `XLA_FLAGS` (see `ENVIRONMENT`): without a device, the autotuner has nothing to measure on.

`cost_model.xla.process` starts this process. The functions here run inside it, except the checks of the request and the
conversion of caps.

XLA's scheduler trades memory for overlap up to a budget for temporaries of `0.95 x (0.8 x device memory -
arguments - outputs + aliased)`. A program compiled for a device larger than the cap therefore says nothing about
the cap. So `memory_bytes` can be given, and `memory_for_cap` computes it. As the scheduler overshoots its budget, the
budget is a little less than the cap leaves (`gpu_targets.budget_bytes`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jax.experimental import topologies

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InputError
from autoshard.cost_model.xla import _jax
from autoshard.cost_model.xla.gpu_targets import budget_bytes, compute_capability, target_config

ENVIRONMENT = MappingProxyType(
    {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false "
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
)
"""Environment variables that must be set before JAX is imported. LLVM optimises no kernel: kernels never run, and XLA has
decided all fusions, buffers and collectives before."""

MEMORY_SHARE = 0.8
"""Share of the device's memory that XLA's scheduler plans with. Source: measured;
`xla_gpu_memory_limit_slop_factor` is 95."""

BUDGET_SHARE = 0.95
"""Budget for temporaries, as a share of that memory less arguments and outputs. Source: measured, to the byte;
`xla_gpu_memory_limit_slop_factor` is 95."""

SLOP_FACTOR = "xla_gpu_memory_limit_slop_factor"
"""XLA's option for that budget, in percent."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled program: its HLO and its memory, in bytes per device.

    Attributes:
      text: the optimised HLO.
      argument_bytes: size of the arguments.
      output_bytes: size of the results, aliased ones included.
      alias_bytes: size of the results that reuse an argument's buffer.
      temporary_bytes: peak of all other buffers.
      host_bytes: size of the arguments, results and temporaries in host memory, aliased ones once.
    """

    text: str
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    host_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Peak of the device memory."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def check(cluster: Cluster, description: str | None = None) -> None:
    """Raises an error if the compiler cannot compile for a cluster.

    Args:
      cluster: the cluster to compile for.
      description: XLA's target config in text, for a GPU that is not among the presets.

    Raises:
      InputError: a cluster of CPUs, or an unknown GPU.
    """
    if cluster.device.name == "CPU":
        raise InputError(f"XLA's GPU compiler cannot be asked about {cluster.name}: its devices are no GPUs")
    target_config(cluster.device.name, 1, description)


def can_compile_for(cluster: Cluster, description: str | None = None) -> bool:
    """True if `check` finds nothing to refuse."""
    if cluster.device.name == "CPU":
        return False
    return description is not None or compute_capability(cluster.device.name) is not None


def topology(cluster: Cluster) -> str:
    """Slices x hosts x GPUs per host, in the plugin's notation."""
    return f"1x{cluster.num_nodes}x{cluster.devices_per_node}"


def described_devices(topology: str, config: str) -> Sequence[Any]:
    """Compile-only devices of a topology and a target config, in the cluster's order. The module states the process's
    requirements."""
    return topologies.get_topology_desc(platform="cuda", topology=topology, target_config=config).devices


def compile_module(module: bytes, devices: Sequence[Any], cuda_folder: str) -> Compiled:
    """Compiles a program's bytecode from `_jax.module_bytes`, with the CUDA tools in `cuda_folder`."""
    return _read(*_jax.compile_module(module, devices, cuda_folder))


def read(executable: Any) -> Compiled:
    """The HLO and the memory of a program that XLA has compiled, a `jax.stages.Compiled`."""
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


def options_for_cap(
    cap_bytes: int, resting_bytes: int, device_bytes: int, overlap: float = 1.0
) -> dict[str, str]:
    """The compiler's options that aim its scheduler at a cap, on a device with more memory; none if it has no more.

    Args:
      cap_bytes: the program's memory cap.
      resting_bytes: size of its arguments and outputs, aliased ones once.
      device_bytes: memory of the device.
      overlap: the plan's share of the scheduler's budget.

    Example:
      >>> options_for_cap(8_000_000_000, 2_000_000_000, 80_000_000_000)
      {'xla_gpu_memory_limit_slop_factor': '8'}
    """
    room_bytes = MEMORY_SHARE * device_bytes - resting_bytes
    percent = (
        int(100 * budget_bytes(cap_bytes, resting_bytes, overlap) / room_bytes) if room_bytes > 0 else 100
    )
    return {SLOP_FACTOR: str(max(percent, 1))} if percent < 100 * BUDGET_SHARE else {}


def memory_for_cap(cap_bytes: int, resting_bytes: int, overlap: float = 1.0) -> int:
    """The device memory that aims XLA's scheduler at a cap.

    Args:
      cap_bytes: the program's memory cap.
      resting_bytes: size of its arguments and outputs, aliased ones once.
      overlap: the plan's share of the scheduler's budget.

    Example:
      >>> memory_for_cap(8_000_000_000, 2_000_000_000)
      9605263157
    """
    return int(
        (budget_bytes(cap_bytes, resting_bytes, overlap) / BUDGET_SHARE + resting_bytes) / MEMORY_SHARE
    )
