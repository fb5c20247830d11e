"""From a solution for the whole step to how the devices of a replica share its work in one program for all stages.

Stages and replicas are axes of their own. What the solution decides of an op or of a value holds on the other axes, at every
stage alike; but the dim that carries the layers is the stages'.
"""

from collections.abc import Iterator

from search.ir.sharding import Place
from search.ir.spec import AXIS_NAMES, WHOLE, Spec
from search.pipeline.imposed import Imposed
from search.pipeline.intra_op import IntraOp
from search.pipeline.pipeline_step import PipelineStep
from search.plan.spmd_step import LayerLoop, SpmdSharding, SpmdStep


def spmd_sharding(
    intra_op: IntraOp, step: PipelineStep, program: SpmdStep, num_replicas: int
) -> SpmdSharding:
    """How values lie on the devices of a replica, which share the work by a solution.

    Args:
      intra_op: the solution, of the step that `step` takes apart.
      step: the step in parts.
      program: written from it.
      num_replicas: of each stage.
    """
    specs = {v: _lies(intra_op, step, program, v) for v in sorted(set(_values(program)))}
    specs |= {new: specs[old] for new, old in _replaced(program) if new in specs}
    imposed = Imposed.of(intra_op, step)
    inside = {
        part: imposed.on((part.op,) if isinstance(part, LayerLoop) else part.graph.ops)
        for part in program.parts
    }
    names = AXIS_NAMES[len(intra_op.mesh_shape)]
    split = {v: spec for v, spec in specs.items() if max(spec) >= 0}
    whole = (WHOLE,) * len(intra_op.mesh_shape)
    entering = {v: s for v, s in _entering(intra_op, step, program) if s != split.get(v, whole)}
    return SpmdSharding(num_replicas, intra_op.mesh_shape, names, split, entering, inside)


def _lies(
    intra_op: IntraOp, step: PipelineStep, program: SpmdStep, v: int, place: Place | None = None
) -> Spec:
    spec = intra_op.lies(place or step.place_of(v), step.values[v])
    return tuple(WHOLE if d == 0 else d for d in spec) if v in program.layered else spec


def _entering(intra_op: IntraOp, step: PipelineStep, program: SpmdStep) -> Iterator[tuple[int, Spec]]:
    """What the loop over parts of the batch reads as a whole, and how it does."""
    loop = step.step.graph.ops[step.loop]
    dealt = {*program.examples.values()}
    for i, v in enumerate(loop.inputs[: loop.loop_counts[0]]):
        if isinstance(v, int) and v not in dealt:
            yield v, _lies(intra_op, step, program, v, ("input", (step.loop, "jaxpr", 0), i))


def _values(program: SpmdStep) -> Iterator[int]:
    """What parts read and make, and what the step does."""
    for graph in (program.prologue, program.epilogue):
        yield from graph.inputs
        yield from (v for v in graph.outputs if isinstance(v, int))
    for part in program.parts:
        yield from (*part.reads, *part.makes, *part.sums.values())
        if isinstance(part, LayerLoop):
            yield from (*part.op.operands, *part.op.outputs)
    yield from (whole for whole in program.examples.values())


def _replaced(program: SpmdStep) -> Iterator[tuple[int, int]]:
    """New state, with the argument that it replaces."""
    step = program.step
    for v, r in zip(program.epilogue.outputs, step.replaces, strict=True):
        if r is not None and isinstance(v, int):
            yield v, step.graph.inputs[r]
