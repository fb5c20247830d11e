"""A step rewritten so that some of its state rests in the host's memory, and is on the device only while it is read.

The rewritten step is a step like any other: its copies are ops (`device_put`), so that strategies, costs, live ranges, the
executor and the compiler need know little of it. An offloaded value is fetched once for each phase that reads it, and new
state is stored on the host as soon as it is made. Frozen weights are only fetched: the host's array stays as it is. A
loop that goes through a stack of arguments fetches a slice in each iteration.

`search.memory.fetches` plans the times, and a barrier (`optimization_barrier`) delays each fetch. Later readers of a
barrier's other operands read the barrier's results: the compiler removes results that no op reads (XLA:GPU, measured).
(ZeRO-Offload, Ren et al. 2021, and ZeRO-Infinity, Rajbhandari et al. 2021, offload whole optimizers and layers.)

A phase that reads nothing but rows of a table, or replaces them, does so in the host's memory (`search.memory.host_rows`).
State that the host's processors update does not come at all for the update (`search.memory.host_updates`).

Ops keep their order, except updates: each moves to its gradient, because late updates would hold all gradients.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Role, Site, Step, Value, verify
from autoshard.search.memory.fetches import Fetch, fetches
from autoshard.search.memory.host_rows import bounded, by_rows, filled, is_filled
from autoshard.search.memory.host_update_ops import with_host_updates
from autoshard.search.memory.host_updates import host_updates
from autoshard.search.memory.retyped import retyped_by_phase
from autoshard.search.memory.written import Written

SCOPE = "offload"
"""The name scope of copies."""

MIN_BYTES = 1 << 16
"""Smaller arrays stay on the device. Source: a choice of ours; their copies are all latency."""


def may_rest_on_host(step: Step) -> dict[int, Role]:
    """The arguments that can be offloaded and are not yet, with their roles: large frozen weights, and large state that
    comes back as nothing but its new values."""
    graph = step.graph
    replaced, elsewhere = {r for r in step.replaces if r is not None}, _results_elsewhere(step)
    return {
        i: argument.role
        for i, (v, argument) in enumerate(step.inputs)
        if (i in replaced or argument.role is Role.FROZEN)
        and v not in elsewhere
        and _is_large_on_device(graph.values[v])
    }


def _results_elsewhere(step: Step) -> set[Atom]:
    """The results, except for arguments that come back in their own places."""
    inputs = step.graph.inputs
    results = zip(step.graph.outputs, step.replaces, strict=True)
    return {a for a, r in results if isinstance(a, int) and (r is None or inputs[r] != a)}


@dataclass(frozen=True, slots=True, eq=False)
class Offloaded:
    """A step with some arguments in the host's memory.

    Attributes:
      step: with the same arguments and results.
      origin: by op of its outermost graph, the op's index before the rewrite; negative for copies and their barriers.
    """

    step: Step
    origin: tuple[int, ...]

    def before(self, sites: Iterable[Site]) -> frozenset[Site]:
        """The sites of ops before the rewrite; copies are left out."""
        found = (self._before(s) for s in sites if self.origin[s[0]] >= 0)
        return frozenset(site for site in found if site is not None)

    def _before(self, site: Site) -> Site | None:
        at, *inner = site
        is_inside = len(inner) > 2  # a cut of the loop into segments has two
        if is_inside and (num_copies := _num_copies(self.step.graph.ops[at])):
            param, body, place, *rest = inner
            return None if place < num_copies else (self.origin[at], param, body, place - num_copies, *rest)
        return (self.origin[at], *inner)


def _num_copies(loop: Op) -> int:
    """The number of ops at the beginning of a loop's body that fetch slices of stacks from the host."""
    ops = loop.bodies["jaxpr"][0].ops if loop.name == "scan" else ()
    return next((n for n, op in enumerate(ops) if not (op.is_transfer and op.scope == SCOPE)), len(ops))


def _is_large_on_device(value: Value) -> bool:
    return value.num_bytes >= MIN_BYTES and not value.is_on_host


def may_wait(graph: Graph, v: int) -> bool:
    """True if a value of the forward phase is worth a copy to the host."""
    return graph.values[v].num_bytes >= MIN_BYTES


