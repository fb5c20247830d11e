"""Descriptions of absent GPUs for XLA's compiler: each a `GpuTargetConfigProto` as text.

This module holds those of the presets. A file of its own can describe any other GPU; XLA's sources hold examples
under `xla/backends/gpu/target_config/specs`. In every description autoshard can set the device's memory, which
tells the compiler the cap.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

from autoshard.cost_model.errors import InputError

_HOPPER = {
    "shared_memory_per_core": "233472",
    "core_count": "132",
    "fpus_per_core": "128",
    "l2_cache_size": "52428800",
    "clock_rate_ghz": "1.98",
    "shared_memory_per_block_optin": "232448",
    "cuda_compute_capability": "{ major: 9 }",
}

_BLACKWELL = {
    **_HOPPER,
    "core_count": "148",
    "l2_cache_size": "132644864",
    "clock_rate_ghz": "1.965",
    "cuda_compute_capability": "{ major: 10 }",
}

_ADA = {
    "threads_per_core_limit": "1536",
    "shared_memory_per_core": "102400",
    "core_count": "58",
    "fpus_per_core": "128",
    "l2_cache_size": "50331648",
    "clock_rate_ghz": "2.04",
    "shared_memory_per_block_optin": "101376",
    "cuda_compute_capability": "{ major: 8 minor: 9 }",
}

_CHIPS = MappingProxyType(
    {
        "V100": {
            "shared_memory_per_core": "98304",
            "core_count": "80",
            "fpus_per_core": "64",
            "l2_cache_size": "6291456",
            "clock_rate_ghz": "1.53",
            "shared_memory_per_block_optin": "98304",
            "cuda_compute_capability": "{ major: 7 }",
        },
        "A100": {
            "shared_memory_per_core": "167936",
            "core_count": "108",
            "fpus_per_core": "64",
            "l2_cache_size": "41943040",
            "clock_rate_ghz": "1.41",
            "shared_memory_per_block_optin": "166912",
            "cuda_compute_capability": "{ major: 8 }",
        },
        "A10G": {
            **_ADA,
            "core_count": "80",
            "l2_cache_size": "6291456",
            "clock_rate_ghz": "1.71",
            "cuda_compute_capability": "{ major: 8 minor: 6 }",
        },
        "L4": _ADA,
        "L40S": {
            **_ADA,
            "core_count": "142",
            "l2_cache_size": "100663296",
            "clock_rate_ghz": "2.52",
        },
        "RTX-4090": {
            **_ADA,
            "core_count": "128",
            "l2_cache_size": "75497472",
            "clock_rate_ghz": "2.52",
        },
        "RTX-6000-Ada": {
            **_ADA,
            "core_count": "142",
            "l2_cache_size": "100663296",
            "clock_rate_ghz": "2.505",
        },
        "H100": _HOPPER,
        "H100-PCIe": {**_HOPPER, "core_count": "114", "clock_rate_ghz": "1.755"},
        "H100-NVL": {**_HOPPER, "clock_rate_ghz": "1.785"},
        "B200": _BLACKWELL,
        "GB200": {
            **_BLACKWELL,
            "core_count": "152",
            "l2_cache_size": "135528448",
            "clock_rate_ghz": "2.062",
        },
        "B300": {
            **_BLACKWELL,
            "core_count": "158",
            "l2_cache_size": "135528448",
            "cuda_compute_capability": "{ major: 10 minor: 3 }",
        },
        "GB300": {
            **_BLACKWELL,
            "core_count": "152",
            "l2_cache_size": "135528448",
            "clock_rate_ghz": "2.07",
            "cuda_compute_capability": "{ major: 10 minor: 3 }",
        },
    }
)
"""XLA's fields for each chip. Source: XLA, `target_config/specs`. Those of compute capability 8.6 and 8.9 are not
among them: NVIDIA's data sheets, its Ada whitepaper (cache and clock) and the CUDA C++ Programming Guide, table "Technical
Specifications per Compute Capability"; clocks of the A10G and the H100 NVL: their peak FLOP/s and cores."""

