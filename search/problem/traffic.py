"""Communication whose results nothing needs immediately, for all meshes: the values that may travel beside computation.

*Gathers* are of state that the step begins with, *reductions* of gradients on their way to the update, *returns* of the
update's results to their resting specs. Ops that only pass a value on (a cast, a reshape, a slice of a stack) are part
of its way: their results may travel beside computation too, but the value counts once.

A sum of rows, a broadcast, or any other op whose result has another size than its operand does not just pass a value
on. The larger of the two, such as an activation whose sum is a bias's gradient, is no state.

The computation that may hide a collective follows from XLA's schedules (`benchmarks.overlap`). XLA lists a program from
its end to its beginning, with one collective under way at a time.

* Gathers run beside any computation before their readers.
* Reductions, which only the update depends on, come last. So do the products that make weight gradients, because
  nothing else depends on these either. Reductions never run beside the products that make the activations' gradients.
  They do not run beside the update where it needs all gradients before it changes anything, as to clip them by their
  norm.
* Nothing runs beside a loop, and nothing of one iteration beside another.
* Small collectives of a kind are joined (`costs.COMBINED_BYTES`): they begin when the last of them can, and end when
  the first is needed.

So computation is divided into parts (`Part`). Collectives beside one part of a loop's body, or of the program, share a
`Pool`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import repeat

import numpy as np

from autoshard.search.ir.graph import Phase, Role
from autoshard.search.problem.costs import COMBINED_BYTES
from autoshard.search.problem.flat_program import FlatOp, ReadPhase, read_phase
from autoshard.search.problem.strategy_graph import Copy, ReshardEdge, StrategyGraph
from autoshard.search.problem.windows import Span, Windows


class HideableKind(StrEnum):
    """The kinds of collectives that may run beside computation."""

    GATHER = "gather"
    REDUCTION = "reduction"
    RETURN = "return"


class Part(StrEnum):
    """The parts of the computation beside which collectives may run."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The ops of the backward phase that make gradients of activations."""
    LATE = "late"
    """The ops whose results only the update needs, and the update."""
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Pool:
    """Computation that collectives share: a part of a loop's body, or of the whole program."""

    part: Part
    body: Span


@dataclass(frozen=True, slots=True)
class Hideable:
    """A value's reshard that may run beside computation.

    Attributes:
      kind: its kind.
      pool: the computation that may hide it.
      num_elements: elements of the value, in a step.
      num_bytes: bytes of the value, each time.
      window: the ops that run meanwhile.
      is_counted: whether the value counts at this reshard, or at another one on its way.
    """

    kind: HideableKind
    pool: Pool
    num_elements: float
    num_bytes: float
    window: Span
    is_counted: bool

    @property
    def is_forward(self) -> bool:
        """Whether computation of the forward phase hides the reshard, rather than that after it."""
        return self.pool.part is Part.FORWARD


