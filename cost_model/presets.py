"""The clusters known by name: `"64xH100-80GB"`, `"16xA100-80GB-Ethernet"`, `"8xCPU"`.

Each preset is a small cluster file, with the keys, units and sources of `cluster`, for one full node of
eight. Peaks are the vendor's *dense* figures; datasheets print the tensor-core figures with sparsity,
twice as high. "float32" is TensorFloat-32 where it exists, because JAX's default precision uses it on
Ampere and later (V100: true float32; google/jax issue 18934).

Network rates are per device: its share when all eight send at once. InfiniBand is the network of the vendor's
own system of that generation. Ethernet is one 100 Gb/s port per node, as in the usual cloud instance without a
GPU fabric.
"""

from typing import Any

from autoshard.cost_model.cluster import LAUNCH_S, MATMUL_EFFICIENCY, MEMORY_EFFICIENCY, VECTOR_EFFICIENCY
from autoshard.cost_model.units import exact_seconds

NODE_DEVICES = 8
"""Devices in a full node. Source: NVIDIA DGX-1 to DGX B200; Google Cloud g2-standard-96 for L4."""

DEVICE_KEYS = (
    "memory",
    "memory_bandwidth",
    "flops",
    "reserve",
    "cores",
    "matmul_efficiency",
    "vector_efficiency",
    "memory_efficiency",
    "launch",
)
"""The keys of a device's numbers, each with its own source."""

LINK_KEYS = ("bandwidth", "latency", "efficiency", "sums_in_switch")
"""The keys of a link's numbers, with one source for all."""

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

_XLA_SPECS = "XLA xla/backends/gpu/target_config/specs"

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

_ETHERNET = {
    "bandwidth": "12.5Gb/s",
    "latency": _ETHERNET_LATENCY,
    "efficiency": 0.8,
    "sums_in_switch": False,
    "source": "one 100 Gb/s port per node of 8 (AWS p3dn, Google Cloud a2, g2); latency and share of TCP, assumed",
}


_LOOPBACK = {
    "bandwidth": "5GB/s",
    "latency": "1us",
    "efficiency": 1.0,
    "sums_in_switch": False,
    "source": "invented: all links are equal",
}


def _infiniband(bandwidth: str, source: str) -> dict[str, Any]:
    return {
        "bandwidth": bandwidth,
        "latency": _NETWORK_LATENCY,
        "efficiency": 0.95,
        "sums_in_switch": False,
        "source": f"{source}; latency: {_LATENCY_SOURCE}; share: assumed, ib_write_bw reaches 0.96 to 0.98",
    }


def _nvlink(bandwidth: str, source: str, efficiency: float, sums_in_switch: bool) -> dict[str, Any]:
    return {
        "bandwidth": bandwidth,
        "latency": _NVLINK_LATENCY,
        "efficiency": efficiency,
        "sums_in_switch": sums_in_switch,
        "source": f"{source}; latency: {_LATENCY_SOURCE}; share: {_NVLINK_SHARE_SOURCE}",
    }


def _pcie(bandwidth: str, source: str) -> dict[str, Any]:
    return {
        "bandwidth": bandwidth,
        "latency": _COPY_LATENCY,
        "efficiency": 0.85,
        "sums_in_switch": False,
        "source": f"{source}; latency assumed, cudaMemcpyAsync; share assumed, bandwidthTest with pinned memory",
    }


_V100_FLOPS = {
    "value": {
        "float16": "125TFLOP/s",
        "bfloat16": "15.7TFLOP/s",
        "float32": "15.7TFLOP/s",
        "float64": "7.8TFLOP/s",
        "int8": "62.8TFLOP/s",
        "vector": "15.7TFLOP/s",
    },
    "source": "NVIDIA V100 datasheet (SXM2); bfloat16 runs in float32 on XLA:GPU; int8 is DP4A, 4 x float32",
}
_A100_FLOPS = {
    "value": {
        "bfloat16": "312TFLOP/s",
        "float16": "312TFLOP/s",
        "float32": "156TFLOP/s",
        "float64": "19.5TFLOP/s",
        "int8": "624TFLOP/s",
        "vector": "19.5TFLOP/s",
    },
    "source": "NVIDIA A100 datasheet (SXM), without sparsity; float32 is TF32",
}
_H100_FLOPS = {
    "value": {
        "float8": "1979TFLOP/s",
        "bfloat16": "989TFLOP/s",
        "float16": "989TFLOP/s",
        "float32": "494.5TFLOP/s",
        "float64": "67TFLOP/s",
        "int8": "1979TFLOP/s",
        "vector": "67TFLOP/s",
    },
    "source": "NVIDIA H100 and H200 datasheets (SXM), half of the figures with sparsity; float32 is TF32",
}

