"""Labels of dimensions: fresh ones for each, and two that meet become one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autoshard.search.ir.graph import Graph, Op, Value

PRODUCT = "dot_general"

IDENTITIES = frozenset({"copy", "name", "optimization_barrier", "stop_gradient", "convert_element_type"})
"""Elementwise ops that pass values on, up to rounding."""

MOVES = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "broadcast_in_dim"})
"""Ops that move dimensions."""

Name = int
"""A dimension's label while a region is recognised; `Names` unifies."""

Shape = tuple[tuple[Name, ...], ...]
"""For each dimension of a value, its labels, major to minor; none for a dimension of size 1."""


class UnrecognisedError(Exception):
    """The ops are no attention that can be replaced."""


def check(condition: object) -> None:
    if not condition:
        raise UnrecognisedError


class Names:
    """Labels and their sizes; labels that meet become one."""

    def __init__(self) -> None:
        self._root: list[int] = []
        self.size: list[int] = []

    def fresh(self, size: int) -> tuple[Name, ...]:
        if size == 1:
            return ()
        self._root.append(len(self._root))
        self.size.append(size)
        return (len(self._root) - 1,)

    def find(self, name: Name) -> Name:
        while self._root[name] != name:
            name = self._root[name]
        return name

    def resolved(self, shape: Shape) -> Shape:
        return tuple(tuple(self.find(a) for a in dim) for dim in shape)

    def flat(self, shape: Shape) -> list[Name]:
        return [self.find(a) for dim in shape for a in dim]

    def unify(self, left: Sequence[Name], right: Sequence[Name]) -> None:
        """Makes the labels of two dimensions that meet the same, one by one."""
        check([self.size[a] for a in left] == [self.size[b] for b in right])
        for a, b in zip(left, right, strict=True):
            first, second = sorted((self.find(a), self.find(b)))
            self._root[second] = first


@dataclass(frozen=True, slots=True)
class Moved:
    """Takes the names of dimensions from an op's operand to its result, and back."""

    names: Names
    op: Op
    operand: Value

    def forwards(self, shape: Shape) -> Shape:
        """The result's dimensions."""
        params, made = self.op.params, self.op.result_values[0].shape
        if self.op.name == "transpose":
            return tuple(shape[d] for d in params["permutation"])
        if self.op.name == "broadcast_in_dim":
            of = {int(d): n for n, d in enumerate(params["broadcast_dimensions"])}
            return tuple(
                shape[of[d]] if d in of and self.operand.shape[of[d]] == n else self.names.fresh(n)
                for d, n in enumerate(made)
            )
        return self._regrouped(shape, made)

    def backwards(self, shape: Shape) -> Shape:
        """The operand's dimensions, given the result's."""
        params, read = self.op.params, self.operand.shape
        if self.op.name == "transpose":
            return tuple(shape[params["permutation"].index(d)] for d in range(len(read)))
        if self.op.name == "broadcast_in_dim":
            at = [int(d) for d in params["broadcast_dimensions"]]
            return tuple(() if n == 1 else shape[d] for d, n in zip(at, read, strict=True))
        return self._regrouped(shape, read)

    def _regrouped(self, shape: Shape, sizes: Sequence[int]) -> Shape:
        """Labels in the same order, grouped into dimensions of these sizes."""
        check(self.op.params.get("dimensions") is None or self.op.name != "reshape")
        left, found = [a for dim in shape for a in dim], list[tuple[Name, ...]]()
        for size in sizes:
            dim: list[Name] = []
            while prod(self.names.size[a] for a in dim) < size:
                check(left)
                dim.append(left.pop(0))
            check(prod(self.names.size[a] for a in dim) == size)
            found.append(tuple(dim))
        check(not left)
        return tuple(found)


@dataclass(frozen=True)
class ProductLabels:
    """A `dot_general` in labels."""

    names: Names
    graph: Graph
    op: Op

    @cached_property
    def operands(self) -> tuple[Shape, Shape]:
        """Fresh labels of both operands, with those that meet made one."""
        values = [self.graph.value(a) for a in self.op.inputs]
        check(len(self.op.operands) == 2)
        left, right = (tuple(self.names.fresh(n) for n in v.shape) for v in values)
        return left, right

    def labelled(self, left: Shape | None = None, right: Shape | None = None) -> Shape:
        """The result's dimensions, after the operands' are known to be these."""
        (summed_left, summed_right), (batch_left, batch_right) = self.op.params["dimension_numbers"]
        own = self.operands
        left, right = left or own[0], right or own[1]
        for a, b in zip((*summed_left, *batch_left), (*summed_right, *batch_right), strict=True):
            self.names.unify(left[a], right[b])
        free_left = [d for d in range(len(left)) if d not in (*summed_left, *batch_left)]
        free_right = [d for d in range(len(right)) if d not in (*summed_right, *batch_right)]
        return (
            *(left[d] for d in batch_left),
            *(left[d] for d in free_left),
            *(right[d] for d in free_right),
        )

    def summed(self, left: Shape) -> set[Name]:
        """The labels over which the product sums."""
        (summed_left, _), _ = self.op.params["dimension_numbers"]
        return {self.names.find(a) for d in summed_left for a in left[d]}


def is_view(graph: Graph, v: int, made: int) -> bool:
    """Whether a move keeps each element once."""
    return prod(graph.values[v].shape) == prod(graph.values[made].shape)
