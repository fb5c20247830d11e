"""Barriers that wait only for values of their own stage.

*Recomputation.* In one program, a barrier makes the copies of a segment wait for all values that the backward phase has
made by then and still holds: the gradient that arrives, and weight gradients of later layers
(`search.memory.recompute`). In a pipeline, values of other stages would have to be sent there and, as the barrier
passes them on, summed up there. That gains nothing: a stage's backward pass is a program of its own, which begins when
its operands have arrived. So a barrier passes on only values of its own stage, and later readers of the others read
these directly.

*State on the host.* In one program, the fetch of a parameter's state waits for its gradient, and for new state that was
stored before (`search.memory.fetches`). In a pipeline, each stage updates its own state in its own time. So a barrier
of ops that run once is split into one barrier for each stage. To find the stages, each operand first gets a barrier of
its own: otherwise one stage's state would seem to be read by another's barrier.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Op
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stages import StageAssignment, is_barrier


def barriers_within_stages(step: PipelineStep, assigned: StageAssignment) -> PipelineStep:
    """The step whose barriers in the backward phase pass on no value of another stage."""
    made_as: dict[int, int] = {}
    body: list[Op] = []
    for op in step.body:
        near = range(len(op.outputs))
        if is_barrier(op) and op in assigned.backward:
            near = [n for n in near if assigned.of_value[op.outputs[n]] == assigned.of_op[op]]
        read = tuple(made_as.get(v, v) if isinstance(v, int) else v for v in op.inputs)
        passed = zip(read, op.outputs, strict=False)
        made_as |= {out: v for n, (v, out) in enumerate(passed) if n not in near and isinstance(v, int)}
        if len(near) < len(op.outputs):
            body += [_passing(replace(op, inputs=read), near)] if near else []
        else:
            body.append(op if read == op.inputs else replace(op, inputs=read))
    if not made_as:
        return step
    terms = {total: made_as.get(v, v) for total, v in step.terms.items()}
    pieces = {piece: (made_as.get(v, v), part) for piece, (v, part) in step.pieces.items()}
    return replace(step, body=tuple(body), terms=terms, pieces=pieces)


def barriers_per_value(step: PipelineStep) -> PipelineStep:
    """The step in which each barrier of ops that run once has one operand."""
    return _split(step, lambda v: v)


def barriers_per_stage(step: PipelineStep, assigned: StageAssignment) -> PipelineStep:
    """The step in which each barrier of ops that run once has operands of one stage.

    Args:
      step: the step in parts.
      assigned: the stages of the step in which each barrier has one operand.
    """
    return _split(step, assigned.of_value.__getitem__)


def _split(step: PipelineStep, group: Callable[[int], Hashable]) -> PipelineStep:
    """The step with each barrier split by groups of its results."""

    def parts(op: Op) -> Iterator[Op]:
        groups = dict[Hashable, list[int]]()
        for n, v in enumerate(op.outputs):
            groups.setdefault(group(v), []).append(n)
        yield from (_passing(op, which) for which in groups.values())

    def split(ops: Sequence[Op]) -> tuple[Op, ...]:
        return tuple(part for op in ops for part in (parts(op) if is_barrier(op) else (op,)))

    return replace(step, prologue=split(step.prologue), epilogue=split(step.epilogue))


def _passing(op: Op, which: Sequence[int]) -> Op:
    """A barrier with some of its operands and results."""
    return replace(
        op,
        inputs=tuple(op.inputs[n] for n in which),
        outputs=tuple(op.outputs[n] for n in which),
        result_values=tuple(op.result_values[n] for n in which),
    )
