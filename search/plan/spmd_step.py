"""A training step as one program for all stages of a pipeline: its loops over layers go from stage to stage, microbatch by
microbatch, and all else runs on all devices.

    prologue   once: parameters in another type, the examples dealt out, sums set to zero;
    parts      by turns, for all microbatches: what stands before a loop over layers, and such a loop, forward or backward;
    epilogue   once: the update.

A value that is another one for each microbatch is held for all of them. So what a forward loop stacks up for the backward
loop is there for all microbatches at once, as GPipe has it, on the stage that made it.
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
      graph: what they compute.
      reads: the value that each input of the graph is.
      makes: the value that each output of the graph is.
      wanted: of these, those that others read.
      sums: of these, those that are added up over microbatches, each with the sum that it is added to.
    """

    graph: Graph
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    wanted: frozenset[int]
    sums: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """A loop over layers, of which each stage has its own.

    Attributes:
      op: the loop, a `scan`; its operands are values of the step.
      ahead: makes those operands anew that are light, for each microbatch; of `reads`.
      reads: the value that each input of `ahead` is.
      makes: the value that each output of `ahead` is.
      wanted: of its results, those that others read.
      sums: of its results, those that are added up over microbatches, each with the sum that it is added to.
    """

    op: Op
    ahead: Graph
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    wanted: frozenset[int]
    sums: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class SpmdStep:
    """A step as one program for all stages.

    Attributes:
      step: the traced step.
      num_workers: groups of devices, along which the layers are split.
      stages_per_worker: runs of layers that each of them has, far apart.
      num_parts: in how many it goes through its batch: each device of a group has microbatches of its own.
      values: all values.
      prologue: from the step's arguments to what the others read; its outputs are those values themselves.
      parts: by turns.
      epilogue: from what it reads, its inputs, to the step's results.
      index: the number of a part of the batch.
      examples: by value of the parts that holds examples of the batch, the value of the prologue that has all parts': it has
        one more dim, the first.
      of_microbatch: the values that are others in each part of the batch.
      pieces: by value that the epilogue reads, the value that it is, and of which part of the batch.
      batch: the arguments whose first dim is the examples.
      layered: the values whose first dim carries the layers, arguments and results among them.
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


@dataclass(frozen=True, eq=False)
class SpmdSharding:
    """How the devices of a stage share its work: as replicas, of which each has devices that form a mesh; all stages alike.

    Attributes:
      num_replicas: of each stage.
      mesh_shape: sizes of the mesh's axes, outermost first; none where a replica is one device.
      axis_names: their names.
      specs: of the values that parts read and make, and of what the step reads and makes, those that are split.
      entering: of the values that are the same for all microbatches, those that parts read otherwise than they rest.
      inside: by part, what is imposed on its ops; a loop over layers is the one op of its part.
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
        """How a value lies, apart from its stage and its replica."""
        return self.specs.get(value, (WHOLE,) * len(self.mesh_shape))

    def entry_spec(self, value: int) -> Spec:
        """How a value lies that is the same for all microbatches, where parts read it."""
        return self.entering.get(value, self.spec(value))

    def of_part(self, part: Segment | LayerLoop) -> StepSharding:
        """What is imposed on a part's values."""
        return self.inside.get(part, StepSharding(self.mesh_shape, self.axis_names, {}, {}))
