"""A training step as one program for all stages of a pipeline. Its loops over layers run from stage to stage,
microbatch by microbatch; all other ops run on all devices.

    prologue   once: casts parameters, deals out the examples, sets sums to zero;
    parts      in turn, for all microbatches: the ops before a loop over layers, and the loop, forward or backward;
    epilogue   once: the update.

A value that differs between microbatches is held for all of them. So the residuals that a forward loop stacks for the
backward loop exist for all microbatches at once, as in GPipe, on the stage that made them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.search.ir.graph import Graph, Op, Step, Value
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import WHOLE, Spec

LOOP = (0,)
"""The place of a loop over layers in its part."""


@dataclass(frozen=True, eq=False)
class Segment:
    """Ops that run for each microbatch, on all devices.

    Attributes:
      graph: the ops.
      reads: the value of each input of the graph.
      makes: the value of each output of the graph.
      exported: values of `makes` that other parts read.
      sums: values of `makes` that are added up over microbatches, each with the sum that it is added to.
    """

    graph: Graph
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    exported: frozenset[int]
    sums: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """A loop over layers, of which each stage has its own.

    Attributes:
      op: the loop, a `scan`; its operands are values of the step.
      ahead: makes the cheap operands of the loop anew for each microbatch, from `reads`.
      reads: the value of each input of `ahead`.
      makes: the value of each output of `ahead`.
      exported: results of the loop that other parts read.
      sums: results of the loop that are added up over microbatches, each with the sum that it is added to.
    """

    op: Op
    ahead: Graph
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    exported: frozenset[int]
    sums: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class SpmdStep:
    """A step as one program for all stages.

    Attributes:
      step: the traced step.
      num_workers: number of groups of devices that share the layers.
      stages_per_worker: number of runs of layers that each group has, far apart.
      num_parts: number of parts of the batch. Each device of a group has microbatches of its own.
      values: all values.
      prologue: from the step's arguments to the values that other parts read, which are its outputs.
      parts: segments and loops over layers, in turn.
      epilogue: from the values that it reads, which are its inputs, to the step's results.
      index: the number of a part of the batch.
      examples: by value of the parts that holds examples, the value of the prologue that holds those of all parts. It
        has one more dim, the first.
      of_microbatch: values that differ between parts of the batch.
      pieces: by value that the epilogue reads, the value and the part of the batch that it comes from.
      batch: arguments whose first dim is the examples.
      layered: values whose first dim is the layers, including arguments and results.
    """

    step: Step
    num_workers: int
    stages_per_worker: int
    num_parts: int
    values: tuple[Value, ...]
    prologue: Graph
    parts: tuple[Segment | LayerLoop, ...]
    epilogue: Graph
    index: int
    examples: Mapping[int, int]
    of_microbatch: frozenset[int]
    pieces: Mapping[int, tuple[int, int]]
    batch: frozenset[int]
    layered: frozenset[int]

    @property
    def loops(self) -> tuple[LayerLoop, ...]:
        """The loops over layers, in program order."""
        return tuple(part for part in self.parts if isinstance(part, LayerLoop))

    @property
    def read_layers(self) -> tuple[int, ...]:
        """The stacks that loops slice by layer and that are equal for all parts of the batch."""
        sliced = dict.fromkeys(a for loop in self.loops for a in loop.op.sliced if isinstance(a, int))
        return tuple(v for v in sliced if v not in self.of_microbatch)


@dataclass(frozen=True, eq=False)
class SpmdSharding:
    """The division of a stage's work among its devices: replicas, each of which is a mesh of devices. All stages are
    alike.

    Attributes:
      num_replicas: number of replicas of each stage.
      mesh_shape: sizes of the mesh's axes, outermost first; empty if a replica is one device.
      axis_names: their names.
      specs: specs of the split values that the parts and the step read and make.
      entering: specs of values that are equal for all microbatches, and that parts read in another layout than their
        own.
      inside: by part, the specs to impose on its ops. A loop over layers is the only op of its part.
    """

    num_replicas: int
    mesh_shape: tuple[int, ...] = ()
    axis_names: tuple[str, ...] = ()
    specs: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    entering: Mapping[int, Spec] = field(default_factory=dict[int, Spec])
    inside: Mapping[Segment | LayerLoop, StepSharding] = field(
        default_factory=dict[Segment | LayerLoop, StepSharding]
    )

    def spec(self, value: int) -> Spec:
        """The spec of a value, apart from its stage and its replica."""
        return self.specs.get(value, (WHOLE,) * len(self.mesh_shape))

    def entry_spec(self, value: int) -> Spec:
        """The spec in which parts read a value that is equal for all microbatches."""
        return self.entering.get(value, self.spec(value))

    def of_part(self, part: Segment | LayerLoop) -> StepSharding:
        """The specs to impose on a part's values."""
        return self.inside.get(part, StepSharding(self.mesh_shape, self.axis_names, {}, {}))
