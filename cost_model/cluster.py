"""A cluster: one device model, the number of devices, and the links between them.

All values are in SI units. Each rate is a peak with the share of it that real programs sustain. A preset has
the vendor's rates and the usual shares; a calibrated file has the measured rates and shares of 1. Devices are
numbered node by node: device d sits in node d // devices_per_node, and every node is full. Devices of one node
talk over `intra`, devices of different nodes over `inter`, and each device reaches its node's memory over `host_link`.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from autoshard.cost_model.errors import ClusterError
from autoshard.cost_model.file_forms import (
    BYTES,
    FLOPS,
    RATE,
    SECONDS,
    Table,
    file_config,
    key_of,
    read_record,
    write_record,
)

VECTOR = "vector"
"""The entry of `Device.flops_per_s` for the ordinary cores, which run all ops but matrix products."""

_STAND_INS = {
    "float4": "float8",
    "float8": "bfloat16",
    "float16": "bfloat16",
    "bfloat16": "float32",
    "int4": "int8",
    "complex64": "float32",
    "complex128": "float64",
}
"""The dtype whose speed stands in for a missing one, as XLA:GPU then computes in a wider dtype; all others use float32's."""


MATMUL_EFFICIENCY = 0.8
"""Share of the matrix units' peak that the tiles of a large GEMM sustain. Source: XLA's measured products give 0.88 on an
H100 and 0.75 on a B200 (see `cost_model.compute.START_S`); under a long step's load a GPU clocks lower than in a
benchmark."""

VECTOR_EFFICIENCY = 0.7
"""Share of the ordinary cores' peak that fused elementwise and reduction kernels sustain. Source: assumed; such ops
are bound by memory on every preset (fewer than 10 FLOP per byte), so the share rarely matters."""

MEMORY_EFFICIENCY = 0.9
"""Share of the memory's peak that streaming kernels sustain. Source: assumed, the usual result of STREAM-like
benchmarks (BabelStream triad) on HBM GPUs, 0.85 to 0.93."""

LINK_EFFICIENCY = 0.8
"""Share of a link's peak that collectives and copies sustain. Source: assumed; NCCL counts 20 of 25 GB/s per NVLink of
Volta and Ampere, 20.6 of 25 on Hopper, 12 of 15.75 GB/s of PCIe 3.0 x16 (its `src/graph/topo.h`)."""

HOST_EFFICIENCY = 0.7
"""Share of the host memory's peak that updates of state sustain. Source: assumed; STREAM's triad reaches 0.75 to 0.85 on
servers of two sockets and does not count that a line is read before it is written."""

CORE_BYTES_PER_S = 15e9
"""Bytes that one core reads and writes in a second of an AdamW update, as XLA:CPU compiles it. Source: `optax.adamw` on 16 M
parameters in float32, jitted, its state donated, on one thread of a Xeon (`intra_op_parallelism_threads=1`): 15.2 GB/s."""

