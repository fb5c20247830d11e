"""When offloaded values are fetched, and which ops are delayed for that.

State is fetched once for each phase that reads it. Left alone, XLA may fetch all state as the step begins. Or it may delay
all updates to the end of the backward phase, with all gradients and all state on the device at once (XLA:GPU, measured). So:

* In the update, a fetch depends on its gradient. Arguments that are updated together are fetched together, as a *parcel*.
  Parcels are ordered by the arrival of their gradients, and each depends on the completion of an earlier one.
* The backward phase does not run ahead of the updates: the op that makes a parcel's gradient depends on the completion of an
  earlier parcel too. (If all gradients must be complete first, as for a clipping by their global norm, it cannot.)
* Residuals are copied to the host in the order in which they are made. A forward reader of a residual depends on the copy of
  an earlier one; otherwise the compiler may hold all residuals to the end of that phase.
* In the other phases, a fetch depends on the last reader of an earlier fetch. The first fetches depend on the beginning of
  their phase. If the reader's result is a term of a sum, the fetch depends on the sum, if that exists in time: before a
  barrier the compiler would sum up the devices' terms of each product by themselves.

Here, the earlier one is the last before the *window*, which limits the bytes in transfer or in use at a time. A wide window
hides more transfers, and takes more memory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.graph import Atom, Graph, Op, Phase
from autoshard.search.memory.retyped import RETYPES, is_retyped
from autoshard.search.problem.flat_program import ADDITIONS

WINDOW = 2
"""Size of the window, in multiples of the largest parcel. Source: a choice of ours: one is in use while the next arrives."""
SUMS = ADDITIONS | RETYPES
"""Ops over which the compiler moves the sum of devices' terms."""


type Arrival = tuple[int, int | None]
"""The newest result from before the update on which a value depends, behind the number of its op."""

NEVER: Arrival = (-1, None)
"""No such result."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Values that are fetched from the host together.

    Attributes:
      arguments: the fetched values.
      phase: the phase whose ops read them.
      first: the first op that reads one.
      ties: values that must exist before the fetch.
    """

    arguments: tuple[int, ...]
    phase: Phase
    first: int
    ties: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fetches:
    """All fetches from the host, and the ops that are delayed for them.

    Attributes:
      fetches: phase by phase.
      departures: by value of the forward phase, the values that must be on the host before that phase reads it.
      pauses: by value of the backward phase, the values that must exist before that phase reads it.
    """

    fetches: tuple[Fetch, ...]
    departures: Mapping[int, tuple[int, ...]]
    pauses: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Use:
    """A use of arguments in a phase, before its predecessors are known.

    Attributes:
      arguments: the values that are read.
      first: the first op that reads one.
      done: values that exist when the use is over.
      summed: the sums of which these values are terms; the values themselves if they are no terms.
      num_bytes: of the arguments, unsharded.
      ties: the ties of a use without predecessors.
    """

    arguments: tuple[int, ...]
    first: int
    done: tuple[int, ...]
    summed: tuple[int, ...]
    num_bytes: int
    ties: tuple[int, ...]


def fetches(
    graph: Graph,
    on_host: Sequence[int],
    residuals: Sequence[int],
    new_state: Mapping[int, Atom],
    sliced: Set[tuple[int, int]] = frozenset(),
    by_rows: Set[tuple[int, Phase]] = frozenset(),
) -> Fetches:
    """Plans the fetches.

    Args:
      graph: a step's.
      on_host: the inputs that rest in the host's memory.
      residuals: values of the forward phase that are offloaded until the backward phase.
      new_state: by input, the output that replaces it in the next step.
      sliced: loops, by number, that fetch slices of an input by themselves, each with this input.
      by_rows: inputs that a phase does not fetch (`search.memory.host_rows`).
    """
    fetched = {phase: [v for v in on_host if (v, phase) not in by_rows] for phase in Phase}
    planning = _Planning(graph, fetched[Phase.UPDATE], new_state, sliced)
    forward = planning.of_phase(Phase.FORWARD, fetched[Phase.FORWARD])
    backward = planning.of_phase(Phase.BACKWARD, [*fetched[Phase.BACKWARD], *residuals])
    updates = list(planning.updates())
    departures, pauses = dict(planning.departures(residuals)), dict(p for _, p in updates if p is not None)
    return Fetches((*forward, *backward, *(f for f, _ in updates)), departures, pauses)


