"""A step rewritten so that its backward phase recomputes forward values instead of reading kept ones.

The rewritten step is a step like any other: its recomputation is ops of the backward phase, so that strategies, costs, live
ranges, the executor and the compiler need know nothing of it. *Sites*, places of forward ops, list the ops to recompute.

A listed op is copied ahead of the first backward op that reads its result, and all backward readers read the copy. The copy
reads the copies of other listed ops, and the original results of all other forward ops. These originals pass through a
barrier together with a gradient that arrives there, or with the array from which that gradient is computed on the fly.
Without the barrier the compiler would merge original and copy, or compute the copy early (XLA:GPU, measured). Weight
gradients of earlier pieces pass through the barrier too (`_Debts`).

A loop over layers is differentiated into two. Ops inside the forward loop are recomputed inside the backward one
(`search.memory.loop_pairs`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import Factor, Kind, rule_for
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Site, Step, Value, verify
from autoshard.search.memory.copies import OpCopier, copied
from autoshard.search.memory.loop_pairs import LoopPair, loop_pairs, without_unread_stacks
from autoshard.search.memory.loop_segments import SegmentedLoop, in_segments, segments_at
from autoshard.search.memory.written import Written
from autoshard.search.problem.fusion import VIEWS


def recomputed(step: Step, sites: frozenset[Site]) -> Step:
    """The step with the forward ops at these sites recomputed in its backward phase.

    Args:
      step: the traced step.
      sites: of ops of the outermost graph, of ops in the body of a forward loop whose residuals a backward loop reads, or of
        such
        ops in the body of a loop that holds both phases.

    Returns:
      A step with the same arguments and results; the given step if there are no sites.
    """
    if not sites:
        return step
    graph = _Recomputing(step.graph, (), sites).run()
    verify(graph)
    return replace(step, graph=graph)


class _Debts:
    """Weight gradients, which no op of the backward phase reads, but whose operands are held for them.

    XLA's scheduler delays such products to the end of the step, into the windows of their own reductions, and so would hold
    all recomputed values of all layers (XLA:GPU, measured). Therefore each recomputed piece depends on the gradients due
    before the previous piece. More recent gradients are left alone, so that their reductions have time to hide.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, self._leaving = graph, _leaving(graph)
        self._new: list[int] = []
        self._old: list[int] = []

    def read(self, op: Op) -> None:
        """Records a backward op."""
        if self._leaving.issuperset(op.outputs) and _sums(self._graph, op):
            self._new += op.outputs

    def due(self) -> list[int]:
        """The gradients that must be complete before the next piece is recomputed."""
        due, self._old, self._new = self._old, self._new, []
        return due


def _leaving(graph: Graph) -> set[int]:
    """Values made in the backward phase that only later phases read."""
    read: set[int] = set()
    leaving: set[int] = set()
    for op in reversed(graph.ops):
        if op.phase is Phase.BACKWARD and read.isdisjoint(op.outputs):
            leaving |= set(op.outputs)
        elif op.phase is Phase.BACKWARD:
            read |= set(op.operands)
    return leaving


def _sums(graph: Graph, op: Op) -> bool:
    """True if an op sums over a factor, so that its result holds less than its operands."""
    return any(factor.kind is Kind.SUM for factor in _factors([graph.value(a) for a in op.inputs], op))


def _factors(inputs: Sequence[Value], op: Op) -> Sequence[Factor]:
    return rule_for(op.name, inputs, op.result_values, op.params).in_rows.factors


class _Recomputing:
    """One walk over a graph that holds both phases."""

    def __init__(self, graph: Graph, path: Site, sites: frozenset[Site]) -> None:
        self.graph, self.path, self.sites = graph, path, sites
        self.written = Written(graph.values)
        self.copies = OpCopier(
            graph, lambda i: (*path, i) in sites, self._held, partial(copied, self.written)
        )
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
        return without_unread_stacks(in_segments(graph, self._cuts()))

    def _cuts(self) -> list[SegmentedLoop]:
        """The loops to cut into segments, by their places in the new graph."""
        return [
            SegmentedLoop(self.place[f], tuple(self.place[b] for b in self.pairs[f]), segments)
            for f, segments in segments_at(self.sites, self.path).items()
        ]

    def _inside(self, i: int, op: Op) -> Op:
        """An op, rewritten in its bodies if these hold both phases."""
        paths = {key: [(*self.path, i, key, j) for j in range(len(b))] for key, b in op.bodies.items()}
        is_inside = any(site[: len(p)] == p for ps in paths.values() for p in ps for site in self.sites)
        if i in self.pairs or not is_inside:
            return op
        return replace(
            op,
            bodies={
                key: tuple(
                    _Recomputing(b, p, self.sites).run() for b, p in zip(bodies, paths[key], strict=True)
                )
                for key, bodies in op.bodies.items()
            },
        )

    def _read(self, atom: Atom) -> Atom:
        """The operand of a backward op after the rewrite."""
        if not isinstance(atom, int):
            return atom
        return self.copies.value(atom) if self.copies.comes_anew(atom) else self.copies.made.get(atom, atom)

    def _held(self, kept: Sequence[int]) -> Sequence[int]:
        """Values of the forward phase behind a barrier with an arrived gradient and the weight gradients that are due."""
        if not kept:
            return ()
        arrived = self._arrived()
        ties = (*self.debts.due(), *(() if arrived is None else (arrived,)))
        inputs = tuple(dict.fromkeys((*kept, *ties)))
        results = tuple(self.written.values[a] for a in inputs)
        reader = self.reader
        source, equivalence = (reader.source_info, reader.equivalence) if reader else (None, None)
        barrier = Op(
            _jax.optimization_barrier_p, {}, inputs, (), results, Phase.BACKWARD, "", source, {}, equivalence
        )
        return copied(self.written, barrier, inputs)[: len(kept)]

    def _arrived(self) -> int | None:
        """A gradient that the current backward op reads, or else the newest gradient."""
        own = [v for v in (self.reader.operands if self.reader else ()) if v in self.backward]
        arrived = own[0] if own else next(reversed(self.backward), None)
        return None if arrived is None else self._stored(arrived)

    def _stored(self, v: int) -> int:
        """The newest array from which a gradient is computed on the fly, or else the smallest value on the way: the compiler
        stores the operands of a barrier."""
        found, way = v, list[int]()
        while self._is_on_the_fly(op := self.backward[found][1]):
            way.append(found)
            before = [a for a in op.operands if a in self.backward]
            if not before:
                return self._smallest(way)
            found = max(before, key=lambda a: self.backward[a][0])
        return found

    def _smallest(self, way: Sequence[int]) -> int:
        """The smallest value that is no constant, from a list in which each value is computed from the next."""
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
        """A backward loop that recomputes residuals of a forward one, which is rewritten too."""
        body = (*self.path, f, "jaxpr", 0)
        forward = self.written.ops[self.place[f]]
        is_recomputed = [(*body, i) in self.sites for i in range(len(forward.bodies["jaxpr"][0].ops))]
        if not any(is_recomputed):
            return backward
        loops = LoopPair(forward, backward, is_recomputed.__getitem__, self.written.new, self._read)
        self.written.ops[self.place[f]], backward = loops.run()
        return backward
