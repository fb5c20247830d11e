"""The clusters known by name: `"64xH100-80GB"`, `"16xA100-80GB-Ethernet"`, `"72xGB200-NVL72"`, `"8xCPU"`.

Each preset is a small cluster file, with the keys, units and sources of `cluster`, for one full node: the devices that
share the fast link, eight unless the preset says otherwise. Peaks are the vendor's *dense* figures; datasheets print the
tensor-core figures with sparsity, twice as high. "float32" is TensorFloat-32 where it exists, because JAX's default
precision uses it on Ampere and later (V100: true float32; google/jax issue 18934).

Network rates are per device: its share when all devices of a node send at once. InfiniBand is the network of the vendor's
own system of that generation. Ethernet is one 100 Gb/s port per node, as in the usual cloud instance without a
GPU fabric, unless the preset's source names another instance.
"""

from typing import Any

from autoshard.cost_model.preset_forms import (
    ETHERNET,
    UNKNOWN_HOST,
    c2c,
    ethernet,
    flops,
    gpu,
    host_processors,
    infiniband,
    number,
    nvlink,
    of_xla,
    pcie_peers,
    pcie_to_host,
    simulated,
    through_host,
)

NODE_DEVICES = 8
"""Devices in a full node, unless the preset has `node_devices`. Source: NVIDIA DGX-1 to DGX B300; Google Cloud
g2-standard-96 for L4, AWS g5.48xlarge for A10G and g6e.48xlarge for L40S."""

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

_V100_FLOPS = flops(
    "NVIDIA V100 datasheet (SXM2); bfloat16 runs in float32 on XLA:GPU; int8 is DP4A, 4 x float32",
    float16=125,
    bfloat16=15.7,
    float32=15.7,
    float64=7.8,
    int8=62.8,
    vector=15.7,
)
_A100_FLOPS = flops(
    "NVIDIA A100 datasheet (SXM), without sparsity; float32 is TF32",
    bfloat16=312,
    float16=312,
    float32=156,
    float64=19.5,
    int8=624,
    vector=19.5,
)
_HOPPER_SXM = {
    "float8": 1979,
    "bfloat16": 989,
    "float16": 989,
    "float32": 494.5,
    "float64": 67,
    "int8": 1979,
    "vector": 67,
}
_H100_FLOPS = flops(
    "NVIDIA H100 and H200 datasheets (SXM), half of the figures with sparsity; float32 is TF32", **_HOPPER_SXM
)

_V100_NODE = {
    "intra": nvlink("150GB/s", "NVIDIA V100 datasheet: NVLink 300 GB/s, both directions", 0.8, False),
    "host_memory": number("512GiB", "NVIDIA DGX-1 user guide: 512 GB"),
    **host_processors("153.6GB/s", 40, "NVIDIA DGX-1: 2 Xeon E5-2698 v4, each 20 cores and 4 x DDR4-2400"),
    "host_link": pcie_to_host("15.75GB/s", "PCIe 3.0 x16"),
    "networks": {
        "InfiniBand": infiniband("50Gb/s", "NVIDIA DGX-1: 4 x 100 Gb/s EDR for 8 GPUs"),
        "Ethernet": ETHERNET,
    },
}
_A100_NODE = {
    "intra": nvlink("300GB/s", "NVIDIA A100 datasheet: NVLink 600 GB/s, both directions", 0.8, False),
    **host_processors("409.6GB/s", 128, "NVIDIA DGX A100: 2 EPYC 7742, each 64 cores and 8 x DDR4-3200"),
    "host_link": pcie_to_host("31.5GB/s", "PCIe 4.0 x16"),
    "networks": {
        "InfiniBand": infiniband("200Gb/s", "NVIDIA DGX A100: 8 x 200 Gb/s HDR for 8 GPUs"),
        "Ethernet": ETHERNET,
    },
}
_HOPPER_NODE = {
    "intra": nvlink(
        "450GB/s", "NVIDIA H100 and H200 datasheets: NVLink 900 GB/s, both directions", 0.824, True
    ),
    "host_memory": number("2TiB", "NVIDIA DGX H100 and H200 datasheets: 2 TB"),
    **host_processors("614.4GB/s", 112, "NVIDIA DGX H100: 2 Xeon 8480C, each 56 cores and 8 x DDR5-4800"),
    "host_link": pcie_to_host("63GB/s", "PCIe 5.0 x16"),
    "networks": {
        "InfiniBand": infiniband("400Gb/s", "NVIDIA DGX H100: 8 x 400 Gb/s NDR for 8 GPUs"),
        "Ethernet": ETHERNET,
    },
}
_PCIE_5_NODE = {
    "intra": pcie_peers(
        "63GB/s", "NVIDIA H100 datasheet: PCIe 5.0 x16; NVLink bridges join pairs only and are not counted"
    ),
    "host_link": pcie_to_host("63GB/s", "PCIe 5.0 x16"),
}
_GRACE_NODE = {
    "node_devices": number(72, "NVIDIA GB200 and GB300 NVL72 datasheets: 72 GPUs in one NVLink domain"),
    "intra": nvlink(
        "900GB/s", "NVIDIA GB200 and GB300 NVL72 datasheets: NVLink 1.8 TB/s, both directions", 0.802, True
    ),
    "host_memory": number("17TB", "NVIDIA GB200 and GB300 NVL72 datasheets: up to 17 TB LPDDR5X"),
    **host_processors("14TB/s", 2592, "NVIDIA GB200 NVL72 datasheet: 36 Grace, 2,592 cores, up to 14 TB/s"),
    "host_link": c2c(
        "225GB/s",
        "NVIDIA GB200 and GB300 NVL72 datasheets: NVLink-C2C 900 GB/s, both directions, for the two GPUs of a Grace",
    ),
}


