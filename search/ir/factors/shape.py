"""Ops that move elements without computing: reshapes, broadcasts, slices, concatenations.

Reshape is the one with an idea, the compound dimension: `(b, h * d) -> (b, h, d)` has the loops `b`, `h` and
`d`. Both shapes are walked from the major end. While the sizes left of the two current dimensions divide one
another, the smaller is a loop that both share. Where they do not, as in `(6, 4) -> (4, 6)`, their greatest
common divisor is one (the 2 of 6 = 2 x 3 and 4 = 2 x 2); the rest, up to where the shapes next agree, stays
whole.
"""

from collections.abc import Sequence
from math import gcd
from typing import Any

from autoshard.search.ir.factors.loops import Dim, Loops, leading, mixing, resized_dims
from autoshard.search.ir.factors.rule import Dims, Kind, Rule, RuleFn


def reshape(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """As this module's docstring says; `dimensions`, where given, first transposes the operand."""
    shape = ins[0].shape
    order = params.get("dimensions") or tuple(range(len(shape)))
    loops = Loops()
    source, result = _walk_together(loops, tuple([shape[d] for d in order]), outs[0].shape)
    operand = tuple([source[order.index(d)] for d in range(len(shape))])
    return loops.rule((operand,), (result,), is_additive=True)


class _Walk:
    """A place in a shape: `left` iterations of dimension `at` are in no loop yet."""

    __slots__ = ("at", "dims", "left", "shape")

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.dims: list[Dim] = [()] * len(shape)
        self.at, self.left = -1, 1

    def advance(self) -> bool:
        """Moves on to the next iterations that are in no loop; False at the end of the shape."""
        while self.left == 1 and self.at + 1 < len(self.shape):
            self.at += 1
            self.left = self.shape[self.at]
        return self.left > 1

    def take(self, dim: Dim, size: int) -> None:
        self.dims[self.at] += dim
        self.left //= size

    def take_whole(self, loops: Loops) -> int:
        """Makes what is left of the dimension a loop that stays whole, and says how many iterations it
        has."""
        size = self.left
        self.take(loops.dim(size, Kind.UNSPLITTABLE), size)
        return size


def _walk_together(loops: Loops, source: tuple[int, ...], target: tuple[int, ...]) -> tuple[Dims, Dims]:
    """The dims of two shapes of one element count."""
    if 0 in source:
        return loops.dims(source, Kind.UNSPLITTABLE), loops.dims(target, Kind.UNSPLITTABLE)
    walks = _Walk(source), _Walk(target)
    while all([walk.advance() for walk in walks]):
        shared = gcd(walks[0].left, walks[1].left)
        dim = loops.dim(shared)
        for walk in walks:
            walk.take(dim, shared)
        if all(walk.left > 1 for walk in walks):
            _take_until_agreement(loops, *walks)
    return tuple(walks[0].dims), tuple(walks[1].dims)


def _take_until_agreement(loops: Loops, source: _Walk, target: _Walk) -> None:
    """Takes whole dimensions until both walks have passed the same number of elements."""
    passed = {walk: walk.take_whole(loops) for walk in (source, target)}
    while passed[source] != passed[target]:
        behind = min(passed, key=passed.__getitem__)
        behind.advance()
        passed[behind] *= behind.take_whole(loops)


def transpose(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    loops = Loops()
    permutation: Sequence[int] = params["permutation"]
    dims = loops.dims(ins[0].shape)
    return loops.rule((dims,), (tuple([dims[d] for d in permutation]),), is_additive=True)


def squeeze(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    loops = Loops()
    dims = loops.dims(ins[0].shape)
    kept = tuple([dim for d, dim in enumerate(dims) if d not in params["dimensions"]])
    return loops.rule((dims,), (kept,), is_additive=True)


def expand_dims(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    loops = Loops()
    operand = loops.dims(ins[0].shape)
    dims = iter(operand)
    result = tuple([() if d in params["dimensions"] else next(dims) for d in range(len(outs[0].shape))])
    return loops.rule((operand,), (result,), is_additive=True)


def broadcast_in_dim(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Dimensions that the operand lacks, or has with size 1, are loops of the result only."""
    shape: tuple[int, ...] = ins[0].shape
    places: Sequence[int] = params["broadcast_dimensions"]
    loops = Loops()
    result = loops.dims(outs[0].shape)
    operand = tuple([() if n == 1 else result[d] for n, d in zip(shape, places, strict=True)])
    dynamic_sizes: list[Dims] = [()] * (len(ins) - 1)
    return loops.rule((operand, *dynamic_sizes), (result,), is_additive=True)


def tile(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Each result dimension is the repetition (major) and the operand's dimension."""
    loops = Loops()
    operand = loops.dims(ins[0].shape)
    result = tuple([loops.dim(n) + dim for n, dim in zip(params["reps"], operand, strict=True)])
    return loops.rule((operand,), (result,), is_additive=True)


def stack(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    loops = Loops()
    dims = loops.dims(ins[0].shape)
    axis = params["axis"]
    pieces = loops.dim(len(ins), Kind.UNSPLITTABLE)
    return loops.rule([dims] * len(ins), ((*dims[:axis], pieces, *dims[axis:]),), is_additive=True)


def unstack(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    loops = Loops()
    axis = params["axis"]
    kinds = [Kind.UNSPLITTABLE if d == axis else Kind.PARALLEL for d in range(len(ins[0].shape))]
    dims = tuple([loops.dim(n, kind) for n, kind in zip(ins[0].shape, kinds, strict=True)])
    return loops.rule((dims,), [(*dims[:axis], *dims[axis + 1 :])] * len(outs), is_additive=True)


def created(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> Rule:
    """Arrays made from nothing: each device can make its part."""
    loops = Loops()
    dims = loops.dims(outs[0].shape)
    return loops.rule([()] * len(ins), [dims] * len(outs))


def _padded(ins: Sequence[Any], outs: Sequence[Any], params: dict[str, Any]) -> list[int]:
    return [d for d, config in enumerate(params["padding_config"]) if any(config)]


RULES: dict[str, RuleFn] = {
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "expand_dims": expand_dims,
    "broadcast_in_dim": broadcast_in_dim,
    "tile": tile,
    "stack": stack,
    "unstack": unstack,
    **dict.fromkeys(("iota", "empty", "empty2"), created),
    "slice": mixing(lambda ins, outs, params: resized_dims(ins[0], outs[0]), is_additive=True),
    "pad": mixing(_padded, is_additive=True),
    "rev": mixing(lambda ins, outs, params: params["dimensions"], is_additive=True),
    "concatenate": mixing(lambda ins, outs, params: (params["dimension"],), is_additive=True),
    "split": mixing(lambda ins, outs, params: (params["axis"],), is_additive=True),
    "bitcast_convert_type": leading(Kind.UNSPLITTABLE),
}
