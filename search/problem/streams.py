"""What communication computation hides.

A device computes on one stream and communicates on another. Collectives that nothing waits for run while it computes, and
cost only what computation does not cover: *gathers* of state that the step begins with, in the forward phase and behind it,
*reductions* of gradients on their way to the update, and what *returns* from it to where it rests. Those between one
activation and the next cost in full.

How much of them is hidden is decided value by value, so that a plan's time remains a sum over nodes and edges, which the
solver can bound. A value's collective has

* its *window*: the computation between what makes the value and what reads it (`search.problem.windows`);
* its *share* of all computation of the phase. Shares are by size: a parameter with a third of all elements gets a third of
  the time, and what is more than its window goes to the others. Behind the forward phase a reduction may have all of its
  parameter's share. A gather or a return there has what the reduction leaves, which is taken to last as long: who splits
  state pays for both, once they are more than the share together, and who does not for an all-reduce.

So whoever splits all parameters alike, as experts do, hides what streams would; where some communicate and others need not,
what these would have hidden is not lent to those, and the real step is faster than the plan says.

Computation is taken at its fastest, as if it were split over all devices. A collective takes some of the device from the
computation beside it: hiding it is not free. Copies to and from the host are not part of this (`search.device.prediction`).
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import accumulate

import numpy as np

from cost_model.compute import kernel_s
from search.ir.graph import Phase, Role
from search.ir.spec import PARTIAL
from search.problem.costs import CostedGraph
from search.problem.flat_program import ReadPhase, read_phase
from search.problem.kernels import runs_alone
from search.problem.strategies import port_specs
from search.problem.strategy_graph import Copy, ReshardEdge
from search.problem.windows import Windows
from search.solver.pbqp import Labels

CONTENTION = 0.1
"""Of a hidden collective's time, by how much it slows down the computation beside it: NCCL's kernels take some of the
multiprocessors and of the memory's rate. Source: assumed."""

MAX_WINDOWS = 6
"""Different windows of one edge that are told apart. Source: a choice of ours; a stack's differ by a layer each."""


class Way(StrEnum):
    """Why a value's collective waits for nothing."""

    GATHER = "gather"
    REDUCTION = "reduction"
    RETURN = "return"


@dataclass(frozen=True, slots=True)
class _Ride:
    """A value on its way.

    Attributes:
      way: what kind.
      is_forward: whether computation of the forward phase hides it, or that behind it.
      num_elements: of it, in a step.
      window_s: the computation in its window, in a step.
      is_counted: whether it stands for itself, or hands on what stands elsewhere.
    """

    way: Way
    is_forward: bool
    num_elements: float
    window_s: float
    is_counted: bool


