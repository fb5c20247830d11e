"""Windows that slide along a dimension, and the rows that a part of it borrows from its neighbours.

A convolution or a pooling computes row `y` of its result from rows `y * stride - low + t * dilation` of its operand, for
each tap `t`. If `rows * base_dilation = results * stride`, equal parts of both sides lie over one another. Then splitting
the dimension is splitting a factor that operand and result share. A stride is a minor factor of the operand's dimension. A
base dilation (of a transposed convolution, or of a strided one's gradient) is a minor factor of the result's. At its ends,
a part reads a few rows of its neighbours: its *halo* (Dryden et al., "Improving strong-scaling of CNN training by
exploiting finer-grained parallelism", 2019).

The gradient of a kernel slides the cotangent, which is as long as the operand, along it. There it is the taps that lie over
the operand's rows, and the sum over them is split. Stride and dilation change places in the formulas, and so do results and
taps.
"""

from dataclasses import dataclass, replace

from autoshard.search.ir.factors.loops import Dim, Loops
from autoshard.search.ir.factors.rule import Kind, Window


@dataclass(frozen=True, slots=True)
class Sliding:
    """Windows along one dimension.

    Attributes:
      rows: extent of the operand.
      results: extent of the result.
      taps: rows in a window.
      stride: distance of neighbouring windows.
      dilation: distance of a window's rows.
      base_dilation: distance of the operand's rows, between which are zeros.
      low: rows of padding before the operand.
    """

    rows: int
    results: int
    taps: int
    stride: int = 1
    dilation: int = 1
    base_dilation: int = 1
    low: int = 0

    @property
    def has_aligned_results(self) -> bool:
        """True if equal parts of the result read equal parts of the operand, but for halos."""
        return self._is_aligned and 1 in (self.stride, self.base_dilation)

    @property
    def has_aligned_taps(self) -> bool:
        """True if equal parts of the windows read equal parts of the operand, but for halos."""
        return self._exchanged._is_aligned and 1 in (self.dilation, self.base_dilation)

    @property
    def halo(self) -> tuple[int, int]:
        """Rows that a part of the result reads before and behind its part of the operand."""
        end = (self.taps - 1) * self.dilation - self.stride - self.low
        return max(0, self.low // self.base_dilation), max(0, end // self.base_dilation + 1)

    @property
    def taps_halo(self) -> tuple[int, int]:
        """Rows that a part of the taps reads before and behind its part of the operand."""
        return self._exchanged.halo

    @property
    def _is_aligned(self) -> bool:
        return self.low >= 0 and self.rows * self.base_dilation == self.results * self.stride

    @property
    def _exchanged(self) -> "Sliding":
        """The windows with taps as results."""
        return replace(self, results=self.taps, taps=self.results, stride=self.dilation, dilation=self.stride)


def window(
    factor: Dim,
    operand: int,
    dim: int,
    halo: tuple[int, int],
    is_named: bool = False,
    is_returned: bool = False,
) -> tuple[Window, ...]:
    """The window along a factor; none along a dimension of one row."""
    return tuple(Window(f, operand, dim, *halo, is_named, is_returned) for f in factor)


def over_rows(loops: Loops, factor: Dim, step: int) -> Dim:
    """A dimension that has `step` rows in each iteration of a factor."""
    return factor + loops.dim(step, Kind.UNSPLITTABLE)
