"""Communication that nothing waits for, mesh by mesh the same: which values travel when there is time.

*Gathers* are of state that the step begins with, *reductions* of gradients on their way to the update, *returns* of what the
update makes to where it rests. Ops that only hand a value on (a cast, a reshape, a slice of a stack) are part of its way:
these too have collectives that wait for nothing, but the value counts once.

A sum of rows, a broadcast, or whatever else makes a value of another size than it reads is no mere handing on: what is large
on one side of it, an activation whose sum is a bias's gradient, is no state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import repeat

import numpy as np

from search.ir.graph import Phase, Role
from search.problem.flat_program import ReadPhase, read_phase
from search.problem.strategy_graph import Copy, ReshardEdge, StrategyGraph
from search.problem.windows import Span, Windows


class Way(StrEnum):
    """Why a value's collective waits for nothing."""

    GATHER = "gather"
    REDUCTION = "reduction"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class Ride:
    """A value on its way.

    Attributes:
      way: what kind.
      is_forward: whether computation of the forward phase hides it, or that behind it.
      num_elements: of it, in a step.
      window: the ops that run meanwhile.
      is_counted: whether it stands for itself, or hands on what stands elsewhere.
    """

    way: Way
    is_forward: bool
    num_elements: float
    window: Span
    is_counted: bool


@dataclass(frozen=True, eq=False)
class Traffic:
    """The rides of a step's values."""

    graph: StrategyGraph

    @cached_property
    def rides(self) -> tuple[tuple[Ride, ...], ...]:
        """By edge: a ride for each value that goes this way and waits for nothing; none where it is of no such kind."""
        return tuple(tuple(self._of(edge)) for edge in self.graph.edges)

    @cached_property
    def windows(self) -> tuple[np.ndarray, ...]:
        """By edge, [of its rides; is in the forward phase, window's start, its end], for all meshes."""
        table = ([(ride.is_forward, *ride.window) for ride in rides] for rides in self.rides)
        return tuple(np.array(rows, np.int64).reshape(-1, 3) for rows in table)

    @cached_property
    def runs(self) -> np.ndarray:
        """[behind the forward phase, in it; position]: how often an op computes in a step."""
        ops = self.graph.folded.program.ops
        runs = np.array([0 if op.is_boundary or op.is_transfer else op.count for op in ops])
        is_forward = np.array([op.phase is Phase.FORWARD for op in ops])
        return np.stack([np.where(is_forward, 0, runs), np.where(is_forward, runs, 0)])

    def goes_on(self, node: int) -> bool:
        """Whether state may have another leg of its way from a node: a copy for several, or ops that hand it on."""
        if copy := self._copy(node):
            return len(copy.targets) != 1
        return not self._early.isdisjoint(self.graph.groups[node].op_classes)

    def _of(self, edge: ReshardEdge) -> Iterator[Ride]:
        folded, (op_class, result) = self.graph.folded, edge.maker
        program, members = folded.program, folded.members[op_class]
        num_elements = edge.count * np.prod(edge.value.shape) / folded.sizes[op_class]
        for made in members:
            readers = [
                u for u in program.uses.get(program.ops[made].results[result], ()) if self._reads(edge, u)
            ]
            if not readers or (way := self._way(op_class, {folded.class_of[u] for u in readers})) is None:
                continue
            window, first = min((self._windows.between(made, u), u) for u in readers)
            is_forward = read_phase(program.ops[first]) is ReadPhase.FORWARD
            is_counted = self._is_last(way, first) and edge.source.node < len(self.graph.groups)
            yield from repeat(
                Ride(way, is_forward, num_elements, window, is_counted), program.ops[made].repeats
            )

    def _is_last(self, way: Way, reader: int) -> bool:
        """Whether what reads a value does not just hand it on, so that it counts there and nowhere else."""
        phase = read_phase(self.graph.folded.program.ops[reader])
        if way is not Way.GATHER:
            return phase is ReadPhase.UPDATE
        is_handed_on = self.graph.folded.class_of[reader] in self._early
        return phase is not ReadPhase.UPDATE and not is_handed_on

    def _way(self, maker: int, readers: set[int]) -> Way | None:
        """Why nothing waits for what a class makes on its way to others."""
        graph = self.graph
        if maker in self._early:
            return Way.GATHER if self._keeps_size(maker) else None
        if not readers <= graph.late or not all(map(self._keeps_size, readers)):
            return None
        if graph.folded.op(maker).phase is not Phase.UPDATE:
            return Way.REDUCTION
        reader = graph.folded.op(min(readers))
        return Way.RETURN if reader.name == "input" and reader.phase is Phase.FORWARD else None

    def _keeps_size(self, op_class: int) -> bool:
        """Whether an op's result has as many elements as what it reads: it is no sum of rows, and repeats nothing."""
        op, values = self.graph.folded.op(op_class), self.graph.folded.program.values
        shapes = {values[v].shape for v in (*op.operands, *op.results)}
        return op.is_boundary or op.phase is Phase.UPDATE or len({np.prod(shape) for shape in shapes}) == 1

    @cached_property
    def _early(self) -> set[int]:
        """The classes of the state that a step begins with, and those that only hand it on."""
        folded = self.graph.folded
        roles = [argument.role for argument in folded.program.step.arguments]
        inputs = {k for k in range(len(folded.members)) if folded.op(k).name == "input"}
        return self.graph.handing_on({k for k in inputs if roles[folded.op(k).number] is not Role.BATCH})

    def _reads(self, edge: ReshardEdge, reader: int) -> bool:
        """Whether an op gets its value by an edge."""
        graph, phase = self.graph, read_phase(self.graph.folded.program.ops[reader])
        copies = [copy for node in (edge.target.node, edge.source.node) if (copy := self._copy(node))]
        if any(copy.phase not in (ReadPhase.REST, phase) for copy in copies):
            return False
        return (
            bool(self._copy(edge.target.node))
            or graph.node_of[graph.folded.class_of[reader]] == edge.target.node
        )

    def _copy(self, node: int) -> Copy | None:
        graph = self.graph
        return graph.copies[node - len(graph.groups)] if node >= len(graph.groups) else None

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.graph.folded)