_V100_NODE = {
    "intra": _nvlink("150GB/s", "NVIDIA V100 datasheet: NVLink 300 GB/s, both directions", 0.8, False),
    "host_memory": {"value": "512GiB", "source": "NVIDIA DGX-1 user guide: 512 GB"},
    "host_link": _pcie("15.75GB/s", "PCIe 3.0 x16"),
    "networks": {
        "InfiniBand": _infiniband("50Gb/s", "NVIDIA DGX-1: 4 x 100 Gb/s EDR for 8 GPUs"),
        "Ethernet": _ETHERNET,
    },
}
_A100_NODE = {
    "intra": _nvlink("300GB/s", "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions", 0.8, False),
    "host_link": _pcie("31.5GB/s", "PCIe 4.0 x16"),
    "networks": {
        "InfiniBand": _infiniband("200Gb/s", "NVIDIA DGX A100: 8 x 200 Gb/s HDR for 8 GPUs"),
        "Ethernet": _ETHERNET,
    },
}
_HOPPER_NODE = {
    "intra": _nvlink(
        "450GB/s", "NVIDIA H100 and H200 datasheets: NVLink 900 GB/s, both directions", 0.824, True
    ),
    "host_memory": {"value": "2TiB", "source": "NVIDIA DGX H100 and H200 datasheets: 2 TB"},
    "host_link": _pcie("63GB/s", "PCIe 5.0 x16"),
    "networks": {
        "InfiniBand": _infiniband("400Gb/s", "NVIDIA DGX H100: 8 x 400 Gb/s NDR for 8 GPUs"),
        "Ethernet": _ETHERNET,
    },
}

