"""The live ranges of a program's arrays on a device, before any mesh.

Program order is taken as the schedule. `search.problem.fusion` says which values are arrays; a value that is computed
on the fly keeps its fusion sources alive as long as it is used. An operand that is resharded for a reader is an array
of its own, until the reader's result is stored. State is donated: the new state is written over the old one, and a
loop's sums over their earlier values. A loop's operands live to its end; a stack that it fills exists from its start. A
`LiveRange` is a stretch of the program over which a node's strategy costs bytes.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import groupby

from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Role
from autoshard.search.problem import equivalence
from autoshard.search.problem.convolution_copies import CONVOLUTION
from autoshard.search.problem.flat_program import FlatProgram, ReadPhase, read_phase
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.fusion import Fusion, is_part, is_view
from autoshard.search.problem.repeats import piled_up_from
from autoshard.search.problem.strategies import CopySource
from autoshard.search.problem.strategy_graph import Port, StrategyGraph


class Resident(StrEnum):
    """The kinds of arrays in memory."""

    PARAMETERS = "parameters"
    FROZEN_WEIGHTS = "frozen_weights"
    OPTIMIZER_STATE = "optimizer_state"
    OTHER_STATE = "other_state"
    BATCH = "batch"
    GRADIENTS = "gradients"
    RESIDUALS = "residuals"
    TEMPORARIES = "temporaries"


_RESIDENT_OF = {
    Role.PARAMETER: Resident.PARAMETERS,
    Role.OPTIMIZER_STATE: Resident.OPTIMIZER_STATE,
    Role.STATE: Resident.OTHER_STATE,
    Role.KEY: Resident.OTHER_STATE,
    Role.FROZEN: Resident.FROZEN_WEIGHTS,
    Role.BATCH: Resident.BATCH,
}


ARGUMENTS = frozenset(_RESIDENT_OF.values())
"""Kinds of arrays that are in memory before the step and after it."""


@dataclass(frozen=True, slots=True)
class LiveRange:
    """From op `start` to op `end`, both included, the value at a port is in memory.

    Attributes:
      port: the node whose strategy decides, and the value's dimensions there.
      num_bytes: bytes of the whole value.
      start: first op position.
      end: last op position.
      copy_source: for a copy: the range counts only under strategies with this source; None for other values.
      resident: kind of the array.
      position: the op that made the value, or reads it resharded.
      source: for a value resharded for a reader, the port of the array that it comes from; only the bytes by which it is
        larger than that array count.
      others: for such a value, the ports of other readers at the time; the largest of all arrays counts.
    """

    port: Port
    num_bytes: int
    start: int
    end: int
    copy_source: CopySource | None
    resident: Resident
    position: int
    source: Port | None = None
    others: tuple[Port, ...] = ()


class LiveRanges:
    """The arrays that are in memory, and their live ranges."""

    def __init__(self, graph: StrategyGraph, fusion: Fusion) -> None:
        self.graph, self.fusion = graph, fusion
        self.folded: FoldedProgram = graph.folded
        self.program: FlatProgram = graph.folded.program
        self.maker, self.uses = self.program.maker, self.program.uses
        self.loops_at = self._loops_at()
        self.held_until: dict[int, int] = {}

    @memo
    def with_copies(self, copied: frozenset[tuple[int, int]]) -> "LiveRanges":
        """The live ranges if these operands, each an op's position and a number, are written out for their readers."""
        if not copied:
            return self
        return LiveRanges(self.graph, Fusion(self.folded, self.fusion.expensive_itemsize, copied))

    @cached_property
    def places(self) -> tuple[Hashable, ...]:
        """By position, the key that an op shares with its equivalents in other blocks; none if no op stands for others."""
        return equivalence.places(self.program) if self.program.is_shortened else ()

    def _loops_at(self) -> list[tuple[tuple[int, int], ...]]:
        at: list[tuple[tuple[int, int], ...]] = [()] * len(self.program.ops)
        for loop in self.program.loops:
            for i in range(*loop):
                at[i] = (*at[i], loop)
        return at

    def resident(self, v: int) -> Resident:
        """The kind of a value that is made inside the step."""
        born = read_phase(self.program.ops[self.maker[v][0]])
        read = self.fusion.computed_in[v]
        if born is ReadPhase.BACKWARD and ReadPhase.UPDATE in read:
            return Resident.GRADIENTS
        if born is ReadPhase.FORWARD and read - {ReadPhase.FORWARD}:
            return Resident.RESIDUALS
        return Resident.TEMPORARIES

    def resident_of_argument(self, op) -> Resident:
        """The kind of an argument of the step."""
        return _RESIDENT_OF[self.program.step.arguments[op.number].role]

    def items(self) -> tuple[LiveRange, ...]:
        """The live ranges in a device's memory."""
        made = self._made(on_host=False)
        for v in made:
            self._hold(v)
        found: list[LiveRange] = []
        for v in made:
            found += self._of_value(v) if self.fusion.is_stored(v) else self._copies_of_light(v)
            found += self._arriving(v)
        return tuple(self._with_equivalents([*found, *self._kernel_copies()]))

    def host_items(self) -> tuple[LiveRange, ...]:
        """The live ranges in the host's memory."""
        made = self._made(on_host=True)
        for v in made:
            self._hold(v)
        stored = (
            v
            for v in made
            if self.fusion.is_stored(v)
            and not (self._is_new_state(v) or self._is_slice_of_stack(v) or self._is_in_host_update(v))
        )
        found = [item for v in stored for item in self._of_value(v)]
        return tuple(self._with_equivalents([*found, *self._of_host_updates()]))

    def _of_host_updates(self) -> Iterator[LiveRange]:
        """All that one call to the host reads and makes, besides its arguments, until the last update is over. New state
        stays; it is not written over the old."""
        updates = [i for i, op in enumerate(self.program.ops) if op.is_host_update]
        touched = (v for i in updates for v in (*self.program.ops[i].operands, *self.program.ops[i].results))
        for v in dict.fromkeys(touched):
            i, r = self.maker[v]
            op, op_class = self.program.ops[i], self.folded.class_of[i]
            if op.name != "input":
                end = len(self.program.ops) - 1 if self._is_new_state(v) else updates[-1]
                port, num_bytes = self.graph.ports[op_class, r, True], self.program.values[v].num_bytes
                yield LiveRange(port, num_bytes, i, end, None, Resident.TEMPORARIES, i)

    def _with_equivalents(self, items: Sequence[LiveRange]) -> Iterator[LiveRange]:
        """Live ranges, with those of the arrays for which one stands (`search.problem.repeats`)."""
        yield from items
        if not self.program.is_shortened:
            return
        seen = Counter[Hashable]()
        alike: dict[Hashable, list[LiveRange]] = {}
        for item in items:
            copy = self.graph.copy_at(item.port.node)
            what = item.position, copy and copy.phase, item.copy_source, item.num_bytes
            seen[what] += 1
            alike.setdefault((self.places[item.position], *what[1:], seen[what]), []).append(item)
        for members in alike.values():
            members.sort(key=lambda item: item.start)
            starts = piled_up_from([item.start for item in members], [item.end for item in members])
            for item, start in zip(members, starts, strict=True):
                others = self.program.ops[item.position].repeats - 1
                if others and start is not None:
                    yield replace(item, num_bytes=others * item.num_bytes, start=start)

    def _is_in_host_update(self, v: int) -> bool:
        """Whether an update by the host reads or makes a value; arguments count by themselves."""
        maker, readers = self.program.ops[self.maker[v][0]], self.uses.get(v, ())
        return maker.name != "input" and any(
            op.is_host_update for op in (maker, *(self.program.ops[u] for u in readers))
        )

    def _is_slice_of_stack(self, v: int) -> bool:
        """Whether a value is only a loop's part of a stack, read or written in its place."""
        readers = {self.program.ops[u].name for u in self.uses.get(v, ())}
        return self.program.ops[self.maker[v][0]].name == "slice" or readers == {"stack"}

    def _is_new_state(self, v: int) -> bool:
        """Whether a value, or a view of it, is written over an argument."""
        readers = [self.program.ops[u] for u in self.uses.get(v, ())]
        views = [r for op in readers if is_view(op) for r in op.results]
        return v in self.program.in_place or any(map(self._is_new_state, views))

    def _made(self, on_host: bool) -> list[int]:
        values = self.program.values
        return [v for op in self.program.ops for v in op.results if values[v].is_on_host is on_host]

    def _use(self, v: int, u: int) -> int:
        """The end of a use at op `u`: `u` itself, or the end of the innermost loop around `u` that the value enters
        from outside."""
        born = self.maker[v][0]
        for start, end in self.loops_at[u]:
            if not start <= born < end:
                return end - 1
        return u

    @cached_property
    def _needed_until(self) -> list[int]:
        """Per op, the position until which its operands are needed; its light results may be computed on the fly where
        they are read."""
        until = [*range(len(self.program.ops))]
        for i in reversed(until):
            light = (v for v in self.program.ops[i].results if not self.fusion.is_stored(v))
            reads = [(v, u) for v in light for u in self.uses.get(v, ()) if u > i]
            until[i] = max((max(self._use(v, u), until[u]) for v, u in reads), default=i)
        return until

    def _until(self, v: int, uses: Sequence[int], others: Sequence[int] = ()) -> int:
        """The position until which readers need a copy. Where these and the others are all in one loop, the copy is
        made inside it."""
        together = [*uses, *others]
        if len({self.loops_at[u] for u in together}) == 1 and not any(
            is_part(self.program.ops[u]) for u in together
        ):
            return max(self._needed_until[u] for u in uses)
        return max(self._use(v, u) for u in uses)

    def _hold(self, v: int) -> None:
        """A value that is not stored keeps its fusion sources until its own last use."""
        if self.fusion.is_stored(v):
            return
        end = max((self._use(v, u) for u in self.uses.get(v, ())), default=-1)
        for a in self.fusion.sources[v]:
            self.held_until[a] = max(self.held_until.get(a, -1), end)

    def _of_value(self, v: int) -> list[LiveRange]:
        i, r = self.maker[v]
        op, op_class, value = self.program.ops[i], self.folded.class_of[i], self.program.values[v]
        port = self.graph.ports[op_class, r, True]
        if op.name == "input":
            role = self.program.step.arguments[op.number].role
            stays = [
                LiveRange(port, value.num_bytes, 0, len(self.program.ops) - 1, None, _RESIDENT_OF[role], i)
            ]
            return stays + self._copies(v, op_class, r, len(self.program.ops) - 1)
        if v in self.program.in_place:
            return []
        by_phase: dict[ReadPhase, list[int]] = {}
        for u in self.uses.get(v, ()):
            reader = self.program.ops[u]
            if reader.name != "input":
                by_phase.setdefault(read_phase(reader), []).append(u)
        if not by_phase and v not in self.held_until:
            return []
        start = self._born(i)
        copied = {g for g in by_phase if (op_class, r, g) in self.graph.copy_of}
        ends = [min(us) if g in copied else max(self._use(v, u) for u in us) for g, us in by_phase.items()]
        end = max([start, *ends, self.held_until.get(v, -1)])
        resident = self._resident(op, end)
        rest = self.graph.copy_of.get((op_class, r, ReadPhase.REST))
        found = [LiveRange(port, value.num_bytes, start, start if rest else end, None, resident, i)]
        if rest:
            resting = Port(rest.node, ())
            found += [
                LiveRange(resting, value.num_bytes, start, end, copy_source, resident, i)
                for copy_source in (CopySource.SAME, CopySource.FRESH)
            ]
        return found + self._copies(v, op_class, r, end)

    def _born(self, i: int) -> int:
        op = self.program.ops[i]
        if op.name != "stack":
            return i
        return max((start for start, end in self.program.loops if start <= i < end), default=i)

    def _resident(self, op, end: int) -> Resident:
        last = read_phase(self.program.ops[end])
        born = read_phase(op)
        if born is ReadPhase.BACKWARD and last is ReadPhase.UPDATE:
            return Resident.GRADIENTS
        if born is ReadPhase.FORWARD and last is not ReadPhase.FORWARD:
            return Resident.RESIDUALS
        return Resident.TEMPORARIES

    def _kernel_copies(self) -> Iterator[LiveRange]:
        """The transposed copies of arguments that convolutions read as their kernels. A copy lives until the argument's last
        use. A kernel that is gathered first has none."""
        reads: dict[int, dict[ReadPhase, int]] = {}
        for u, op in enumerate(self.program.ops):
            if op.name == CONVOLUTION:
                argument = self.fusion.seen_through(op.operands[1])
                if self.program.ops[self.maker[argument][0]].name == "input":
                    reads.setdefault(argument, {}).setdefault(read_phase(op), u)
        for argument, of_phase in reads.items():
            starts = sorted((u, phase) for phase, u in of_phase.items())
            ends = [start - 1 for start, _ in starts[1:]]
            ends.append(max(self._use(argument, u) for u in self.uses[argument]))
            for (start, phase), end in zip(starts, ends, strict=True):
                v = self.program.ops[start].operands[1]
                (i, r), num_bytes = self.maker[v], self.program.values[v].num_bytes
                copy = self.graph.copy_of.get((self.folded.class_of[i], r, phase))
                port, same = (
                    (Port(copy.node, ()), CopySource.SAME) if copy else (self._read_from(v, phase), None)
                )
                yield LiveRange(port, num_bytes, start, end, same, Resident.TEMPORARIES, start)

    def _copies_of_light(self, v: int) -> list[LiveRange]:
        """The copies of a light value: it has no array of its own, but each reshard of it is one."""
        i, r = self.maker[v]
        copies = self._copies(v, self.folded.class_of[i], r, len(self.program.ops))
        return [item for item in copies if item.copy_source is not CopySource.SAME]

    def _arriving(self, v: int) -> Iterator[LiveRange]:
        """The arrays of operands that are read in another spec than the value has. Readers may share one: of those that
        have theirs at a time, the largest counts."""
        num_bytes, reads = self.program.values[v].num_bytes, dict[Port, list[tuple[int, int, Port]]]()
        for u in self.uses.get(v, ()) if self.program.values[v].shape else ():
            op, op_class = self.program.ops[u], self.folded.class_of[u]
            port = self.graph.ports[op_class, op.operands.index(v), False]
            source = self._read_from(v, read_phase(op))
            if self.maker[v][0] < u and port.node != source.node:
                reads.setdefault(source, []).append((u, self._needed_until[u], port))
        for source, readers in reads.items():
            for start, end, u, (port, *others) in _with_equal_readers(readers):
                ports = tuple(others)
                yield LiveRange(port, num_bytes, start, end, None, Resident.TEMPORARIES, u, source, ports)

    def _copies(self, v: int, op_class: int, r: int, source_end: int) -> list[LiveRange]:
        value, i, readers = self.program.values[v], self.maker[v][0], self._readers(v)
        found, forward = list[LiveRange](), list[int]()
        for phase in (ReadPhase.FORWARD, ReadPhase.BACKWARD, ReadPhase.UPDATE):
            uses = readers.get(phase)
            if not uses:
                continue
            copy = self.graph.copy_of.get((op_class, r, phase))
            if copy is not None:
                last, last_forward = self._until(v, uses), self._until(v, forward, uses) if forward else i
                stretches = [
                    (CopySource.FRESH, max(i, min(uses))),
                    (CopySource.SAME, source_end + 1),
                    (CopySource.KEPT, last_forward + 1),
                ]
                for copy_source, start in stretches:
                    resident = Resident.RESIDUALS if copy_source is CopySource.KEPT else Resident.TEMPORARIES
                    if start <= last:
                        found.append(
                            LiveRange(
                                Port(copy.node, ()), value.num_bytes, start, last, copy_source, resident, i
                            )
                        )
            forward = uses if phase is ReadPhase.FORWARD else forward
        return found

    def _read_from(self, v: int, phase: ReadPhase) -> Port:
        """The port at which a phase's readers get a value: their own copy's, if there is one."""
        i, r = self.maker[v]
        op_class, copy_of = self.folded.class_of[i], self.graph.copy_of
        copy = copy_of.get((op_class, r, phase)) or copy_of.get((op_class, r, ReadPhase.REST))
        return Port(copy.node, ()) if copy else self.graph.ports[op_class, r, True]

    def _readers(self, v: int) -> dict[ReadPhase, list[int]]:
        """By phase, the ops that read a value at a port other than its maker's."""
        (i, r), ports, class_of = self.maker[v], self.graph.ports, self.folded.class_of
        made, found = ports[class_of[i], r, True], dict[ReadPhase, list[int]]()
        for u in self.uses.get(v, ()):
            op = self.program.ops[u]
            read = (ports[class_of[u], n, False] for n, w in enumerate(op.operands) if w == v)
            if op.name != "input" and any(port != made for port in read):
                found.setdefault(read_phase(op), []).append(u)
        return found


def _with_equal_readers(
    readers: Sequence[tuple[int, int, Port]],
) -> Iterator[tuple[int, int, int, tuple[Port, ...]]]:
    """The stretches in which the same ports of a value's readers have it: start, end, the first reader's position, ports.

    Args:
      readers: of each, the position, the position until which it has the value, and its port.
    """
    bounds = sorted({at for first, last, _ in readers for at in (first, last + 1)})
    there = [[(u, port) for u, last, port in readers if u <= at <= last] for at in bounds[:-1]]
    ports = [tuple(dict.fromkeys(port for _, port in one)) for one in there]
    for ports_there, found in groupby(range(len(there)), key=ports.__getitem__):
        first, *more = found
        last = more[-1] if more else first
        if ports_there:
            yield bounds[first], bounds[last + 1] - 1, there[first][0][0], ports_there
