"""The sharding of one program for all stages, from a solution for the whole step.

Stages and replicas are mesh axes of their own. The solution's decisions for an op or a value hold on the other axes, at
every stage. Only the dimension of layers is split over stages.

If another loop reads only a part of a stack on each device, the stack is made in these parts: the slice costs nothing
there, either, and a stack holds all microbatches. (The compiler's partitioner would do so by itself, but would then
read all layers of a microbatch at once.)
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from autoshard.search.ir.sharding import OperandReshard, Place, StepSharding
from autoshard.search.ir.spec import AXIS_NAMES, WHOLE, Spec
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.op_shardings import OpShardings
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.plan.spmd_step import LOOP, LayerLoop, Segment, SpmdSharding, SpmdStep
from autoshard.search.problem.reshard import SLICE


def spmd_sharding(
    intra_op: IntraOp, step: PipelineStep, program: SpmdStep, num_replicas: int
) -> SpmdSharding:
    """The specs of values on a replica's devices, which share the work by a solution."""
    specs = {v: _spec_of(intra_op, step, program, v) for v in sorted(set(_values(program)))}
    specs |= {new: specs[old] for new, old in _replaced(program) if new in specs}
    of_ops = OpShardings.of(intra_op, step)
    inside = {
        part: of_ops.on((part.op,) if isinstance(part, LayerLoop) else part.graph.ops)
        for part in program.parts
    }
    in_parts = dict(_stacked_in_parts(program, inside))
    specs |= in_parts
    inside = {part: _without(sharding, part, in_parts) for part, sharding in inside.items()}
    names = AXIS_NAMES[len(intra_op.mesh_shape)]
    split = {v: spec for v, spec in specs.items() if max(spec) >= 0}
    whole = (WHOLE,) * len(intra_op.mesh_shape)
    entering = {v: s for v, s in _entering(intra_op, step, program) if s != split.get(v, whole)}
    return SpmdSharding(num_replicas, intra_op.mesh_shape, names, split, entering, inside)


def _stacked_in_parts(
    program: SpmdStep, inside: Mapping[Segment | LayerLoop, StepSharding]
) -> Iterator[tuple[int, Spec]]:
    """The stacks of which all readers slice one and the same part, with the spec of that part."""
    read: dict[int, set[Spec | None]] = {}
    for part in program.parts:
        for v in part.reads:
            read.setdefault(v, set()).add(None)
        if isinstance(part, LayerLoop):
            reshards, num_given = inside[part].reshards, sum(part.op.loop_counts)
            for n, v in enumerate(part.op.inputs):
                if isinstance(v, int):
                    path = reshards.get(("operand", LOOP, n), OperandReshard(())).path
                    is_sliced = n >= num_given and path and all(step.kind == SLICE for step in path)
                    read.setdefault(v, set()).add(path[-1].after if is_sliced else None)
    for part in program.parts:
        if isinstance(part, LayerLoop):
            for v in part.op.stacked:
                if v in part.exported and len(specs := read.get(v, set())) == 1 and (spec := specs.pop()):
                    yield v, spec


def _without(sharding: StepSharding, part: Segment | LayerLoop, stacks: Mapping[int, Spec]) -> StepSharding:
    """A part's sharding without slices of stacks that are made in parts."""
    inputs = part.op.inputs if isinstance(part, LayerLoop) else ()
    there = {("operand", LOOP, n) for n, v in enumerate(inputs) if isinstance(v, int) and v in stacks}
    return replace(sharding, reshards={p: r for p, r in sharding.reshards.items() if p not in there})


def _spec_of(
    intra_op: IntraOp, step: PipelineStep, program: SpmdStep, v: int, place: Place | None = None
) -> Spec:
    spec = intra_op.spec_of(place or step.place_of(v), step.values[v])
    return tuple(WHOLE if d == 0 else d for d in spec) if v in program.layered else spec


def _entering(intra_op: IntraOp, step: PipelineStep, program: SpmdStep) -> Iterator[tuple[int, Spec]]:
    """The operands that all iterations of the loop over parts of the batch share, with their specs inside the loop."""
    loop = step.step.graph.ops[step.loop]
    examples = {*program.examples.values()}
    for i, v in enumerate(loop.inputs[: loop.loop_counts[0]]):
        if isinstance(v, int) and v not in examples:
            yield v, _spec_of(intra_op, step, program, v, ("input", (step.loop, "jaxpr", 0), i))


def _values(program: SpmdStep) -> Iterator[int]:
    """The values that the parts of a program, its prologue and its epilogue read and make."""
    for graph in (program.prologue, program.epilogue):
        yield from graph.inputs
        yield from graph.made
    for part in program.parts:
        yield from (*part.reads, *part.makes, *part.sums.values())
        if isinstance(part, LayerLoop):
            yield from (*part.op.operands, *part.op.outputs)
    yield from (whole for whole in program.examples.values())


def _replaced(program: SpmdStep) -> Iterator[tuple[int, int]]:
    """New state, with the argument that it replaces."""
    step = program.step
    for v, r in zip(program.epilogue.outputs, step.rests_as, strict=True):
        if r is not None and isinstance(v, int):
            yield v, step.graph.inputs[r]
