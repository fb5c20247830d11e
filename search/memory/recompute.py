"""A step rewritten so that its backward phase recomputes forward values instead of reading what was kept.

The rewritten step is a step like any other: its recomputation is ops of the backward phase, so that strategies, costs, live
ranges, the executor and the compiler need know nothing of it. What is recomputed is said by *sites*, places of forward ops.

An op so named is made once more, ahead of the first backward op that reads what it makes, and all backward readers read
that. It reads the copies of other ops so named, and of everything else what the forward phase made. That is handed over
through a barrier together with a gradient that arrives there, or the array from which it is computed on the fly: without it
the compiler would find both copies alike, and compute neither later nor twice (XLA:GPU, measured). Weight gradients of
layers behind are in the barrier too (`_Debts`).

A loop over layers is differentiated into two. Ops inside the forward one are made once more inside the backward one
(`search.memory.loop_pairs`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import Factor, Kind, rule_for
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Site, Step, Value, verify
from autoshard.search.memory.copies import Copies, copied
from autoshard.search.memory.loop_pairs import LoopPair, loop_pairs, without_unread_stacks
from autoshard.search.memory.written import Written
from autoshard.search.problem.fusion import VIEWS


def recomputed(step: Step, sites: frozenset[Site]) -> Step:
    """The step with the forward ops at these sites recomputed in its backward phase.

    Args:
      step: the traced step.
      sites: of ops of the outermost graph, of ops in the body of a forward loop whose residuals a backward loop reads, or
        of such ops in the body of a loop that holds both phases.

    Returns:
      A step with the same arguments and results; the same step where there are no sites.
    """
    if not sites:
        return step
    graph = _Rewriting(step.graph, (), sites).run()
    verify(graph)
    return replace(step, graph=graph)


class _Debts:
    """Weight gradients, which nothing in the backward phase waits for while what they read is held for them.

    XLA's scheduler puts such products off to the end of the step, into the windows of their own reductions, and so would
    hold what all layers recompute (XLA:GPU, measured). Therefore each piece that is recomputed waits for the gradients due
    before the piece that came before it. Those since then are let be: their reductions shall have time to hide.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._leaving = graph, _leaving(graph)
        self._new: list[int] = []
        self._old: list[int] = []

    def read(self, op: Op) -> None:
        """A backward op."""
        if self._leaving.issuperset(op.outputs) and _sums(self._graph, op):
            self._new += op.outputs

    def due(self) -> list[int]:
        """What has to be there before the next piece is recomputed."""
        due, self._old, self._new = self._old, self._new, []
        return due


def _leaving(graph: Graph) -> set[int]:
    """What the backward phase makes for later phases alone."""
    read: set[int] = set()
    leaving: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase is Phase.BACKWARD and read.isdisjoint(op.outputs):
            leaving |= set(op.outputs)
        elif op.phase is Phase.BACKWARD:
            read |= set(op.operands)
    return leaving


def _sums(graph: Graph, op: Op) -> bool:
    """Whether an op sums over something, so that its result holds less than its operands."""
    return any(factor.kind is Kind.SUM for factor in _factors([graph.value(a) for a in op.inputs], op))


def _factors(inputs: Sequence[Value], op: Op) -> Sequence[Factor]:
    return rule_for(op.name, inputs, op.result_values, op.params).factors


