"""The forms of a preset's numbers: devices, links and networks, each number with its source.

Numbers that all presets share live here: the runtime's reserve, the shares that kernels and links sustain, and latencies.
`presets` has the numbers of each GPU and node.
"""

from typing import Any

from autoshard.cost_model.cluster import LAUNCH_S, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, VECTOR_EFFICIENCY
from autoshard.cost_model.units import exact_seconds

XLA_SPECS = "XLA xla/backends/gpu/target_config/specs"

_CONTEXT_MIB = 576
"""CUDA context with libraries and kernels loaded, MiB. Source: assumed, usually 400 to 600 in nvidia-smi."""

_NCCL_BUFFER_MIB = 4
"""NCCL's buffer per channel and direction, MiB. Source: NCCL docs, environment variables, NCCL_BUFFSIZE."""

_NCCL_CHANNELS = 32
"""Most channels per communicator. Source: NCCL 2.8 to 2.18, MAXCHANNELS in its source."""

_NCCL_COMMUNICATORS = 4
"""Communicators alive in one program: three mesh axes and all devices. Source: assumed."""

_RESERVE_MIB = _CONTEXT_MIB + 2 * _NCCL_BUFFER_MIB * _NCCL_CHANNELS * _NCCL_COMMUNICATORS
_RESERVE = {
    "value": f"{_RESERVE_MIB}MiB",
    "source": (
        f"assumed: {_CONTEXT_MIB} MiB CUDA context + {_NCCL_COMMUNICATORS} NCCL communicators of "
        f"{_NCCL_CHANNELS} channels with {_NCCL_BUFFER_MIB} MiB to send and to receive (NCCL_BUFFSIZE)"
    ),
}

_LATENCY_SOURCE = "NCCL 2.8, src/graph/tuning.cc, hwLat of rings with LL128"
_NVLINK_SHARE_SOURCE = (
    "GB/s per NVLink in NCCL, src/graph/topo.h: 20 of 25 (SM70, SM80), 20.6 of 25 (SM90), 40.1 of 50 (SM100)"
)
_NVLINK_LATENCY = "1.9us"
_PCIE_LATENCY = "2.5us"
_NETWORK_LATENCY = "4us"
_ETHERNET_LATENCY = "25us"
_COPY_LATENCY = "10us"

_KERNELS = {
    "matmul_efficiency": {
        "value": MATMUL_EFFICIENCY,
        "source": "XLA default_matmul_perf_table.txtpb: 0.88 on an H100, 0.75 on a B200; less under load",
    },
    "vector_efficiency": {"value": VECTOR_EFFICIENCY, "source": "assumed: such ops are bound by memory"},
    "memory_efficiency": {"value": MEMORY_EFFICIENCY, "source": "assumed: BabelStream triad, 0.85 to 0.93"},
    "launch": {"value": exact_seconds(LAUNCH_S), "source": "assumed: kernels of a CUDA graph, 1.5 to 2.5 us"},
}
"""The shares that every GPU's programs sustain, and the launch time, until `autoshard calibrate` has measured them."""

type Number = dict[str, Any]
"""A number with its unit, under "value", and its "source"."""


def number(value: Any, source: str) -> Number:
    """A number and its source."""
    return {"value": value, "source": source}


def of_xla(value: str | int, spec: str) -> Number:
    """A number of XLA's description of a GPU, with the description's file as its source."""
    return number(value, f"{XLA_SPECS}/{spec}.txtpb{': core_count' if isinstance(value, int) else ''}")


def flops(source: str, **teraflops: float) -> Number:
    """Peak TFLOP/s by dtype."""
    return number({dtype: f"{speed}TFLOP/s" for dtype, speed in teraflops.items()}, source)


def gpu(memory: Number, memory_bandwidth: Number, flops: Number, cores: Number) -> dict[str, Number]:
    """A GPU's numbers, with the ones that all GPUs share."""
    return {
        "memory": memory,
        "memory_bandwidth": memory_bandwidth,
        "flops": flops,
        "reserve": _RESERVE,
        "cores": cores,
        **_KERNELS,
    }


def _link(
    bandwidth: str, latency: str, efficiency: float, source: str, sums_in_switch: bool = False
) -> dict[str, Any]:
    return {
        "bandwidth": bandwidth,
        "latency": latency,
        "efficiency": efficiency,
        "sums_in_switch": sums_in_switch,
        "source": source,
    }


