"""What XLA's compiler is told of a GPU that is not there: a `GpuTargetConfigProto` as text.

Those of the presets are known here. Any other can be described in a file of its own; XLA's sources hold examples
under `xla/backends/gpu/target_config/specs`. Whoever describes it, the device's memory is ours to say: it is how
the compiler learns of the cap.
"""

import re
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
        "L4": {
            "threads_per_core_limit": "1536",
            "shared_memory_per_core": "102400",
            "core_count": "58",
            "fpus_per_core": "128",
            "l2_cache_size": "50331648",
            "clock_rate_ghz": "2.04",
            "shared_memory_per_block_optin": "101376",
            "cuda_compute_capability": "{ major: 8 minor: 9 }",
        },
        "H100": _HOPPER,
        "B200": {
            **_HOPPER,
            "core_count": "148",
            "l2_cache_size": "132644864",
            "clock_rate_ghz": "1.965",
            "cuda_compute_capability": "{ major: 10 }",
        },
    }
)
"""What XLA knows of a chip. Source: XLA, `target_config/specs`; of the L4, which is not there, NVIDIA's data sheet and
the CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability"."""

_GPUS = MappingProxyType(
    {
        "V100-16GB": ("V100", 16935682048, "898048000000"),
        "V100-32GB": ("V100", 34079637504, "898048000000"),
        "L4": ("L4", 23622320128, "300000000000"),
        "A100-40GB": ("A100", 42949672960, "1555200000000"),
        "A100-80GB": ("A100", 85100068864, "2039040000000"),
        "H100-80GB": ("H100", 84929347584, "3352320000000"),
        "H200": ("H100", 151397597184, "4800000000000"),
        "B200": ("B200", 191514411008, "7672320000000"),
    }
)
"""By device name: chip, memory in bytes, memory bandwidth in bytes/s. Source: as above; V100-32GB and L4 as in
`presets`."""

_DNN = MappingProxyType({"V100": "{ major: 8 minor: 9 patch: 4 }", "A100": "{ major: 8 minor: 9 patch: 4 }"})
"""cuDNN's version, where it is not 9.7. Source: as above."""

LATENCY_HIDING = "xla_gpu_enable_latency_hiding_scheduler"
"""XLA's option for the scheduler that puts computation between a collective's start and its end."""

REDUCE_SCATTER_JOINED = "xla_gpu_reduce_scatter_combine_threshold_bytes"
"""XLA's option for how much it joins reduce-scatters to, counted by what a device keeps."""

JOINED_BYTES = 30 * 2**20 // 8
"""For that: what is left on each of eight devices of 30 MiB, to which XLA joins other collectives. Left alone, it joins as
much of what a device keeps: nearly all gradients at once, so that no computation is left to hide the reduction."""

AIM_SHARE = 0.9
"""Of what a cap leaves beside arguments and outputs, what the scheduler is told to keep to: it is a goal, and not a bound.
Source: compiled programs (`benchmarks.under_caps`). Of 22 under tight caps, 13 held up to 5% more than the cap with all of
it, and 5 with this share, which costs them nothing or hardly any overlap; with less the rest would have no less."""

_BEFORE_HOPPER = ("V100", "A100", "L4", "CPU")


def is_hopper_or_later(gpu: str) -> bool:
    """Whether XLA treats a GPU, by its name, like Hopper: it hides latencies there by default, and gives cuBLAS more
    workspace. A GPU that is not known is taken for a new one."""
    return not gpu.startswith(_BEFORE_HOPPER)


def scheduler_options(gpu: str) -> dict[str, str]:
    """The compiler's options with which XLA hides the latencies of collectives on a GPU, by its name, where it does not by
    default. JAX hands on a bool as text only where it is spelt as in Python. Source: compiled programs.
    Without its scheduler, A100s reduce gradients while nothing is computed; without the other, reductions wait for all."""
    if gpu == "CPU":
        return {}
    hiding = {} if is_hopper_or_later(gpu) else {LATENCY_HIDING: "True"}
    return hiding | {REDUCE_SCATTER_JOINED: str(JOINED_BYTES)}


AS_PLANNED = MappingProxyType({"xla_disable_hlo_passes": "rematerialization"})
"""The compiler's option for a plan's program: what it recomputes is planned. Near its budget XLA would make again what it
finds cheap, gathers of parameters too, though the program fits as it is. Source: compiled programs; of 36 that recompute
(six models on 16 L4s and 8 H100s, under 80, 60 and 45% of what they hold), 10 gathered 3 to 100% more of some kind with
that pass, and none without; 8 held more than their cap with it, and 12 without."""

UNHIDDEN = MappingProxyType({**AS_PLANNED, LATENCY_HIDING: "False"})
"""The same without the scheduler that hides latencies, which takes memory for that. Source: compiled programs; of ten plans
under tight caps that hold 0.1 to 193% more than these otherwise, all hold less without it, 0 to 25% more, and three fit."""

ATTEMPTS = (AS_PLANNED, UNHIDDEN, MappingProxyType[str, str]({}))
"""Options with which a plan's program is compiled, in turn, until it keeps to its cap; last, with what XLA makes again."""


def budget_bytes(cap_bytes: float, resting_bytes: float) -> float:
    """What the scheduler is told to keep its temporaries to.

    Args:
      cap_bytes: what the program may use.
      resting_bytes: its arguments and outputs, aliased ones once; where these alone exceed the cap, nothing is left.

    Example:
      >>> budget_bytes(8_000_000_000, 2_000_000_000)
      5400000000.0
    """
    return AIM_SHARE * max(0, cap_bytes - resting_bytes)


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
      memory_bytes: what the compiler is told of its memory; by default what the GPU has.
      description: its text proto, for a GPU that is not known here.

    Raises:
      InputError: the GPU is not known here, or the description is none.
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
