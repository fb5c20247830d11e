"""Dimensions of an attention's arrays, by labels.

A dimension is a tuple of labels, major to minor: `i` counts queries, `j` keys, `d` the channels of both, `e` those of
values, `b...` batches and heads of keys, `g...` query heads that share one of keys. So an op takes arrays as the step lays
them out, and brings a device's shards into one canonical form.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

Label = str
Dims = tuple[tuple[Label, ...], ...]

QUERY, KEY, CHANNEL, VALUE_CHANNEL = "i", "j", "d", "e"


@dataclass(frozen=True, slots=True)
class Layout:
    """The dimensions of an attention's operands and results, in labels.

    Attributes:
      query: of queries, `key` of keys, `value` of values, `output` of the result.
      statistics: of the log-sum-exp of rows.
      output_gradient: of the gradient of the output, for the backward op.
      gradients: of the gradients of queries, keys and values.
      operands: of the operands of the score function.
    """

    query: Dims
    key: Dims
    value: Dims
    output: Dims
    statistics: Dims
    output_gradient: Dims = ()
    gradients: tuple[Dims, ...] = ()
    operands: tuple[Dims, ...] = ()

    @property
    def batch(self) -> tuple[Label, ...]:
        """The labels that queries and keys share, without channels."""
        return tuple(a for dim in self.key for a in dim if a[0] == "b")

    @property
    def group(self) -> tuple[Label, ...]:
        """The labels of query heads that share keys."""
        return tuple(a for dim in self.query for a in dim if a[0] == "g")

    @property
    def groups(self) -> frozenset[tuple[Label, ...]]:
        """The labels of `group`, as dimensions."""
        return frozenset((a,) for a in self.group)

    def sizes(self, query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> dict[Label, int]:
        """By label, its size, for operands of these shapes."""
        dims = [*zip(self.key, key, strict=True), *zip(self.value, value, strict=True)]
        dims += [*zip(self.query, query, strict=True)]
        known = {dim[0]: n for dim, n in dims if len(dim) == 1}
        while unknown := [(dim, n) for dim, n in dims if any(a not in known for a in dim)]:
            for dim, n in unknown:
                missing = [a for a in dim if a not in known]
                if len(missing) == 1:
                    known[missing[0]] = n // prod(known[a] for a in dim if a in known)
        return known

    def shape(self, dims: Dims, sizes: Mapping[Label, int]) -> tuple[int, ...]:
        """The shape of an array with these dimensions."""
        return tuple(prod(sizes[a] for a in dim) for dim in dims)


def canonical(x: Any, dims: Dims, order: Sequence[Sequence[Label]], sizes: Mapping[Label, int]) -> Any:
    """An array with one dimension for each of `order`: the labels that it lacks are left out of the product."""
    flat = [a for dim in dims for a in dim]
    x = x.reshape([sizes[a] for a in flat])
    wanted = [a for dim in order for a in dim if a in flat]
    x = x.transpose([flat.index(a) for a in wanted])
    return x.reshape([prod(sizes[a] for a in dim if a in flat) for dim in order])


def laid_out(x: Any, dims: Dims, order: Sequence[Sequence[Label]], sizes: Mapping[Label, int]) -> Any:
    """The array with dimensions `dims` whose canonical form is given."""
    flat = [a for dim in order for a in dim]
    x = x.reshape([sizes[a] for a in flat])
    x = x.transpose([flat.index(a) for dim in dims for a in dim])
    return x.reshape([prod(sizes[a] for a in dim) for dim in dims])


def plain_layout(heads_first: bool, is_grouped: bool) -> Layout:
    """Arrays of four dimensions: batch, positions, heads, channels; or batch, heads, positions, channels.

    Args:
      heads_first: whether heads come before positions.
      is_grouped: whether several query heads share one of keys.
    """
    groups = ("b1", "g0") if is_grouped else ("b1",)

    def dims(heads: tuple[Label, ...], position: Label, channel: Label) -> Dims:
        middle = (heads, (position,)) if heads_first else ((position,), heads)
        return (("b0",), *middle, (channel,))

    query, key = dims(groups, QUERY, CHANNEL), dims(("b1",), KEY, CHANNEL)
    value, output = dims(("b1",), KEY, VALUE_CHANNEL), dims(groups, QUERY, VALUE_CHANNEL)
    return Layout(query, key, value, output, (("b0",), groups, (QUERY,)), output, (query, key, value))
