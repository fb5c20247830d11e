"""One program for all stages, written from a step whose layers are loops.

The loop over microbatches is opened at the loops over layers inside it. First all microbatches run the ops before the
forward loop, then that loop, then the ops between the loops, and so on to the end of the backward phase. Loops over
layers are pipelined, the backward one like the forward one: each stage holds the parameters of its layers, and the
carry is sent from stage to stage. Ops between loops form segments. These run on all devices, each with an equal part of
the examples. So all stages have equal work, although the embedding and the head are no layers.

An op of the body stands behind the loops that it depends on, as early as possible. An op that depends on no loop stands
before its first reader. Cheap ops are duplicated: each reader computes them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from autoshard.cost_model.errors import InputError
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Role, Step, verify, walk
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.program_body import ProgramBody
from autoshard.search.pipeline.split_loops import is_of_layers
from autoshard.search.plan.spmd_step import LayerLoop, Segment, SpmdStep


def written(traced: Step, step: PipelineStep, num_workers: int, stages_per_worker: int) -> SpmdStep:
    """Writes one program for all stages.

    Args:
      traced: the step.
      step: the step taken apart into the microbatches of all replicas of a stage.
      num_workers: number of groups of devices.
      stages_per_worker: number of stages of each.

    Raises:
      InputError: there is no loop over so many equal layers.
    """
    loops = layer_loops(step, num_workers * stages_per_worker)
    return _SpmdWriter(traced, step, loops).run(num_workers, stages_per_worker)


def check_has_loops(step: Step) -> None:
    """Refuses a step without any loop that may be one over layers. That is known before the step is taken apart.

    Raises:
      InputError: there is no such loop.
    """
    if not any(op.name == "scan" for _, graph in walk(step.graph) for op in graph.ops):
        raise _without_loops(step.name)


def _without_loops(name: str) -> InputError:
    return InputError(
        f"the step {name!r} cannot run as one program for all stages: that is for layers in a loop, and its forward phase "
        "has no jax.lax.scan over layers with parameters of their own. Write its layers as one (nn.scan, nnx.scan), or "
        "leave out executor="
    )


def layer_loops(step: PipelineStep, num_stages: int) -> tuple[Op, ...]:
    """The loops over layers, forward and backward, in program order.

    Raises:
      InputError: there are none, the number of layers is no multiple of the number of stages, or a loop carries a
        random key.
    """
    forward = [op for op in step.body if is_of_layers(step, op)]
    if not forward:
        raise _without_loops(step.step.name)
    lengths = {int(op.params["length"]) for op in forward}
    for op in forward:
        if (length := int(op.params["length"])) % num_stages:
            raise InputError(
                f"the {length} layers of the loop {op.where} are not a multiple of {num_stages} stages, of which all are "
                "alike in one program. Ask for a number of stages that divides them, or leave out executor="
            )
        carries = op.result_values[: op.loop_counts[1]]
        if any(_jax.is_key_dtype(value.dtype) for value in carries):
            raise InputError(
                f"the loop over layers {op.where} hands a random key from layer to layer, which cannot be sent from stage "
                "to stage in one program. Split the key for all layers beforehand, or leave out executor="
            )
    stacks = {v for op in forward for v in op.stacked}
    backward = [op for op in step.body if _is_backward(op, lengths, stacks)]
    return tuple(op for op in step.body if op in forward or op in backward)


def _is_backward(op: Op, lengths: set[int], stacks: set[int]) -> bool:
    """True if an op is the reverse loop over the layers of another loop."""
    return (
        op.name == "scan"
        and op.params["reverse"]
        and int(op.params["length"]) in lengths
        and not stacks.isdisjoint(a for a in op.sliced if isinstance(a, int))
    )


class _SpmdWriter:
    """Writes the parts of one step.

    Attributes:
      examples: by value of the body that is one part of the examples, the array of all parts.
      level: by op of the body that is not duplicated, the number of loops that it stands behind.
      sum_of: by term, the sum that it is added to. A loop's stack that is only cast and added counts as the term.
    """

    def __init__(self, traced: Step, step: PipelineStep, loops: tuple[Op, ...]) -> None:
        self.traced, self.step, self.loops = traced, step, loops
        self.examples = _examples(step)
        cast = _only_added(step, loops)
        self.sum_of = {cast.get(term, term): total for total, term in step.terms.items()}
        self.left_out = {step.maker[term] for term in cast}
        self.level = self._levels()

    def run(self, num_workers: int, stages_per_worker: int) -> SpmdStep:
        step, epilogue_reads = self.step, self._epilogue_reads()
        order = [part for level in range(max(self.level.values()) + 1) for part in self._parts_at(level)]
        bodies = {
            part: ProgramBody(step, *self._content(part), makes_anew=self._is_duplicated) for part in order
        }
        exported = {step.pieces[v][0] for v in epilogue_reads if v in step.pieces}
        exported |= {a for op in self.loops for a in op.operands}.union(
            *(body.entering for body in bodies.values())
        )
        parts = tuple(self._written(part, bodies[part], exported) for part in order)
        exported |= {*epilogue_reads, *step.terms, *self.examples.values()}
        made = [v for op in step.prologue for v in op.outputs if v in exported]
        prologue = self._graph(step.prologue, step.step.graph.inputs, made)
        epilogue = self._graph(step.epilogue, epilogue_reads, step.step.graph.outputs)
        return SpmdStep(
            self.traced,
            num_workers,
            stages_per_worker,
            step.num_microbatches,
            step.values,
            prologue,
            tuple(part for part in parts if isinstance(part, LayerLoop) or part.makes),
            epilogue,
            step.index,
            self.examples,
            step.of_microbatch,
            {v: step.pieces[v] for v in epilogue_reads if v in step.pieces},
            frozenset(
                v
                for v, argument in self.traced.inputs
                if argument.role is Role.BATCH and step.values[v].shape
            ),
            layered(step, self.loops, self.sum_of),
        )

    # --- which op is in which part

    def _levels(self) -> dict[Op, int]:
        step, of_value, level = self.step, dict[int, int](), dict[Op, int]()
        for op in step.body:
            if op not in step.duplicated and op not in self.left_out:
                read = [of_value[v] for v in self._sources(op.operands) if v in of_value]
                level[op] = max(read, default=0) + (op in self.loops)
                of_value.update(dict.fromkeys(op.outputs, level[op]))
        handed_on = {*self.sum_of, *(v for v, _ in step.pieces.values())}
        first_read: dict[int, int] = {}
        for op in reversed(level):
            read = [first_read[v] for v in op.outputs if v in first_read]
            if not level[op] and read and handed_on.isdisjoint(op.outputs):
                level[op] = min(read)
            for v in self._sources(op.operands):
                first_read[v] = min(first_read.get(v, level[op]), level[op] - (op in self.loops))
        return level

    def _sources(self, values: Iterable[int]) -> set[int]:
        """The values, and those from which duplicated ops make them."""
        found = set(values)
        makers = {self.step.maker[v] for v in found if self._is_duplicated(v)}
        return found.union(*(self._sources(op.operands) for op in makers))

    def _is_duplicated(self, v: int) -> bool:
        return v not in self.examples and self.step.maker.get(v) in self.step.duplicated

    def _parts_at(self, level: int) -> list[Op | int]:
        """The loops of a level, then its segment."""
        return [*(op for op in self.loops if self.level[op] == level), level]

    def _content(self, part: Op | int) -> tuple[list[Op], list[int]]:
        """The ops of a part, and the duplicated values that it makes. A loop makes those that all layers of a
        microbatch share; the segment before a loop makes those that the loop slices."""
        if isinstance(part, Op):
            return [], self._duplicated(part.inputs[: sum(part.loop_counts)])
        ops = [op for op, level in self.level.items() if level == part and op not in self.loops]
        behind = [op for op in self.loops if self.level[op] == part + 1]
        return ops, [v for op in behind for v in self._duplicated(op.sliced)]

    def _duplicated(self, atoms: Iterable[Atom]) -> list[int]:
        values = dict.fromkeys(v for v in atoms if isinstance(v, int))
        return [v for v in values if self._is_duplicated(v)]

    def _epilogue_reads(self) -> tuple[int, ...]:
        """The values of other parts that the epilogue reads or the step returns."""
        graph = self.step.step.graph
        made = {v for op in self.step.epilogue for v in op.outputs} | {v for v, _ in self.step.constants}
        read = [v for op in self.step.epilogue for v in op.operands]
        read += graph.made
        return tuple(v for v in dict.fromkeys(read) if v not in made)

    # --- the parts

    def _written(self, part: Op | int, body: ProgramBody, exported: set[int]) -> Segment | LayerLoop:
        reads, (ops, anew) = tuple(body.entering), self._content(part)
        made = part.outputs if isinstance(part, Op) else tuple(v for op in ops for v in op.outputs)
        sums = {v: self.sum_of[v] for v in made if v in self.sum_of}
        used = frozenset(exported.intersection(made))
        if isinstance(part, Op):
            return LayerLoop(part, self._graph(body.ops, reads, anew), reads, tuple(anew), used, sums)
        makes = (*(v for v in made if v in used or v in sums), *anew)
        return Segment(self._graph(body.ops, reads, makes), reads, makes, used.union(anew), sums)

    def _graph(self, ops: Sequence[Op], inputs: Sequence[int], outputs: Sequence[Atom]) -> Graph:
        made = {v for op in ops for v in op.outputs}.union(inputs)
        constants = tuple(c for c in self.step.constants if c[0] not in made)
        graph = Graph(self.step.values, tuple(inputs), constants, tuple(ops), tuple(outputs))
        verify(graph)
        return graph


def _examples(step: PipelineStep) -> dict[int, int]:
    """By value of the body that is one part of the examples, the array of all parts."""
    found: dict[int, int] = {}
    for op in step.body:
        taken = step.maker.get(op.operands[0]) if op.name in ("squeeze", "reshape") and op.operands else None
        if taken is None or taken.name != "dynamic_slice" or not isinstance(array := taken.inputs[0], int):
            continue
        (v,) = op.outputs
        whole = (step.num_microbatches, *step.values[v].shape)
        if not step.is_of_microbatch(array) and step.values[array].shape == whole and array in step.maker:
            found[v] = array
    return found


def _only_added(step: PipelineStep, loops: Sequence[Op]) -> dict[int, int]:
    """By term that is a loop's stack in another dtype: that stack, if neither has another reader."""
    stacks = {v for op in loops for v in op.stacked}
    readers = Counter(v for op in step.ops for v in op.operands)
    handed_on = Counter((*step.terms.values(), *(v for v, _ in step.pieces.values())))
    found: dict[int, int] = {}
    for term in step.terms.values():
        op = step.maker[term]
        if op.name == "convert_element_type" and op.operands and (v := op.operands[0]) in stacks:
            uses = (readers[term], handed_on[term], readers[v], handed_on[v])
            found |= {term: v} if uses == (0, 1, 1, 0) else {}
    return found


def layered(step: PipelineStep, loops: Sequence[Op], sum_of: Mapping[int, int]) -> frozenset[int]:
    """The values outside of loops whose first dimension is that of layers: stacks that loops slice or make, their sums,
    and values that are computed with these element by element, such as moments."""
    found = {a for op in loops for a in op.sliced if isinstance(a, int)}
    found |= {v for op in loops for v in op.stacked}
    found |= {total for term, total in sum_of.items() if term in found}
    outside = (*step.prologue, *step.epilogue)
    while True:
        more = {v for op in outside for v in _alike(step, op, found)} - found
        if not more:
            return frozenset(found)
        found |= more


def _alike(step: PipelineStep, op: Op, found: set[int]) -> set[int]:
    """The values that an op reads and makes element by element, if one of them is among `found`; else none."""
    shaped = {v for v in (*op.operands, *op.outputs) if step.values[v].shape}
    is_elementwise = len({step.values[v].shape for v in shaped}) == 1 and not op.bodies
    return shaped if is_elementwise and not shaped.isdisjoint(found) else set()