def offloaded(
    step: Step,
    hosted: frozenset[int],
    residuals: frozenset[int] = frozenset(),
    updated: frozenset[int] = frozenset(),
) -> Offloaded:
    """The step with some arguments and some residuals in the host's memory.

    Args:
      step: a step.
      hosted: numbers of arguments, of those that `may_rest_on_host` lists.
      residuals: values of the forward phase to offload until the backward phase; small ones stay on the device.
      updated: the hosted arguments that the host updates (`search.memory.host_updates`).

    Returns:
      The given step if neither is named.
    """
    if not hosted and not residuals:
        return Offloaded(step, tuple(range(len(step.graph.ops))))
    named, updates = {step.graph.inputs[i] for i in updated}, host_updates(step, hosted) if updated else ()
    together, before = with_host_updates(step, [one for one in updates if not named.isdisjoint(one.state)])
    retyped = retyped_by_phase(together.graph, [step.graph.inputs[i] for i in sorted(hosted)])
    rewriting = _Rewriting(replace(together, graph=retyped.graph), hosted, residuals - retyped.made_again)
    graph = rewriting.run()
    verify(graph)
    origin = (rewriting.origin.get(i, -1) for i in range(len(graph.ops)))
    for earlier in (retyped.origin, before):
        origin = [-1 if n < 0 else earlier[n] for n in origin]
    return Offloaded(replace(step, graph=graph), tuple(origin))


