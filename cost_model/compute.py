"""The time of one kernel on one device: a roofline whose roof for matrix products is made of tiles.

A kernel cannot finish before its arithmetic is done, nor before its bytes have moved, nor can the next one start
before it has been launched:

    time = max(arithmetic, bytes / (bandwidth x efficiency), launch)

(Williams, Waterman & Patterson, "Roofline", CACM 52(4), 2009.) Of a matrix product `[b] (m, k) (k, n) -> (m, n)` each
core computes one tile of the result at a time, and the device all its cores' tiles in *waves*. What is lost at the
edges, in the last wave, and in starting a tile is what makes small products slow:

    arithmetic = ceil(tiles / cores) x (2 tile_m tile_n (k + DEPTH) / (speed of a core x efficiency of the tile))
    time = START + max(arithmetic, bytes / (bandwidth x efficiency))

(NVIDIA, "Matrix Multiplication Background User's Guide": tile and wave quantisation.) Small tiles waste less at the
edges and are slower within; where there are fewer tiles than cores, the sum over k can be split among several tiles,
whose partial results are then added up through memory. cuBLAS tries many; we take the best of `TILES` and `SPLITS`.
Where a device's cores are not known (`num_cores` is 1), products run at their rate whatever their shape.

Inputs are *local*: what one device computes and moves after sharding. Everything accepts NumPy arrays, so that all
strategies of an op are priced in one call.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from autoshard.cost_model.cluster import Device

type Seconds = np.ndarray | float
"""Of the inputs' shape; a float for scalars."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A part of the result that one core computes, and its speed relative to the largest tiles'."""

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
"""Source: the guide named above, which lists these for cuBLAS, the most efficient first; speeds assumed."""

SPLITS = (1, 2, 4, 8, 16)
"""Into how many parts the sum over k may be split. Source: a choice of ours among CUTLASS's split-k factors."""

DEPTH = 192
"""Steps of k that a tile takes to load its first operands and store its results. Source: `START_S`'s."""

START_S = 5e-6
"""Seconds before the first tile and after the last. Source: fitted, with `DEPTH`, to the 375 products in bfloat16 that
XLA's authors measured on an H100 (`xla/service/gpu/model/default_matmul_perf_table.txtpb`, 2026); the median error is 3%
with an efficiency of 0.88, which was fitted too."""

_WAYS = np.array([(tile.m, tile.n, tile.efficiency, parts) for tile in TILES for parts in SPLITS], float).T

_PARTIAL_BYTES = 8
"""For each element and part of a split sum: 4 bytes written and read again, in float32."""


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product on one device, or many of one batch, or as many strategies in arrays.

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
    """Seconds of a kernel that is no matrix product.

    Args:
      device: where it runs.
      num_bytes: that it reads and writes.
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
    """Seconds of a matrix product, or of a convolution as the product that it amounts to.

    Args:
      device: where it runs.
      product: its sizes.
      num_bytes: that it reads and writes.
      peak_flops_per_s: of the device, for the operands' dtype.

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
    """Seconds for each of many bytes that are written, or read."""
    return 1.0 / (device.memory_bytes_per_s * device.memory_efficiency)


def _memory_s(device: Device, num_bytes: ArrayLike) -> np.ndarray:
    return np.asarray(num_bytes, float) * pass_s_per_byte(device)


def _plain(seconds: np.ndarray) -> Seconds:
    return float(seconds) if seconds.ndim == 0 else seconds
