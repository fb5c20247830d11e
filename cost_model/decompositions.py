"""The time of a matrix decomposition on one GPU: a chain of kernels for each column.

cuSOLVER and cuBLAS decompose a matrix column by column, in panels: each column waits for the previous one. Three parts take
time, one after the other:

    time = matrices x (columns x column_s + bytes read again / bandwidth)
         + max(FLOPs / (speed x SPEED_SHARE), bytes / bandwidth)

* the chain of kernels for each column, which dominates for small matrices (`Steps.column_s`);
* the half of a reduction to tridiagonal or bidiagonal form that multiplies the rest of the matrix by one vector per column,
  at the memory's rate: n x n, (n - 1) x (n - 1), ... are n^3 / 3 elements, and half of them if the matrix is symmetric
  (Dongarra, Sorensen & Hammarling, "Block reduction of matrices to condensed forms", 1989);
* the arithmetic (`search.ir.factors.linalg`), on the ordinary cores: cuSOLVER uses TF32 only on request.

The library decomposes the matrices of a batch one after the other unless it has a routine for batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.compute import Seconds, kernel_s, pass_s_per_byte


@dataclass(frozen=True, slots=True)
class Steps:
    """The cost of a decomposition per column of a matrix.

    Attributes:
      column_s: seconds of the chain of kernels for a column.
      passes: reads of the whole remaining matrix per column.
      most_together: most columns of matrices that are decomposed together in a batch; infinite if there is no limit.
    """

    column_s: float
    passes: float = 0.0
    most_together: float = 0.0


SPEED_SHARE = 0.14
"""Share of the ordinary cores' peak that the arithmetic reaches, in place of `vector_efficiency`. Source:
pytorch#173515, cuSOLVER: a Cholesky decomposition of 64 matrices of 2,048 columns takes 20 ms longer than that of one, 9.2
TFLOP/s, or 0.14 of an H100's peak. The GPU is not named; it is assumed to be the H100 of the related #173788. The other
decompositions are assumed to reach this share too."""

CHOLESKY = Steps(0.9e-6, most_together=np.inf)
"""Source: pytorch#173515, cuSOLVER: 376 us for n = 512, 1,954 us for 2,048, 22 ms for 64 of 2,048."""

LU = Steps(10e-6)
"""Source: jax#9694, float32: n = 4,096 takes 41 ms on a V100, a determinant by it 44 ms on an A100."""

QR = Steps(6e-6)
"""QR with the orthogonal factor. Source: pytorch#173788, cuSOLVER on an H100: 128 x 32 takes 189 us."""

HOUSEHOLDER = Steps(3e-6)
"""One of the two halves of a QR. Source: half of `QR`."""

EIGH = Steps(30e-6, passes=0.5, most_together=32)
"""Source: in float32, between the 55 us a column of jax#10180 (n = 1,024, V100) and the 18 us of pytorch#174674 (n = 100,
GPU not named).
Beyond 32 columns JAX decomposes the matrices of a batch one after the other (jax#10180, jax#1135). For large ones,
"Extracting the Potential of Emerging Hardware Accelerators for Symmetric Eigenvalue Decomposition" (Wang et al.) finds less
than 3% of an H100's arithmetic in use."""

SVD = Steps(120e-6, passes=2.0, most_together=32)
"""Source: tenferro-rs#1849, `gesvd` in complex128 on an A100: 48 ms for n = 400."""

STEPS: Mapping[str, Steps] = {
    "cholesky": CHOLESKY,
    "triangular_solve": CHOLESKY,
    "lu": LU,
    "qr": QR,
    **dict.fromkeys(("geqrf", "geqp3", "householder_product", "ormqr"), HOUSEHOLDER),
    "eigh": EIGH,
    "tridiagonal": EIGH,
    "svd": SVD,
    **dict.fromkeys(("eig", "schur", "hessenberg"), SVD),
}
"""By primitive. An unmeasured primitive uses a related one's steps: a triangular solve is a part of a Cholesky
decomposition, and a nonsymmetric matrix is reduced as for an SVD."""


def decomposition_s(
    device: Device,
    steps: Steps,
    shape: tuple[int, int],
    num_matrices: ArrayLike,
    dtype: DTypeLike,
    num_bytes: ArrayLike,
    flops: ArrayLike,
) -> Seconds:
    """Seconds of a decomposition.

    Args:
      device: the device that runs it.
      steps: its cost per column.
      shape: rows and columns of one matrix.
      num_matrices: matrices that the device decomposes.
      dtype: the elements' dtype.
      num_bytes: bytes that it reads and writes once.
      flops: for all matrices, counted as if their elements were real; a complex dtype takes four times as many.

    Example:
      >>> from autoshard.cost_model.hardware import parse_cluster
      >>> h100, n = parse_cluster("8xH100-80GB").device, 16384
      >>> f"{decomposition_s(h100, EIGH, (n, n), 1, 'float32', 8 * n**2, 9 * n**3):.1f} s"
      '7.5 s'
    """
    is_complex, itemsize = np.issubdtype(dtype, np.complexfloating), np.dtype(dtype).itemsize
    columns, is_wide = min(shape), itemsize > (8 if is_complex else 4)
    wide_flops_per_s = min(device.peak_flops_per_s("float64"), device.vector_flops_per_s)
    slowdown = device.vector_flops_per_s / wide_flops_per_s if is_wide else 1.0
    real_flops = np.asarray(flops, float) * slowdown * (4 if is_complex else 1)
    if device.name == "CPU":
        return kernel_s(device, num_bytes, real_flops)
    once_s = kernel_s(device, num_bytes, real_flops * device.vector_efficiency / SPEED_SHARE)
    again_bytes = steps.passes * itemsize * max(shape) * columns**2 / 3
    turns = np.minimum(num_matrices, 1) if columns <= steps.most_together else np.asarray(num_matrices)
    chain_s = turns * columns * steps.column_s
    return once_s + chain_s + np.asarray(num_matrices) * again_bytes * pass_s_per_byte(device)