class _Rewriting:
    """One walk over a step's outermost graph."""

    def __init__(self, step: Step, hosted: frozenset[int], residuals: frozenset[int]) -> None:
        self.graph = step.graph
        on_host = [self.graph.inputs[i] for i in sorted(hosted)]
        outputs = zip(self.graph.outputs, step.replaces, strict=True)
        new_state = {v: a for a, r in outputs if r is not None and (v := self.graph.inputs[r]) != a}
        waiting = [v for v in sorted(residuals) if may_wait(self.graph, v)]
        self.by_rows = by_rows(self.graph, on_host, new_state)
        whole = [v for v in on_host if (v, Phase.UPDATE) not in self.by_rows]
        updated = {v for op in self.graph.ops if op.is_host_update for v in op.operands}
        self.read_here = {v for op in self.graph.ops if not op.is_host_update for v in op.operands}
        served = self.by_rows | {(v, Phase.UPDATE) for v in on_host if v in updated}
        self.stored = {a for v in whole if isinstance(a := new_state.get(v), int)} | set(waiting)
        self.new_state = frozenset(a for a in new_state.values() if isinstance(a, int))
        self.sliced = _sliced(self.graph, set(on_host))
        self.plan = fetches(self.graph, on_host, waiting, new_state, self.sliced, served)
        self.pauses = {**self.plan.departures, **self.plan.pauses}
        values = list(self.graph.values)
        for v in on_host:
            values[v] = replace(values[v], is_on_host=True)
        self.written = Written(values, SCOPE)
        self.origin: dict[int, int] = {}
        self.there: dict[tuple[int, Phase], int] = {}
        self.on_host: dict[int, int] = {}
        self.now: dict[int, int] = {}
        self.sent: dict[int, int] = {}

    def run(self) -> Graph:
        """The graph with its copies."""
        for what in _order(self.graph, self.plan.fetches, self.plan.pauses, self.sliced):
            if isinstance(what, Fetch):
                self._fetch(what)
            else:
                self._op(what)
        outputs = tuple(
            self.on_host.get(a, a) if isinstance(a, int) and a in self.new_state else a
            for a in self.graph.outputs
        )
        ops, values = tuple(self.written.ops), tuple(self.written.values)
        return replace(self.graph, values=values, ops=ops, outputs=outputs)

    def _op(self, n: int) -> None:
        op = self.graph.ops[n]
        if op.phase is not Phase.UPDATE:
            self._pause(op)
        if op.operands and (op.operands[0], op.phase) in self.by_rows:
            self._serve(n)
            return
        slices = [k for k, a in enumerate(op.inputs) if isinstance(a, int) and (n, a) in self.sliced]
        inputs = tuple(
            self._read(a, op.phase) if isinstance(a, int) and k not in slices else a
            for k, a in enumerate(op.inputs)
        )
        self.origin[len(self.written.ops)] = n
        op = op if inputs == op.inputs else replace(op, inputs=inputs)
        if op.is_host_update:
            self._update_there(op)
            return
        self.written.ops.append(_fetching_slices(op, slices) if slices else op)
        for v in op.outputs:
            if v in self.stored:
                self.on_host[v] = self._copied(v, to_host, op)

    def _update_there(self, op: Op) -> None:
        """Writes an update by the host. Results that the device reads, or that rest there, are fetched."""
        stays = [v in self.stored and v not in self.read_here for v in op.outputs]
        pairs = zip(op.outputs, stays, strict=True)
        made = tuple(v if stay else self.written.new(self.written.values[v]) for v, stay in pairs)
        self.written.ops.append(replace(op, outputs=made))
        for v, there in zip(op.outputs, made, strict=True):
            if v in self.stored:
                self.on_host[v] = there
            if v != there:
                self.written.values[v] = replace(self.written.values[v], is_on_host=False)
                self.written.write(to_device, [there], op, v)

    def _serve(self, n: int) -> None:
        """Writes an op that looks up or replaces rows of an array in the host's memory."""
        op = self.graph.ops[n]
        (out,), (value,) = op.outputs, op.result_values
        array, indices, *new = (self._read(a, op.phase) for a in op.operands)
        made = self.written.new(replace(value, is_on_host=True)) if op.name == "gather" else out
        self.written.values[made] = there = replace(value, is_on_host=True)
        inputs = (array, *(self._sent(a, op) for a in (indices, *new)))
        params = bounded(op) if is_filled(op) else op.params
        self.origin[len(self.written.ops)] = n
        self.written.ops.append(
            replace(op, params=params, inputs=inputs, outputs=(made,), result_values=(there,))
        )
        if op.name == "gather":
            fill = partial(filled, op, self.graph.values[array].shape[0]) if is_filled(op) else None
            rows = self.written.write(_looked_up, [made], op, None if fill else out)
            if fill is not None and isinstance(rows, int):
                self.written.write(fill, [indices, rows], op, out)

    def _sent(self, v: int, like: Op) -> int:
        """A value's copy in the host's memory."""
        if v not in self.sent:
            self.sent[v] = self._copied(v, to_host, like)
        return self.sent[v]

    def _read(self, v: int, phase: Phase) -> int:
        """The replacement of a value in a phase: a fetched argument, or the result of a barrier."""
        return self.there[v, phase] if (v, phase) in self.there else self.now.get(v, v)

    def _pause(self, op: Op) -> None:
        """Puts an op's operands behind a barrier with the values that must come first."""
        for v in dict.fromkeys(op.operands):
            if ties := self.pauses.pop(v, ()):
                (self.now[v],) = self._tied((v,), ties, op)

    def _fetch(self, fetch: Fetch) -> None:
        like = self.graph.ops[fetch.first]
        there = [self.on_host.get(v, v) for v in fetch.arguments]
        for v, tied in zip(fetch.arguments, self._tied(there, fetch.ties, like), strict=True):
            self.there[v, fetch.phase] = self._copied(tied, to_device, like)

    def _tied(self, values: Sequence[int], ties: Sequence[int], like: Op) -> tuple[int, ...]:
        """Values behind a barrier with their ties; for offloaded state, a tie means its copy on the host."""
        if not ties:
            return tuple(values)
        given = [v for v in dict.fromkeys(ties) if v not in values]
        tied = [self.on_host.get(v, self.now.get(v, v)) for v in given]
        behind = self.written.together([*(self.now.get(v, v) for v in values), *tied], like)
        for v, new in zip(given, behind[len(values) :], strict=True):
            (self.on_host if v in self.on_host else self.now)[v] = new
        return behind[: len(values)]

    def _copied(self, v: int, copy: Callable[[Any], Any], like: Op) -> int:
        made = self.written.write(copy, [v], like)
        assert isinstance(made, int)
        return made


def _sliced(graph: Graph, stacks: Set[int]) -> frozenset[tuple[int, int]]:
    """The loops, by number, that read stacks slice by slice, each with such a stack."""
    found: set[tuple[int, int]] = set()
    for n, op in enumerate(graph.ops):
        if op.name == "scan":
            first = sum(op.loop_counts)
            found.update((n, v) for v in op.inputs[first:] if v in stacks and v not in op.inputs[:first])
    return frozenset(found)