LAUNCH_S = 2e-6
"""Seconds from the start of one empty kernel to the start of the next. Source: assumed. 1.5 to 2.5 us is usual for
kernels of a CUDA graph, as in XLA:GPU's command buffers; 3 to 5 us for kernels launched one by one."""


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator."""

    __pydantic_config__ = file_config()

    name: str
    """The model, for example "H100-80GB"."""
    memory_bytes: Annotated[int, BYTES]
    """What the runtime sees as device memory."""
    memory_bytes_per_s: Annotated[float, RATE]
    """Peak bandwidth of that memory."""
    flops_per_s: Annotated[tuple[tuple[str, float], ...], Table(Annotated[float, FLOPS])]
    """Peak *dense* FLOP/s of matrix products by NumPy dtype name ("float8" stands for all its variants), and of all other
    ops under "vector". "float32" is required and means JAX's default precision: TensorFloat-32 on devices that have it."""
    reserve_bytes: Annotated[int, BYTES] = 0
    """Memory that the runtime keeps for itself and no XLA statistic shows: CUDA context, NCCL buffers."""
    num_cores: int = 1
    """Units that compute one tile of a matrix product each: streaming multiprocessors. 1 if unknown."""
    matmul_efficiency: float = MATMUL_EFFICIENCY
    """Share of `flops` that a large, well-shaped matrix product sustains."""
    vector_efficiency: float = VECTOR_EFFICIENCY
    """Share of the "vector" speed that other kernels sustain."""
    memory_efficiency: float = MEMORY_EFFICIENCY
    """Share of the memory's bandwidth that streaming kernels sustain."""
    launch_s: Annotated[float, SECONDS] = LAUNCH_S
    """Least time from the start of one kernel to the start of the next."""

    def __post_init__(self) -> None:
        check_name(self.name, "device name")
        _check_positive(self.memory_bytes, "device memory", "bytes")
        _check_positive(self.memory_bytes_per_s, "device memory bandwidth", "bytes/s")
        for dtype, speed in self.flops_per_s:
            _check_positive(speed, f"device speed for {dtype}", "FLOP/s")
        names = [dtype for dtype, _ in self.flops_per_s]
        if "float32" not in names or len(set(names)) < len(names):
            raise ClusterError(
                f"wanted one speed per dtype, with one for 'float32', got {', '.join(names) or 'none'}"
            )
        if not 0 <= self.reserve_bytes < self.memory_bytes:
            raise ClusterError(
                f"the runtime's reserve must be less than the device memory, {self.memory_bytes} bytes, "
                f"and not negative, got {self.reserve_bytes} bytes"
            )
        _check_positive(self.num_cores, "number of cores", "cores")
        _check_share(self.matmul_efficiency, "efficiency of matrix products")
        _check_share(self.vector_efficiency, "efficiency of vector ops")
        _check_share(self.memory_efficiency, "efficiency of device memory")
        _check_not_negative(self.launch_s, "launch time", "s")

    @property
    def platform(self) -> str:
        """The platform that JAX lowers its programs for: "cuda", or "cpu" for simulated devices."""
        return "cpu" if self.name == "CPU" else "cuda"

    def peak_flops_per_s(self, dtype: DTypeLike) -> float:
        """Peak dense FLOP/s of matrix products of this dtype: a NumPy or JAX dtype, or its name.

        Example:
          >>> device = Device("toy", 2**30, 1e9, (("float32", 1e12), ("bfloat16", 2e12)))
          >>> device.peak_flops_per_s("bfloat16"), device.peak_flops_per_s("float64")
          (2000000000000.0, 1000000000000.0)
        """
        speeds = dict(self.flops_per_s)
        name = _dtype_name(dtype)
        name = next((family for family in ("float8", "float4") if name.startswith(family)), name)
        while name not in speeds:
            name = _STAND_INS.get(name, "float32")
        return speeds[name]

    @property
    def vector_flops_per_s(self) -> float:
        """Peak FLOP/s of ops that are not matrix products."""
        speeds = dict(self.flops_per_s)
        return speeds.get(VECTOR, speeds["float32"])


@dataclass(frozen=True, slots=True)
class Link:
    """The rate at which one device can send, and at once receive, over one kind of wire."""

    __pydantic_config__ = file_config()

    bytes_per_s: Annotated[float, RATE]
    """Peak bandwidth per device and direction."""
    latency_s: Annotated[float, SECONDS]
    """Time of one small message between two devices, as one step of a larger collective."""
    efficiency: float = LINK_EFFICIENCY
    """Share of the bandwidth that copies and collectives of large messages sustain."""
    sums_in_switch: bool = False
    """Whether the switch can sum the devices' contributions (NVLink SHARP)."""

    def __post_init__(self) -> None:
        _check_positive(self.bytes_per_s, "link bandwidth", "bytes/s")
        _check_not_negative(self.latency_s, "link latency", "s")
        _check_share(self.efficiency, "efficiency of a link")

    @property
    def sustained_bytes_per_s(self) -> float:
        """The bandwidth of large messages."""
        return self.bytes_per_s * self.efficiency

    def copy_s(self, num_bytes: ArrayLike) -> np.ndarray:
        """Seconds of one copy of `num_bytes` bytes."""
        return self.latency_s + np.asarray(num_bytes, float) / self.sustained_bytes_per_s