def _pcie_4_node(datasheet: str) -> dict[str, Any]:
    return {
        "intra": pcie_peers("31.5GB/s", f"{datasheet}: PCIe 4.0 x16, no NVLink"),
        "host_link": pcie_to_host("31.5GB/s", "PCIe 4.0 x16"),
    }


_VOLTA: dict[str, dict[str, Any]] = {
    "V100-16GB": _V100_NODE
    | gpu(
        memory=of_xla("16935682048B", "v100"),
        memory_bandwidth=of_xla("898.048GB/s", "v100"),
        flops=_V100_FLOPS,
        cores=of_xla(80, "v100"),
    ),
    "V100-32GB": _V100_NODE
    | gpu(
        memory=number("31.74GiB", "what PyTorch reports as the total capacity of this model"),
        memory_bandwidth=of_xla("898.048GB/s", "v100"),
        flops=_V100_FLOPS,
        cores=of_xla(80, "v100"),
    ),
}
_AMPERE: dict[str, dict[str, Any]] = {
    "A10G": _pcie_4_node("NVIDIA A10G datasheet")
    | gpu(
        memory=number("22587MiB", "NVIDIA A10G datasheet: 24 GB; what PyTorch reports on AWS g5"),
        memory_bandwidth=number("600GB/s", "NVIDIA A10G datasheet"),
        flops=flops(
            "NVIDIA A10G datasheet (AWS), without sparsity; float32 is TF32, float64 vector/64",
            bfloat16=70,
            float16=70,
            float32=35,
            float64=0.547,
            int8=140,
            vector=35,
        ),
        cores=number(80, "what PyTorch reports as multi_processor_count on AWS g5"),
    )
    | {
        "host_memory": number("768GiB", "AWS g5.48xlarge: 768 GiB for 8 A10G"),
        **host_processors("409.6GB/s", 96, "AWS g5.48xlarge: 2 EPYC 7R32, each 48 cores and 8 x DDR4-3200"),
        "networks": {"Ethernet": ethernet("12.5Gb/s", "AWS g5.48xlarge: 100 Gb/s for 8 A10G")},
    },
    "A100-40GB": _A100_NODE
    | gpu(
        memory=of_xla("42331013120B", "a100_sxm_40"),
        memory_bandwidth=of_xla("1555.2GB/s", "a100_sxm_40"),
        flops=_A100_FLOPS,
        cores=of_xla(108, "a100_sxm_40"),
    )
    | {"host_memory": number("1TiB", "NVIDIA DGX A100 320GB datasheet: 1 TB")},
    "A100-80GB": _A100_NODE
    | gpu(
        memory=of_xla("85100068864B", "a100_sxm_80"),
        memory_bandwidth=of_xla("2039.04GB/s", "a100_sxm_80"),
        flops=_A100_FLOPS,
        cores=of_xla(108, "a100_sxm_80"),
    )
    | {"host_memory": number("2TiB", "NVIDIA DGX A100 640GB datasheet: 2 TB")},
}
_ADA: dict[str, dict[str, Any]] = {
    "L4": _pcie_4_node("NVIDIA L4 datasheet")
    | gpu(
        memory=number("22GiB", "NVIDIA L4 datasheet: 24 GB; nvidia-smi shows 23,034 MiB, programs see less"),
        memory_bandwidth=number("300GB/s", "NVIDIA L4 datasheet"),
        flops=flops(
            "NVIDIA L4 datasheet, half of those with sparsity; float32 is TF32, float64 vector/64",
            float8=242.5,
            bfloat16=121,
            float16=121,
            float32=60,
            float64=0.473,
            int8=242.5,
            vector=30.3,
        ),
        cores=number(58, "NVIDIA L4 datasheet: 7,424 CUDA cores, 128 per multiprocessor"),
    )
    | {
        "host_memory": number("384GiB", "Google Cloud g2-standard-96: 384 GB for 8 L4"),
        **host_processors(
            "281.6GB/s", 48, "Google Cloud g2-standard-96: 96 vCPUs of 2 Cascade Lake, each 6 x DDR4-2933"
        ),
        "networks": {"Ethernet": ETHERNET},
    },
    "L40S": _pcie_4_node("NVIDIA L40S datasheet")
    | gpu(
        memory=number("45589MiB", "NVIDIA L40S datasheet: 48 GB; what PyTorch reports with ECC on"),
        memory_bandwidth=number("864GB/s", "NVIDIA L40S datasheet"),
        flops=flops(
            "NVIDIA L40S datasheet, without sparsity; float32 is TF32, float64 vector/64",
            float8=733,
            bfloat16=362.05,
            float16=362.05,
            float32=183,
            float64=1.431,
            int8=733,
            vector=91.6,
        ),
        cores=number(142, "NVIDIA L40S datasheet: 18,176 CUDA cores, 128 per multiprocessor"),
    )
    | {
        "host_memory": number("1536GiB", "AWS g6e.48xlarge: 1,536 GiB for 8 L40S"),
        **host_processors("409.6GB/s", 96, "AWS g6e.48xlarge: 2 EPYC 7R13, each 48 cores and 8 x DDR4-3200"),
        "networks": {"Ethernet": ethernet("50Gb/s", "AWS g6e.48xlarge: 400 Gb/s for 8 L40S")},
    },
    "RTX-4090": gpu(
        memory=number(
            "23.64GiB", "NVIDIA GeForce RTX 4090: 24 GB; what PyTorch reports as the total capacity"
        ),
        memory_bandwidth=number("1008GB/s", "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
        flops=flops(
            "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090: dense, products summed in float32; "
            "float32 is TF32, float64 vector/64",
            float8=330.3,
            bfloat16=165.2,
            float16=165.2,
            float32=82.6,
            float64=1.29,
            int8=660.6,
            vector=82.6,
        ),
        cores=number(128, "NVIDIA Ada GPU architecture whitepaper, GeForce RTX 4090"),
    )
    | {
        "intra": through_host("31.5GB/s", "NVIDIA GeForce RTX 4090: PCIe 4.0 x16, no NVLink"),
        "host_memory": number("256GiB", "assumed: more than the GPUs' memory, no vendor's system"),
        **UNKNOWN_HOST,
        "host_link": pcie_to_host("31.5GB/s", "PCIe 4.0 x16"),
        "networks": {"Ethernet": ETHERNET},
    },
    "RTX-6000-Ada": _pcie_4_node("NVIDIA RTX 6000 Ada Generation datasheet")
    | gpu(
        memory=number("48622MiB", "NVIDIA RTX 6000 Ada Generation datasheet: 48 GB; what PyTorch reports"),
        memory_bandwidth=number("960GB/s", "NVIDIA RTX 6000 Ada Generation datasheet"),
        flops=flops(
            "NVIDIA Ada GPU architecture whitepaper, RTX 6000 Ada Generation: dense; float32 is TF32, "
            "float64 vector/64",
            float8=728.5,
            bfloat16=364.2,
            float16=364.2,
            float32=182.1,
            float64=1.423,
            int8=728.5,
            vector=91.1,
        ),
        cores=number(
            142, "NVIDIA RTX 6000 Ada Generation datasheet: 18,176 CUDA cores, 128 per multiprocessor"
        ),
    )
    | {
        "host_memory": number("512GiB", "assumed: more than the GPUs' memory, no vendor's system"),
        **UNKNOWN_HOST,
        "networks": {"Ethernet": ETHERNET},
    },
}
_HOPPER: dict[str, dict[str, Any]] = {
    "H100-80GB": _HOPPER_NODE
    | gpu(
        memory=number(
            "84929347584B",
            "XLA xla/backends/gpu/target_config/specs/h100_sxm.txtpb, the smaller of two versions (the other: 84942979072)",
        ),
        memory_bandwidth=of_xla("3352.32GB/s", "h100_sxm"),
        flops=_H100_FLOPS,
        cores=of_xla(132, "h100_sxm"),
    ),
    "H100-PCIe": _PCIE_5_NODE
    | gpu(
        memory=of_xla("84942979072B", "h100_pcie"),
        memory_bandwidth=of_xla("2039.04GB/s", "h100_pcie"),
        flops=flops(
            "NVIDIA H100 datasheet (PCIe), half of the figures with sparsity; float32 is TF32",
            float8=1513,
            bfloat16=756,
            float16=756,
            float32=378,
            float64=51,
            int8=1513,
            vector=51,
        ),
        cores=of_xla(114, "h100_pcie"),
    )
    | {
        "host_memory": number("1TiB", "assumed: half as much again as the GPUs' memory, no vendor's system"),
        **UNKNOWN_HOST,
        "networks": {"Ethernet": ETHERNET},
    },
    "H100-NVL": _PCIE_5_NODE
    | gpu(
        memory=number("99456909312B", "NVIDIA H100 datasheet (NVL): 94 GB; what PyTorch reports"),
        memory_bandwidth=number("3.9TB/s", "NVIDIA H100 datasheet (NVL)"),
        flops=flops(
            "NVIDIA H100 datasheet (NVL), half of the figures with sparsity; float32 is TF32",
            float8=1670.5,
            bfloat16=835.5,
            float16=835.5,
            float32=417.5,
            float64=60,
            int8=1670.5,
            vector=60,
        ),
        cores=number(132, "NVIDIA H100 NVL product brief: 16,896 CUDA cores, 128 per multiprocessor"),
    )
    | {
        "host_memory": number("2560GiB", "Azure NC80adis_H100_v5: 640 GiB for 2 H100 NVL, four times that"),
        **host_processors(
            "1536GB/s",
            320,
            "Azure NC80adis_H100_v5: 80 of 96 cores of an EPYC of 12 x DDR5-4800, four times that",
        ),
        "networks": {"Ethernet": ethernet("40Gb/s", "Azure NC80adis_H100_v5: 80 Gb/s for 2 H100 NVL")},
    },
    "GH200": gpu(
        memory=number(
            "94.5GiB", "NVIDIA GH200 datasheet: 96 GB HBM3; what PyTorch reports, the smaller of two"
        ),
        memory_bandwidth=number("4TB/s", "NVIDIA GH200 datasheet, with HBM3"),
        flops=flops(
            "NVIDIA GH200 datasheet, half of the figures with sparsity; float32 is TF32", **_HOPPER_SXM
        ),
        cores=number(132, "NVIDIA GH200 datasheet: 16,896 CUDA cores, 128 per multiprocessor"),
    )
    | {
        "node_devices": number(4, "JUPITER, Alps and Isambard-AI: 4 GH200 per node"),
        "intra": nvlink(
            "450GB/s",
            "JUPITER: all four of a node joined by NVLink 4, 900 GB/s per GPU, both directions",
            0.824,
            False,
        ),
        "host_memory": number("480GB", "JUPITER: 120 GB LPDDR5X for each GH200"),
        **host_processors(
            "2048GB/s", 288, "NVIDIA GH200 datasheet: 72 cores, up to 512 GB/s, four times that"
        ),
        "host_link": c2c("450GB/s", "NVIDIA GH200 datasheet: NVLink-C2C 900 GB/s, both directions"),
        "networks": {"InfiniBand": infiniband("200Gb/s", "JUPITER: 4 x 200 Gb/s NDR200 for 4 GH200")},
    },
    "H200": _HOPPER_NODE
    | gpu(
        memory=of_xla("151397597184B", "h200"),
        memory_bandwidth=of_xla("4.8TB/s", "h200"),
        flops=_H100_FLOPS,
        cores=of_xla(132, "h200"),
    ),
}
_BLACKWELL: dict[str, dict[str, Any]] = {
    "B200": gpu(
        memory=of_xla("191514411008B", "b200"),
        memory_bandwidth=of_xla("7672.32GB/s", "b200"),
        flops=flops(
            "NVIDIA HGX B200 datasheet, per GPU, half of those with sparsity; float32 is TF32",
            float4=9000,
            float8=4500,
            bfloat16=2250,
            float16=2250,
            float32=1100,
            float64=37,
            int8=4500,
            vector=75,
        ),
        cores=of_xla(148, "b200"),
    )
    | {
        "intra": nvlink(
            "900GB/s", "NVIDIA HGX B200 datasheet: NVLink 1.8 TB/s, both directions", 0.802, True
        ),
        "host_memory": number("2TiB", "NVIDIA DGX B200 datasheet: 2 TB"),
        **host_processors("716.8GB/s", 112, "NVIDIA DGX B200: 2 Xeon 8570, each 56 cores and 8 x DDR5-5600"),
        "host_link": pcie_to_host("63GB/s", "PCIe 5.0 x16"),
        "networks": {
            "InfiniBand": infiniband("400Gb/s", "NVIDIA DGX B200: 8 x 400 Gb/s for 8 GPUs"),
            "Ethernet": ETHERNET,
        },
    },
    "GB200-NVL72": _GRACE_NODE
    | gpu(
        memory=of_xla("197897748480B", "gb200"),
        memory_bandwidth=of_xla("7928.064GB/s", "gb200"),
        flops=flops(
            "NVIDIA GB200 NVL72 datasheet, a 72nd, half of those with sparsity; float32 is TF32",
            float4=10000,
            float8=5000,
            bfloat16=2500,
            float16=2500,
            float32=1250,
            float64=40,
            int8=5000,
            vector=80,
        ),
        cores=of_xla(152, "gb200"),
    )
    | {
        "networks": {
            "InfiniBand": infiniband("400Gb/s", "NVIDIA DGX GB200 datasheet: 72 x 400 Gb/s for 72 GPUs")
        }
    },
    "B300": gpu(
        memory=of_xla("297021865984B", "b300"),
        memory_bandwidth=of_xla("7936GB/s", "b300"),
        flops=flops(
            "NVIDIA HGX B300 specifications, per GPU, half of those with sparsity (float4: without); float32 is TF32",
            float4=13500,
            float8=4500,
            bfloat16=2250,
            float16=2250,
            float32=1125,
            float64=1.25,
            int8=187.5,
            vector=75,
        ),
        cores=of_xla(158, "b300"),
    )
    | {
        "intra": nvlink(
            "900GB/s", "NVIDIA HGX B300 specifications: NVLink 1.8 TB/s, both directions", 0.802, True
        ),
        "host_memory": number("2TiB", "NVIDIA DGX B300 datasheet: 2 TB"),
        **host_processors("819.2GB/s", 128, "NVIDIA DGX B300: 2 Xeon 6776P, each 64 cores and 8 x DDR5-6400"),
        "host_link": pcie_to_host("63GB/s", "PCIe 5.0 x16 of the CPUs of a DGX B300"),
        "networks": {
            "InfiniBand": infiniband("800Gb/s", "NVIDIA DGX B300: 8 x 800 Gb/s for 8 GPUs"),
            "Ethernet": ETHERNET,
        },
    },
    "GB300-NVL72": _GRACE_NODE
    | gpu(
        memory=of_xla("297021079552B", "gb300"),
        memory_bandwidth=of_xla("7928.064GB/s", "gb300"),
        flops=flops(
            "NVIDIA GB300 NVL72 specifications, a 72nd, half of those with sparsity (float4: without); float32 is TF32",
            float4=15000,
            float8=5000,
            bfloat16=2500,
            float16=2500,
            float32=1250,
            float64=1.39,
            int8=166.7,
            vector=83.3,
        ),
        cores=of_xla(152, "gb300"),
    )
    | {
        "networks": {
            "InfiniBand": infiniband("800Gb/s", "NVIDIA DGX GB300 datasheet: 72 x 800 Gb/s for 72 GPUs")
        }
    },
}

PRESETS: dict[str, dict[str, Any]] = _VOLTA | _AMPERE | _ADA | _HOPPER | _BLACKWELL | {"CPU": simulated()}
"""Numbers with their sources, by GPU; the first network is the default."""

SHORT_NAMES = {"GB200": "GB200-NVL72", "GB300": "GB300-NVL72"}
"""Other names of presets."""


def node_devices(preset: str) -> int:
    """Devices in a full node of a preset."""
    return PRESETS[preset].get("node_devices", {"value": NODE_DEVICES})["value"]