@dataclass(frozen=True, eq=False)
class Traffic:
    """The reshards of a step that may run beside computation."""

    graph: StrategyGraph

    @cached_property
    def hideables(self) -> tuple[tuple[Hideable, ...], ...]:
        """By edge: a reshard for each value on the edge that may travel beside computation."""
        alone = [tuple(self._of(edge)) for edge in self.graph.edges]
        windows = iter(_joined([hideable for hideables in alone for hideable in hideables]))
        return tuple(tuple(_within(next(windows), hideable) for hideable in hideables) for hideables in alone)

    @cached_property
    def pools(self) -> dict[Pool, int]:
        """The pools of computation, numbered."""
        return {
            pool: n
            for n, pool in enumerate(dict.fromkeys(r.pool for hideables in self.hideables for r in hideables))
        }

    @cached_property
    def windows(self) -> tuple[np.ndarray, ...]:
        """By edge, [its reshards; pool, window's start, its end], for all meshes."""
        table = (
            [(self.pools[hideable.pool], *hideable.window) for hideable in hideables]
            for hideables in self.hideables
        )
        return tuple(np.array(rows, np.int64).reshape(-1, 3) for rows in table)

    @cached_property
    def runs(self) -> np.ndarray:
        """[pool; position]: runs of an op in a step that may hide the collectives of the pool."""
        found = np.zeros((len(self.pools), len(self.graph.folded.program.ops)))
        computing = self._computing
        for pool, n in self.pools.items():
            start, end = pool.body
            is_part = np.isin(self._parts[start:end], self._within(pool.part))
            found[n, start:end] = np.where(is_part, computing[start:end], 0)
            for loop in self.graph.folded.program.loops:
                if start <= loop[0] and loop[1] <= end and loop != pool.body:
                    found[n, slice(*loop)] = 0
        return found

    @property
    def _computing(self) -> np.ndarray:
        """By position: computing runs of an op in a step."""
        ops = self.graph.folded.program.ops
        return np.array(
            [0 if op.is_boundary or op.is_transfer or op.is_host_update else op.count for op in ops]
        )

    @cached_property
    def _parts(self) -> np.ndarray:
        """By position: the part of the computation that an op belongs to."""
        program, late = self.graph.folded.program, self.graph.late
        found = []
        for at, op in enumerate(program.ops):
            readers = [u for v in op.results for u in program.uses.get(v, ())]
            is_late = bool(readers) and all(self.graph.folded.class_of[u] in late for u in readers)
            found.append(_part(op, is_late or self.graph.folded.class_of[at] in late))
        return np.array(found)

    def _within(self, part: Part) -> list[Part]:
        """The parts of ops that hide the collectives of a part."""
        updates_meanwhile = part is Part.LATE and not self._awaits_all
        return [part, Part.UPDATE] if updates_meanwhile else [part]

    @cached_property
    def _awaits_all(self) -> bool:
        """Whether the update computes a single number from most gradients, such as their norm."""
        program, gradients, needs, numbers = self.graph.folded.program, dict[int, int](), dict[int, int](), []
        for op in program.ops:
            if op.phase is not Phase.UPDATE:
                continue
            needed = 0
            for v in op.operands:
                if program.ops[program.maker[v][0]].phase is Phase.BACKWARD:
                    needed |= 1 << gradients.setdefault(v, len(gradients))
                needed |= needs.get(v, 0)
            needs |= dict.fromkeys(op.results, needed)
            numbers += [needed] if all(program.values[v].shape == () for v in op.results) else []
        return any(2 * needed.bit_count() > len(gradients) for needed in numbers)

    def goes_on(self, node: int) -> bool:
        """Whether state may have another reshard on its way from a node: a copy for several readers, or ops that pass
        it on."""
        if copy := self._copy(node):
            return len(copy.targets) != 1
        return not self._early.isdisjoint(self.graph.groups[node].op_classes)

    def _of(self, edge: ReshardEdge) -> Iterator[Hideable]:
        folded, (op_class, result) = self.graph.folded, edge.maker
        program, members = folded.program, folded.members[op_class]
        num_elements = edge.count * np.prod(edge.value.shape) / folded.sizes[op_class]
        for made in members:
            readers = [
                u for u in program.uses.get(program.ops[made].results[result], ()) if self._reads(edge, u)
            ]
            if not readers or (kind := self._kind(op_class, {folded.class_of[u] for u in readers})) is None:
                continue
            window, first = min((self._windows.between(made, u), u) for u in readers)
            body = self._windows.bodies[made]
            is_counted = self._is_last(kind, first) and edge.source.node < len(self.graph.groups)
            pool = Pool(_PART.get(kind) or _gathered_in(program.ops[first]), body)
            hideable = Hideable(kind, pool, num_elements, edge.value.num_bytes, window, is_counted)
            yield from repeat(hideable, program.ops[made].repeats)

    def _is_last(self, kind: HideableKind, reader: int) -> bool:
        """Whether the reader of a value does not just pass it on, so that the value counts there and nowhere else."""
        op = self.graph.folded.program.ops[reader]
        phase = read_phase(op)
        if kind is not HideableKind.GATHER:
            return phase is ReadPhase.UPDATE or op.name == "stack"
        is_handed_on = self.graph.folded.class_of[reader] in self._early
        return phase is not ReadPhase.UPDATE and not is_handed_on

    def _kind(self, maker: int, readers: set[int]) -> HideableKind | None:
        """The kind of the reshard from a class to its readers; None if computation needs its result immediately."""
        graph = self.graph
        if maker in self._early:
            return HideableKind.GATHER if self._keeps_size(maker) else None
        if not readers <= graph.late or not all(map(self._keeps_size, readers)):
            return None
        if graph.folded.op(maker).phase is not Phase.UPDATE:
            return HideableKind.REDUCTION
        reader = graph.folded.op(min(readers))
        return HideableKind.RETURN if reader.name == "input" and reader.phase is Phase.FORWARD else None

    def _keeps_size(self, op_class: int) -> bool:
        """Whether an op's result has as many elements as its operands: it is no sum of rows, and repeats nothing."""
        op, values = self.graph.folded.op(op_class), self.graph.folded.program.values
        shapes = {values[v].shape for v in (*op.operands, *op.results)}
        return op.is_boundary or op.phase is Phase.UPDATE or len({np.prod(shape) for shape in shapes}) == 1

    @cached_property
    def _early(self) -> set[int]:
        """The classes of the state that a step begins with, and those that only pass it on."""
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


_PART = {HideableKind.REDUCTION: Part.LATE, HideableKind.RETURN: Part.UPDATE}
"""The parts beside which reshards run that are no gathers."""


def _gathered_in(reader: FlatOp) -> Part:
    return Part.FORWARD if read_phase(reader) is ReadPhase.FORWARD else Part.BACKWARD


def _part(op: FlatOp, is_late: bool) -> Part:
    """The smallest part to which an op belongs."""
    if op.phase is Phase.BACKWARD:
        return Part.LATE if is_late else Part.BACKWARD
    return Part.UPDATE if op.phase is Phase.UPDATE else Part.FORWARD


def _joined(hideables: Sequence[Hideable]) -> list[Span]:
    """The windows of reshards once XLA has joined their collectives, in the order in which they are needed, or made."""
    alike = defaultdict[tuple[HideableKind, Pool], list[int]](list)
    for n, hideable in enumerate(hideables):
        if hideable.is_counted:
            alike[hideable.kind, hideable.pool].append(n)
    found = [hideable.window for hideable in hideables]
    for (kind, _), numbers in alike.items():
        ordered = sorted(numbers, key=lambda n: hideables[n].window[kind is HideableKind.GATHER])
        for group in _filled(ordered, [hideables[n].num_bytes for n in ordered]):
            start = max(hideables[n].window[0] for n in group)
            end = min(hideables[n].window[1] for n in group)
            for n in group:
                found[n] = start, max(start, end)
    return found


def _within(window: Span, hideable: Hideable) -> Hideable:
    return hideable if window == hideable.window else replace(hideable, window=window)


def _filled(numbers: Sequence[int], num_bytes: Sequence[float]) -> Iterator[list[int]]:
    """Consecutive groups of collectives, each as large as XLA joins them."""
    group, total = list[int](), 0.0
    for n, own in zip(numbers, num_bytes, strict=True):
        if group and total + own > COMBINED_BYTES:
            yield group
            group, total = list[int](), 0.0
        group.append(n)
        total += own
    if group:
        yield group
