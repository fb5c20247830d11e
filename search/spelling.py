"""From labels to a layout: every decision spelled out op by op, for the executor.

A spec is imposed where it decides: on arguments and at loops' borders, on the results of heavy ops and of ops
with loops that cannot be split, and on what leaves a cluster or is reduced in it; inside a fused chain the
compiler propagates.

A constraint cannot say that a value is partial. It says that the value is whole, and where the reader wants it
scattered, the compiler makes one reduce-scatter of the two (XLA:GPU, measured on products and scatters):

* partial over one axis. With the reader's spec alone, the compiler may compute on an axis that the plan leaves idle;
* terms of a sum: the compiler moves the reductions behind it. Left alone, it scatters a tied embedding's gradient into
  the other term, which it has to reduce before.

A value that is partial over several axes and no such term is not imposed: its reader's spec is.
"""

from collections.abc import Sequence

from autoshard.factors import Kind
from autoshard.layout import Layout, Place, Route, Want
from autoshard.spec import AXIS_NAMES, PARTIAL, Spec
from search.choices import Way, port_specs
from search.pricing import Priced
from search.program import FlatOp
from search.sketch import Group, Port, group_of


def spell(priced: Priced, labels: Sequence[int]) -> Layout:
    """The layout that a full assignment means."""
    shape = priced.resharder.mesh.shape
    speller = _Speller(priced, labels)
    return Layout(shape, AXIS_NAMES[len(shape)], speller.specs(), speller.wants())


class _Speller:
    def __init__(self, priced: Priced, labels: Sequence[int]) -> None:
        self.priced, self.labels = priced, labels
        self.sketch, self.folded = priced.sketch, priced.sketch.folded
        self.program = self.folded.program
        self.maker = {v: (i, r) for i, op in enumerate(self.program.ops) for r, v in enumerate(op.results)}
        node_of = self.sketch.node_of
        self.leaving = {
            (link.producer, link.result)
            for link in self.folded.links
            if node_of[link.producer] != node_of[link.consumer]
        }
        self.summed = {
            (link.producer, link.result)
            for link in self.folded.links
            if self.sketch.clusters[node_of[link.consumer]].is_sum and self.folded.is_heavy[link.producer]
        }
        self.memo: dict[Port, Spec] = {}

    def spec(self, port: Port) -> Spec:
        if port not in self.memo:
            row = port_specs(port, self.priced.choices[port.node])[self.labels[port.node]]
            self.memo[port] = tuple(int(d) for d in row)
        return self.memo[port]

    def way(self, node: int) -> Way:
        return self.priced.choices[node].ways[self.labels[node]]

    def resting(self, kind: int, result: int) -> Spec:
        """The spec that a value has once it is made."""
        rest = self.sketch.copy_of.get((kind, result, Group.REST))
        return self.spec(Port(rest.node, ())) if rest else self.spec(self.sketch.ports[kind, result, True])

    def specs(self) -> dict[Place, Route]:
        found: dict[Place, Route] = {}
        for i, op in enumerate(self.program.ops):
            kind = self.folded.kind_of[i]
            for r, (v, places) in enumerate(zip(op.results, op.result_places, strict=True)):
                if self.program.values[v].shape and self._decides(op, kind, r):
                    made, rest = self.spec(self.sketch.ports[kind, r, True]), self.resting(kind, r)
                    route = (*self._imposed(kind, r, made), *self._route(v, made, rest))
                    if route:
                        found |= dict.fromkeys(places, route)
        return found

    def _imposed(self, kind: int, result: int, made: Spec) -> Route:
        return (made,) if made.count(PARTIAL) <= 1 or (kind, result) in self.summed else ()

    def _decides(self, op: FlatOp, kind: int, result: int) -> bool:
        if op.is_boundary or self.folded.is_heavy[kind] or (kind, result) in self.leaving:
            return True
        return any(f.kind is not Kind.PARALLEL and f.size > 1 for f in op.rule.factors)

    def wants(self) -> dict[Place, Want]:
        found: dict[Place, Want] = {}
        for i, op in enumerate(self.program.ops):
            for operand, (v, place) in enumerate(zip(op.operands, op.operand_places, strict=True)):
                if place is not None and self.program.values[v].shape:
                    want = self._want(v, self.folded.kind_of[i], operand, group_of(op))
                    if want is not None:
                        found[place] = want
        return found

    def _want(self, v: int, consumer: int, operand: int, group: Group) -> Want | None:
        made, r = self.maker[v]
        kind = self.folded.kind_of[made]
        port = self.sketch.ports[consumer, operand, False]
        here, need = self.resting(kind, r), self.spec(port)
        is_made_so = port == self.sketch.ports[kind, r, True]
        copy = None if is_made_so else self.sketch.copy_of.get((kind, r, group))
        held, is_fresh = here, False
        if copy is not None and self.way(copy.node) is not Way.SAME:
            held = self.spec(Port(copy.node, ()))
            is_fresh = bool(copy.kept_from) and self.way(copy.node) is Way.FRESH and held != here
        shared = self._route(v, here, held)
        last = self._route(v, held, need) if PARTIAL not in need else ()
        is_fresh |= copy is not None and bool(copy.kept_from) and not shared and bool(last)
        return Want(shared, is_fresh, group.value, last) if shared or last else None

    def _route(self, v: int, here: Spec, there: Spec) -> Route:
        """What the cheapest chain passes through.

        Where it scatters a sum over one axis before it reduces it over another, that is said with the other axis whole:
        the compiler then does both in this order (measured on XLA:GPU).
        """
        made, result = self.maker[v]
        kind = self.folded.kind_of[made]
        how = self.priced.handling(self.sketch.node_of[kind], (kind, result))
        chain = self.priced.resharder.chain(self.program.values[v], here, there, how)
        return tuple(s.after for s in chain if PARTIAL not in s.after or s.kind == "reduce-scatter")
