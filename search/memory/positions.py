"""Look-ups in which each example picks of its own row: `logits[jnp.arange(batch), labels]`.

To a gather or a scatter that is a look-up of rows by a computed index, which needs all of them at hand. But where that index
provably counts the examples, each finds its own row, and a microbatch needs no others: there, the rows' numbers are what is
left of the index when divided by the number of microbatches, as those hold every count-th example.

The proof goes back from the index to an `iota`, through what only moves elements, and through what indexing makes of
negative numbers.
"""

from collections.abc import Mapping

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Atom, Graph, Op

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "name"})


def own_row(op: Op, graph: Graph, maker: Mapping[int, Op], dim: int) -> tuple[int, int] | None:
    """Where a look-up's indices at one of their dims count that dim: which of the operand's dims it picks so, and the column
    of the indices that says it. None where none of it does.

    Args:
      op: a gather or a scatter.
      graph: that it stands in.
      maker: by value of that graph, the op that makes it.
      dim: of the indices.
    """
    numbers = op.params["dimension_numbers"]
    is_gather = op.name == "gather"
    picked = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    absent = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    operand, indices = graph.value(op.inputs[0]).shape, graph.value(op.inputs[1]).shape
    if dim == len(indices) - 1:
        return None
    for column, d in enumerate(picked):
        is_alike = d in absent and operand[d] == indices[dim]
        if is_alike and _Proof(graph, maker).of_column(op.inputs[1], column, dim):
            return d, column
    return None


class _Proof:
    """That elements count one of their dims."""

    def __init__(self, graph: Graph, maker: Mapping[int, Op]) -> None:
        self.graph, self.maker = graph, maker

    def of_column(self, indices: Atom, column: int, dim: int) -> bool:
        """One column of an array's last dim."""
        shape = self.graph.value(indices).shape
        if shape[-1] == 1:
            return self._counts(indices, dim)
        op = self.maker.get(indices) if isinstance(indices, int) else None
        if op is None or op.name != "concatenate" or op.params["dimension"] != len(shape) - 1:
            return False
        for piece in op.inputs:
            width = self.graph.value(piece).shape[-1]
            if column < width:
                return self.of_column(piece, column, dim)
            column -= width
        return False

    def _counts(self, atom: Atom, dim: int) -> bool:
        op = self.maker.get(atom) if isinstance(atom, int) else None
        if op is None:
            return False
        if op.name == "iota":
            return op.params["dimension"] == dim
        if op.name == "select_n":
            return self._is_nonnegative(op, dim)
        if op.name == "convert_element_type":
            is_integer = op.result_values[0].dtype.kind in "iu"
            return is_integer and self._counts(op.inputs[0], dim)
        return op.name in _MOVES and self._is_moved(op, dim)

    def _is_nonnegative(self, op: Op, dim: int) -> bool:
        """`where(i < 0, i + n, i)` of an i that counts."""
        which, kept, *_ = op.inputs
        test = self.maker.get(which) if isinstance(which, int) else None
        if test is None or test.name != "lt" or test.inputs[0] != kept or isinstance(test.inputs[1], int):
            return False
        return not test.inputs[1].val and self._counts(kept, dim)

    def _is_moved(self, op: Op, dim: int) -> bool:
        """Whether the dim is one of the operand's, all of it, that counts."""
        source = self.graph.value(op.inputs[0])
        rule = rule_for(op.name, [self.graph.value(a) for a in op.inputs], op.result_values, op.params)
        factors = rule.results[0][dim]
        if factors not in rule.operands[0] or not factors:
            return False
        d = rule.operands[0].index(factors)
        return source.shape[d] == op.result_values[0].shape[dim] and self._counts(op.inputs[0], d)
