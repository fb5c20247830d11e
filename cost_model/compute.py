"""The time of one kernel on one device: a roofline, with a tile model for matrix products.

A kernel cannot finish before its arithmetic is done and its bytes have moved, and its launch delays the next kernel:

    time = max(arithmetic, bytes / (bandwidth x efficiency), launch)

(Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009.) In a matrix product `[b] (m, k) (k, n) -> (m, n)` each
core computes one tile of the result at a time, and the device computes the tiles of all its cores in *waves*. Losses at
the edges, in the last wave and at the start of a tile make small products slow:

    arithmetic = ceil(tiles / cores) x (2 tile_m tile_n (k + DEPTH) / (speed of a core x efficiency of the tile))
    time = START + max(arithmetic, bytes / (bandwidth x efficiency))

(NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantisation.) Small tiles waste less at the
edges but compute more slowly. If there are fewer tiles than cores, the sum over k can be split among several tiles,
and their partial results are added up through memory. cuBLAS tries many ways; we take the best of `TILES` and `SPLITS`.
If a device's cores are unknown (`num_cores` is 1), products of every shape run at one rate.

Inputs are *local*: the arithmetic and the bytes of one device after sharding. All functions accept NumPy arrays, so
that one call prices all strategies of an op.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autoshard.cost_model.cluster import Device

type Seconds = np.ndarray | float
"""An array of the inputs' shape, or a float for scalars."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the result that one core computes, and its speed relative to the largest tiles."""

    m: int
    n: int
    efficiency: float


TILES: Sequence[Tile] = (
    Tile(256, 128, 1.0),
    Tile(128, 256, 1.0),
    Tile(128, 128, 0.95),
    Tile(128, 64, 0.8),
    Tile(64, 128, 0.8),
    Tile(64, 64, 0.65),
)
"""Tiles of cuBLAS, the most efficient first. Source: NVIDIA's guide (see the module) lists them; speeds assumed."""

SPLITS = (1, 2, 4, 8, 16)
"""Numbers of parts into which the sum over k may be split. Source: a choice of ours among CUTLASS's split-k factors."""

DEPTH = 192
"""Time in which a tile loads its first operands and stores its results, in steps of k. Source: fitted with `START_S`."""

START_S = 5e-6
"""Seconds before the first tile and after the last. Source: fitted, with `DEPTH` and an efficiency of 0.88, to the 375
products in bfloat16 that XLA's authors measured on an H100 (`xla/service/gpu/model/default_matmul_perf_table.txtpb`,
2026); the median error is 3%."""

_WAYS = np.array([(tile.m, tile.n, tile.efficiency, parts) for tile in TILES for parts in SPLITS], float).T

_PARTIAL_BYTES = 8
"""Bytes for each element and part of a split sum: 4 bytes in float32, written and then read."""


@dataclass(frozen=True, slots=True)
class Product:
    """A batch of equal matrix products on one device; arrays hold one entry per strategy.

    Attributes:
      batch: independent products.
      m: rows of the left operand.
      n: columns of the right operand.
      k: summed over.
    """

    batch: ArrayLike
    m: ArrayLike
    n: ArrayLike
    k: ArrayLike


def kernel_s(device: Device, num_bytes: ArrayLike, flops: ArrayLike = 0.0) -> Seconds:
    """Seconds of a kernel that is not a matrix product.

    Args:
      device: the device that runs it.
      num_bytes: bytes read and written.
      flops: floating-point operations.

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> h100 = parse_cluster("8xH100-80GB").device
      >>> f"{kernel_s(h100, 2 * 2**30) * 1e6:.0f} us"
      '712 us'
    """
    vector_s = np.asarray(flops, float) / (device.vector_flops_per_s * device.vector_efficiency)
    return _plain(np.maximum(np.maximum(vector_s, _memory_s(device, num_bytes)), device.launch_s))


def product_s(device: Device, product: Product, num_bytes: ArrayLike, peak_flops_per_s: float) -> Seconds:
    """Seconds of a matrix product, or of a convolution expressed as a matrix product.

    Args:
      device: the device that runs it.
      product: its sizes.
      num_bytes: bytes read and written.
      peak_flops_per_s: peak of the device for the operands' dtype.

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> h100 = parse_cluster("8xH100-80GB").device
      >>> seconds = product_s(h100, Product(1, 4096, 4096, 4096), 3 * 2 * 4096**2, h100.peak_flops_per_s("bfloat16"))
      >>> f"{seconds * 1e6:.0f} us"
      '193 us'
    """
    flops_per_s = peak_flops_per_s * device.matmul_efficiency
    b, m, n, k = (np.asarray(size, float) for size in (product.batch, product.m, product.n, product.k))
    if device.num_cores == 1:
        seconds = np.maximum(2 * b * m * n * k / flops_per_s, _memory_s(device, num_bytes))
    else:
        seconds = _tiled_s(device, (b, m, n, k), _memory_s(device, num_bytes), flops_per_s)
    return _plain(np.maximum(seconds, device.launch_s))


def _tiled_s(
    device: Device, sizes: tuple[np.ndarray, ...], memory_s: np.ndarray, flops_per_s: float
) -> np.ndarray:
    b, m, n, k = sizes
    copy_sources = (-1,) + (1,) * np.broadcast(*sizes, memory_s).ndim
    tile_m, tile_n, efficiency, parts = (column.reshape(copy_sources) for column in _WAYS)
    num_tiles = b * np.ceil(m / tile_m) * np.ceil(n / tile_n)
    waves = np.ceil(num_tiles * parts / device.num_cores)
    step_s = 2 * tile_m * tile_n * device.num_cores / (flops_per_s * efficiency)
    arithmetic_s = waves * (np.ceil(k / parts) + DEPTH) * step_s
    joining_s = parts * _memory_s(device, _PARTIAL_BYTES * b * m * n) + device.launch_s
    return START_S + (np.maximum(arithmetic_s, memory_s) + np.where(parts > 1, joining_s, 0.0)).min(axis=0)


def pass_s_per_byte(device: Device) -> float:
    """Seconds per byte read or written, for arrays of many bytes."""
    return 1.0 / (device.memory_bytes_per_s * device.memory_efficiency)


def _memory_s(device: Device, num_bytes: ArrayLike) -> np.ndarray:
    return np.asarray(num_bytes, float) * pass_s_per_byte(device)


def _plain(seconds: np.ndarray) -> Seconds:
    return float(seconds) if seconds.ndim == 0 else seconds