_GPUS = MappingProxyType(
    {
        "V100-16GB": ("V100", 16935682048, "898048000000"),
        "V100-32GB": ("V100", 34079637504, "898048000000"),
        "A10G": ("A10G", 23684186112, "600000000000"),
        "L4": ("L4", 23622320128, "300000000000"),
        "L40S": ("L40S", 47803531264, "864000000000"),
        "RTX-4090": ("RTX-4090", 25383256719, "1008000000000"),
        "RTX-6000-Ada": ("RTX-6000-Ada", 50983862272, "960000000000"),
        "A100-40GB": ("A100", 42949672960, "1555200000000"),
        "A100-80GB": ("A100", 85100068864, "2039040000000"),
        "H100-80GB": ("H100", 84929347584, "3352320000000"),
        "H100-PCIe": ("H100-PCIe", 84942979072, "2039040000000"),
        "H100-NVL": ("H100-NVL", 99456909312, "3900000000000"),
        "GH200": ("H100", 101468602368, "4000000000000"),
        "H200": ("H100", 151397597184, "4800000000000"),
        "B200": ("B200", 191514411008, "7672320000000"),
        "GB200-NVL72": ("GB200", 197897748480, "7928064000000"),
        "B300": ("B300", 297021865984, "7936000000000"),
        "GB300-NVL72": ("GB300", 297021079552, "7928064000000"),
    }
)
"""By device name: chip, memory in bytes, memory bandwidth in bytes/s. Source: XLA, `target_config/specs`; as in `presets`
for those that it does not have."""

NEWEST = "B200"
"""The first GPU of the newest generation among the presets."""

_DNN = MappingProxyType({"V100": "{ major: 8 minor: 9 patch: 4 }", "A100": "{ major: 8 minor: 9 patch: 4 }"})
"""cuDNN's version for chips where it is not 9.7. Source: XLA, `target_config/specs`."""

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
"""XLA's option for the scheduler that puts computation between a collective's start and its end."""

REDUCE_SCATTER_JOINED = "xla_gpu_reduce_scatter_combine_threshold_bytes"
"""XLA's option for the size to which it combines reduce-scatters, in bytes that one device keeps."""

JOINED_BYTES = 30 * 2**20 // 8
"""The value for `REDUCE_SCATTER_JOINED`: one device's part of 30 MiB over eight devices; XLA combines other collectives to
30 MiB. By default XLA combines reduce-scatters until each device keeps 30 MiB: nearly all gradients at once, so that no
computation is left to hide the reduction."""

AIM_SHARE = 0.9
"""The scheduler's budget, as a share of the memory that a cap leaves beside arguments and outputs. The budget is a goal, not
a bound. Source: compiled programs (`benchmarks.under_caps`). With the full budget 13 of 22 programs under tight caps
exceeded the cap, by up to 5%; with this share 5 did, with little or no loss of overlap. A smaller share helps no further."""

_BEFORE_HOPPER = ("V100", "A100", "L4", "CPU")
"""How the names of devices without a preset begin that are no Hoppers."""

_HOPPER_CAPABILITY = (9, 0)


def is_hopper_or_later(gpu: str) -> bool:
    """Whether XLA treats a GPU, given by its name, like Hopper: it hides latencies there by default, and gives cuBLAS more
    workspace. An unknown GPU counts as a newer one.

    Example:
      >>> [is_hopper_or_later(gpu) for gpu in ("GH200", "RTX-4090", "CPU")]
      [True, False, False]
    """
    capability = compute_capability(gpu)
    return not gpu.startswith(_BEFORE_HOPPER) if capability is None else capability >= _HOPPER_CAPABILITY


def compute_capability(gpu: str) -> tuple[int, int] | None:
    """The compute capability of a preset's GPU, given by its name; None for other devices.

    Example:
      >>> compute_capability("H200"), compute_capability("L4"), compute_capability("CPU")
      ((9, 0), (8, 9), None)
    """
    if gpu not in _GPUS:
        return None
    parts = dict(re.findall(r"(\w+): (\d+)", _CHIPS[_GPUS[gpu][0]]["cuda_compute_capability"]))
    return int(parts["major"]), int(parts.get("minor", 0))


def scheduler_options(gpu: str) -> dict[str, str]:
    """The compiler's options that make XLA hide the latencies of collectives on a GPU, given by its name.

    JAX accepts a bool as text only in Python's spelling. Source: compiled programs. Without `LATENCY_HIDING`, A100s
    reduce gradients with no computation beside it; without `REDUCE_SCATTER_JOINED`, reductions wait for all gradients."""
    if gpu == "CPU":
        return {}
    hiding = {} if is_hopper_or_later(gpu) else {LATENCY_HIDING: "True"}
    return hiding | {REDUCE_SCATTER_JOINED: str(JOINED_BYTES)}


