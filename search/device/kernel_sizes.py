"""Kernel times in XLA's scheduler on GPUs before Hopper, for which it has no tables: kernels come in three sizes.

(`ApproximateLatencyEstimator` in `xla/service/latency_hiding_scheduler.cc`, with the overrides of
`xla/service/gpu/gpu_latency_hiding_scheduler.cc`; `IsSupportedForModule` in
`xla/service/gpu/model/sol_latency_estimator.cc` says for which GPUs there are tables.)
"""

from dataclasses import replace

from autoshard.search.device.latency_hiding import EDGE_S
from autoshard.search.device.lowering import Copies, Kernel, Lowered, Sums

SMALL_S = EDGE_S
"""A kernel that sums an array, or writes it in another order tile by tile. Source: XLA, `kLowCost`."""

MEDIUM_S = 1e3 * EDGE_S
"""A product, a convolution, or a kernel that is a plain loop. Source: XLA, `kMediumCost`."""

LARGE_S = 5e3 * EDGE_S
"""A collective, or a copy to the host or from it. Source: XLA, `kHighLatency`."""


def sized(lowered: Lowered) -> Lowered:
    """The program with the scheduler's time for each kernel, which does not depend on its operations or bytes."""
    kernels = (replace(k, time=replace(k.time, scheduled_s=_size_s(k))) for k in lowered.kernels)
    return replace(lowered, kernels=tuple(kernels))


def _size_s(kernel: Kernel) -> float:
    if kernel.collective is not None:
        return LARGE_S
    is_tiled = isinstance(kernel.root, Copies) and kernel.root.is_tiled
    return SMALL_S if is_tiled or isinstance(kernel.root, Sums) else MEDIUM_S
