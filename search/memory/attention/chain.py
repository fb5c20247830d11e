"""The softmax's argument: the ops between a product and an exponential, as a function of the score."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.search.ir.attention.layout import KEY, QUERY
from autoshard.search.ir.attention.scores import Mask, Node, Scores
from autoshard.search.ir.factors.elementwise import RULES as ELEMENTWISE
from autoshard.search.ir.graph import Atom, Op
from autoshard.search.memory.attention.dataflow import Dataflow
from autoshard.search.memory.attention.names import MOVES, Moved, Names, Shape, UnrecognisedError, check
from autoshard.search.memory.attention.region import Region

FUNCTIONS = frozenset(ELEMENTWISE) - {
    *("device_put", "sharding_constraint", "layout_constraint", "reshard", "optimization_barrier", "name"),
}
"""Elementwise ops that a function of a score may be made of."""

LONGEST_CHAIN = 64
"""Most ops between a product and an exponential. Source: attention with a mask, a bias and a cap has 10 to 20."""


class Chain:
    """The ops between the product and the exponential, as a function of the score."""

    def __init__(self, reader: Dataflow, names: Names, product: int, made: Shape) -> None:
        self.reader, self.names, self.ops, self.graph = reader, names, reader.ops, reader.graph
        (raw,) = reader.ops[product].outputs
        self.raw, self.shapes = raw, {raw: made}
        self.nodes: list[Node] = []
        self.known: dict[Any, int] = {}
        self.is_of_score: dict[int, bool] = {raw: True}

    def shape_of(self, v: int) -> Shape:
        """The dimensions of a value of the chain, from the product on."""
        if v in self.shapes:
            return self.shapes[v]
        check(v in self.reader.maker and len(self.shapes) < LONGEST_CHAIN)
        op = self.ops[self.reader.maker[v]]
        check(len(op.outputs) == 1)
        if op.name in MOVES:
            (operand,) = op.operands
            self.shapes[v] = Moved(self.names, op, self.graph.values[operand]).forwards(
                self.shape_of(operand)
            )
            return self.shapes[v]
        check(op.name in FUNCTIONS)
        for operand in op.operands:
            if self._depends(operand):
                self.shapes[v] = self.shape_of(operand)
                return self.shapes[v]
        raise UnrecognisedError

    def _depends(self, v: int, left: int = LONGEST_CHAIN) -> bool:
        """Whether a value is computed from the raw score, by ops of the chain."""
        if v not in self.is_of_score:
            at = self.reader.maker.get(v)
            is_inside = at is not None and self.ops[at].name in FUNCTIONS | MOVES and left > 0
            self.is_of_score[v] = is_inside and any(
                self._depends(o, left - 1) for o in self.ops[at or 0].operands
            )
        return self.is_of_score[v]

    def write(self, region: Region, argument: int) -> None:
        """Makes the region's score function."""
        self.region = region
        self.slope, self.mask = 1.0, None
        self._score(argument)
        dtype = str(self.graph.values[self.raw].dtype)
        region.scores = Scores(tuple(self.nodes), self.mask, dtype)
        region.scale = self.slope

    def _node(self, node: Node) -> int:
        if node not in self.known:
            self.known[node] = len(self.nodes)
            self.nodes.append(node)
        return self.known[node]

    def _score(self, v: int) -> int:
        """A value of the chain that depends on the score."""
        if v == self.raw:
            return self._node(Node(None, leaf=("score",)))
        op = self.ops[self.reader.maker[v]]
        dependent = [n for n, a in enumerate(op.inputs) if isinstance(a, int) and self._depends(a)]
        check(len(dependent) == 1 and op.name != "stop_gradient")
        (at,) = dependent
        own = op.inputs[at]
        assert isinstance(own, int), "it depends on the score"
        if op.name in MOVES or op.name == "copy":
            return self._score(own)
        inner, shape = self._score(own), self.shape_of(v)
        others = [inner if n == at else self._side(a, shape) for n, a in enumerate(op.inputs)]
        self._slope_of(op, at, others)
        return self._node(Node(op.primitive, params_of(op), tuple(others)))

    def _slope_of(self, op: Op, at: int, others: Sequence[int]) -> None:
        """Follows the derivative of the chain: a factor, and a mask."""
        number: tuple[Any, ...] = self.nodes[others[1 - at]].leaf if len(others) == 2 else ()
        if op.name == "mul" and number[:1] == ("number",):
            self.slope *= float(number[1])
        elif op.name == "div" and at == 0 and number[:1] == ("number",):
            self.slope /= float(number[1])
        elif op.name == "neg" or (op.name == "sub" and at == 1):
            self.slope *= -1.0
        elif op.name == "select_n":
            check(at in (1, 2) and len(others) == 3)
            other = self.nodes[others[3 - at]].leaf
            check(other[:1] == ("number",) and self.mask is None)
            self.mask = Mask(others[0], 2 - at, float(other[1]))
        else:
            check(op.name in ("add", "add_any", "sub", "convert_element_type"))

    def is_written(self, atom: Atom, shape: Shape, node: int) -> bool:
        """Whether a value is computed as a node is."""
        saved = len(self.nodes), dict(self.known), len(self.region.operands)
        try:
            return self._side(atom, shape) == node
        except UnrecognisedError:
            return False
        finally:
            del self.nodes[saved[0] :], self.region.operands[saved[2] :]
            self.known = saved[1]

    def _side(self, atom: Atom, shape: Shape) -> int:
        """A value that does not depend on the score, with these dimensions."""
        if not isinstance(atom, int):
            number = np.asarray(atom.val).item()
            return self._node(Node(None, leaf=("number", number, str(atom.aval.dtype))))
        value = self.graph.values[atom]
        own = shape if value.shape else ()
        own = tuple(() if n == 1 else dim for n, dim in zip(value.shape, own, strict=True))
        saved = len(self.nodes), dict(self.known)
        try:
            return self._computed(atom, own)
        except UnrecognisedError:
            del self.nodes[saved[0] :]
            self.known = saved[1]
            return self._operand(atom, own)

    def _computed(self, v: int, shape: Shape) -> int:
        """A value computed from positions, numbers, and operands of rows or columns."""
        check(v in self.reader.maker)
        op = self.ops[self.reader.maker[v]]
        if op.name == "iota":
            return self._position(op, shape)
        check(op.operands or op.inputs)
        if op.name in MOVES:
            (a,) = op.inputs
            if not isinstance(a, int):
                return self._side(a, ())
            return self._side(a, Moved(self.names, op, self.graph.values[a]).backwards(shape))
        check(op.name in FUNCTIONS and len(op.outputs) == 1)
        read = [self._side(a, self._of(op, a, shape)) for a in op.inputs]
        if op.name == "convert_element_type" and self.nodes[read[0]].leaf[:1] == ("number",):
            number = np.asarray(self.nodes[read[0]].leaf[1]).astype(op.params["new_dtype"])
            return self._node(Node(None, leaf=("number", number.item(), str(number.dtype))))
        kinds = {self.nodes[n].leaf[:1] for n in read if self.nodes[n].leaf}
        names = set(self.names.flat(shape))
        is_plain = {self.region.row, self.region.column} <= names or ("operand",) not in kinds
        check(is_plain)  # else it is an operand itself
        return self._node(Node(op.primitive, params_of(op), tuple(read)))

    def _of(self, op: Op, atom: Atom, shape: Shape) -> Shape:
        value = self.graph.value(atom)
        if not value.shape:
            return ()
        return tuple(() if n == 1 else dim for n, dim in zip(value.shape, shape, strict=True))

    def _position(self, op: Op, shape: Shape) -> int:
        dim = shape[op.params["dimension"]]
        check(len(dim) == 1)
        name = self.names.find(dim[0])
        check(name in (self.region.row, self.region.column))
        label = QUERY if name == self.region.row else KEY
        return self._node(Node(None, leaf=("position", label, str(op.result_values[0].dtype))))

    def _operand(self, v: int, shape: Shape) -> int:
        """A value of rows or of columns."""
        names, shape = set(self.names.flat(shape)), self.names.resolved(shape)
        check(not {self.region.row, self.region.column} <= names)
        if (v, shape) not in self.region.operands:
            self.region.operands.append((v, shape))
        number = self.region.operands.index((v, shape))
        return self._node(Node(None, leaf=("operand", number)))


def params_of(op: Op) -> tuple[tuple[str, Any], ...]:
    """An op's parameters, in the order of their names."""
    return tuple(sorted(op.params.items(), key=lambda item: item[0]))