PRESETS: dict[str, dict[str, Any]] = {
    "V100-16GB": _V100_NODE
    | {
        "memory": {"value": "16935682048B", "source": f"{_XLA_SPECS}/v100.txtpb"},
        "memory_bandwidth": {"value": "898.048GB/s", "source": f"{_XLA_SPECS}/v100.txtpb"},
        "flops": _V100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 80, "source": f"{_XLA_SPECS}/v100.txtpb: core_count"},
        **_KERNELS,
    },
    "V100-32GB": _V100_NODE
    | {
        "memory": {"value": "31.74GiB", "source": "what PyTorch reports as the total capacity of this model"},
        "memory_bandwidth": {"value": "898.048GB/s", "source": f"{_XLA_SPECS}/v100.txtpb"},
        "flops": _V100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 80, "source": f"{_XLA_SPECS}/v100.txtpb: core_count"},
        **_KERNELS,
    },
    "L4": {
        "memory": {
            "value": "22GiB",
            "source": "NVIDIA L4 datasheet: 24 GB; nvidia-smi shows 23,034 MiB, programs see less",
        },
        "memory_bandwidth": {"value": "300GB/s", "source": "NVIDIA L4 datasheet"},
        "flops": {
            "value": {
                "float8": "242.5TFLOP/s",
                "bfloat16": "121TFLOP/s",
                "float16": "121TFLOP/s",
                "float32": "60TFLOP/s",
                "float64": "0.473TFLOP/s",
                "int8": "242.5TFLOP/s",
                "vector": "30.3TFLOP/s",
            },
            "source": "NVIDIA L4 datasheet, half of those with sparsity; float32 is TF32, float64 vector/64",
        },
        "reserve": _RESERVE,
        "cores": {"value": 58, "source": "NVIDIA L4 datasheet: 7,424 CUDA cores, 128 per multiprocessor"},
        **_KERNELS,
        "intra": {
            "bandwidth": "31.5GB/s",
            "latency": _PCIE_LATENCY,
            "efficiency": 0.76,
            "sums_in_switch": False,
            "source": (
                f"NVIDIA L4 datasheet: PCIe 4.0 x16, no NVLink; latency: {_LATENCY_SOURCE}; share: NCCL, "
                f"src/graph/topo.h, 12 of 15.75 GB/s of PCIe 3.0 x16"
            ),
        },
        "host_memory": {"value": "384GiB", "source": "Google Cloud g2-standard-96: 384 GB for 8 L4"},
        "host_link": _pcie("31.5GB/s", "PCIe 4.0 x16"),
        "networks": {"Ethernet": _ETHERNET},
    },
    "A100-40GB": _A100_NODE
    | {
        "memory": {"value": "42331013120B", "source": f"{_XLA_SPECS}/a100_sxm_40.txtpb"},
        "memory_bandwidth": {"value": "1555.2GB/s", "source": f"{_XLA_SPECS}/a100_sxm_40.txtpb"},
        "flops": _A100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 108, "source": f"{_XLA_SPECS}/a100_sxm_40.txtpb: core_count"},
        **_KERNELS,
        "host_memory": {"value": "1TiB", "source": "NVIDIA DGX A100 320GB datasheet: 1 TB"},
    },
    "A100-80GB": _A100_NODE
    | {
        "memory": {"value": "85100068864B", "source": f"{_XLA_SPECS}/a100_sxm_80.txtpb"},
        "memory_bandwidth": {"value": "2039.04GB/s", "source": f"{_XLA_SPECS}/a100_sxm_80.txtpb"},
        "flops": _A100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 108, "source": f"{_XLA_SPECS}/a100_sxm_80.txtpb: core_count"},
        **_KERNELS,
        "host_memory": {"value": "2TiB", "source": "NVIDIA DGX A100 640GB datasheet: 2 TB"},
    },
    "H100-80GB": _HOPPER_NODE
    | {
        "memory": {
            "value": "84929347584B",
            "source": f"{_XLA_SPECS}/h100_sxm.txtpb, the smaller of two versions (the other: 84942979072)",
        },
        "memory_bandwidth": {"value": "3352.32GB/s", "source": f"{_XLA_SPECS}/h100_sxm.txtpb"},
        "flops": _H100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 132, "source": f"{_XLA_SPECS}/h100_sxm.txtpb: core_count"},
        **_KERNELS,
    },
    "H200": _HOPPER_NODE
    | {
        "memory": {"value": "151397597184B", "source": f"{_XLA_SPECS}/h200.txtpb"},
        "memory_bandwidth": {"value": "4.8TB/s", "source": f"{_XLA_SPECS}/h200.txtpb"},
        "flops": _H100_FLOPS,
        "reserve": _RESERVE,
        "cores": {"value": 132, "source": f"{_XLA_SPECS}/h200.txtpb: core_count"},
        **_KERNELS,
    },
    "B200": {
        "memory": {"value": "191514411008B", "source": f"{_XLA_SPECS}/b200.txtpb"},
        "memory_bandwidth": {"value": "7672.32GB/s", "source": f"{_XLA_SPECS}/b200.txtpb"},
        "flops": {
            "value": {
                "float4": "9000TFLOP/s",
                "float8": "4500TFLOP/s",
                "bfloat16": "2250TFLOP/s",
                "float16": "2250TFLOP/s",
                "float32": "1100TFLOP/s",
                "float64": "37TFLOP/s",
                "int8": "4500TFLOP/s",
                "vector": "75TFLOP/s",
            },
            "source": "NVIDIA HGX B200 datasheet, per GPU, half of those with sparsity; float32 is TF32",
        },
        "reserve": _RESERVE,
        "cores": {"value": 148, "source": f"{_XLA_SPECS}/b200.txtpb: core_count"},
        **_KERNELS,
        "intra": _nvlink(
            "900GB/s", "NVIDIA HGX B200 datasheet: NVLink 1.8 TB/s, both directions", 0.802, True
        ),
        "host_memory": {"value": "2TiB", "source": "NVIDIA DGX B200 datasheet: 2 TB"},
        "host_link": _pcie("63GB/s", "PCIe 5.0 x16"),
        "networks": {
            "InfiniBand": _infiniband("400Gb/s", "NVIDIA DGX B200: 8 x 400 Gb/s for 8 GPUs"),
            "Ethernet": _ETHERNET,
        },
    },
    "CPU": {
        "memory": {"value": "16GiB", "source": "invented: simulated devices"},
        "memory_bandwidth": {"value": "20GB/s", "source": "invented: simulated devices"},
        "flops": {
            "value": {"float32": "200GFLOP/s", "float64": "100GFLOP/s", "vector": "50GFLOP/s"},
            "source": "invented: simulated devices",
        },
        "reserve": {"value": "0B", "source": "invented: simulated devices need no context"},
        "cores": {"value": 1, "source": "invented: simulated devices"},
        "matmul_efficiency": {"value": MATMUL_EFFICIENCY, "source": "invented: simulated devices"},
        "vector_efficiency": {"value": VECTOR_EFFICIENCY, "source": "invented: simulated devices"},
        "memory_efficiency": {"value": MEMORY_EFFICIENCY, "source": "invented: simulated devices"},
        "launch": {"value": "1ns", "source": "invented: so short that small examples split like large ones"},
        "intra": _LOOPBACK,
        "host_memory": {"value": "128GiB", "source": "invented: simulated devices"},
        "host_link": _LOOPBACK,
        "networks": {"Loopback": _LOOPBACK},
    },
}
"""Numbers with their sources, by GPU; the first network is the default."""
