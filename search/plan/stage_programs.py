"""A training step as programs, each of which runs on one stage of a pipeline.

Each stage has a program for every kind of task: forward, backward, and weight gradients if the schedule separates them.
A task runs it for one microbatch. Ops that run once per step have programs too: the *prologue* before all tasks, and
the *epilogue* behind them, with the update. Their ops may wait for other stages. A total over all gradients, for
instance, goes from all stages to one, and from there to all. So a stage has one such program for each number of
transfers between stages that come before it.

A value has a number, and a stage where it is made or rests. Programs of other stages that read it get a copy. Values of
forward and backward programs differ between microbatches. A value that a program both reads and makes is a sum: the new
one takes the old one's place. All this is data: a schedule orders the tasks, and an executor runs them.

*Replicas.* A stage's devices may form several groups that do the same work for different examples. A task's program
then describes the work of one group on its part of the microbatch. All groups read equal values of the prologue, and
each has its own results and sums. The groups' sums are added once, behind the last task, for the epilogue. So a step
takes its batch in as many parts as microbatches times replicas. The number of a part is the replica's number times the
number of microbatches, plus the microbatch's number.
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
    """A program that a stage runs in one go.

    Attributes:
      name: its name in messages and for the compiler: `forward 2`.
      stage: the stage that runs it.
      graph: its ops.
      reads: the value of each input of the graph.
      makes: the value of each output of the graph.
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
      num_stages: number of stages.
      num_microbatches: number of microbatches of a batch.
      num_replicas: number of groups of a stage's devices that share each microbatch.
      prologue: programs before all tasks, in order.
      tasks: the program of a task, by stage and kind; a stage may have none.
      epilogue: programs behind all tasks, in order.
      stage_of: the stage where each value is made or rests, arguments included.
      values: all values.
      of_microbatch: values that differ between microbatches.
      index: the part's number, a value that every stage has.
      pieces: by value that the epilogue reads, the value and the part of the batch that it comes from.
      results: per result of the step, its value or literal.
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
        """All programs."""
        yield from self.prologue
        yield from self.tasks.values()
        yield from self.epilogue

    def is_of_microbatch(self, value: int) -> bool:
        """True if a value differs between microbatches."""
        return value in self.of_microbatch

    def is_of_replica(self, value: int) -> bool:
        """True if each replica has a value of its own. Sums do not count: each replica has a part of them."""
        return value == self.index or self.is_of_microbatch(value)

    @cached_property
    def sums(self) -> frozenset[int]:
        """The values that tasks add to."""
        return frozenset[int]().union(*(program.sums for program in self.tasks.values()))

    @cached_property
    def copied(self) -> tuple[int, ...]:
        """The results that are copies of other results, or of arguments that their caller keeps, each by its value."""
        graph, replaces = self.step.graph, self.step.replaces
        taken = {v for n, v in enumerate(graph.inputs) if n not in replaces}
        found: list[int] = []
        for v in (atom for atom in self.results if isinstance(atom, int)):
            found += [v] if v in taken else []
            taken.add(v)
        return tuple(found)

    @cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """The values that go from stage to stage, ordered by value and target."""
        found = {
            Transfer(v, self.stage_of[v], program.stage, self.is_of_microbatch(v))
            for program in self.programs
            for v in program.reads
            if v != self.index and self.stage_of[v] != program.stage
        }
        return tuple(sorted(found, key=lambda t: (t.value, t.target)))


@dataclass(frozen=True, eq=False)
class StageSharding:
    """The layouts of a stage's values on its submesh.

    The first axis of the submesh is that of the replicas. Values that each replica has for itself lie on the other
    axes.

    Attributes:
      mesh_shape: sizes of the submesh's axes, outermost first.
      axis_names: their names.
      specs: specs of the split values that its programs read and make.
      inside: by program, the specs to impose on values within it.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[int, Spec]
    inside: Mapping[str, StepSharding]

    def spec(self, value: int) -> Spec:
        """The spec of a value."""
        return self.specs.get(value, (WHOLE,) * len(self.mesh_shape))

    def of_program(self, program: StageProgram) -> StepSharding:
        """The specs to impose on a program's values."""
        nothing = StepSharding(self.mesh_shape, self.axis_names, {}, {})
        return self.inside.get(program.name, nothing)
