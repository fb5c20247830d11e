"""Gradients of parameters that several stages share: each stage adds up its own terms, and the sums are added once.

The gradient of a tied embedding, for example, has terms of several stages. The step adds these terms for each
microbatch; a pipeline would have to send them between stages as often. But the contribution of a microbatch to a sum is
linear in its terms. So the ops that add terms of several stages move from the body to the epilogue, where they add the
sums of the stages: one transfer per step. Other linear ops on the way to the sum move with them.

Ops that widen a dtype stay in the body, as the terms before them would be added up in the narrower one.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Op, Phase
from autoshard.search.memory.written import Written
from autoshard.search.pipeline.pipeline_step import SCOPE, PipelineStep, zeros
from autoshard.search.pipeline.stages import StageAssignment


def added_once(step: PipelineStep, assigned: StageAssignment) -> PipelineStep:
    """The step that adds terms of several stages in its epilogue."""
    return _Moving(step, assigned).run()


class _Moving:
    """The sums of one step."""

    def __init__(self, step: PipelineStep, assigned: StageAssignment) -> None:
        self.step, self.assigned = step, assigned
        pieces = [v for v, _ in step.pieces.values()]
        self.num_readers = Counter(
            [*(v for op in step.body for v in op.operands), *step.terms.values(), *pieces]
        )
        self.once = Written(step.values, SCOPE)
        self.total_of = {term: total for total, term in step.terms.items()}
        self.moved: dict[Op, None] = {}
        self.like = dict(step.like)

    def run(self) -> PipelineStep:
        for term in self.step.terms.values():
            self._move(term)
        if not self.moved:
            return self.step
        late_ops = [op for op in self.step.body if op in self.moved]
        late = [self._late(op) for op in late_ops]
        gone = {v for op in late_ops for v in op.outputs}
        terms = {total: term for term, total in self.total_of.items() if term not in gone}
        dropped = self.step.terms.keys() - terms.keys()
        begins = [op for op in self.step.prologue if dropped.isdisjoint(op.outputs)]
        return replace(
            self.step,
            values=tuple(self.once.values),
            prologue=(*begins, *self.once.ops),
            body=tuple(op for op in self.step.body if op not in self.moved),
            epilogue=(*late, *self.step.epilogue),
            terms=terms,
            like=self.like,
        )

    def _move(self, term: int) -> None:
        """Marks the linear ops that lead from terms of several stages to a sum."""
        op = self.step.maker[term]
        if self._is_linear(op) and len({*self._stages(term)}) > 1:
            self.moved[op] = None
            for v in op.operands:
                self._move(v)

    def _stages(self, term: int) -> Iterator[int]:
        """The stages that make the terms behind a term."""
        op = self.step.maker[term]
        if self._is_linear(op):
            for v in op.operands:
                yield from self._stages(v)
        else:
            yield self.assigned.of_op[op]

    def _is_linear(self, op: Op) -> bool:
        """True if an op is linear, and may as well run once on sums."""
        inputs = [self.step.values[v] for v in op.operands]
        return (
            op in self.assigned.backward
            and len(op.outputs) == 1
            and self.num_readers[op.outputs[0]] == 1
            and all(self.step.maker.get(v) in self.assigned.of_op for v in op.operands)
            and all(map(self.step.is_of_microbatch, op.operands))
            and len(inputs) == len(op.inputs)
            and all(v.itemsize >= op.result_values[0].itemsize for v in inputs)
            and rule_for(op.name, inputs, op.result_values, op.params).is_additive
            and op.name != "reduce_sum"
        )

    def _late(self, op: Op) -> Op:
        """The op on sums in place of terms."""
        outputs = tuple(map(self._total, op.outputs))
        inputs = tuple(
            self._begun(v) if self.step.maker[v] not in self.moved else self._total(v) for v in op.operands
        )
        return replace(op, inputs=inputs, outputs=outputs, phase=Phase.UPDATE)

    def _total(self, term: int) -> int:
        """The sum of a term."""
        if term not in self.total_of:
            self.total_of[term] = self.once.new(self.step.values[term])
            self.like[self.total_of[term]] = term
        return self.total_of[term]

    def _begun(self, term: int) -> int:
        """The sum of a term that one stage adds up; it begins at zero."""
        is_new = term not in self.total_of
        total = self._total(term)
        if is_new:
            self.once.write(partial(zeros, self.step.values[term]), (), None, total)
        return total