def nvlink(bandwidth: str, source: str, efficiency: float, sums_in_switch: bool) -> dict[str, Any]:
    """The NVLinks of a device, in one direction."""
    return _link(
        bandwidth,
        _NVLINK_LATENCY,
        efficiency,
        f"{source}; latency: {_LATENCY_SOURCE}; share: {_NVLINK_SHARE_SOURCE}",
        sums_in_switch,
    )


def pcie_peers(bandwidth: str, source: str) -> dict[str, Any]:
    """PCIe between the devices of a node."""
    sources = f"{source}; latency: {_LATENCY_SOURCE}; share: NCCL, src/graph/topo.h, 12 of 15.75 GB/s of PCIe 3.0 x16"
    return _link(bandwidth, _PCIE_LATENCY, 0.76, sources)


def through_host(bandwidth: str, source: str) -> dict[str, Any]:
    """PCIe between devices without peer access: NCCL copies through the host's memory."""
    sources = f"{source}, no peer access: NCCL copies through host memory; latency: {_LATENCY_SOURCE}; share assumed"
    return _link(bandwidth, _PCIE_LATENCY, 0.5, sources)


def pcie_to_host(bandwidth: str, source: str) -> dict[str, Any]:
    """PCIe between a device and host memory."""
    sources = f"{source}; latency assumed, cudaMemcpyAsync; share assumed, bandwidthTest with pinned memory"
    return _link(bandwidth, _COPY_LATENCY, 0.85, sources)


def c2c(bandwidth: str, source: str) -> dict[str, Any]:
    """NVLink-C2C between a GPU and the memory of its Grace CPU."""
    return _link(bandwidth, _COPY_LATENCY, 0.8, f"{source}; latency assumed, cudaMemcpyAsync; share assumed")


def host_processors(bandwidth: str, cores: int, source: str) -> dict[str, Any]:
    """The processors of a full node's host, and the peak bandwidth of their memory."""
    return {"host_bandwidth": number(bandwidth, source), "host_cores": number(cores, source)}


UNKNOWN_HOST = host_processors("0B/s", 0, "unknown: no vendor's system, so the host updates no state")
"""The processors of a host of which nothing is said."""


def infiniband(bandwidth: str, source: str) -> dict[str, Any]:
    """InfiniBand, a device's share."""
    sources = f"{source}; latency: {_LATENCY_SOURCE}; share: assumed, ib_write_bw reaches 0.96 to 0.98"
    return _link(bandwidth, _NETWORK_LATENCY, 0.95, sources)


def ethernet(bandwidth: str, source: str) -> dict[str, Any]:
    """Ethernet, a device's share."""
    return _link(bandwidth, _ETHERNET_LATENCY, 0.8, f"{source}; latency and share of TCP, assumed")


ETHERNET = ethernet("12.5Gb/s", "one 100 Gb/s port per node of 8 (AWS p3dn, Google Cloud a2, g2)")
"""The usual cloud instance without a GPU fabric."""


_INVENTED = "invented: simulated devices"


def simulated() -> dict[str, Any]:
    """Simulated devices, whose numbers are those of no machine."""
    loopback = _link("5GB/s", "1us", 1.0, "invented: all links are equal")
    return {
        "memory": number("16GiB", _INVENTED),
        "memory_bandwidth": number("20GB/s", _INVENTED),
        "flops": number({"float32": "200GFLOP/s", "float64": "100GFLOP/s", "vector": "50GFLOP/s"}, _INVENTED),
        "reserve": number("0B", "invented: simulated devices need no context"),
        "cores": number(1, _INVENTED),
        "matmul_efficiency": number(MATMUL_EFFICIENCY, _INVENTED),
        "vector_efficiency": number(VECTOR_EFFICIENCY, _INVENTED),
        "memory_efficiency": number(MEMORY_EFFICIENCY, _INVENTED),
        "launch": number("1ns", "invented: so short that small examples split like large ones"),
        "intra": loopback,
        "host_memory": number("128GiB", _INVENTED),
        **UNKNOWN_HOST,
        "host_link": loopback,
        "networks": {"Loopback": loopback},
    }
