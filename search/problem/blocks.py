"""The repeated block to which each op of a step belongs.

A traced step does not name its blocks, but they follow from four rules, without the name of a model or a library:

* *The spine.* A model's layers are traced one after the other, so the forward phase's ops repeat: a stack is the
  longest periodic run of ops that look alike (primitive, types, parameters), and a block is one period of it. Further
  stacks (a decoder, the next stage of a convolutional network) are looked for in the remaining ops.
* *Values that only one block reads* are its own: parameters, and their casts ahead of the first layer.
* *Ops on a block's values.* A backward op that reads a parameter or a residual of one block belongs to it. So does an
  op that only makes the gradient of one of its leaves. An op that reads nothing but gradients belongs where the newest
  of them was made: one that comes from the next block is older than those made here. An update op belongs to the block
  of its leaf, even where it also reads a total over all leaves.
* *Values that only one block reads*, once more: moments, their decay.

All other ops (the mask that all blocks read, the embedding, the loss) belong to no block. A wrong guess is not
dangerous: `search.problem.shortening` cuts only blocks of exactly equal structure.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.search.ir.graph import Graph, Op, Phase, Step

MIN_BLOCKS = 5
"""Blocks of the smallest stack that is looked for: the first, the last, two of one structure, and one to leave out."""

MIN_SHARE = 0.1
"""Smallest share of the forward ops that a stack has to cover."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of a step's outermost graph, numbered through all stacks.

    Attributes:
      stacks: each stack's blocks, in the order of the forward phase.
      of_op: the block of each op, or None.
      of_argument: the block of each argument, or None.
      looks: for each op, a number that ops which look alike share.
    """

    stacks: tuple[range, ...]
    of_op: tuple[int | None, ...]
    of_argument: tuple[int | None, ...]
    looks: tuple[int, ...]


def find_blocks(step: Step) -> Blocks:
    """Assigns ops and arguments to the repeated blocks of the step's outermost graph; loops stay whole."""
    flow, looks = _Flow(step.graph), _looks(step.graph.ops)
    forward = [i for i, op in enumerate(step.graph.ops) if op.phase is Phase.FORWARD]
    stacks: list[range] = []
    while run := _longest_run(_unlabelled(flow, forward, looks)):
        start, period, count = run
        first = stacks[-1].stop if stacks else 0
        stacks.append(range(first, first + count))
        for n, i in enumerate(forward[start : start + period * count]):
            flow.block[flow.op_node(i)] = first + n // period
        flow.own_what_it_alone_reads((None, Phase.FORWARD))
    if stacks:
        flow.own_what_works_on_it()
        flow.follow(looks)
        flow.own_what_it_alone_reads((None, *Phase))
        flow.own_what_it_makes(step.replaces)
    arguments = tuple(flow.block.get(n) for n in range(flow.num_arguments))
    ops = tuple(flow.block.get(flow.op_node(i)) for i in range(len(looks)))
    return Blocks(tuple(stacks), ops, arguments, tuple(looks))


# --- ops that look alike


def _looks(ops: Iterable[Op]) -> list[int]:
    """A number per op, shared by ops that look alike."""
    seen: dict[Any, int] = {}
    described: dict[Any, Any] = {}
    return [seen.setdefault(_look(op, described), len(seen)) for op in ops]


_WHERE_AND_WHO = frozenset({"start_indices", "limit_indices", "padding_config", "name"})
"""Parameters in which the n-th block differs from the next: the place of its part of a stacked array, its name."""


def _look(op: Op, described: dict[Any, Any]) -> Any:
    """The look of an op: a key that ops which look alike share.

    Args:
      op: the op.
      described: memo of parameters.
    """
    bodies = tuple(
        [
            (k, tuple([tuple([_look(o, described) for o in b.ops]) for b in bodies]))
            for k, bodies in op.bodies.items()
        ]
    )
    read = tuple(["value" if isinstance(a, int) else (a.aval.shape, a.aval.dtype) for a in op.inputs])
    return op.name, op.phase, read, op.result_values, _params(op, described), bodies


def _params(op: Op, described: dict[Any, Any]) -> Any:
    try:
        key = tuple(op.params.items())
        if key not in described:
            described[key] = tuple([(k, _comparable(v)) for k, v in key if k not in _WHERE_AND_WHO])
        return described[key]
    except TypeError:  # a parameter that cannot be hashed
        return tuple([(k, _comparable(v)) for k, v in op.params.items() if k not in _WHERE_AND_WHO])


def _comparable(value: Any) -> Any:
    """A parameter as far as it can be compared; the type of one that is code."""
    if callable(value) or hasattr(value, "eqns") or hasattr(value, "jaxpr"):
        return type(value).__name__
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    try:
        hash(value)
    except TypeError:
        return type(value).__name__
    return value


# --- the spine


def _unlabelled(flow: "_Flow", forward: Sequence[int], looks: Sequence[int]) -> np.ndarray:
    """The looks of the forward ops; those that have a block already look like nothing else."""
    return np.array([-1 - i if flow.op_node(i) in flow.block else looks[i] for i in forward], np.int64)


