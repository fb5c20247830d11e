"""A training step as programs, each of which one stage of a pipeline runs.

Each stage has a program for every kind of task: forward, backward, and weight gradients where the schedule has these
apart. A task runs it for one microbatch. What the step does once stands in programs too: its *prologue*, before all tasks,
and its *epilogue*, behind them, with the update. As their ops may wait for other stages (a total over all gradients goes
from all stages to one, and from there to all), a stage has one of these for each number of hops between stages that lie
before.

A value has a number and a stage where it is made or rests; programs of other stages that read it get a copy. Values of the
forward and backward programs are others for each microbatch. A value that a program reads and makes is a sum: the new one
takes the old one's place. All this is data: a schedule says when what runs, and an executor does it.

*Replicas.* A stage's devices may be several groups that do the same for other examples: a task's program then says what one
of them does with its part of the microbatch. What it reads of the prologue is alike for all; what it makes, and its sums,
each has its own. The sums of all are added together once, behind the last task, for the epilogue. So a step that goes
through its batch in so many microbatches on so many replicas takes it in as many parts as both make together: the part of a
replica has its number times the microbatches, and the microbatch's number.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.graph import Atom, Graph, Step, Value
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import WHOLE, Spec
from autoshard.search.plan.schedule import TaskKind


@dataclass(frozen=True, eq=False)
class StageProgram:
    """What a stage runs at once.

    Attributes:
      name: for messages and the compiler: `forward 2`.
      stage: whose it is.
      graph: what it computes.
      reads: the value that each input of the graph is.
      makes: the value that each output of the graph is.
    """

    name: str
    stage: int
    graph: Graph
    reads: tuple[int, ...]
    makes: tuple[int, ...]

    @property
    def sums(self) -> frozenset[int]:
        """The values that it adds to."""
        return frozenset(self.reads) & frozenset(self.makes)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one stage to another, once in a step or for each microbatch."""

    value: int
    source: int
    target: int
    is_per_microbatch: bool


@dataclass(frozen=True, eq=False)
class StagePrograms:
    """A step as programs of its stages.

    Attributes:
      step: the traced step.
      num_stages: in how many it is cut.
      num_microbatches: in how many it goes through its batch.
      num_replicas: among how many groups of a stage's devices each of them is shared out.
      prologue: what runs before all tasks, in order.
      tasks: what runs for a microbatch, by stage and kind; a stage may have nothing to do.
      epilogue: what runs behind all tasks, in order.
      stage_of: where each value is made, or rests; of arguments too.
      values: all values.
      of_microbatch: the values that are others for each microbatch.
      index: the part's number, a value that every stage has.
      pieces: by value that the epilogue reads: the value that it is, and of which part.
      results: per result of the step: the value, or the literal that it is.
    """

    step: Step
    num_stages: int
    num_microbatches: int
    num_replicas: int
    prologue: tuple[StageProgram, ...]
    tasks: Mapping[tuple[int, TaskKind], StageProgram]
    epilogue: tuple[StageProgram, ...]
    stage_of: Mapping[int, int]
    values: tuple[Value, ...]
    of_microbatch: frozenset[int]
    index: int
    pieces: Mapping[int, tuple[int, int]]
    results: tuple[Atom, ...]

    @property
    def programs(self) -> Iterator[StageProgram]:
        """All of them."""
        yield from self.prologue
        yield from self.tasks.values()
        yield from self.epilogue

    def is_of_microbatch(self, value: int) -> bool:
        """Whether a value is another one for each microbatch."""
        return value in self.of_microbatch

    def is_of_replica(self, value: int) -> bool:
        """Whether each replica has a value of its own; sums aside, of which each has a part."""
        return value == self.index or self.is_of_microbatch(value)

    @cached_property
    def sums(self) -> frozenset[int]:
        """The values that tasks add to."""
        return frozenset[int]().union(*(program.sums for program in self.tasks.values()))

    @cached_property
    def copied(self) -> tuple[int, ...]:
        """The results that are copies, each by its value: of other results, or of arguments that their caller keeps."""
        graph, replaces = self.step.graph, self.step.replaces
        taken = {v for n, v in enumerate(graph.inputs) if n not in replaces}
        found: list[int] = []
        for v in (atom for atom in self.results if isinstance(atom, int)):
            found += [v] if v in taken else []
            taken.add(v)
        return tuple(found)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """What goes from stage to stage, by value and target."""
        found = {
            Transfer(v, self.stage_of[v], program.stage, self.is_of_microbatch(v))
            for program in self.programs
            for v in program.reads
            if v != self.index and self.stage_of[v] != program.stage
        }
        return tuple(sorted(found, key=lambda t: (t.value, t.target)))


@dataclass(frozen=True, eq=False)
class StageSharding:
    """How a stage's values lie on its submesh.

    The first axis of the submesh is that of the replicas. Values that each of these has for itself lie on the other axes.

    Attributes:
      mesh_shape: sizes of the submesh's axes, outermost first.
      axis_names: their names.
      specs: of the values that its programs read and make, those that are split.
      inside: by program, the specs to impose on what it makes in between.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[int, Spec]
    inside: Mapping[str, StepSharding]

    def spec(self, value: int) -> Spec:
        """How a value lies."""
        return self.specs.get(value, (WHOLE,) * len(self.mesh_shape))

    def of_program(self, program: StageProgram) -> StepSharding:
        """What is imposed on a program's values."""
        nothing = StepSharding(self.mesh_shape, self.axis_names, {}, {})
        return self.inside.get(program.name, nothing)
