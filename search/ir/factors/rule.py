"""What a primitive's dimensions mean: one frozen value per equation.

A *factor* is one loop dimension of an op. A matrix product `(m, k), (k, n) -> (m, n)` has three: `m` and `n`
are parallel (a mesh axis that splits one splits the result with it, no communication), `k` is contracted
(each device then holds a partial result). A reshape `(b, h * d) -> (b, h, d)` has a *compound* dimension: `h
* d` is the factor `h` (major) followed by `d` (minor). The idea and the notation are those of Shardy's factor
rules (OpenXLA, `docs/propagation.md`); here one rule serves strategies, their collectives, local shapes and
costs alike.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import Any

Dims = tuple[tuple[int, ...], ...]
"""For each dimension of one operand or result, the factors that it is made of, major to minor."""


class Kind(StrEnum):
    """What splitting a factor over a mesh axis does to the results that do not carry it."""

    PARALLEL = "parallel"
    """Nothing: every result carries the factor, or computes the same without it."""
    SUM = "sum"
    """Results that lack the factor are partial sums over the axis."""
    REDUCE = "reduce"
    """As SUM, under another associative reduction (max, min, and, or, product, arg-max): resolved where it is
    made."""
    UNSPLITTABLE = "unsplittable"
    """The factor cannot be split without changing the result or moving data inside the op."""


@dataclass(frozen=True, slots=True)
class Factor:
    """One loop dimension: its extent (elements) and kind."""

    size: int
    kind: Kind = Kind.PARALLEL


@dataclass(frozen=True, slots=True)
class Window:
    """A factor along which windows slide, so that a part of it reads rows of its neighbours' parts: a halo.

    Attributes:
      factor: the factor.
      operand: the operand that is read in windows.
      dim: its dimension, whose major part the factor is.
      before: rows of the dimension that windows read before their part.
      after: rows of the dimension that windows read behind their part.
      is_named: whether the program itself exchanges the halo (`executors.halos`): XLA's partitioner would move more.
      is_returned: whether the op makes a result for the halo too, which goes back to its owners.
    """

    factor: int
    operand: int
    dim: int
    before: int = 0
    after: int = 0
    is_named: bool = False
    is_returned: bool = False


def num_points(factors: Iterable[Factor]) -> int:
    """Of a nest of loops."""
    return prod(max(1, factor.size) for factor in factors)


@dataclass(frozen=True, slots=True)
class Rule:
    """The factors of one equation.

    Attributes:
      factors: the loop dimensions, each listed once.
      operands: per operand, per dimension, the indices into `factors` (major to minor).
      results: per result, likewise.
      flops_per_point: floating-point operations for each of `num_points`: 2 for a product-sum, 1 for an elementwise op, 0
        for a data movement.
      is_additive: whether summing partial operands after the op equals the op on summed operands, when all
        operands are partial over the same axes (add, sub, neg, convert, reshape, transpose, reduce_sum, ...).
      is_kernel: whether somebody wrote it as one, which the compiler neither fuses nor splits.
      is_missplit: whether the compiler splits it otherwise than its factors say.
      is_unknown: whether it stands for an op of which nothing is known; then nothing can be split.
      windows: the factors along which windows slide, those without a halo too. They are split evenly.
      examples: the factor that a windowed op splits over examples instead, if it has one.
    """

    factors: tuple[Factor, ...]
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    flops_per_point: float = 0.0
    is_additive: bool = False
    is_kernel: bool = False
    is_missplit: bool = False
    is_unknown: bool = False
    windows: tuple[Window, ...] = ()
    examples: int | None = None

    def __post_init__(self) -> None:
        used = [f for dims in (*self.operands, *self.results) for dim in dims for f in dim]
        assert all(0 <= f < len(self.factors) for f in used), f"factor index out of range in {self}"

    @property
    def is_on_shards(self) -> bool:
        """Whether the program says that each device runs the op on its own shards (`executors.kernels`)."""
        return self.is_kernel or self.is_missplit

    @property
    def in_rows(self) -> "Rule":
        """The rule for parts that are no runs of neighbouring rows. Windows reach across such parts: windowed factors stay
        whole, in each array for itself."""
        slid, factors = {window.factor for window in self.windows}, list(self.factors)

        def whole(f: int) -> int:
            factors.append(Factor(self.factors[f].size, Kind.UNSPLITTABLE))
            return len(factors) - 1

        def own(dims: Dims) -> Dims:
            return tuple(tuple(whole(f) if f in slid else f for f in dim) for dim in dims)

        operands, results = tuple(map(own, self.operands)), tuple(map(own, self.results))
        return replace(
            self, factors=tuple(factors), operands=operands, results=results, windows=(), examples=None
        )

    @property
    def num_points(self) -> int:
        """Of the iteration space; the loops of an empty array, which stands for one that is not given, count once."""
        return num_points(self.factors)


RuleFn = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], Rule]
"""(operand avals, result avals, equation parameters) -> Rule."""
