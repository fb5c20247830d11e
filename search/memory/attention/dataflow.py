"""A graph's dataflow, and the arrays under moves of dimensions."""

from collections import defaultdict

from autoshard.search.ir.graph import Graph
from autoshard.search.memory.attention.names import (
    IDENTITIES,
    MOVES,
    is_view,
)


class Dataflow:
    """The ops of a graph, by the values that they make and read."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.ops = graph, graph.ops
        self.maker = graph.made_at
        self.uses: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(graph.ops):
            for v in dict.fromkeys(op.operands):
                self.uses[v].append(i)


def root(reader: Dataflow, v: int) -> int:
    """The value that moves and identities make a value of."""
    while v in reader.maker:
        op = reader.ops[reader.maker[v]]
        if op.name not in MOVES | IDENTITIES or not op.operands or len(op.inputs) != len(op.outputs):
            return v
        own = op.inputs[op.outputs.index(v)]
        if not isinstance(own, int) or not is_view(reader.graph, own, v):
            return v
        v = own
    return v
