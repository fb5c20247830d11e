"""Copies of a convolution's operands: cuDNN takes neither uneven padding nor dilated operands.

XLA:GPU writes such an operand out with its zeros, in the kernel that computes it (`ConvPaddingLegalization`). A value
that only such copies read has no other array.

* A convolution whose padding is uneven reads a padded copy; the gradient of its kernel reads that copy too.
* A transposed convolution reads its images with zeros between the rows. The gradient of a strided convolution differs
  only by its reversed kernel, and does not: cuDNN computes it directly, with any padding.
* The gradient of a transposed convolution's kernel slides the larger operand, the cotangent, over the smaller one. XLA
  exchanges the operands (`AlgebraicSimplifier::SwapConvOperands`). Then batch and channels change places, and both
  operands are written out so: the cotangent padded, the images with zeros between the rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from autoshard.search.problem.flat_program import FlatOp, FlatProgram

CONVOLUTION = "conv_general_dilated"


@dataclass(frozen=True, slots=True)
class ConvolutionCopy:
    """The copy of a convolution's operand.

    Attributes:
      spatial: the extents of the images' dimensions, zeros included.
      growth: bytes of the copy over bytes of the operand.
    """

    spatial: tuple[int, ...]
    growth: float


def convolution_copy(program: FlatProgram, op: FlatOp, operand: int) -> ConvolutionCopy | None:
    """The copy of a convolution's operand; None where the convolution reads the operand itself."""
    assert op.op is not None
    params, values = op.op.params, [program.values[v].shape for v in op.operands]
    dims = params["dimension_numbers"]
    images, kernel = ([shape[d] for d in spec[2:]] for shape, spec in zip(values, dims[:2], strict=True))
    if prod(kernel) > prod(images):
        made = [program.values[op.results[0]].shape[d] for d in dims.out_spec[2:]]
        dilated = [_dilated(n, d) for n, d in zip(images, params["lhs_dilation"], strict=True)]
        if operand == 0:
            return _copy(images, dilated)
        padded = [max(n, m + k - 1) for n, m, k in zip(kernel, made, dilated, strict=True)]
        return _copy(kernel, padded)
    is_dilated = max(params["lhs_dilation"], default=1) > 1
    if operand == 0 and (not _is_reversed(program, op) if is_dilated else _is_uneven(params)):
        written = map(_padded, images, params["padding"], params["lhs_dilation"])
        return _copy(images, list(written))
    return None


def _copy(shape: list[int], written: list[int]) -> ConvolutionCopy:
    return ConvolutionCopy(tuple(written), prod(written) / prod(shape))


def _dilated(extent: int, dilation: int) -> int:
    return (extent - 1) * dilation + 1


def _padded(extent: int, padding: tuple[int, int], dilation: int) -> int:
    return _dilated(extent, dilation) + sum(max(n, 0) for n in padding)


def _is_uneven(params: Mapping[str, Any]) -> bool:
    """Whether padding is uneven. In the kernel gradient of a strided convolution, the end may have less, by less than a
    stride."""
    pads = zip(params["padding"], params["rhs_dilation"], strict=True)
    return any(not high <= low <= high + dilation - 1 for (low, high), dilation in pads)


def _is_reversed(program: FlatProgram, op: FlatOp) -> bool:
    """Whether the kernel is reversed; a dilated convolution with one is the gradient of a strided convolution."""
    return program.ops[program.maker[op.operands[1]][0]].name == "rev"
