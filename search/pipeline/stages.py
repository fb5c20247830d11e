"""The stage of each op of a step, and the stage at which each argument rests.

A cut of the program decides the stages of forward ops. All others follow by dataflow:

* *Backward ops.* Gradients travel from the last stage to the first, so an op's stage is at most that of any gradient
  that it reads. Among these stages, it is the last one that has all residuals and parameters that the op reads: a stage
  still has the values that it made or received in the forward phase. If no stage has all, it is the one that has most
  of their bytes. Gradients of other stages that a barrier passes on stay at their stages.
* *Prologue.* An op stands at the first stage that reads its result. An op that makes its operand smaller, such as a
  slice of parameters, stands where the operand is. An argument rests at the first stage that reads it, in the prologue
  or in the forward phase; other stages that read it get a copy, once in a step.
* *Epilogue.* An op stands where most of its operands' bytes are. Of equal ones, an argument's stage is taken, else the
  first. An op that adds sums of several stages stands at the first of these stages, where the parameter rests that they
  share. State that only the epilogue reads, such as moments, rests with its first reader.

Duplicated ops have no stage.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.search.ir.graph import Op
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stage_cut import StageCut
from autoshard.search.problem.flat_program import BARRIER


@dataclass(frozen=True, eq=False)
class StageAssignment:
    """The stages of a step.

    Attributes:
      num_stages: number of stages.
      of_op: the stage of each op that has one.
      backward: the ops of the body that belong to the backward phase.
      of_value: the stage that makes a value, or at which it rests; none for duplicated values.
    """

    num_stages: int
    of_op: Mapping[Op, int]
    backward: frozenset[Op]
    of_value: Mapping[int, int]


def is_barrier(op: Op) -> bool:
    """True if an op is a barrier: it passes on its operands when all of them are there."""
    return op.name == BARRIER


def assign(step: PipelineStep, cut: StageCut) -> StageAssignment:
    """Assigns a stage to each op."""
    return _Assigning(step, cut).run()


class _Assigning:
    """Assigns the stages of one step.

    Attributes:
      of_op: the stage of each op.
      of_value: the stage of each value.
      readers: by value, the stages that read it.
      there: by value, the stages that have it in the forward phase.
    """

    def __init__(self, step: PipelineStep, cut: StageCut) -> None:
        self.step, self.cut = step, cut
        self.arguments = frozenset(step.step.graph.inputs)
        self.of_op: dict[Op, int] = {}
        self.of_value: dict[int, int] = {}
        self.readers: dict[int, set[int]] = {}
        self.there: dict[int, set[int]] = {}

    def run(self) -> StageAssignment:
        backward = self.step.backward_ops
        self._forward()
        for op in self.step.body:
            if op in backward:
                stage = self._of_gradients(op)
                far = self._passed_on_by_others(op, stage)
                self._put(op, stage)
                self.of_value.update(far)
        self._prologue()
        self._epilogue()
        return StageAssignment(self.cut.num_stages, self.of_op, backward, self.of_value)

    def _put(self, op: Op, stage: int) -> None:
        self.of_op[op] = stage
        self.of_value.update(dict.fromkeys(op.outputs, stage))
        self._read_by(op, stage)

    def _read_by(self, op: Op, stage: int) -> None:
        """Records that an op's operands are read at its stage, and the operands of duplicated ops behind them, too."""
        for v in op.operands:
            if stage not in self.readers.setdefault(v, set()):
                self.readers[v].add(stage)
                if (maker := self.step.maker.get(v)) in self.step.duplicated:
                    self._read_by(maker, stage)

    def _staged(self, ops: Iterable[Op]) -> list[Op]:
        return [op for op in ops if op not in self.step.duplicated]

    # --- what runs for each microbatch

    def _forward(self) -> None:
        """Assigns the forward ops, and finds the stages that have each value in the forward phase."""
        ops, prologue = self.step.forward_ops, self._staged(self.step.prologue)
        for op, stage in zip(ops, self.cut.stages(len(ops)), strict=True):
            self._put(op, stage)
        self.there = {v: {*stages} for v, stages in self.readers.items()}
        for op in ops:
            for v in op.outputs:
                self.there.setdefault(v, set()).add(self.of_op[op])
        for op in reversed(prologue):
            stages = self._anywhere(op.outputs)
            for v in op.operands:
                self.there.setdefault(v, set()).update(stages)
        for op in prologue:  # for the backward phase alone, such as a transposed weight
            if not self._anywhere(op.outputs):
                self.there.update(dict.fromkeys(op.outputs, self._anywhere(op.operands)))

    def _anywhere(self, values: Sequence[int]) -> set[int]:
        return set[int]().union(*(self.there.get(v, ()) for v in values))

    def _of_gradients(self, op: Op) -> int:
        """The stage of a backward op."""
        gradients = [self.of_value[v] for v in op.operands if self._is_gradient(v)]
        stages = range(min(gradients, default=self.cut.num_stages - 1) + 1)
        residuals = [v for v in op.operands if self.there.get(v)]

        def missing_bytes(stage: int) -> int:
            return sum(self.step.values[v].num_bytes for v in residuals if stage not in self.there[v])

        having = set[int]().union(*(self.there[v] for v in residuals)).intersection(stages)
        return min(sorted({stages[-1], *having}, reverse=True), key=missing_bytes)

    def _passed_on_by_others(self, op: Op, stage: int) -> dict[int, int]:
        """The results of a barrier that are gradients of other stages, with their stages
        (`search.pipeline.stage_barriers`)."""
        if not is_barrier(op):
            return {}
        passed = zip(op.inputs, op.outputs, strict=True)
        made = {out: self.of_value[v] for v, out in passed if isinstance(v, int) and self._is_gradient(v)}
        return {out: at for out, at in made.items() if at != stage}

    def _is_gradient(self, v: int) -> bool:
        return self.step.is_of_microbatch(v) and v in self.of_value and v not in self.there

    # --- what runs once

    def _prologue(self) -> None:
        for total, term in self.step.terms.items():
            self._put(self.step.maker[total], self.of_value[term])
        for op in reversed(self._staged(self.step.prologue)):
            if op not in self.of_op:
                self._put(op, min(self._read_at(op), default=0))
        for v in self.step.step.graph.inputs:
            if stages := self.there.get(v) or self.readers.get(v):
                self.of_value[v] = min(stages)
        for op in self._staged(self.step.prologue):
            resting = [v for v in op.operands if v in self.of_value]
            largest = max(resting, key=self._num_bytes, default=None)
            if largest is not None and self._num_bytes(largest) > sum(map(self._num_bytes, op.outputs)):
                self._put(op, self.of_value[largest])
        for piece, (v, _) in self.step.pieces.items():
            self.of_value[piece] = self.of_value[v]

    def _epilogue(self) -> None:
        """Goes forth along the data, then back from readers, until all ops are assigned; ops without any link to a
        stage stand at the first one."""
        left = self._staged(self.step.epilogue)
        while left:
            found = [op for op in left if self._follow_operands(op)]
            found += [op for op in reversed(left) if op not in self.of_op and self._follow_readers(op)]
            for op in () if found else left:
                self._put(op, 0)
            left = [op for op in left if op not in self.of_op]
        for v in self.step.step.graph.inputs:
            self.of_value.setdefault(v, min(self.readers.get(v, {0})))

    def _follow_operands(self, op: Op) -> bool:
        known = [v for v in op.operands if v in self.of_value]
        if known and all(v in self.step.terms for v in op.operands):
            self._put(op, min(self.of_value[v] for v in known))
        elif known:
            most = max(known, key=lambda v: (self._num_bytes(v), v in self.arguments, -self.of_value[v]))
            self._put(op, self.of_value[most])
        return bool(known)

    def _follow_readers(self, op: Op) -> bool:
        stages = self._read_at(op)
        if stages:
            self._put(op, min(stages))
        return bool(stages)

    def _read_at(self, op: Op) -> set[int]:
        """The stages that read an op's results."""
        return set[int]().union(*(self.readers.get(v, ()) for v in op.outputs))

    def _num_bytes(self, v: int) -> int:
        return self.step.values[v].num_bytes