class _Planning:
    """The fetches of one graph."""

    def __init__(
        self,
        graph: Graph,
        on_host: Sequence[int],
        new_state: Mapping[int, Atom],
        sliced: Set[tuple[int, int]],
    ) -> None:
        self.graph, self.on_host, self.new_state, self.sliced = graph, on_host, new_state, sliced
        self.maker = graph.made_at

    @cached_property
    def uses(self) -> dict[int, list[int]]:
        """By value: the ops that read it whole."""
        found: dict[int, list[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for v in (v for v in dict.fromkeys(op.operands) if (i, v) not in self.sliced):
                found.setdefault(v, []).append(i)
        return found

    def _readers(self, v: int, phase: Phase) -> list[int]:
        return [i for i in self.uses.get(v, ()) if self.graph.ops[i].phase is phase]

    # --- forward and backward

    def of_phase(self, phase: Phase, values: Sequence[int]) -> Iterator[Fetch]:
        """The fetches of the forward or the backward phase, value by value."""
        uses = sorted(self._uses_in(phase, values), key=lambda use: use.first)
        for use, before in zip(uses, _out_of_window(uses), strict=True):
            ways = (way for u in reversed(before) for way in (u.summed, u.done))
            over = (way for way in ways if self._newest(way) < use.first)
            yield Fetch(use.arguments, phase, use.first, next(over, use.ties))

    def _uses_in(self, phase: Phase, values: Sequence[int]) -> Iterator[_Use]:
        start = self._start(phase)
        for v in values:
            if readers := self._readers(v, phase):
                done = self.graph.ops[self._last_reader(v, phase)].outputs[:1]
                ties = tuple(t for t in start if self.maker[t] < readers[0])
                summed = tuple(map(self._sum, done))
                yield _Use((v,), readers[0], done, summed, self.graph.values[v].num_bytes, ties)

    def _start(self, phase: Phase) -> tuple[int, ...]:
        """The first array that a phase makes; none for the forward phase."""
        made = (
            v for op in self.graph.ops if op.phase is phase for v in op.outputs if self.graph.values[v].shape
        )
        first = None if phase is Phase.FORWARD else next(made, None)
        return () if first is None else (first,)

    def _last_reader(self, v: int, phase: Phase) -> int:
        """The last op of a phase that reads a value, or a converted form of it."""
        found = -1
        for i in self._readers(v, phase):
            op = self.graph.ops[i]
            found = max(found, i, self._last_reader(op.outputs[0], phase) if is_retyped(op, v) else i)
        return found

    def _sum(self, v: int) -> int:
        """The sum of which a value is a term, and nothing else reads the value; the value itself if there is none."""
        readers = self.uses.get(v, ())
        op = self.graph.ops[readers[0]] if len(readers) == 1 else None
        is_term = op is not None and op.name in SUMS and op.phase is self.graph.ops[self.maker[v]].phase
        return self._sum(op.outputs[0]) if op is not None and is_term else v

    def _newest(self, values: Iterable[int]) -> int:
        return max((self.maker[v] for v in values), default=-1)

    def departures(self, residuals: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Residuals that are read in the forward phase, each with an earlier one that must be on the host by then."""
        made = [(v, self.maker[v], self.graph.values[v].num_bytes) for v in residuals]
        made.sort(key=lambda m: m[1])
        uses = [_Use((v,), i, (v,), (v,), num_bytes, ()) for v, i, num_bytes in made]
        for use, before in zip(uses, _out_of_window(uses), strict=True):
            if before and self._readers(use.arguments[0], Phase.FORWARD):
                yield use.arguments[0], before[-1].done

    # --- update

    def updates(self) -> Iterator[tuple[Fetch, tuple[int, tuple[int, ...]] | None]]:
        """The fetches of the update phase, parcel by parcel, each with its pause: a value of the backward phase and the
        results of an earlier parcel that must precede its readers."""
        read = [v for v in self.on_host if self._readers(v, Phase.UPDATE)]
        update = _Update(self.graph, read)
        parcels = [(update.arrival(p), self._parcel(p)) for p in update.parcels(self.new_state.values())]
        parcels.sort(key=lambda one: (_moment(one[0]), one[1].first))
        arrivals, uses = [a for a, _ in parcels], [u for _, u in parcels]
        for (_, gradient), use, before in zip(arrivals, uses, _out_of_window(uses), strict=True):
            ties = before[-1].done if before else ()
            source = None if gradient is None else self._source(gradient)
            own = () if source is None else (source,)
            fetch = Fetch(use.arguments, Phase.UPDATE, use.first, (*own, *ties))
            yield fetch, None if source is None else self._pause(source, arrivals, uses[: len(before)])

    def _parcel(self, arguments: tuple[int, ...]) -> _Use:
        first = min(self._readers(v, Phase.UPDATE)[0] for v in arguments)
        new = (self.new_state.get(v) for v in arguments)
        done = tuple(a for a in new if isinstance(a, int) and a in self.maker)
        return _Use(arguments, first, done, done, sum(self.graph.values[v].num_bytes for v in arguments), ())

    def _source(self, v: int) -> int:
        """The array that was converted to this value, or the value itself."""
        op = self.graph.ops[self.maker[v]]
        is_made_of_one = op.name in RETYPES and len(op.operands) == 1 and op.operands[0] in self.maker
        return self._source(op.operands[0]) if is_made_of_one else v

    def _pause(
        self, gradient: int, arrivals: Sequence[Arrival], before: Sequence[_Use]
    ) -> tuple[int, tuple[int, ...]] | None:
        """The newest backward operand of a gradient's op, and the results of the last parcel that can be complete before its
        readers."""
        made = [v for v in self.graph.ops[self.maker[gradient]].operands if self._is_backward(v)]
        if not made:
            return None
        newest = max(made, key=self.maker.__getitem__)
        over = [u for (a, _), u in zip(arrivals, before, strict=False) if a < self.maker[newest] and u.done]
        return (newest, over[-1].done) if over else None

    def _is_backward(self, v: int) -> bool:
        is_array = bool(self.graph.values[v].shape) and v in self.maker
        return is_array and self.graph.ops[self.maker[v]].phase is Phase.BACKWARD


class _Update:
    """The dependencies of the update phase on arguments and on gradients."""

    def __init__(self, graph: Graph, arguments: Sequence[int]) -> None:
        self.arguments = arguments
        self._reads = {v: 1 << n for n, v in enumerate(arguments)}
        self._newest: dict[int, Arrival] = {}
        self._arrival = dict.fromkeys(arguments, NEVER)
        for i, op in enumerate(graph.ops):
            if op.phase is Phase.UPDATE:
                self._read(op)
            else:
                self._newest |= {v: (i, v) for v in op.outputs}

    def _read(self, op: Op) -> None:
        reads = 0
        for v in op.operands:
            reads |= self._reads.get(v, 0)
        newest = max((self._newest.get(v, NEVER) for v in op.operands), default=NEVER, key=_moment)
        for v in op.outputs:
            self._reads[v], self._newest[v] = reads, newest
        for n in _bits(reads):
            self._arrival[self.arguments[n]] = max(self._arrival[self.arguments[n]], newest, key=_moment)

    def arrival(self, parcel: Iterable[int]) -> Arrival:
        """The newest result from before the update on which a parcel depends: its last gradient. (A loop over microbatches
        makes gradients in no single phase.)"""
        return max((self._arrival[v] for v in parcel), key=_moment)

    def parcels(self, new_state: Iterable[Atom]) -> list[tuple[int, ...]]:
        """The arguments, grouped by the new state that they make together."""
        masks = [1 << n for n in range(len(self.arguments))]
        masks += [self._reads.get(a, 0) for a in new_state if isinstance(a, int)]
        parts: list[int] = []
        for mask in masks:
            joined = [part for part in parts if part & mask]
            parts = [part for part in parts if not part & mask]
            for part in joined:
                mask |= part
            parts += [mask] if mask else []
        return [tuple(self.arguments[n] for n in _bits(part)) for part in parts]


def _moment(arrival: Arrival) -> int:
    return arrival[0]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _out_of_window(uses: Sequence[_Use]) -> Iterator[Sequence[_Use]]:
    """For each use: the earlier uses that must be over, so that it and the uses since then fit the window."""
    window_bytes = WINDOW * max((use.num_bytes for use in uses), default=0)
    oldest, held_bytes = 0, 0
    for use in uses:
        held_bytes += use.num_bytes
        while held_bytes > window_bytes:
            held_bytes -= uses[oldest].num_bytes
            oldest += 1
        yield uses[:oldest]
