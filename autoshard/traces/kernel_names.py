"""The class of a kernel, by its names.

The HLO instruction that launched a kernel says most: a collective, a fusion, a product. A library's kernels have their own
names, and those of a CUDA graph have nothing else. Sources: HLO names by XLA's GPU compiler (`all-gather-start`,
`gemm_fusion`, `cudnn-conv`); NCCL's `ncclDevKernel_AllGather_RING_LL`; cuBLAS's `nvjet_`, `sm90_xmma_gemm_`; CUTLASS;
cuDNN's `cudnn_generated_fort_native_sdpa_`; `MemcpyD2H` and its kin by `cupti_collector.cc`.
"""

import re

from autoshard.search.plan.kernel_class import KernelClass
from autoshard.traces.kernel import TracedKernel

HOST_COPIES, COPIES, OTHER_PROGRAMS = "copies to and from the host", "copies on the device", "other programs"

SENDS = "all-to-all or collective-permute"
"""NCCL runs both by one kernel, which has no HLO instruction in a CUDA graph."""

_COLLECTIVE = re.compile(
    "(?:ragged-)?(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)"
)
_OF_NCCL = {
    "AllReduce": "all-reduce",
    "AllGather": "all-gather",
    "ReduceScatter": "reduce-scatter",
    "AllToAll": "all-to-all",
    "Broadcast": "collective-broadcast",
    "SendRecv": SENDS,
}
_NCCL = re.compile(f"ccl(?:Dev)?Kernel_({'|'.join(_OF_NCCL)})")
_HOST_COPY = re.compile("MemcpyD2H|MemcpyH2D|CopyDeviceToHost|CopyHostToDevice")
_COPY = re.compile("Memcpy|Memset|CopyDeviceToDevice|copyBuffer")
_KINDS = {
    KernelClass.ATTENTION: "sdpa|fmha|flash|attention|attn|softmax_bprop",
    KernelClass.CONVOLUTIONS: r"implicit_gemm|convolv|winograd|[fd]prop|[dw]grad|conv(?!ert)",
    KernelClass.PRODUCTS: r"gemm|gemv|matmul|nvjet|cutlass|xmma|cublas|splitk|(^|[\W_])dot([\W_]|$)",
    KernelClass.FUSED: "fusion|^wrapped_|^(copy|transpose|concatenate|reduce|broadcast|select|slice|scatter|gather|iota)",
}
"""The first that fits: attention's and convolutions' kernels may be named after products, too."""

_CLASSES = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _KINDS.items()}


def class_of(kernel: TracedKernel) -> str:
    """The kind of a collective, a kind of copies, or the class of a kernel that computes.

    Example:
      >>> class_of(TracedKernel("gpu", "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 0, 1))
      'products'
    """
    if found := _COLLECTIVE.match(kernel.hlo_op):
        return found[1]
    if found := _NCCL.search(kernel.name):
        return _OF_NCCL[found[1]]
    if _HOST_COPY.match(kernel.name):
        return HOST_COPIES
    if _COPY.search(kernel.name):
        return COPIES
    label = f"{kernel.hlo_op} {kernel.name}".strip()
    return str(next((kind for kind, pattern in _CLASSES.items() if pattern.search(label)), _made(kernel)))


def _made(kernel: TracedKernel) -> KernelClass:
    """The class of a kernel that no pattern knows: XLA names those that it makes after their instruction."""
    made = re.sub(r"\W", "_", kernel.hlo_op)
    return KernelClass.FUSED if made and kernel.name.startswith(made) else KernelClass.OTHER


def computes(kind: str) -> bool:
    """Whether kernels of a class compute; others move data."""
    return kind in {*map(str, KernelClass), OTHER_PROGRAMS, COPIES}
