"""An op for fewer examples.

Most primitives take their sizes from their operands. A few have sizes among their parameters; the table below lists their
new values:

    shape, new_sizes        of the result: `broadcast_in_dim`, `iota`, `empty`, `reshape`; `slice_sizes` of `dynamic_slice`
    reps                    as many as make the result of the operand: `tile`
    limits, edges, sizes    of pieces along the dim of the examples, where `batch_cut` lets them be: `slice`, `pad`, `split`
    slice_sizes             of the dims that are taken whole: `gather`
    counts of groups        where the examples are groups of a convolution's features, as under `vmap` over kernels

Random bits (`random_bits`, `random_split`, `rng_bit_generator`, `iota_2x32_shape`) have the batch's size too, but other
sizes give other bits: they are made for all examples, and cut (`microbatch_body`). Kernels (`pallas_call`,
`custom_partitioning`) contain the size where no table reaches. JAX itself checks the new op: its shape inference must give
the expected shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Op, Value

_Resize = Callable[[Op, Sequence[Value], Sequence[Value], Sequence[Value]], dict[str, Any]]
"""(op, operands as they were, operands now, results now) -> the parameters that change."""


def _slice(op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]) -> dict[str, Any]:
    places = ("start_indices", "limit_indices")
    return {key: _scaled(op.params[key], was[0], now[0]) for key in places}


def _pad(op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]) -> dict[str, Any]:
    low, high, interior = zip(*op.params["padding_config"], strict=True)
    edges = (_scaled(each, was[0], now[0]) for each in (low, high))
    return {"padding_config": tuple(zip(*edges, interior, strict=True))}


def _scaled(places: Sequence[int], was: Value, now: Value) -> tuple[int, ...]:
    """Places along dims, scaled with the dims; the places are multiples of the ratio."""
    return tuple(
        place if small == whole else place * small // whole
        for place, whole, small in zip(places, was.shape, now.shape, strict=True)
    )


def _split(op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]) -> dict[str, Any]:
    return {"sizes": tuple(v.shape[op.params["axis"]] for v in results)}


def _tile(op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]) -> dict[str, Any]:
    sizes = zip(op.params["reps"], results[0].shape, now[0].shape, strict=True)
    return {"reps": tuple(made // read if read else reps for reps, made, read in sizes)}


def _convolution(
    op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]
) -> dict[str, Any]:
    """Counts of groups. There are as many feature groups as the kernel's inputs fit in the features; batch groups shrink
    with the batch if the kernel's outputs do."""
    numbers, (lhs, kernel) = op.params["dimension_numbers"], now
    batch, features, *_ = numbers.lhs_spec
    made, read, *_ = numbers.rhs_spec
    is_in_groups = lhs.shape[batch] < was[0].shape[batch] and kernel.shape[made] < was[1].shape[made]
    batch_groups = op.params["batch_group_count"]
    if is_in_groups:
        batch_groups = batch_groups * lhs.shape[batch] // was[0].shape[batch]
    return {
        "feature_group_count": lhs.shape[features] // kernel.shape[read],
        "batch_group_count": batch_groups,
    }


def _gather(op: Op, was: Sequence[Value], now: Sequence[Value], results: Sequence[Value]) -> dict[str, Any]:
    return {"slice_sizes": _taken(op.params["slice_sizes"], was[0], now[0])}


def _taken(sizes: Sequence[int], was: Value, now: Value) -> tuple[int, ...]:
    """Sizes of a slice: a dim that has become smaller is taken whole, or one element at a time."""
    return tuple(
        small if small < whole and size == whole else size
        for size, whole, small in zip(sizes, was.shape, now.shape, strict=True)
    )


def _to(parameter: str) -> _Resize:
    """Sets this parameter to the result's shape."""
    return lambda op, was, now, results: {parameter: results[0].shape}


_RESIZES: dict[str, _Resize] = {
    **dict.fromkeys(("broadcast_in_dim", "iota", "empty", "empty2"), _to("shape")),
    "reshape": _to("new_sizes"),
    "dynamic_slice": _to("slice_sizes"),
    "tile": _tile,
    "slice": _slice,
    "pad": _pad,
    "split": _split,
    "gather": _gather,
    "conv_general_dilated": _convolution,
}


class Resizer:
    """Makes ops for fewer examples; JAX's shape inference runs once for ops that look alike."""

    def __init__(self) -> None:
        self._inferred: dict[Any, tuple[Value, ...] | None] = {}

    def resized(
        self,
        op: Op,
        inputs: tuple[Atom, ...],
        operands: tuple[Sequence[Value], Sequence[Value]],
        results: tuple[Value, ...],
    ) -> Op | None:
        """The op with these inputs and results; None if JAX infers other results.

        Args:
          op: the original op.
          inputs: its new operands.
          operands: the types of its operands, before and now.
          results: the types of its results now.
        """
        was, now = operands
        if not op.bodies and op.name in _RESIZES:
            op = replace(op, params={**op.params, **_RESIZES[op.name](op, was, now, results)})
        is_right = bool(op.bodies) or self._made(op, tuple(now)) == [(v.shape, v.dtype) for v in results]
        return replace(op, inputs=inputs, result_values=results) if is_right else None

    def _made(self, op: Op, operands: tuple[Value, ...]) -> list[tuple[Any, Any]] | None:
        try:
            key = (op.name, operands, tuple(op.params.items()))
            if key not in self._inferred:
                self._inferred[key] = _inferred(op, operands)
            made = self._inferred[key]
        except TypeError:  # a parameter that cannot be hashed
            made = _inferred(op, operands)
        return None if made is None else [(v.shape, v.dtype) for v in made]


def _inferred(op: Op, operands: Sequence[Value]) -> tuple[Value, ...] | None:
    abstract = [_jax.abstract_value(v.shape, v.dtype) for v in operands]
    try:
        return tuple(map(Value.of, _jax.result_types(op.primitive, abstract, op.params)))
    except (TypeError, ValueError):  # as JAX says that operands and parameters do not go together
        return None
