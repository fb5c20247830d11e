"""The programs of a pipeline's stages, written from a step whose ops have stages.

An op goes into the program of its stage and of its part of the step: prologue, forward, backward, epilogue. A program's
operands are the values that its ops read and do not make; its results are the values that other programs read. Each program
computes cheap values itself. A backward program also recomputes those forward values that the compiler would not store if
both passes were one program.

*Prologue and epilogue* may have to wait for other stages. An op's level is the number of hops between stages that lie
before it: one program runs the ops of one stage and level. So no two programs wait for each other, and there are few.

*Weight gradients.* If the schedule has tasks for them, the backward program of a stage keeps the ops that other stages wait
for: a backward slice from the values that it sends. The other ops follow in a program of their own (Qi et al. 2024, "Zero
bubble pipeline parallelism"). The first stage sends nothing, so that all of its backward ops come later.

*Sums* are added up in the program that makes their terms.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import jax

from autoshard.search.ir.graph import Graph, Op, verify
from autoshard.search.memory.written import Written
from autoshard.search.pipeline.pipeline_step import SCOPE, PipelineStep
from autoshard.search.pipeline.program_body import ProgramBody
from autoshard.search.pipeline.shared_gradients import added_once
from autoshard.search.pipeline.split_loops import between_ops
from autoshard.search.pipeline.stage_barriers import (
    barriers_per_stage,
    barriers_per_value,
    barriers_within_stages,
)
from autoshard.search.pipeline.stage_cut import StageCut
from autoshard.search.pipeline.stages import StageAssignment, assign
from autoshard.search.plan.schedule import TaskKind
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms


def stage_programs(step: PipelineStep, cut: StageCut, splits_backward: bool = False) -> StagePrograms:
    """The programs of a step that is cut into stages.

    Args:
      step: the step in parts, made ready for the cut.
      cut: the positions at which stages begin in its forward phase.
      splits_backward: whether weight gradients have programs of their own.
    """
    return _StageWriter(step, assign(step, cut), splits_backward).run()


def made_ready(step: PipelineStep, cut: StageCut) -> tuple[PipelineStep, StageCut]:
    """The step with its loops cut between stages, barriers within stages, and sums of several stages joined late; and its
    cut."""
    step, cut = between_ops(step, cut)
    step = barriers_within_stages(step, assign(step, cut))
    step = added_once(step, assign(step, cut))
    return barriers_per_stage(step, assign(barriers_per_value(step), cut)), cut


def left_for_later(step: PipelineStep, assigned: StageAssignment) -> frozenset[Op]:
    """The backward ops on which no other stage depends."""
    backward = [op for op in step.body if op in assigned.backward]
    awaited: set[int] = set()
    later: set[Op] = set()
    for op in reversed(backward):
        stage = assigned.of_op[op]
        if awaited.isdisjoint(op.outputs):
            later.add(op)
        for v in op.operands:
            if op not in later or assigned.of_value.get(v, stage) != stage:
                awaited.add(v)
    return frozenset(later)


@dataclass(frozen=True)
class _Place:
    """The program of an op: a part of the step (numbered in the order in which parts run), a stage, and a level in the
    part."""

    part: int
    level: int
    stage: int


_PROLOGUE, _FORWARD, _BACKWARD, _WEIGHT_GRADIENT, _EPILOGUE = range(5)
_KINDS = {
    _FORWARD: TaskKind.FORWARD,
    _BACKWARD: TaskKind.BACKWARD,
    _WEIGHT_GRADIENT: TaskKind.WEIGHT_GRADIENT,
}
_NAMES = ("prologue", "forward", "backward", "weight gradient", "update")


class _StageWriter:
    """Writes the programs of one step."""

    def __init__(self, step: PipelineStep, assigned: StageAssignment, splits_backward: bool) -> None:
        self.step, self.assigned, self.splits_backward = step, assigned, splits_backward
        self.sum_of = {term: total for total, term in step.terms.items()}
        self.stage_of = dict(assigned.of_value)
        self.results = tuple(step.step.graph.outputs)

    def run(self) -> StagePrograms:
        ops = self._placed()
        self._duplicate_results(ops)
        exported = self._exported(ops)
        programs = {place: self._program(place, ops[place], exported) for place in ops}
        for program in programs.values():
            verify(program.graph)
        ordered = sorted(programs.items(), key=lambda one: (one[0].part, one[0].level, one[0].stage))
        return StagePrograms(
            self.step.step,
            self.assigned.num_stages,
            self.step.num_microbatches,
            self.step.num_replicas,
            tuple(program for place, program in ordered if place.part == _PROLOGUE),
            {
                (place.stage, _KINDS[place.part]): program
                for place, program in ordered
                if place.part in _KINDS
            },
            tuple(program for place, program in ordered if place.part == _EPILOGUE),
            self.stage_of,
            self.step.values,
            self.step.of_microbatch,
            self.step.index,
            self.step.pieces,
            self.results,
        )

    # --- from ops to programs

    def _placed(self) -> dict[_Place, list[Op]]:
        """The ops of each program, in program order."""
        placed: dict[_Place, list[Op]] = {}
        later = left_for_later(self.step, self.assigned) if self.splits_backward else frozenset[Op]()
        for part, ops in ((_PROLOGUE, self.step.prologue), (_EPILOGUE, self.step.epilogue)):
            for op, level in self._levels(ops):
                placed.setdefault(_Place(part, level, self.assigned.of_op[op]), []).append(op)
        for op in self.step.body:
            if op not in self.step.duplicated:
                is_backward = op in self.assigned.backward
                part = _WEIGHT_GRADIENT if op in later else _BACKWARD if is_backward else _FORWARD
                placed.setdefault(_Place(part, 0, self.assigned.of_op[op]), []).append(op)
        return placed

    def _levels(self, ops: Iterable[Op]) -> list[tuple[Op, int]]:
        """The ops that have a stage, each with its level."""
        levels: dict[int, int] = {}
        found: list[tuple[Op, int]] = []
        for op in ops:
            if op not in self.step.duplicated:
                stage = self.assigned.of_op[op]
                before = [levels[v] + (self.stage_of[v] != stage) for v in op.operands if v in levels]
                level = max(before, default=0)
                levels.update(dict.fromkeys(op.outputs, level))
                found.append((op, level))
        return found

    def _duplicate_results(self, placed: dict[_Place, list[Op]]) -> None:
        """Assigns the step's duplicated results to programs: at the stage of the argument that each replaces."""
        step = self.step.step
        for v, replaced in zip(self.results, step.replaces, strict=True):
            if v in self._duplicated_results:
                stage = 0 if replaced is None else self.stage_of[step.graph.inputs[replaced]]
                placed.setdefault(_Place(_EPILOGUE, 0, stage), [])
                self.stage_of[v] = stage

    # --- programs

    def _exported(self, placed: Mapping[_Place, Sequence[Op]]) -> frozenset[int]:
        """The values that programs make for other programs or for the caller."""
        exported = {*self.step.step.graph.made}
        for place, ops in placed.items():
            exported |= {*self._body(place, ops).entering}
        return frozenset(exported | {v for piece, (v, _) in self.step.pieces.items() if piece in exported})

    def _duplicated_at(self, place: _Place) -> list[int]:
        """The step's results that a program computes, although they are duplicated."""
        is_first = place.part == _EPILOGUE and place.level == 0
        return [v for v in self._duplicated_results if is_first and self.stage_of[v] == place.stage]

    @cached_property
    def _duplicated_results(self) -> tuple[int, ...]:
        """The step's results that each reader computes itself: constants, and results of cheap ops."""
        constants = {v for v, _ in self.step.constants}
        results = dict.fromkeys(self.step.step.graph.made)
        return tuple(v for v in results if v in constants or self.step.maker.get(v) in self.step.duplicated)

    def _body(self, place: _Place, ops: Sequence[Op]) -> ProgramBody:
        anew = self.step.duplicated
        if place.part in (_BACKWARD, _WEIGHT_GRADIENT):
            anew |= self._recomputed_at(place.stage)
        duplicated = self._duplicated_at(place)
        return ProgramBody(self.step, ops, duplicated, lambda v: self.step.maker.get(v) in anew)

    def _recomputed_at(self, stage: int) -> frozenset[Op]:
        """The forward ops of a stage that its backward pass runs again: the compiler would not store their results."""
        assigned = self.assigned
        return frozenset(
            op
            for op in self.step.body
            if assigned.of_op.get(op) == stage and op not in assigned.backward and self._is_on_the_fly(op)
        )

    def _is_on_the_fly(self, op: Op) -> bool:
        on_the_fly = self.step.on_the_fly
        return not op.bodies and all(self.step.original(v) in on_the_fly for v in op.outputs)

    def _program(self, place: _Place, ops: Sequence[Op], exported: frozenset[int]) -> StageProgram:
        duplicated = self._duplicated_at(place)
        body = self._body(place, ops)
        written = Written(self.step.values, SCOPE)
        written.ops += body.ops
        made = [v for op in ops for v in op.outputs]
        outputs = {v: v for v in (*made, *duplicated) if v in exported}
        reads = list(body.entering)
        for op in ops:
            for term in op.outputs:
                if term in self.sum_of:
                    total = self.sum_of[term]
                    reads.append(total)
                    outputs[total] = written.write(jax.lax.add, (total, term), op)
        constants = tuple((v, content) for v, content in self.step.constants if v in body.constants)
        graph = Graph(
            tuple(written.values), tuple(reads), constants, tuple(written.ops), tuple(outputs.values())
        )
        level = f" {place.level}" if place.level else ""
        name = f"{_NAMES[place.part]} {place.stage}{level}"
        return StageProgram(name, place.stage, graph, tuple(reads), tuple(outputs))