@dataclass(frozen=True, eq=False)
class Hiding:
    """The communication of a costed graph that computation hides."""

    costed: CostedGraph

    def hidden_s(self, labels: Labels) -> float:
        """Seconds under a full assignment."""
        at = ((labels[edge.source.node], labels[edge.target.node]) for edge in self.costed.graph.edges)
        hidden = zip(at, self.seconds, strict=True)
        return float(sum(seconds[place] for place, seconds in hidden if isinstance(seconds, np.ndarray)))

    @cached_property
    def seconds(self) -> tuple[np.ndarray | float, ...]:
        """Per edge: [strategies of source, strategies of target] hidden seconds; 0.0 where there are none."""
        if self.costed.device.platform == "cpu":  # simulated devices: nothing runs beside anything
            return (0.0,) * len(self.costed.graph.edges)
        return tuple(
            self._of(edge, rides) for edge, rides in zip(self.costed.graph.edges, self._rides, strict=True)
        )

    def _of(self, edge: ReshardEdge, rides: Sequence[_Ride]) -> np.ndarray | float:
        if not any(ride.window_s for ride in rides):
            return 0.0
        seconds, total_s = self.costed.edge_seconds(edge), 0.0
        each_s = np.where(np.isfinite(seconds), seconds, 0.0) / len(rides)
        share_s = self._rates[rides[0].way, rides[0].is_forward] * rides[0].num_elements
        if not rides[0].is_forward:
            share_s = np.where(self._reduces(edge), share_s, np.maximum(share_s - each_s, 0.0))
        for windows_s in np.array_split(
            sorted(ride.window_s for ride in rides), min(MAX_WINDOWS, len(rides))
        ):
            total_s = total_s + len(windows_s) * np.minimum(each_s, np.minimum(share_s, windows_s.mean()))
        return (1 - CONTENTION) * total_s

    def _reduces(self, edge: ReshardEdge) -> np.ndarray:
        """[strategies of source, strategies of target]: whether partial values are added up on the way."""
        source, target = (port_specs(p, self.costed.strategies[p.node]) for p in (edge.source, edge.target))
        return ((source[:, None, :] == PARTIAL) & (target[None, :, :] != PARTIAL)).any(axis=2)

    @cached_property
    def _rates(self) -> dict[tuple[Way, bool], float]:
        """Seconds per element, by kind, at which all shares together are the computation that there is."""
        of_kind: dict[tuple[Way, bool], list[_Ride]] = defaultdict(list)
        for ride in (ride for rides in self._rides for ride in rides):
            of_kind[ride.way, ride.is_forward].append(ride)
        total = {is_forward: before_s[-1] for is_forward, before_s in self._computed_before.items()}
        return {
            (way, is_forward): _rate([r for r in rides if r.is_counted], total[is_forward])
            for (way, is_forward), rides in of_kind.items()
        }

    @cached_property
    def _rides(self) -> tuple[tuple[_Ride, ...], ...]:
        return tuple(tuple(self._rides_of(edge)) for edge in self.costed.graph.edges)

    def _rides_of(self, edge: ReshardEdge) -> Iterator[_Ride]:
        """A ride for each value that goes this way and waits for nothing; none where it is of no such kind."""
        folded, (op_class, result) = self.costed.graph.folded, edge.maker
        program, members = folded.program, folded.members[op_class]
        num_elements = edge.count * np.prod(edge.value.shape) / len(members)
        for made in members:
            readers = [
                u for u in program.uses.get(program.ops[made].results[result], ()) if self._reads(edge, u)
            ]
            if not readers or (way := self._way(op_class, {folded.class_of[u] for u in readers})) is None:
                continue
            (start, end), first = min((self._windows.between(made, u), u) for u in readers)
            is_forward = read_phase(program.ops[first]) is ReadPhase.FORWARD
            before_s, is_last = self._computed_before[is_forward], self._is_last(way, first)
            is_counted = is_last and edge.source.node < len(self.costed.graph.groups)
            yield _Ride(way, is_forward, num_elements, before_s[end] - before_s[start], is_counted)

    def _is_last(self, way: Way, reader: int) -> bool:
        """Whether what reads a value does not just hand it on, so that it counts there and nowhere else."""
        phase = read_phase(self.costed.graph.folded.program.ops[reader])
        if way is not Way.GATHER:
            return phase is ReadPhase.UPDATE
        is_handed_on = self.costed.graph.folded.class_of[reader] in self._early
        return phase is not ReadPhase.UPDATE and not is_handed_on

    def _way(self, maker: int, readers: set[int]) -> Way | None:
        """Why nothing waits for what a class makes on its way to others."""
        graph = self.costed.graph
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
        op, values = self.costed.graph.folded.op(op_class), self.costed.graph.folded.program.values
        shapes = {values[v].shape for v in (*op.operands, *op.results)}
        return op.is_boundary or op.phase is Phase.UPDATE or len({np.prod(shape) for shape in shapes}) == 1

    @cached_property
    def _early(self) -> set[int]:
        """The classes of the state that a step begins with, and those that only hand it on."""
        folded = self.costed.graph.folded
        roles = [argument.role for argument in folded.program.step.arguments]
        inputs = {k for k in range(len(folded.members)) if folded.op(k).name == "input"}
        return self.costed.graph.handing_on(
            {k for k in inputs if roles[folded.op(k).number] is not Role.BATCH}
        )

    def _reads(self, edge: ReshardEdge, reader: int) -> bool:
        """Whether an op gets its value by an edge."""
        graph, phase = self.costed.graph, read_phase(self.costed.graph.folded.program.ops[reader])
        copies = [copy for node in (edge.target.node, edge.source.node) if (copy := self._copy(node))]
        if any(copy.phase not in (ReadPhase.REST, phase) for copy in copies):
            return False
        return (
            bool(self._copy(edge.target.node))
            or graph.node_of[graph.folded.class_of[reader]] == edge.target.node
        )

    def _copy(self, node: int) -> Copy | None:
        graph = self.costed.graph
        return graph.copies[node - len(graph.groups)] if node >= len(graph.groups) else None

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self.costed.graph.folded)

    @cached_property
    def _computed_before(self) -> dict[bool, list[float]]:
        """Whether in the forward phase, or behind it, and by position: the seconds of computation in a step before it."""
        program = self.costed.graph.folded.program
        seconds = {True: [0.0], False: [0.0]}
        for at, op in enumerate(program.ops):
            own_s = 0.0 if op.is_boundary or op.is_transfer else op.count * self._least_s(at)
            for is_forward, found in seconds.items():
                found.append(own_s if is_forward == (op.phase is Phase.FORWARD) else 0.0)
        return {is_forward: list(accumulate(found)) for is_forward, found in seconds.items()}

    def _least_s(self, at: int) -> float:
        """What one run of an op takes under the strategies that make it fastest."""
        costed, op_class = self.costed, self.costed.graph.folded.class_of[at]
        if runs_alone(costed.graph.folded, op_class):
            return float(np.min(costed.op_seconds(op_class)))
        if at in costed.kernels.of_op:
            kernel, share = costed.kernels.of_op[at]
            return share * float(np.min(kernel_s(costed.device, costed.kernel_bytes(kernel))))
        return 0.0


def _rate(rides: Sequence[_Ride], total_s: float) -> float:
    """At which rooms, each no more than its window, add up to the total; infinite if windows are no more together."""
    left_s, elements = total_s, sum(ride.num_elements for ride in rides)
    for ride in sorted(rides, key=lambda ride: ride.window_s / max(ride.num_elements, 1.0)):
        if ride.window_s * elements >= left_s * ride.num_elements:
            return left_s / elements if elements else np.inf
        left_s, elements = left_s - ride.window_s, elements - ride.num_elements
    return np.inf
