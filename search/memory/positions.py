"""Look-ups in which each example reads its own row: `logits[jnp.arange(batch), labels]`.

To a gather or a scatter that is a look-up of rows by a computed index, which needs all rows at hand. But if the index
provably counts the examples, each example reads its own row, and a microbatch needs no others. A microbatch holds every
count-th example, so the row numbers in it are the index divided by the number of microbatches.

The proof goes back from the index to an `iota`. It passes ops that only move elements, the treatment of negative numbers in
indexing, and the operands of a loop that are constant in its body.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Atom, Graph, Op

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "name"})


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph and its place.

    Attributes:
      graph: the step's, or a body.
      maker: by value, the op that makes it.
      outer: for a body, the scope of its loop.
      entering: for a body, the outer value of each input that is constant over all iterations.
    """

    graph: Graph
    maker: Mapping[int, Op]
    outer: "Scope | None"
    entering: Mapping[int, Atom]

    @classmethod
    def of(cls, graph: Graph) -> "Scope":
        """The scope of a graph that is no body."""
        return cls(graph, graph.maker, None, {})

    def of_body(self, body: Graph, op: Op) -> "Scope":
        """The scope of a body of one of the graph's ops."""
        entering = dict(zip(body.inputs, _entering(op, body), strict=False))
        maker = body.maker
        return Scope(body, maker, self, entering)


def _entering(op: Op, body: Graph) -> tuple[Atom, ...]:
    """The outer values of the leading inputs of an op's body."""
    if op.name == "scan":
        return op.inputs[: op.loop_counts[0]]
    if op.name == "while":
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        is_condition = body in op.bodies["cond_jaxpr"]
        return op.inputs[:num_cond] if is_condition else op.inputs[num_cond : num_cond + num_body]
    return op.inputs[1:]


def own_row(op: Op, scope: Scope, dim: int) -> tuple[int, int] | None:
    """The dim of rows in a look-up where each example reads its own row, and the column of the indices that counts the rows.
    None if no column counts.

    Args:
      op: a gather or a scatter.
      scope: the scope of the op.
      dim: the dim of the indices that is to be counted.
    """
    numbers = op.params["dimension_numbers"]
    is_gather = op.name == "gather"
    picked = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    absent = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    operand, indices = scope.graph.value(op.inputs[0]).shape, scope.graph.value(op.inputs[1]).shape
    if dim == len(indices) - 1:
        return None
    for column, d in enumerate(picked):
        is_alike = d in absent and operand[d] == indices[dim]
        if is_alike and _Proof(scope).of_column(op.inputs[1], column, dim):
            return d, column
    return None


class _Proof:
    """A proof that elements count one of their dims."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.graph, self.maker = scope, scope.graph, scope.maker

    def of_column(self, indices: Atom, column: int, dim: int) -> bool:
        """True if one column of an array's last dim counts `dim`."""
        shape = self.graph.value(indices).shape
        if shape[-1] == 1:
            return self._counts(indices, dim)
        op = self.maker.get(indices) if isinstance(indices, int) else None
        if op is None:
            outer = self._outside(indices)
            return outer is not None and outer.of_column(self.scope.entering[indices], column, dim)
        if op.name != "concatenate" or op.params["dimension"] != len(shape) - 1:
            return False
        for piece in op.inputs:
            width = self.graph.value(piece).shape[-1]
            if column < width:
                return self.of_column(piece, column, dim)
            column -= width
        return False

    def _outside(self, atom: Atom) -> "_Proof | None":
        """The proof in the outer scope, for an input of a body."""
        outer = self.scope.outer if isinstance(atom, int) and atom in self.scope.entering else None
        return None if outer is None else _Proof(outer)

    def _counts(self, atom: Atom, dim: int) -> bool:
        op = self.maker.get(atom) if isinstance(atom, int) else None
        if op is None:
            outer = self._outside(atom)
            return outer is not None and outer._counts(self.scope.entering[atom], dim)
        if op.name == "iota":
            return op.params["dimension"] == dim
        if op.name == "select_n":
            return self._is_nonnegative(op, dim)
        if op.name == "convert_element_type":
            is_integer = op.result_values[0].dtype.kind in "iu"
            return is_integer and self._counts(op.inputs[0], dim)
        return op.name in _MOVES and self._is_moved(op, dim)

    def _is_nonnegative(self, op: Op, dim: int) -> bool:
        """True for `where(i < 0, i + n, i)` of an i that counts."""
        which, kept, *_ = op.inputs
        test = self.maker.get(which) if isinstance(which, int) else None
        if test is None or test.name != "lt" or test.inputs[0] != kept or isinstance(test.inputs[1], int):
            return False
        return not test.inputs[1].val and self._counts(kept, dim)

    def _is_moved(self, op: Op, dim: int) -> bool:
        """True if the whole dim comes from one dim of the operand, which counts."""
        source = self.graph.value(op.inputs[0])
        rule = rule_for(op.name, [self.graph.value(a) for a in op.inputs], op.result_values, op.params)
        factors = rule.results[0][dim]
        if factors not in rule.operands[0] or not factors:
            return False
        d = rule.operands[0].index(factors)
        return source.shape[d] == op.result_values[0].shape[dim] and self._counts(op.inputs[0], d)
