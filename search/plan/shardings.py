"""The sharding of a step: a plan's strategies, written out op by op for the executor.

A spec is imposed if it decides something: on arguments and at the borders of loops, on the results of heavy ops and of
ops with loops that cannot be split, and on values that leave a group or are reduced in it. Inside a fused chain the
compiler propagates specs.

A constraint cannot say that a value is partial. It says that the value is whole. If the reader needs it scattered, the
compiler joins both into one reduce-scatter (XLA:GPU, measured on products and scatters). So a value is said to be whole
if

* it is partial over one axis. With the reader's spec alone, the compiler may compute on an axis that the plan leaves
  idle;
* it is a term of a sum: the compiler moves the reductions behind the sum. Without the constraint, it scatters a tied
  embedding's gradient into the other term, which it has to reduce before.

For a value that is partial over several axes and no such term, the reader's spec is imposed instead. The reader's spec
is also imposed on a sum that stays partial over fewer axes than its terms. The terms are scattered over the other axes
one by one, and the sum is reduced once.

A loop's sum is said to be whole, in the loop and behind it: the compiler reduces it once, behind the loop. A barrier
that waits for such a sum, or for a term of a sum, waits for each device's terms (`search.plan.barrier_terms`).

If constraints cannot lead the compiler to a product's plan, its terms are summed by name (`search.plan.named_sums`).
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.factors.reduction import POOLING_GRADIENT
from autoshard.search.ir.sharding import OperandReshard, Place, StepSharding
from autoshard.search.ir.spec import AXIS_NAMES, PARTIAL, WHOLE, Spec, divides
from autoshard.search.plan.barrier_terms import barrier_terms
from autoshard.search.plan.named_sums import has_named_halos, named_sums
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.folding import Dependency
from autoshard.search.problem.reshard_paths import ReshardPaths

ON_SHARDS = frozenset({"top_k"})
"""Ops that are applied shard by shard, besides kernels written by hand (see `executors.kernels`)."""


def step_sharding(costed: CostedGraph, chosen: Sequence[int]) -> StepSharding:
    """The sharding of a full assignment."""
    shape = costed.resharder.mesh.shape
    spelling = _Spelling(costed, chosen)
    return StepSharding(shape, AXIS_NAMES[len(shape)], spelling.specs(), spelling.reshards())


class _Spelling:
    def __init__(self, costed: CostedGraph, chosen: Sequence[int]) -> None:
        self.graph, self.folded, self.mesh_shape = (
            costed.graph,
            costed.graph.folded,
            costed.resharder.mesh.shape,
        )
        self.program = self.folded.program
        self.paths = ReshardPaths(costed, chosen)
        node_of = costed.graph.node_of
        self.leaving = {
            (d.producer, d.result)
            for d in self.folded.dependencies
            if node_of[d.producer] != node_of[d.consumer]
        }
        self.summed = {(d.producer, d.result) for d in self.folded.dependencies if self._is_summed(d)}
        self.waited = barrier_terms(self.paths)
        on_shards = {v: way for v, way in self.waited.items() if way is not None}
        self.named_sums = {**named_sums(self.paths, self.summed), **on_shards}

    def _is_summed(self, d: Dependency) -> bool:
        """True if a sum takes a value as it is made, partial or not, or reduces all of it."""
        source, target = self.graph.node_of[d.producer], self.graph.node_of[d.consumer]
        made = self.paths.spec(self.graph.ports[d.producer, d.result, True])
        read = self.paths.spec(self.graph.ports[d.consumer, d.operand, False])
        is_term = source != target or self.folded.op(d.producer).is_accumulator
        return self.graph.is_sum(target) and is_term and (read == made or PARTIAL not in read)

    def specs(self) -> dict[Place, tuple[Spec, ...]]:
        found: dict[Place, tuple[Spec, ...]] = {}
        for i, op in enumerate(self.program.ops):
            op_class = self.folded.class_of[i]
            for r, (v, places) in enumerate(zip(op.results, op.result_places, strict=True)):
                if self.program.values[v].shape and self._decides(op, op_class, r):
                    named = self.named_sums.get(v)
                    made = self.paths.made(v)
                    constrained = self._constrained_specs(op_class, r, made) if named is None else (made,)
                    way = self.paths.to_rest(v) or named or ()
                    specs = (*constrained, *(step.after for step in way if step.is_constrained))
                    if specs:
                        found |= dict.fromkeys(places, specs)
                    if v in self.waited:
                        terms = () if named is None else (specs[-1],)
                        found |= {("terms", site, n): terms for _, site, n in places}
            found |= self._shards(op, op_class)
        return found

    def _shards(self, op: FlatOp, op_class: int) -> dict[Place, tuple[Spec, ...]]:
        """The specs in which an op that is applied shard by shard reads its operands; nothing for other ops."""
        specs = [self.paths.spec(self.graph.ports[op_class, i, False]) for i in range(len(op.operands))]
        is_split = op.rule.is_on_shards or (op.name in ON_SHARDS and self._splits_evenly(op, specs))
        # applied shard by shard where the program exchanges its halos by name
        is_split |= op.name == POOLING_GRADIENT and has_named_halos(op, specs)
        if not is_split and self.named_sums.keys().isdisjoint(op.results):
            return {}
        return {place: (spec,) for place, spec in zip(op.operand_places, specs, strict=True)}

    def _splits_evenly(self, op: FlatOp, specs: Sequence[Spec]) -> bool:
        shapes = [self.program.values[v].shape for v in op.operands]
        is_split = any(d > WHOLE for spec in specs for d in spec)
        return is_split and all(divides(s, n, self.mesh_shape) for s, n in zip(specs, shapes, strict=True))

    def _constrained_specs(self, op_class: int, result: int, made: Spec) -> tuple[Spec, ...]:
        return (made,) if made.count(PARTIAL) <= 1 or (op_class, result) in self.summed else ()

    def _decides(self, op: FlatOp, op_class: int, result: int) -> bool:
        if op.is_boundary or self.folded.is_heavy[op_class] or (op_class, result) in self.leaving:
            return True
        return any(f.kind is not Kind.PARALLEL and f.size > 1 for f in op.rule.factors)

    def reshards(self) -> dict[Place, OperandReshard]:
        found: dict[Place, OperandReshard] = {}
        for i, op in enumerate(self.program.ops):
            for operand, place in enumerate(op.operand_places):
                reshard = self._left(op.operands[operand], self.paths.to_reader(i, operand))
                if any(s.is_constrained for s in reshard.path):
                    found[place] = reshard
            for v, place in op.after:
                if (read := self.paths.first_read(v)) is not None:
                    found[place] = self._left(v, self.paths.to_reader(*read))
        return found

    def _left(self, v: int, reshard: OperandReshard) -> OperandReshard:
        """The rest of a value's path after its terms were summed by name."""
        num_taken = 0 if self.paths.to_rest(v) else len(self.named_sums.get(v, ()))
        return replace(reshard, path=reshard.path[num_taken:])