class _Rewriting:
    """One walk over a graph that holds both phases."""

    def __init__(self, graph: Graph, path: Site, sites: frozenset[Site]) -> None:
        self.graph, self.path, self.sites = graph, path, sites
        self.written = Written(graph.values)
        self.copies = Copies(graph, lambda i: (*path, i) in sites, self._held, partial(copied, self.written))
        self.debts = _Debts(graph)
        self.pairs = loop_pairs(graph)
        self.place: dict[int, int] = {}
        self.backward: dict[int, tuple[int, Op]] = {}
        self.reader: Op | None = None

    def run(self) -> Graph:
        forward_of = {b: f for f, backward in self.pairs.items() for b in backward}
        for i, op in enumerate(self.graph.ops):
            if op.phase is Phase.BACKWARD:
                self.reader = op
                inputs = tuple(map(self._read, op.inputs))
                self.debts.read(op)
                op = replace(op, inputs=inputs)
            if i in forward_of:
                op = self._recomputing(forward_of[i], op)
            if op.phase is Phase.BACKWARD:
                self.backward |= {v: (i, op) for v in op.outputs if self.written.values[v].shape}
            self.place[i] = len(self.written.ops)
            self.written.ops.append(self._inside(i, op))
        graph = replace(self.graph, values=tuple(self.written.values), ops=tuple(self.written.ops))
        return without_unread_stacks(graph)

    def _inside(self, i: int, op: Op) -> Op:
        """An op that holds both phases in its own body is rewritten there."""
        paths = {key: [(*self.path, i, key, j) for j in range(len(b))] for key, b in op.bodies.items()}
        is_inside = any(site[: len(p)] == p for ps in paths.values() for p in ps for site in self.sites)
        if i in self.pairs or not is_inside:
            return op
        return replace(
            op,
            bodies={
                key: tuple(
                    _Rewriting(b, p, self.sites).run() for b, p in zip(bodies, paths[key], strict=True)
                )
                for key, bodies in op.bodies.items()
            },
        )

    def _read(self, atom: Atom) -> Atom:
        """What a backward op reads."""
        if not isinstance(atom, int):
            return atom
        return self.copies.value(atom) if self.copies.comes_anew(atom) else self.copies.made.get(atom, atom)

    def _held(self, kept: Sequence[int]) -> Sequence[int]:
        """Values of the forward phase, not before a gradient has arrived and what is owed is paid."""
        if not kept:
            return ()
        arrived = self._arrived()
        ties = (*self.debts.due(), *(() if arrived is None else (arrived,)))
        inputs = tuple(dict.fromkeys((*kept, *ties)))
        results = tuple(self.written.values[a] for a in inputs)
        source, likes = (self.reader.source_info, self.reader.likes) if self.reader else (None, None)
        barrier = Op(
            _jax.optimization_barrier_p, {}, inputs, (), results, Phase.BACKWARD, "", source, {}, likes
        )
        return copied(self.written, barrier, inputs)[: len(kept)]

    def _arrived(self) -> int | None:
        """A gradient that the op reads for which all this is done, or the newest one."""
        own = [v for v in (self.reader.operands if self.reader else ()) if v in self.backward]
        arrived = own[0] if own else next(reversed(self.backward), None)
        return None if arrived is None else self._stored(arrived)

    def _stored(self, v: int) -> int:
        """The newest array that a gradient is computed from on the fly, or where there is none what is smallest on the way:
        what a barrier holds, the compiler stores."""
        found, way = v, list[int]()
        while self._is_on_the_fly(op := self.backward[found][1]):
            way.append(found)
            before = [a for a in op.operands if a in self.backward]
            if not before:
                return self._smallest(way)
            found = max(before, key=lambda a: self.backward[a][0])
        return found

    def _smallest(self, way: Sequence[int]) -> int:
        """Of values each of which is computed from the next one, the smallest that is no constant."""
        constant = set[int]()
        for a in reversed(way):
            if constant.issuperset(self.backward[a][1].operands):
                constant.add(a)
        changing = [a for a in way if a not in constant]
        return min(changing, key=lambda a: self.written.values[a].num_bytes, default=way[0])

    def _is_on_the_fly(self, op: Op) -> bool:
        values = [self.written.values[a] if isinstance(a, int) else self.graph.value(a) for a in op.inputs]
        is_elementwise = all(f.kind is Kind.PARALLEL for f in _factors(values, op) if f.size > 1)
        return not op.bodies and (op.name in VIEWS or is_elementwise)

    def _recomputing(self, f: int, backward: Op) -> Op:
        """A backward loop that recomputes what it reads of a forward one, which is rewritten too."""
        body = (*self.path, f, "jaxpr", 0)
        forward = self.written.ops[self.place[f]]
        is_recomputed = [(*body, i) in self.sites for i in range(len(forward.bodies["jaxpr"][0].ops))]
        if not any(is_recomputed):
            return backward
        loops = LoopPair(forward, backward, is_recomputed.__getitem__, self.written.new, self._read)
        self.written.ops[self.place[f]], backward = loops.run()
        return backward
