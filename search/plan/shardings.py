"""From strategies to a sharding of the step: every decision spelled out op by op, for the executor.

A spec is imposed where it decides: on arguments and at loops' borders, on the results of heavy ops and of ops
with loops that cannot be split, and on what leaves a group or is reduced in it; inside a fused chain the
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
from search.ir.sharding import Place, Route, StepSharding, Want
from search.ir.spec import AXIS_NAMES, PARTIAL, Spec
from search.problem.costs import CostedGraph
from search.problem.flat_program import FlatOp
from search.problem.reshard import Step
from search.problem.reshard_paths import Routes
from search.problem.strategy_graph import read_phase


def step_sharding(costed: CostedGraph, chosen: Sequence[int]) -> StepSharding:
    """The sharding that a full assignment means."""
    shape = costed.resharder.mesh.shape
    speller = _Spelling(costed, chosen)
    return StepSharding(shape, AXIS_NAMES[len(shape)], speller.specs(), speller.wants())


class _Spelling:
    def __init__(self, costed: CostedGraph, chosen: Sequence[int]) -> None:
        self.graph, self.folded = costed.graph, costed.graph.folded
        self.program = self.folded.program
        self.routes = Routes(costed, chosen)
        node_of = self.graph.node_of
        self.leaving = {
            (dependency.producer, dependency.result)
            for dependency in self.folded.dependencies
            if node_of[dependency.producer] != node_of[dependency.consumer]
        }
        self.summed = {
            (dependency.producer, dependency.result)
            for dependency in self.folded.dependencies
            if self.graph.groups[node_of[dependency.consumer]].is_sum
            and self.folded.is_heavy[dependency.producer]
        }

    def specs(self) -> dict[Place, Route]:
        found: dict[Place, Route] = {}
        for i, op in enumerate(self.program.ops):
            op_class = self.folded.class_of[i]
            for r, (v, places) in enumerate(zip(op.results, op.result_places, strict=True)):
                if self.program.values[v].shape and self._decides(op, op_class, r):
                    imposed = self._imposed(op_class, r, self.routes.made(v))
                    route = (*imposed, *_passed(self.routes.to_rest(v)))
                    if route:
                        found |= dict.fromkeys(places, route)
        return found

    def _imposed(self, op_class: int, result: int, made: Spec) -> Route:
        return (made,) if made.count(PARTIAL) <= 1 or (op_class, result) in self.summed else ()

    def _decides(self, op: FlatOp, op_class: int, result: int) -> bool:
        if op.is_boundary or self.folded.is_heavy[op_class] or (op_class, result) in self.leaving:
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
        group = read_phase(self.program.ops[i])
        return Want(shared, way.is_fresh, group.value, last) if shared or last else None


def _passed(steps: Sequence[Step]) -> Route:
    """What the steps of a chain pass through.

    Where it scatters a sum over one axis before it reduces it over another, that is said with the other axis whole: the
    compiler then does both in this order (measured on XLA:GPU).
    """
    return tuple(s.after for s in steps if PARTIAL not in s.after or s.kind == "reduce-scatter")