AS_PLANNED = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
"""The compiler's option for a plan's program, which already plans its recomputation. Near its budget XLA would recompute
cheap values too, even gathers of parameters, although the program fits. Source: 36 compiled programs with recomputation
(six models on 16 L4s and 8 H100s, under caps of 80, 60 and 45% of their memory). With XLA's pass 10 gathered 3 to 100%
more of some kind, without it none; 8 exceeded their cap with the pass, 12 without it."""

UNHIDDEN = MappingProxyType({**AS_PLANNED, LATENCY_HIDING: "False"})
"""`AS_PLANNED` without the latency-hiding scheduler, which uses memory for overlap. Source: compiled programs of ten plans
that exceed tight caps by 0.1 to 193%. Without that scheduler all hold less: they exceed the caps by 0 to 25%, and three
fit."""

ATTEMPTS = (AS_PLANNED, UNHIDDEN, MappingProxyType[str, str]({}))
"""Options for compiling a plan's program, tried in turn until it fits its cap; the last ones allow XLA's recomputation."""


def attempts(overlap: float) -> tuple[Mapping[str, str], ...]:
    """The options to try for a plan, in order; the first ones are those of the plan.

    Args:
      overlap: the plan's share of the scheduler's budget; at 0, the scheduler is off.
    """
    return ATTEMPTS if overlap else ATTEMPTS[1:]


def budget_bytes(cap_bytes: float, resting_bytes: float, overlap: float = 1.0) -> float:
    """The scheduler's budget for temporaries.

    Args:
      cap_bytes: the program's memory cap.
      resting_bytes: size of its arguments and outputs, aliased ones once; if these exceed the cap, the budget is 0.
      overlap: the plan's share of the budget.

    Example:
      >>> [budget_bytes(8_000_000_000, 2_000_000_000, overlap) for overlap in (1.0, 0.5)]
      [5400000000.0, 2700000000.0]
    """
    return overlap * AIM_SHARE * max(0, cap_bytes - resting_bytes)


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


def target_config(gpu: str, memory_bytes: int | None = None, description: str | None = None) -> str:
    """XLA's description of a GPU.

    Args:
      gpu: the name of a preset's device.
      memory_bytes: the memory in the description; by default the GPU's own.
      description: its text proto, for a GPU that is not among the presets.

    Raises:
      InputError: the GPU is unknown, or the description is not valid.
    """
    text = _known(gpu) if description is None else description
    if memory_bytes is None:
        return text
    without = re.sub(r"\bdevice_memory_size\s*:\s*\d+", "", text)
    described, count = re.subn(
        r"(gpu_device_info\s*:?\s*\{)", rf"\1 device_memory_size: {memory_bytes} ", without, count=1
    )
    if not count:
        raise InputError(
            f"wanted a target config as XLA's GpuTargetConfigProto in text, with gpu_device_info {{ ... }} in it, got "
            f"{text.strip()[:60]!r}; there are examples in XLA's sources, under xla/backends/gpu/target_config/specs"
        )
    return described


def _known(gpu: str) -> str:
    if gpu not in _GPUS:
        raise InputError(
            f"XLA's GPU compiler can be asked about {', '.join(_GPUS)}, and does not know {gpu!r}. Describe it with "
            "--target-config FILE (target_config=): XLA's GpuTargetConfigProto in text, as in its sources under "
            "xla/backends/gpu/target_config/specs"
        )
    chip, memory_bytes, bandwidth = _GPUS[gpu]
    fields = {
        **_EVERY_CHIP,
        **_CHIPS[chip],
        "memory_bandwidth": bandwidth,
        "device_memory_size": str(memory_bytes),
    }
    info = " ".join(f"{k} {v}" if v.startswith("{") else f"{k}: {v}" for k, v in fields.items())
    dnn = _DNN.get(chip, "{ major: 9 minor: 7 }")
    return (
        f'gpu_device_info {{ {info} }} platform_name: "CUDA" dnn_version_info {dnn} '
        f'runtime_version {{ major: 12 minor: 8 patch: 0 }} device_description_str: "{gpu}"'
    )