def _fetching_slices(loop: Op, stacks: Sequence[int]) -> Op:
    """The loop with the slices of these operands on the host; its body begins with their copies to the device."""
    (body,) = loop.bodies["jaxpr"]
    written = Written(body.values, SCOPE)
    like, there = replace(loop, equivalence=None), dict[int, Atom]()
    for v in (body.inputs[k] for k in stacks):
        written.values[v] = replace(written.values[v], is_on_host=True)
        there[v] = written.write(to_device, [v], like)
    ops = [
        replace(op, inputs=tuple(there.get(a, a) if isinstance(a, int) else a for a in op.inputs))
        for op in body.ops
    ]
    outputs = tuple(there.get(a, a) if isinstance(a, int) else a for a in body.outputs)
    fetching = replace(body, values=tuple(written.values), ops=(*written.ops, *ops), outputs=outputs)
    return replace(loop, bodies={**loop.bodies, "jaxpr": (fetching,)})


def to_host(x: Any) -> Any:
    """A copy in the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: Any) -> Any:
    """A copy in the device's memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def _looked_up(rows: Any) -> Any:
    """A copy of looked-up rows in the device's memory. Behind the barrier XLA may reshape them; without it, it reshapes the
    host's rows to an array in the device's memory, and refuses the program."""
    return jax.lax.optimization_barrier(to_device(rows))


def _order(
    graph: Graph,
    planned: Iterable[Fetch],
    pauses: Mapping[int, tuple[int, ...]],
    sliced: Set[tuple[int, int]],
) -> Iterator[int | Fetch]:
    """Ops, by number, and fetches, in their new order: program order, except for delayed ops and for updates."""
    maker = graph.made_at
    nodes: list[int | Fetch] = [*range(len(graph.ops)), *planned]
    needs = [set[int]() for _ in nodes]
    fetched = {(v, f.phase): n for n, f in enumerate(nodes) if isinstance(f, Fetch) for v in f.arguments}
    for n, node in enumerate(nodes):
        if isinstance(node, Fetch):
            needs[n] = {maker[v] for v in (*node.ties, *node.arguments) if v in maker}
            continue
        op = graph.ops[node]
        paused = [t for v in op.operands if op.phase is Phase.BACKWARD for t in pauses.get(v, ())]
        read = (v for v in (*op.operands, *paused) if (node, v) not in sliced)
        made = (fetched.get((v, op.phase), maker.get(v, -1)) for v in read)
        needs[n] = {m for m in made if m >= 0}
    yield from (nodes[n] for n in _sorted(needs, _ranks(graph, nodes, needs, maker)))


def _ranks(
    graph: Graph, nodes: list[int | Fetch], needs: list[set[int]], maker: dict[int, int]
) -> list[tuple[int, int]]:
    """The preferred place of each node: an update right behind the newest of its gradients, a fetch right behind its ties,
    or else before its readers."""
    newest: list[int] = []
    for i, op in enumerate(graph.ops):
        made = [newest[maker[v]] for v in op.operands if v in maker] if op.phase is Phase.UPDATE else [i]
        newest.append(max(made, default=-1))
    ranks = [(a, 1) if a == i else (a, 2) if a >= 0 else (i, 1) for i, a in enumerate(newest)]
    ranks = [(len(ranks), 1) if op.is_host_update else r for op, r in zip(graph.ops, ranks, strict=True)]
    ranks += [(node.first, 0) for node in nodes if isinstance(node, Fetch)]
    for n, node in enumerate(nodes):
        if isinstance(node, Fetch) and needs[n]:
            ranks[n] = max(ranks[m] for m in needs[n])
    for n in (*range(len(graph.ops), len(nodes)), *reversed(range(len(graph.ops)))):
        for m in needs[n]:
            if isinstance(nodes[m], Fetch) or graph.ops[m].phase is Phase.UPDATE:
                ranks[m] = min(ranks[m], ranks[n])
    return ranks


def _sorted(needs: list[set[int]], ranks: list[tuple[int, int]]) -> Iterator[int]:
    """Topological order of the nodes; among ready nodes, the lowest rank comes first."""
    after: list[list[int]] = [[] for _ in needs]
    for node, needed in enumerate(needs):
        for n in needed:
            after[n].append(node)
    missing = [len(needed) for needed in needs]
    ready = [(ranks[node], node) for node, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    while ready:
        _, node = heapq.heappop(ready)
        yield node
        for follower in after[node]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (ranks[follower], follower))
