"""A step rewritten so that some of its state rests in the host's memory, and is on the device while it is read.

The rewritten step is a step like any other: its copies are ops (`device_put`), so that strategies, costs, live ranges, the
executor and the compiler need know little of it. What comes from the host comes once for each phase that reads it, and new
state goes back as soon as it is made. (ZeRO-Offload, Ren et al. 2021, and ZeRO-Infinity, Rajbhandari et al. 2021, do so for
whole optimizers and layers.)

Left alone, XLA may fetch everything as soon as the step begins, or all at once. So a fetch waits (`optimization_barrier`,
XLA:GPU, measured) for what it must not come before:

* in the update, for the gradient. What is updated together is fetched together, a *parcel*; parcels are in the order in
  which their gradients arrive, and each waits until one some way before it is done;
* in the other phases, for the last reader of a fetch some way before it, in the backward phase at least for its beginning.

How much may be on its way or in use at a time is the *window*. A wide one hides more, and takes more memory.
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from search.ir.graph import Atom, Graph, Op, Phase, Role, Site, Step, verify
from search.memory.written import Written

SCOPE = "offload"
"""The name scope of copies."""

MIN_BYTES = 1 << 16
"""Smaller arrays stay on the device. Source: a choice of ours; to copy them is all latency."""

WINDOW = 2
"""How many of the largest parcels may be there at a time. Source: a choice of ours: one is in use while the next arrives."""


def may_rest_on_host(step: Step) -> dict[int, Role]:
    """The arguments that can: large state, handed on by nothing but their own new values; with their roles."""
    graph = step.graph
    handed_on = {
        a for a, r in zip(graph.outputs, step.replaces, strict=True) if isinstance(a, int) and r is None
    }
    state = {r for r in step.replaces if r is not None}
    return {
        i: step.arguments[i].role
        for i, v in enumerate(graph.inputs)
        if i in state and v not in handed_on and graph.values[v].num_bytes >= MIN_BYTES
    }


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """A step with some arguments in the host's memory.

    Attributes:
      step: with the same arguments and results.
      origin: for each op of its outermost graph, which it was before; negative for copies and their barriers.
    """

    step: Step
    origin: tuple[int, ...]

    def before(self, sites: Iterable[Site]) -> frozenset[Site]:
        """Where ops stood before, those that did."""
        return frozenset((self.origin[s[0]], *s[1:]) for s in sites if self.origin[s[0]] >= 0)


def offloaded(step: Step, hosted: frozenset[int]) -> Offloaded:
    """The step with some arguments in the host's memory.

    Args:
      step: a step.
      hosted: numbers of arguments, of those that `may_rest_on_host`.

    Returns:
      The same step where none is named.
    """
    if not hosted:
        return Offloaded(step, tuple(range(len(step.graph.ops))))
    rewriting = _Offloading(step, hosted)
    graph = rewriting.run()
    verify(graph)
    origin = (rewriting.origin.get(i, -1) for i in range(len(graph.ops)))
    return Offloaded(replace(step, graph=graph), tuple(origin))


@dataclass(frozen=True, slots=True)
class _Fetch:
    """What comes from the host at one time.

    Attributes:
      arguments: the values that come.
      phase: whose readers have them.
      first: the first op that reads one.
      done: values that are there when it is no longer needed.
      num_bytes: of all that comes, unsharded.
      ties: values that it waits for, besides those of the window.
    """

    arguments: tuple[int, ...]
    phase: Phase
    first: int
    done: tuple[int, ...]
    num_bytes: int
    ties: tuple[int, ...]


class _Offloading:
    """One rewriting."""

    def __init__(self, step: Step, hosted: frozenset[int]) -> None:
        self.step, self.graph, self.hosted = step, step.graph, hosted
        self.on_host = {self.graph.inputs[i] for i in sorted(hosted)}
        values = [
            replace(value, is_on_host=True) if v in self.on_host else value
            for v, value in enumerate(self.graph.values)
        ]
        self.written = Written(values, SCOPE)
        self.origin: dict[int, int] = {}
        self.maker = {v: i for i, op in enumerate(self.graph.ops) for v in op.outputs}
        self.new_state = {
            self.graph.inputs[r]: a
            for a, r in zip(self.graph.outputs, step.replaces, strict=True)
            if r in hosted and isinstance(a, int) and a in self.maker
        }

    @cached_property
    def readers(self) -> dict[tuple[int, Phase], list[int]]:
        """By argument on the host and phase: the ops that read it."""
        found: dict[tuple[int, Phase], list[int]] = {}
        for i, op in enumerate(self.graph.ops):
            for v in dict.fromkeys(op.operands):
                if v in self.on_host:
                    found.setdefault((v, op.phase), []).append(i)
        return found

    def run(self) -> Graph:
        """The graph with its copies, in an order in which all is made before it is read."""
        fetches = [*self._in_phase(Phase.FORWARD), *self._in_phase(Phase.BACKWARD), *self._in_update()]
        waits = {
            f: w for phase in Phase for f, w in _waits([f for f in fetches if f.phase is phase], self.maker)
        }
        fetched: dict[tuple[int, Phase], int] = {}
        stored: dict[int, int] = {}
        new = frozenset(self.new_state.values())
        for is_fetch, n in _order(self.graph, fetches, waits, self.maker):
            if is_fetch:
                fetch = fetches[n]
                fetched |= {(v, fetch.phase): new for v, new in self._fetched(fetch, waits[fetch])}
                continue
            op = self.graph.ops[n]
            inputs = tuple(fetched.get((a, op.phase), a) if isinstance(a, int) else a for a in op.inputs)
            self.origin[len(self.written.ops)] = n
            self.written.ops.append(replace(op, inputs=inputs))
            for v in op.outputs:
                if v in new:
                    stored[v] = self._copied(v, jax.memory.Space.Host, op)
        outputs = tuple(
            stored[a] if isinstance(a, int) and r in self.hosted and a in stored else a
            for a, r in zip(self.graph.outputs, self.step.replaces, strict=True)
        )
        return replace(
            self.graph, values=tuple(self.written.values), ops=tuple(self.written.ops), outputs=outputs
        )

    def _in_phase(self, phase: Phase) -> Iterator[_Fetch]:
        """What the forward or the backward phase reads, argument by argument."""
        start = self._start(phase)
        for (v, read_in), readers in sorted(self.readers.items(), key=lambda one: one[1]):
            if read_in is phase:
                last = self.graph.ops[readers[-1]]
                ties = tuple(t for t in start if self.maker[t] < readers[0])
                yield _Fetch((v,), phase, readers[0], last.outputs[:1], self.graph.values[v].num_bytes, ties)

    def _start(self, phase: Phase) -> tuple[int, ...]:
        """What is there when a phase begins."""
        made = (
            v for op in self.graph.ops if op.phase is phase for v in op.outputs if self.graph.values[v].shape
        )
        return () if phase is Phase.FORWARD else tuple(v for v in [next(made, None)] if v is not None)

    def _in_update(self) -> Iterator[_Fetch]:
        """What the update reads, parcel by parcel, in the order in which their gradients arrive."""
        update = _Update(self.graph, [v for v in self.on_host if (v, Phase.UPDATE) in self.readers])
        parcels = sorted(
            (update.arrival(parcel), min(self.readers[v, Phase.UPDATE][0] for v in parcel), parcel)
            for parcel in update.parcels(
                a for a, r in zip(self.graph.outputs, self.step.replaces, strict=True) if r is not None
            )
        )
        for arrival, first, parcel in parcels:
            done = tuple(self.new_state[v] for v in parcel if v in self.new_state)
            num_bytes = sum(self.graph.values[v].num_bytes for v in parcel)
            ties = () if arrival < 0 else (self._gradient(arrival),)
            yield _Fetch(parcel, Phase.UPDATE, first, done, num_bytes, ties)

    def _gradient(self, i: int) -> int:
        """What an op of the backward phase makes, or what that is a view or another type of."""
        op = self.graph.ops[i]
        if len(op.inputs) == 1 and op.operands and op.name in _SEEN_THROUGH and op.operands[0] in self.maker:
            return self._gradient(self.maker[op.operands[0]])
        return op.outputs[0]

    def _fetched(self, fetch: _Fetch, waits: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """The arguments of a fetch, each with what stands for it on the device."""
        like = self.graph.ops[fetch.first]
        ties = tuple(dict.fromkeys((*fetch.ties, *waits)))
        behind = self.written.behind(fetch.arguments, ties, like) if ties else fetch.arguments
        for v, tied in zip(fetch.arguments, behind, strict=True):
            yield v, self._copied(tied, jax.memory.Space.Device, like)

    def _copied(self, v: int, target: Any, like: Op) -> int:
        made = self.written.write(lambda x: jax.device_put(x, target), [v], like)
        assert isinstance(made, int)
        return made


_SEEN_THROUGH = frozenset({"convert_element_type", "reshape", "transpose", "squeeze", "expand_dims"})
"""Ops of which a fetch waits for the operand: what is fused with the update need not be written out for it."""


class _Update:
    """What of the update phase depends on which arguments, and on which gradients."""

    def __init__(self, graph: Graph, arguments: Sequence[int]) -> None:
        self.arguments = arguments
        self._reads = {v: 1 << n for n, v in enumerate(arguments)}
        self._newest: dict[int, int] = {}
        self._arrival = dict.fromkeys(arguments, -1)
        for i, op in enumerate(graph.ops):
            if op.phase is Phase.UPDATE:
                self._read(op)
            elif op.phase is Phase.BACKWARD:
                self._newest |= dict.fromkeys(op.outputs, i)

    def _read(self, op: Op) -> None:
        reads = 0
        for v in op.operands:
            reads |= self._reads.get(v, 0)
        newest = max((self._newest.get(v, -1) for v in op.operands), default=-1)
        for v in op.outputs:
            self._reads[v], self._newest[v] = reads, newest
        for n in _bits(reads):
            self._arrival[self.arguments[n]] = max(self._arrival[self.arguments[n]], newest)

    def arrival(self, parcel: Iterable[int]) -> int:
        """The newest op of the backward phase that a parcel meets; negative where there is none."""
        return max(self._arrival[v] for v in parcel)

    def parcels(self, new_state: Iterable[Atom]) -> list[tuple[int, ...]]:
        """The arguments, parted into those that new state is made of together."""
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


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _waits(fetches: Sequence[_Fetch], maker: dict[int, int]) -> Iterator[tuple[_Fetch, tuple[int, ...]]]:
    """Per fetch of a phase: what is there when the newest one is done that must be, for all since then to fit the window.

    Outside of the update, one that is needed for longer does not count.
    """
    window_bytes = WINDOW * max((f.num_bytes for f in fetches), default=0)
    oldest, held_bytes = 0, 0
    for k, fetch in enumerate(fetches):
        held_bytes += fetch.num_bytes
        while held_bytes > window_bytes:
            held_bytes -= fetches[oldest].num_bytes
            oldest += 1
        is_over = (
            f
            for f in reversed(fetches[:oldest])
            if f.done and (f.phase is Phase.UPDATE or max(maker[v] for v in f.done) < fetch.first)
        )
        before = next(is_over, None)
        yield fetch, before.done if before is not None and k else ()


def _order(
    graph: Graph, fetches: Sequence[_Fetch], waits: dict[_Fetch, tuple[int, ...]], maker: dict[int, int]
) -> Iterator[tuple[bool, int]]:
    """Ops and fetches, (whether a fetch, number): as written, but for what waits for a fetch that waits, and for updates,
    which stand where their gradients are made."""
    num_ops = len(graph.ops)
    fetch_of = {(v, f.phase): num_ops + n for n, f in enumerate(fetches) for v in f.arguments}
    needs = [{fetch_of.get((v, op.phase), maker.get(v, -1)) for v in op.operands} - {-1} for op in graph.ops]
    needs += [{maker[v] for v in (*f.ties, *waits[f])} for f in fetches]
    after: list[list[int]] = [[] for _ in needs]
    for node, needed in enumerate(needs):
        for n in needed:
            after[n].append(node)
    rank = [*_ranks(graph, maker), *((f.first, 0) for f in fetches)]
    for node in reversed(range(len(needs))):  # fetches first
        is_free = node >= num_ops or graph.ops[node].phase is Phase.UPDATE
        rank[node] = min([rank[node], *(rank[n] for n in after[node])]) if is_free else rank[node]
    missing = [len(n) for n in needs]
    ready = [(rank[node], node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        yield node >= num_ops, node - num_ops if node >= num_ops else node
        for follower in after[node]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (rank[follower], follower))


def _ranks(graph: Graph, maker: dict[int, int]) -> list[tuple[int, int]]:
    """Where each op would stand: an update right behind the newest of its gradients."""
    newest: list[int] = []
    for i, op in enumerate(graph.ops):
        is_update = op.phase is Phase.UPDATE
        made = [newest[maker[v]] for v in op.operands if v in maker] if is_update else [i]
        newest.append(max(made, default=-1))
    return [(a, 1) if a == i else (a, 2) if a >= 0 else (i, 1) for i, a in enumerate(newest)]
