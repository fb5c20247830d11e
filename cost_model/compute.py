"""The time of one op on one device: the roofline.

An op cannot finish before its arithmetic is done at the device's peak, nor before its bytes have moved at
the memory's bandwidth, and real kernels reach a known share of both:

    time = max(flops / (peak x efficiency), bytes / (bandwidth x efficiency)) + launch

(Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009.) Inputs are *local*: what one device computes
and moves after sharding. Everything accepts NumPy arrays, so that all strategies of an op are priced in one
call.
"""

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from cost_model.cluster import Device

MATMUL_EFFICIENCY = 0.7
"""Share of the dense tensor-core peak that a large GEMM sustains. Source: assumed, from the usual range 0.6
to 0.85 of cuBLAS on training shapes; replace it by calibration on the machine at hand."""

VECTOR_EFFICIENCY = 0.7
"""Share of the ordinary cores' peak that fused elementwise and reduction kernels sustain. Source: assumed;
such ops are bound by memory on every preset (fewer than 10 FLOP per byte), so it rarely matters."""

MEMORY_EFFICIENCY = 0.9
"""Share of the memory bandwidth that streaming kernels sustain. Source: assumed, the usual result of
STREAM-like benchmarks (BabelStream triad) on HBM GPUs, 0.85 to 0.93."""

KERNEL_LAUNCH_S = 3e-6
"""Seconds from one kernel to the next when the device does nothing else. Source: assumed, a few
microseconds is the usual figure for a CUDA launch; XLA's command buffers (CUDA graphs) and fusions hide
most of it, so it is opt-in."""


def op_time_s(
    device: Device,
    flops: ArrayLike,
    num_bytes: ArrayLike,
    dtype: DTypeLike,
    is_matmul: bool,
    launch_s: float = 0.0,
) -> np.ndarray | float:
    """Seconds that one op takes on one device.

    Args:
      device: where it runs.
      flops: floating-point operations of the local op (2 per multiply-add). Any shape.
      num_bytes: bytes that the local op reads and writes. Broadcasts with `flops`.
      dtype: of the operands: it selects the peak.
      is_matmul: whether the op runs on matrix units (products, convolutions) or on ordinary cores.
      launch_s: fixed cost to add per op, `KERNEL_LAUNCH_S` for ops that are kernels of their own.

    Returns:
      Seconds, of the broadcast shape; a float for scalars.

    Example:
      >>> from cost_model.hardware import parse_cluster
      >>> h100 = parse_cluster("8xH100-80GB").device
      >>> seconds = op_time_s(h100, 2 * 4096**3, 3 * 2 * 4096**2, "bfloat16", is_matmul=True)
      >>> f"{seconds * 1e6:.0f} us"
      '199 us'
    """
    peak_flops_per_s = device.peak_flops_per_s(dtype) if is_matmul else device.vector_flops_per_s
    efficiency = MATMUL_EFFICIENCY if is_matmul else VECTOR_EFFICIENCY
    compute_s = np.asarray(flops, dtype=float) / (peak_flops_per_s * efficiency)
    memory_s = np.asarray(num_bytes, dtype=float) / (device.memory_bytes_per_s * MEMORY_EFFICIENCY)
    seconds = np.maximum(compute_s, memory_s) + launch_s
    return float(seconds) if seconds.ndim == 0 else seconds
