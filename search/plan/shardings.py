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

from search.ir.factors import Kind
from search.ir.sharding import Layout, Place, Route, Want
from search.ir.spec import AXIS_NAMES, PARTIAL, Spec
from search.problem.costs import Priced
from search.problem.flat_program import FlatOp
from search.problem.reshard import Step
from search.problem.reshard_paths import Routes
from search.problem.strategy_graph import group_of


def spell(priced: Priced, labels: Sequence[int]) -> Layout:
    """The layout that a full assignment means."""
    shape = priced.resharder.mesh.shape
    speller = _Speller(priced, labels)
    return Layout(shape, AXIS_NAMES[len(shape)], speller.specs(), speller.wants())


class _Speller:
    def __init__(self, priced: Priced, labels: Sequence[int]) -> None:
        self.sketch, self.folded = priced.sketch, priced.sketch.folded
        self.program = self.folded.program
        self.routes = Routes(priced, labels)
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

    def specs(self) -> dict[Place, Route]:
        found: dict[Place, Route] = {}
        for i, op in enumerate(self.program.ops):
            kind = self.folded.kind_of[i]
            for r, (v, places) in enumerate(zip(op.results, op.result_places, strict=True)):
                if self.program.values[v].shape and self._decides(op, kind, r):
                    imposed = self._imposed(kind, r, self.routes.made(v))
                    route = (*imposed, *_passed(self.routes.to_rest(v)))
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
                    want = self._want(i, operand)
                    if want is not None:
                        found[place] = want
        return found

    def _want(self, i: int, operand: int) -> Want | None:
        way = self.routes.to_reader(i, operand)
        shared, last = _passed(way.shared), _passed(way.last)
        group = group_of(self.program.ops[i])
        return Want(shared, way.is_fresh, group.value, last) if shared or last else None


def _passed(steps: Sequence[Step]) -> Route:
    """What the steps of a chain pass through.

    Where it scatters a sum over one axis before it reduces it over another, that is said with the other axis whole: the
    compiler then does both in this order (measured on XLA:GPU).
    """
    return tuple(s.after for s in steps if PARTIAL not in s.after or s.kind == "reduce-scatter")
