"""Look-ups in which each example picks of its own row: `logits[jnp.arange(batch), labels]`.

To a gather or a scatter that is a look-up of rows by a computed index, which needs all of them at hand. But where that index
provably counts the examples, each finds its own row, and a microbatch needs no others: there, the rows' numbers are what is
left of the index when divided by the number of microbatches, as those hold every count-th example.

The proof goes back from the index to an `iota`, through what only moves elements, through what indexing makes of negative
numbers, and from a loop's body to what the loop reads as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Atom, Graph, Op

_MOVES = frozenset({"broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "copy", "name"})


@dataclass(frozen=True, eq=False)
class Scope:
    """A graph, and where it stands.

    Attributes:
      graph: the step's, or a body.
      maker: by value, the op that makes it.
      outer: of a body, where its loop stands.
      entering: of a body, what its inputs are there, of those that are the same in all iterations.
    """

    graph: Graph
    maker: Mapping[int, Op]
    outer: "Scope | None"
    entering: Mapping[int, Atom]

    @classmethod
    def of(cls, graph: Graph) -> "Scope":
        """A graph that is no body."""
        return cls(graph, {v: op for op in graph.ops for v in op.outputs}, None, {})

    def of_body(self, body: Graph, op: Op) -> "Scope":
        """A body of one of the graph's ops."""
        entering = dict(zip(body.inputs, _entering(op, body), strict=False))
        maker = {v: op for op in body.ops for v in op.outputs}
        return Scope(body, maker, self, entering)


def _entering(op: Op, body: Graph) -> tuple[Atom, ...]:
    """What the leading inputs of an op's body are outside."""
    if op.name == "scan":
        return op.inputs[: op.loop_counts[0]]
    if op.name == "while":
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        is_condition = body in op.bodies["cond_jaxpr"]
        return op.inputs[:num_cond] if is_condition else op.inputs[num_cond : num_cond + num_body]
    return op.inputs[1:]


def own_row(op: Op, scope: Scope, dim: int) -> tuple[int, int] | None:
    """Where a look-up's indices at one of their dims count that dim: which of the operand's dims it picks so, and the column
    of the indices that says it. None where none of it does.

    Args:
      op: a gather or a scatter.
      scope: where it stands.
      dim: of the indices.
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
    """That elements count one of their dims."""

    def __init__(self, scope: Scope) -> None:
        self.scope, self.graph, self.maker = scope, scope.graph, scope.maker

    def of_column(self, indices: Atom, column: int, dim: int) -> bool:
        """One column of an array's last dim."""
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
        """Where a body's input comes from."""
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
