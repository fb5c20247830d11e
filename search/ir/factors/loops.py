"""Building a rule: loops are named by taking them, and shared by using the same name twice.

One convention holds in every rule: the factors of a dimension multiply to its size, so a dimension of size 1
has none (the empty tuple). Broadcasting a size-1 dimension therefore needs no special case: it has no loop to
share.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from autoshard.search.ir.factors.rule import Dims, Factor, Kind, Rule, RuleFn, Window, num_points

Dim = tuple[int, ...]


class Loops:
    """The loops of one rule in the making; `dim` and `dims` add new ones, `rule` ends it."""

    __slots__ = ("factors",)

    def __init__(self) -> None:
        self.factors: list[Factor] = []

    def dim(self, size: int, kind: Kind = Kind.PARALLEL) -> Dim:
        """A new loop of that many iterations; no loop for one iteration."""
        if size == 1:
            return ()
        self.factors.append(Factor(size, kind))
        return (len(self.factors) - 1,)

    def dims(self, shape: Iterable[int], kind: Kind = Kind.PARALLEL) -> Dims:
        """A new loop for each dimension of `shape`."""
        return tuple([self.dim(size, kind) for size in shape])

    def rule(
        self,
        operands: Iterable[Dims],
        results: Iterable[Dims],
        *,
        flops: float = 0.0,
        flops_per_point: float = 0.0,
        is_additive: bool = False,
        is_kernel: bool = False,
        is_missplit: bool = False,
        windows: Iterable[Window] = (),
        examples: Dim = (),
    ) -> Rule:
        """The rule over the loops so far.

        `flops` is for ops whose iteration space is not the product of their dimensions (windows, look-ups):
        the op's true total, spread evenly over the points.
        """
        if flops:
            flops_per_point = flops / num_points(self.factors)
        return Rule(
            tuple(self.factors),
            tuple(operands),
            tuple(results),
            flops_per_point,
            is_additive,
            is_kernel,
            is_missplit,
            windows=tuple(windows),
            examples=next(iter(examples), None),
        )


def opaque(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """The rule of an op that must be computed whole: every dimension is a loop of its own that cannot be
    split."""
    del params
    loops = Loops()
    whole = [loops.dims(getattr(aval, "shape", ()), Kind.UNSPLITTABLE) for aval in (*ins, *outs)]
    return loops.rule(whole[: len(ins)], whole[len(ins) :])


MixedDims = Callable[[Sequence[Any], Sequence[Any], dict[str, Any]], Iterable[int]]
"""(operand avals, result avals, parameters) -> the dimensions along which elements meet."""


def mixing(mixed_dims: MixedDims, *, flops_per_point: float = 0.0, is_additive: bool = False) -> RuleFn:
    """Rules for ops that work along some dimensions and are independent along the others (sort, concatenate,
    cumsum).

    All arrays of the first operand's rank correspond dimension by dimension; a mixed dimension cannot be
    split, and may have another size in each array. Arrays of other ranks are scalars: indices, bounds,
    initial values.
    """

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        mixed = frozenset(mixed_dims(ins, outs, params))
        rank = len(ins[0].shape)
        loops = Loops()
        taken: dict[tuple[int, int], Dim] = {}

        def dims(aval: Any) -> Dims:
            if len(aval.shape) != rank:
                return loops.dims(aval.shape, Kind.UNSPLITTABLE)
            for key in enumerate(aval.shape):
                if key not in taken:
                    taken[key] = loops.dim(key[1], Kind.UNSPLITTABLE if key[0] in mixed else Kind.PARALLEL)
            return tuple([taken[key] for key in enumerate(aval.shape)])

        operands = [dims(aval) for aval in ins]
        results = [dims(aval) for aval in outs]
        return loops.rule(operands, results, flops_per_point=flops_per_point, is_additive=is_additive)

    return rule


def resized_dims(whole: Any, part: Any) -> list[int]:
    """The dims of which a slice takes a part; one that keeps its size is taken all."""
    return [d for d, (n, m) in enumerate(zip(whole.shape, part.shape, strict=True)) if n != m]


def leading(trailing: Kind, *, flops_per_point: float = 0.0) -> RuleFn:
    """Rules for ops whose arrays share their first dimensions, as many as the smallest has; `trailing` is the
    others' kind."""

    def rule(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
        del params
        smallest = min((*ins, *outs), key=lambda aval: len(aval.shape)).shape
        loops = Loops()
        shared = loops.dims(smallest)
        dims = [(*shared, *loops.dims(aval.shape[len(shared) :], trailing)) for aval in (*ins, *outs)]
        return loops.rule(dims[: len(ins)], dims[len(ins) :], flops_per_point=flops_per_point)

    return rule
