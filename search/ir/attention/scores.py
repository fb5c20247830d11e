"""A softmax's argument as a function of the raw score: scale, mask, bias.

A mask is a function of positions, or of arrays that depend on rows or on columns alone. As a function, it can be computed
anew for each block of scores, wherever the block's rows and columns come from. The search runs no JAX program, so it
samples a mask in NumPy to find out how much of it is hidden.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.search.ir._jax import bind
from autoshard.search.ir.attention.layout import KEY, QUERY, Label

CONVERSION = "convert_element_type"


@dataclass(frozen=True, slots=True)
class Node:
    """An elementwise op of a score function: a primitive, its parameters, and its operands, as numbers of nodes. Without a
    primitive, it is a leaf: the raw score, a position, an operand of the attention, or a number."""

    primitive: Any
    params: tuple[tuple[str, Any], ...] = ()
    operands: tuple[int, ...] = ()
    leaf: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class Mask:
    """A selection between a raw score and a number: the node of its predicate, the case of the number, and the number."""

    predicate: int
    case: int
    fill: float


@dataclass(frozen=True)
class Scores:
    """A softmax's argument as a function of the raw score, positions, and operands: the scale, the mask, the bias.

    Attributes:
      nodes: in an order in which each reads earlier ones; the last is the result. Leaves are `("score",)`,
        `("position", label, dtype)`, `("operand", number)` and `("number", value, dtype)`.
      mask: the mask, if there is one.
      dtype: the dtype of the raw score.
    """

    nodes: tuple[Node, ...]
    mask: Mask | None
    dtype: str

    @cached_property
    def sees_positions_only(self) -> bool:
        """True if the mask is a function of positions: the same in every step."""
        if self.mask is None:
            return False
        kinds = {self.nodes[n].leaf[0] for n in self._behind(self.mask.predicate) if self.nodes[n].leaf}
        return kinds <= {"position", "number"}

    @cached_property
    def widest_itemsize(self) -> int:
        """Bytes of an element of the widest number that a raw score is converted to."""
        converted = [
            dict(n.params)["new_dtype"] for n in self.nodes if n.primitive and n.primitive.name == CONVERSION
        ]
        kinds = (np.dtype(dtype) for dtype in (self.dtype, *converted))
        return max(kind.itemsize for kind in kinds if jnp.issubdtype(kind, jnp.floating))

    def _behind(self, node: int) -> set[int]:
        found, left = {node}, [node]
        while left:
            new = set(self.nodes[left.pop()].operands) - found
            found |= new
            left += new
        return found

    def values(self, score: Any, positions: Mapping[Label, Any], operands: Sequence[Any]) -> Any:
        """The softmax's argument for a block of scores [b, g, i, j]; the others broadcast to its shape."""
        return self._evaluated(len(self.nodes) - 1, score, positions, operands)

    def is_masked(self, positions: Mapping[Label, Any], operands: Sequence[Any]) -> Any:
        """Where the mask hides a score; the mask does not depend on it."""
        assert self.mask is not None, "there is a mask"
        shown = self._evaluated(self.mask.predicate, None, positions, operands)
        return shown if self.mask.case else jnp.logical_not(shown)

    def sampled(self, at: np.ndarray) -> np.ndarray | None:
        """Where the mask hides a score, at these rows and columns; None if that is not known beforehand."""
        if not self.sees_positions_only:
            return None
        assert self.mask is not None, "there is a mask"
        positions, known = {QUERY: at[:, None], KEY: at[None, :]}, dict[int, Any]()
        for n in sorted(self._behind(self.mask.predicate)):
            one = self.nodes[n]
            if one.leaf:
                known[n] = positions[one.leaf[1]] if one.leaf[0] == "position" else np.asarray(one.leaf[1])
            elif one.primitive.name == CONVERSION:
                known[n] = known[one.operands[0]].astype(dict(one.params)["new_dtype"])
            elif one.primitive.name in _IN_NUMPY:
                read = np.broadcast_arrays(*(known[o] for o in one.operands))
                known[n] = _IN_NUMPY[one.primitive.name](*read)
            else:
                return None
        shown = np.broadcast_to(known[self.mask.predicate].astype(bool), (len(at), len(at)))
        return shown if self.mask.case else ~shown

    def _evaluated(
        self, node: int, score: Any, positions: Mapping[Label, Any], operands: Sequence[Any]
    ) -> Any:
        known: dict[int, Any] = {}
        for n in sorted(self._behind(node)):
            one = self.nodes[n]
            if one.leaf:
                known[n] = _leaf(one.leaf, score, positions, operands)
            else:
                read = jnp.broadcast_arrays(*(known[o] for o in one.operands))
                (known[n],) = bind(one.primitive, list(read), dict(one.params))
        return known[node]


def _leaf(leaf: tuple[Any, ...], score: Any, positions: Mapping[Label, Any], operands: Sequence[Any]) -> Any:
    kind, *said = leaf
    if kind == "score":
        return score
    if kind == "position":
        return positions[said[0]].astype(said[1])
    return operands[said[0]] if kind == "operand" else jnp.asarray(said[0], said[1])


_IN_NUMPY: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("add", "add_any"), np.add),
    **{"sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs},
    **{"max": np.maximum, "min": np.minimum, "rem": np.fmod},
    **{"eq": np.equal, "ne": np.not_equal, "ge": np.greater_equal, "gt": np.greater, "le": np.less_equal},
    **{"lt": np.less, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert},
    "select_n": lambda which, *cases: np.choose(which.astype(int), cases),
}
"""Elementwise ops as NumPy computes them; the search runs no JAX program."""
