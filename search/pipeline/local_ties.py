"""What is recomputed waits for its own stage only.

In one program, the copies of a segment wait, by a barrier, for all that the backward phase has made by then and still holds:
the gradient that arrives, and weight gradients of layers behind (`search.memory.recompute`). In a pipeline, those of other
stages would have to be sent there and, as they are passed on, summed up there. Nothing is won by it: a stage's backward pass
is a program of its own, which begins when what it reads has come. So a barrier passes on what its own stage has made, and
whoever reads the rest of it reads that as it was made.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.search.ir.graph import Op
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.stages import StageAssignment, is_tie


def within_stages(step: PipelineStep, assigned: StageAssignment) -> PipelineStep:
    """The step whose barriers in the backward phase pass on nothing of other stages.

    Args:
      step: the step in parts.
      assigned: its stages.
    """
    made_as: dict[int, int] = {}
    body: list[Op] = []
    for op in step.body:
        near = range(len(op.outputs))
        if is_tie(op) and op in assigned.backward:
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


def _passing(op: Op, which: Sequence[int]) -> Op:
    """A barrier that passes on some of what it does."""
    return replace(
        op,
        inputs=tuple(op.inputs[n] for n in which),
        outputs=tuple(op.outputs[n] for n in which),
        result_values=tuple(op.result_values[n] for n in which),
    )
