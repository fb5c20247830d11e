"""A lower bound on a device's memory under any recomputation, offloading or sharding: a proof that nothing fits.

Rows (`search.problem.memory_rows`) bound plans of the step as it is. Recomputation removes residuals. But while a
matrix product runs, its operands and results are arrays in the device's memory, in the product's specs. (Rows leave out
an operand that is resharded for one reader alone; a device's kernels do not.) And the step's arguments are in memory
all the time, but for those that rest on the host.

Each node takes the strategy that holds least. A product's own three arrays are of one node, so one strategy can reach
their sum. A value that only passes an argument on is not counted beside the argument, nor is a value that is written
over one. A loop's sums (gradients over microbatches) are in memory from its beginning to its end.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.search.problem.convolution_copies import CONVOLUTION
from autoshard.search.problem.layouts import PRODUCT
from autoshard.search.problem.live_ranges import ARGUMENTS
from autoshard.search.problem.memory_rows import Memory


def floor_bytes(memory: Memory, kept: Sequence[np.ndarray]) -> float:
    """A lower bound on the peak under all of the kept strategies, and of steps that recompute values.

    Args:
      memory: the memory of a device.
      kept: per node, the strategies that are left.
    """
    if not all(map(len, kept)):
        return np.inf
    return _arguments_bytes(memory, kept) + working_bytes(memory, kept)


def working_bytes(memory: Memory, kept: Sequence[np.ndarray]) -> float:
    """A lower bound on the memory besides the step's arguments, which also holds for steps whose arguments rest on the
    host."""
    return max(_sums_bytes(memory, kept), _product_bytes(memory, kept)) if all(map(len, kept)) else np.inf


def _arguments_bytes(memory: Memory, kept: Sequence[np.ndarray]) -> float:
    total: dict[int, np.ndarray] = {}
    for item in memory.items:
        if item.resident in ARGUMENTS and item.copy_source is None:
            share = item.num_bytes * memory.costed.shares(item.port)
            total[item.port.node] = total.get(item.port.node, 0.0) + share
    return float(sum(num_bytes[kept[node]].min() for node, num_bytes in total.items()))


def _sums_bytes(memory: Memory, kept: Sequence[np.ndarray]) -> float:
    """Bytes of the sums of the loop that adds up most."""
    graph, folded = memory.costed.graph, memory.costed.graph.folded
    total: dict[int, float] = {}
    for op_class in (k for k in range(len(folded.members)) if folded.op(k).is_accumulator):
        node, (v,) = graph.node_of[op_class], folded.op(op_class).results
        share = memory.costed.shares(graph.ports[op_class, 0, True])[kept[node]].min()
        for at in folded.members[op_class]:
            begins = min(start for start, _ in folded.program.loops if start > at)
            held_bytes = folded.program.ops[at].repeats * float(share) * folded.program.values[v].num_bytes
            total[begins] = total.get(begins, 0.0) + held_bytes
    return max(total.values(), default=0.0)


def _product_bytes(memory: Memory, kept: Sequence[np.ndarray]) -> float:
    """Bytes of the largest product's operands and results that are no arguments."""
    graph, folded = memory.costed.graph, memory.costed.graph.folded
    inputs = {k for k in range(len(folded.members)) if folded.op(k).name == "input"}
    early, found = graph.handing_on(inputs), 0.0
    for op_class in range(len(folded.members)):
        if folded.op(op_class).name in (PRODUCT, CONVOLUTION):
            node, num_bytes = graph.node_of[op_class], _own_bytes(memory, op_class, early)
            found = max(found, float(num_bytes[kept[node]].min()))
    return found


def _own_bytes(memory: Memory, op_class: int, early: set[int]) -> np.ndarray:
    """[strategies]: bytes of the arrays that a product reads and makes."""
    graph, folded = memory.costed.graph, memory.costed.graph.folded
    op, program = folded.op(op_class), folded.program
    made_in = {v: folded.class_of[program.maker[v][0]] for v in op.operands}
    read = {v: (op_class, n, False) for n, v in enumerate(op.operands) if made_in[v] not in early}
    made = {v: (op_class, r, True) for r, v in enumerate(op.results) if v not in program.in_place}
    endpoints = {**read, **made}.items()
    shares = (program.values[v].num_bytes * memory.costed.shares(graph.ports[e]) for v, e in endpoints)
    return sum(shares, np.zeros(len(memory.costed.strategies[graph.node_of[op_class]])))