def _longest_run(looks: np.ndarray) -> tuple[int, int, int] | None:
    """(Start, period, count) of the periodic run that covers most; None if it is too short."""
    best, covered = None, max(1, int(MIN_SHARE * len(looks)))
    for period in range(1, len(looks) // MIN_BLOCKS + 1):
        # in a run that covers more, at least one op in `stride` looks like the next block's
        stride = covered - covered // MIN_BLOCKS
        if not (looks[:-period:stride] == looks[period::stride]).any():
            continue
        differs = np.flatnonzero(looks[period:] != looks[:-period])
        edges = np.concatenate([[-1], differs, [len(looks) - period]])
        lengths = np.diff(edges) - 1 + period
        longest = int(np.argmax(lengths))
        count = int(lengths[longest]) // period
        if count >= MIN_BLOCKS and count * period > covered:
            best, covered = (int(edges[longest]) + 1, period, count), count * period
    return best


# --- the rest, by dataflow


class _Flow:
    """The maker and the readers of each value; nodes are the arguments, then the ops, in program order.

    Attributes:
      block: the block of a node, if it has one.
      phase: the phase of each node; None for an argument.
      maker: the node that makes a value; constants have none.
      readers: the nodes that read a node's results.
      reads: the nodes whose values a node reads.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph, self.num_arguments = graph, len(graph.inputs)
        self.block: dict[int, int] = {}
        self.phase: list[Phase | None] = [*(None for _ in graph.inputs), *(op.phase for op in graph.ops)]
        self.maker = {v: n for n, v in enumerate(graph.inputs)}
        self.readers: list[list[int]] = [[] for _ in self.phase]
        self.reads: list[list[int]] = [[] for _ in graph.inputs]
        for node, op in enumerate(graph.ops, self.num_arguments):
            self.reads.append(sorted({self.maker[v] for v in op.operands if v in self.maker}))
            for read in self.reads[node]:
                self.readers[read].append(node)
            for v in op.outputs:
                self.maker[v] = node

    def op_node(self, op: int) -> int:
        return self.num_arguments + op

    def own_what_it_alone_reads(self, phases: Container[Phase | None]) -> None:
        """A node without a block that only one block reads, in these phases, belongs to that block."""
        for node in reversed(range(len(self.phase))):
            if node not in self.block and self.phase[node] in phases:
                self._own(node, {self.block.get(r) for r in self.readers[node] if self.phase[r] in phases})

    def own_what_works_on_it(self) -> None:
        """An op after the forward phase belongs to the block whose parameter or residual it reads.

        An op whose results only become a leaf's gradient (the sum that is a bias's) belongs where its known readers do.
        """
        residuals = {node: block for node, block in self.block.items() if not self._is_passed_on(node)}
        later = [node for node, phase in enumerate(self.phase) if phase in (Phase.BACKWARD, Phase.UPDATE)]
        for node in later:
            self._own(node, {residuals[n] for n in self.reads[node] if n in residuals})
        becomes_gradient = {node for node in later if self.phase[node] is Phase.UPDATE}
        passes_it_on = becomes_gradient.union(node for node in later if len(self.reads[node]) == 1)
        for node in reversed(later):
            readers = self.readers[node]
            if passes_it_on.issuperset(readers) and becomes_gradient.issuperset(readers):
                becomes_gradient.add(node)
                if node not in self.block:
                    self._own(node, {self.block[r] for r in readers if r in self.block})

    def own_what_it_makes(self, replaces: Sequence[int | None]) -> None:
        """State that is only written belongs to the block that makes the new one."""
        for out, a in zip(self.graph.outputs, replaces, strict=True):
            if a is not None and not self.readers[a] and isinstance(out, int) and out in self.maker:
                self._own(a, {self.block.get(self.maker[out])})

    def _own(self, node: int, blocks: set[Any]) -> None:
        block = blocks.pop() if len(blocks) == 1 else None
        if block is not None:
            self.block[node] = block

    def follow(self, looks: Sequence[int]) -> None:
        """Gives each other op the block that its operands belong to, in program order.

        `origins` are the blocks that a value comes from; a running total over leaves comes from all blocks so far.
        """
        alone = {b: frozenset([b]) for b in self.block.values()}
        origins = {node: alone[b] for node, b in self.block.items()}
        for i, op in enumerate(self.graph.ops):
            node = self.op_node(i)
            if node in self.block:
                continue
            read = [n for n in self.reads[node] if n in origins]
            if not read:
                continue
            if op.phase is Phase.BACKWARD:
                block, origin = _newest(read, origins), frozenset[int]()
            else:
                totals = {n for n in read if self._looks_like(looks, n, i)}
                block, origin = _term(read, totals, origins)
            if block is not None:
                self.block[node] = block
            origins[node] = origin or frozenset([block] if block is not None else [])

    def _is_passed_on(self, node: int) -> bool:
        """Whether another block's forward ops read it too, as they read the residual stream."""
        own = self.block[node]
        return any(
            self.block.get(r, own) != own for r in self.readers[node] if self.phase[r] is Phase.FORWARD
        )

    def _looks_like(self, looks: Sequence[int], node: int, op: int) -> bool:
        return node >= self.num_arguments and looks[node - self.num_arguments] == looks[op]


_Origins = dict[int, frozenset[int]]


def _newest(read: Sequence[int], origins: _Origins) -> int | None:
    """The block of the newest operand that comes from one only; None if there is none, or too many meet."""
    single = [n for n in read if len(origins[n]) == 1]
    if not single or len({origins[n] for n in single}) > 2:
        return None
    return next(iter(origins[single[-1]]))


def _term(read: list[int], totals: set[int], origins: _Origins) -> tuple[int | None, frozenset[int]]:
    """The block and the origins of an op outside the backward phase.

    An operand made by an op like this one may be a running total: then the block is that of the other, and all
    origins are kept.
    """
    everything = frozenset[int]().union(*(origins[n] for n in read))
    added = _newest([n for n in read if n not in totals], origins)
    if totals and added is not None:
        return added, everything
    block = _newest(read, origins)
    meet = len({origins[n] for n in read if len(origins[n]) == 1}) > 1
    return block, everything if block is None or meet else frozenset()