INVENTED = "invented"
"""The beginning of a source that is none: the numbers of simulated devices."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The hardware that a plan is for."""

    __pydantic_config__ = file_config()

    name: str
    """The user's name for it."""
    device: Device
    """The model of all its devices."""
    num_devices: int
    """A multiple of `devices_per_node`."""
    devices_per_node: int
    """Devices that share the intra link; all nodes are equal."""
    intra: Link
    """The link between devices of a node."""
    inter: Link
    """The link between devices of different nodes: the share of each device when all send at once."""
    host_bytes_per_node: Annotated[int, BYTES]
    """Host memory per node, for all its devices; zero if none can be pinned."""
    host_link: Link
    """The link between a device and its node's memory."""
    sources: Annotated[tuple[tuple[str, str], ...], Table(str)] = ()
    """The source of each number, by its path in a cluster file ("device.memory"); a path covers all numbers below it."""
    host_bytes_per_s: Annotated[float, RATE] = 0.0
    """Peak bandwidth of a node's host memory, for all its devices; zero if unknown, and then the host updates no state."""
    host_cores: int = 0
    """Cores of a node's processors, for all its devices; zero if unknown, and then the host updates no state."""

    def __post_init__(self) -> None:
        check_name(self.name, "cluster name")
        _check_positive(self.num_devices, "number of devices", "devices")
        _check_positive(self.devices_per_node, "devices per node", "devices")
        _check_not_negative(self.host_bytes_per_node, "host memory per node", "bytes")
        _check_not_negative(self.host_bytes_per_s, "host memory bandwidth per node", "bytes/s")
        _check_not_negative(self.host_cores, "host cores per node", "cores")
        if self.num_devices % self.devices_per_node:
            raise ClusterError(
                f"wanted full nodes, got {self.num_devices} devices in nodes of {self.devices_per_node}; "
                f"num_devices must be a multiple of devices_per_node"
            )

    @property
    def host_bytes_per_device(self) -> int:
        """A device's share of its host's memory."""
        return self.host_bytes_per_node // self.devices_per_node

    @property
    def host_update_bytes_per_s(self) -> float:
        """The rate at which the host reads and writes state that it updates, a device's share; zero if unknown."""
        of_memory, of_cores = HOST_EFFICIENCY * self.host_bytes_per_s, CORE_BYTES_PER_S * self.host_cores
        return min(of_memory, of_cores) / self.devices_per_node

    @property
    def num_nodes(self) -> int:
        return self.num_devices // self.devices_per_node

    @property
    def platform(self) -> str:
        """The platform that JAX lowers programs for."""
        return self.device.platform

    def device_memory_limit(self) -> int:
        """Bytes that a program can use on one device, which is the default memory cap."""
        return self.device.memory_bytes - self.device.reserve_bytes

    def __str__(self) -> str:
        nodes = "1 node" if self.num_nodes == 1 else f"{self.num_nodes} nodes"
        return f"{nodes} of {self.devices_per_node} {self.device.name}"

    # --- the interface of a mixed cluster, for one group of nodes (`cost_model.mixed_cluster`)

    @property
    def groups(self) -> "tuple[Cluster]":
        """The groups of equal nodes, of which the cluster itself is the only one."""
        return (self,)

    @property
    def orders(self) -> "tuple[Cluster]":
        """The orders of its groups: one group has one order."""
        return (self,)

    def caps(self, memory_bytes: int) -> tuple[int]:
        """Bytes per device of each group under a common cap, which is the cap itself."""
        return (memory_bytes,)

    def locate(self, device: int) -> "tuple[Cluster, int]":
        """The group of a device, and the device's number in it."""
        return self, device

    def node_of(self, device: int) -> tuple[str, int]:
        """The node of a device, as (name of its group, number in the group)."""
        return self.name, device // self.devices_per_node

    def link(self, first: int, second: int) -> Link:
        """The link between two devices."""
        return self.intra if self.node_of(first) == self.node_of(second) else self.inter

    @property
    def caveat(self) -> str:
        """The end of a line with a predicted time: empty, unless the cluster's numbers are invented.

        Example:
          >>> from autoshard.cost_model.hardware import parse_cluster
          >>> parse_cluster("8xCPU").caveat
          ' (made up: 8xCPU stands for no real machine)'
        """
        is_invented = any(source.startswith(INVENTED) for _, source in self.sources)
        return f" (made up: {self.name} stands for no real machine)" if is_invented else ""

    def fingerprint(self) -> str:
        """A hash of sixteen hexadecimal digits that depends on every number, but not on names or sources."""
        numbers = self.to_json()
        del numbers["name"], numbers["sources"], numbers["device"]["name"]
        if not self.host_update_bytes_per_s:  # earlier releases knew no such numbers
            del numbers[key_of("host_bytes_per_s")], numbers[key_of("host_cores")]
        return hashlib.sha256(json.dumps(numbers, sort_keys=True).encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """A JSON object with units in the numbers; `from_json` is its exact inverse."""
        return write_record(self)

    @classmethod
    def from_json(cls, data: Any, place: str = "cluster") -> "Cluster":
        """The cluster that a JSON object describes.

        Args:
          data: the result of `json.loads`.
          place: the file's name, for messages.

        Raises:
          ClusterError: naming the place and the key.
        """
        from autoshard.cost_model.cluster_schema import checked  # it takes a while to import

        return checked(data, place, cls)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Cluster":
        """The cluster of a JSON object that is known to be valid, such as our own output."""
        return read_record(cls, data)


def _dtype_name(dtype: Any) -> str:
    """A dtype's name. JAX's key dtypes have a name but no NumPy equivalent; a name needs no registered extension type."""
    return dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or np.dtype(dtype).name


def _check_positive(value: float, what: str, unit: str) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ClusterError(f"{what} must be finite and positive, got {value} {unit}")


def _check_not_negative(value: float, what: str, unit: str) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ClusterError(f"{what} must be finite and not negative, got {value} {unit}")


def _check_share(value: float, what: str) -> None:
    if not 0 < value <= 1:
        raise ClusterError(f"{what} must be above 0 and at most 1, got {value}")


def check_name(name: str, what: str) -> None:
    """Raises ClusterError if a name is empty."""
    if not name.strip():
        raise ClusterError(f"{what} must not be empty")
