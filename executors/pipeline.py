"""The pipeline executor: a program per stage and kind of task, handed out in a schedule's order, on disjoint submeshes.

Nothing waits here. JAX runs what it is handed as soon as the operands are there, so the host runs ahead: it hands each
worker its tasks in the schedule's order, and what one stage makes for another is sent as soon as it is made, while both
compute. The schedule is followed once, when the step is built; what is left for each call is a list of instructions over
numbered slots: call this with those, put the results there, let go of what nobody reads any more.

* A value lies in one slot for each way in which it lies somewhere: stages that share a worker and its spec share the slot.
* Sums are added up in place: their old buffers are donated to the new ones. So is state to the new state, where its last
  reader makes that, and what the update alone reads.
* Stages that have replicas add up each one's sums apart; they are added together once, behind the last task.
* Where a value goes between submeshes of one shape, it is sent shard by shard; where the shapes differ, it is laid out
  anew on the way.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from cost_model.errors import InputError
from cost_model.units import format_mesh
from executors.rewrite import evaluator
from search.ir.graph import Step
from search.ir.spec import Spec, partition_spec
from search.plan.schedule import Schedule, Task, TaskKind
from search.plan.stage_programs import StageProgram, StagePrograms, StageSharding
from search.plan.task_order import task_order

Slot = int


@dataclass(frozen=True, eq=False, slots=True)
class Instruction:
    """A part of a step.

    Attributes:
      name: what it does, for traces: `forward 2`, `send`.
      function: of arrays, with several results.
      reads: where its operands lie.
      makes: where its results go.
      frees: what nobody reads behind it.
    """

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]
    frees: tuple[Slot, ...] = ()


@dataclass(frozen=True, eq=False)
class PipelineProgram:
    """What runs: the step as instructions over slots.

    Attributes:
      step: the traced step.
      args: `jax.ShapeDtypeStruct` pytrees with their shardings, each on the submesh where it rests.
      instructions: in the order in which they are handed out.
      slots: what lies in the slots beforehand.
      entering: the slot of each argument.
      leaving: the slot of each result.
      donated_leaves: which of the flat arguments' buffers may be reused.
      on_retrace: called where arguments of other shapes come; it should raise.
    """

    step: Step
    args: tuple[Any, ...]
    instructions: tuple[Instruction, ...]
    slots: tuple[Any, ...]
    entering: tuple[Slot, ...]
    leaving: tuple[Slot, ...]
    donated_leaves: frozenset[int]
    on_retrace: Callable[[], None]

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings of `args`, as pytrees."""
        return jax.tree.map(lambda s: s.sharding, self.args)

    def fn(self, *args: Any) -> Any:
        """Runs a step; takes the step's positional arguments, then its keyword arguments in alphabetical order."""
        slots = list(self.slots)
        for slot, x in zip(self.entering, self._placed(args), strict=True):
            slots[slot] = x
        for one in self.instructions:
            made = one.function(*[slots[slot] for slot in one.reads])
            for slot, x in zip(one.makes, made, strict=True):
                slots[slot] = x
            for slot in one.frees:
                slots[slot] = None
        return jax.tree.unflatten(self.step.out_tree, [slots[slot] for slot in self.leaving])

    @cached_property
    def _wanted(self) -> tuple[Any, tuple[Any, ...]]:
        leaves, tree = jax.tree.flatten(self.args)
        return tree, tuple((s.shape, s.dtype, s.sharding) for s in leaves)

    def _placed(self, args: tuple[Any, ...]) -> list[Any]:
        """The flat arguments, each where it rests."""
        leaves, tree = jax.tree.flatten(args)
        wanted_tree, wanted = self._wanted
        if tree != wanted_tree:
            self.on_retrace()
            raise TypeError(f"wanted arguments as {wanted_tree}, got {tree}")
        moved: list[int] = []
        for i, (x, (shape, dtype, sharding)) in enumerate(zip(leaves, wanted, strict=True)):
            if getattr(x, "sharding", None) == sharding and x.shape == shape and x.dtype == dtype:
                continue
            if np.shape(x) != shape:
                self.on_retrace()
                raise TypeError(f"wanted an argument of shape {shape}, got {np.shape(x)}")
            if i in self.donated_leaves:
                raise ValueError("state that does not lie where it rests is to be placed before")
            moved.append(i)
        shardings = [wanted[i][2] for i in moved]
        there = [jnp.asarray(leaves[i], wanted[i][1]) for i in moved]
        for i, x in zip(moved, jax.device_put(there, shardings), strict=True):
            leaves[i] = x
        return leaves


def build(
    programs: StagePrograms,
    schedule: Schedule,
    shardings: Sequence[StageSharding],
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
) -> PipelineProgram:
    """Jits a step's programs and follows the schedule.

    Args:
      programs: what each stage runs.
      schedule: when.
      shardings: how each stage's values lie.
      devices: the workers' submeshes one after another: real or simulated.
      on_retrace: called when the step is called with other shapes; it should raise.

    Raises:
      InputError: the devices are not as many as the submeshes have, or stages of one worker differ in their submesh.
      PlanError: the schedule cannot be run in its order.
    """
    assert programs.num_stages == schedule.num_stages == len(shardings)
    assert programs.num_microbatches == schedule.num_microbatches
    return _Building(programs, schedule, shardings, _meshes(schedule, shardings, devices), on_retrace).run()


def _meshes(
    schedule: Schedule, shardings: Sequence[StageSharding], devices: Sequence[Any]
) -> tuple[Mesh, ...]:
    """Each worker's submesh."""
    meshes: list[Mesh] = []
    left = list(devices)
    for worker in range(schedule.num_workers):
        first, *others = (shardings[stage] for stage in schedule.stages_of(worker))
        if any((o.mesh_shape, o.axis_names) != (first.mesh_shape, first.axis_names) for o in others):
            raise InputError(
                f"worker {worker} runs the stages {schedule.stages_of(worker)}, whose submeshes differ. Give them one shape"
            )
        num = int(np.prod(first.mesh_shape))
        if len(left) < num:
            raise InputError(
                f"worker {worker} needs {num} devices for its submesh {format_mesh(first.mesh_shape)}, and {len(left)} of "
                f"{len(devices)} are left. Use fewer stages, or run on more devices"
            )
        meshes.append(Mesh(np.array(left[:num]).reshape(first.mesh_shape), first.axis_names))
        left = left[num:]
    return tuple(meshes)


Seat = tuple[int, int]
"""A stage on a worker."""

Name = tuple[int, int | None]
"""A value, and of which microbatch it is."""


@dataclass(frozen=True, eq=False)
class _Call:
    """A program that is to run: what it reads and makes lies in slots."""

    program: StageProgram
    seat: Seat
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class _Sending:
    """Values that are to go elsewhere, or replicas' sums that are to be added up."""

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]


@dataclass(eq=False)
class _Building:
    """The instructions of one step in the making.

    Attributes:
      made: what is to be done, in order.
      slots: what lies in the slots beforehand.
      slot_of: by value, microbatch, worker and spec.
    """

    programs: StagePrograms
    schedule: Schedule
    stage_shardings: Sequence[StageSharding]
    meshes: Sequence[Mesh]
    on_retrace: Callable[[], None]
    made: list[_Call | _Sending] = field(default_factory=list[_Call | _Sending])
    slots: list[Any] = field(default_factory=list[Any])
    slot_of: dict[Any, Slot] = field(default_factory=dict[Any, Slot])

    def run(self) -> PipelineProgram:
        step = self.programs.step
        inputs = [(v, None) for v in step.graph.inputs]
        entering = tuple(self._slot(name, self._home(name)) for name in inputs)
        self._send(inputs)
        for program in self.programs.prologue:
            self._call(program, self._first_seat(program.stage), None)
        for worker, task in task_order(self.schedule):
            if (program := self.programs.tasks.get((task.stage, task.kind))) is not None:
                self._call(program, (task.stage, worker), task.microbatch)
        self._finish_sums()
        for program in self.programs.epilogue:
            self._call(program, self._first_seat(program.stage), None)
        leaving = self._leaving()
        shardings = [self.named(name[0], self._home(name)) for name in inputs]
        abstract = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s, weak_type=a.weak_type)
            for a, s in zip(step.abstract_inputs(), shardings, strict=True)
        ]
        args, kwargs = jax.tree.unflatten(step.in_tree, abstract)
        instructions = _Finishing(self, frozenset(leaving)).run()
        donated = frozenset(r for r in step.replaces if r is not None)
        positional = (*args, *(kwargs[k] for k in sorted(kwargs)))
        return PipelineProgram(
            step, positional, instructions, tuple(self.slots), entering, leaving, donated, self.on_retrace
        )

    # --- where values lie

    def _first_seat(self, stage: int) -> Seat:
        return stage, self.schedule.workers_of(stage)[0]

    def _home(self, name: Name) -> Seat:
        """Where a value is made, or rests."""
        value, microbatch = name
        stage = self.programs.stage_of[value]
        if microbatch is None:
            return self._first_seat(stage)
        return stage, self.schedule.worker_of[Task(stage, microbatch, TaskKind.FORWARD)]

    def _name(self, value: int, microbatch: int | None) -> Name:
        """What a program that runs for a microbatch, or once, means by a value."""
        if value in self.programs.pieces:
            return self.programs.pieces[value]
        is_of_microbatch = value == self.programs.index or self.programs.is_of_microbatch(value)
        return value, microbatch if is_of_microbatch else None

    def _slot(self, name: Name, seat: Seat) -> Slot:
        stage, worker = seat
        key = (*name, worker, self.spec(name[0], stage))
        if key not in self.slot_of:
            is_index = name[0] == self.programs.index
            index = jax.device_put(np.uint32(name[1] or 0), self.named(name[0], seat)) if is_index else None
            self.slot_of[key] = self._new_slot(index)
        return self.slot_of[key]

    def _new_slot(self, content: Any = None) -> Slot:
        self.slots.append(content)
        return len(self.slots) - 1

    def named(self, value: int, seat: Seat) -> NamedSharding:
        """How a value lies at a seat."""
        stage, worker = seat
        spec = partition_spec(self.spec(value, stage), self.stage_shardings[stage].axis_names)
        return NamedSharding(self.meshes[worker], spec)

    def spec(self, value: int, stage: int) -> Spec:
        """How a value lies at a stage; a piece as what it is a piece of."""
        return self.stage_shardings[stage].spec(self.programs.pieces.get(value, (value, 0))[0])

    @cached_property
    def _readers(self) -> dict[Name, dict[Seat, None]]:
        """Who reads each value."""
        found: dict[Name, dict[Seat, None]] = {}
        for program, seat, microbatch in self._calls():
            for value in program.reads:
                found.setdefault(self._name(value, microbatch), {})[seat] = None
        return found

    def _calls(self) -> Iterator[tuple[StageProgram, Seat, int | None]]:
        for program in (*self.programs.prologue, *self.programs.epilogue):
            yield program, self._first_seat(program.stage), None
        for worker, task in self.schedule.tasks():
            if (program := self.programs.tasks.get((task.stage, task.kind))) is not None:
                yield program, (task.stage, worker), task.microbatch

    # --- what is done

    def _call(self, program: StageProgram, seat: Seat, microbatch: int | None) -> None:
        """Runs a program, and sends what it makes."""
        reads = tuple(self._slot(self._name(v, microbatch), seat) for v in program.reads)
        makes = tuple(self._slot(self._name(v, microbatch), seat) for v in program.makes)
        self.made.append(_Call(program, seat, reads, makes))
        self._send(self._name(v, microbatch) for v in program.makes if v not in program.sums)

    def _send(self, names: Iterable[Name]) -> None:
        """Sends values to all who read them; what is yet to be added up only to the replicas of its stage."""
        ways: dict[Slot, tuple[Slot, NamedSharding]] = {}
        for name in names:
            home = self._home(name)
            for seat in self._readers.get(name, ()):
                if seat[0] == home[0] or name[0] not in self._sums:
                    self._way(name, home, seat, ways)
        self._sending(ways)

    def _way(
        self, name: Name, source: Seat, target: Seat, ways: dict[Slot, tuple[Slot, NamedSharding]]
    ) -> None:
        before, after = self._slot(name, source), self._slot(name, target)
        if before != after:
            ways[after] = before, self.named(name[0], target)

    def _sending(self, ways: Mapping[Slot, tuple[Slot, NamedSharding]]) -> None:
        if ways:
            reads, shardings = zip(*ways.values(), strict=True)
            self.made.append(_Sending("send", partial(_sent, list(shardings)), tuple(reads), tuple(ways)))

    @cached_property
    def _sums(self) -> frozenset[int]:
        """The values that tasks add to."""
        return frozenset[int]().union(*(program.sums for program in self.programs.tasks.values()))

    def _finish_sums(self) -> None:
        """Adds up what replicas have added up, and sends it on."""
        for total in sorted(self._sums):
            name = (total, None)
            first, *others = (
                (self.programs.stage_of[total], w)
                for w in self.schedule.workers_of(self.programs.stage_of[total])
            )
            terms = [self._new_slot() for _ in others]
            sources = [self._slot(name, seat) for seat in others]
            sharding = self.named(name[0], first)
            self._sending({t: (s, sharding) for t, s in zip(terms, sources, strict=True)})
            if others:
                slot = self._slot(name, first)
                self.made.append(_Sending("add", jax.jit(_added, donate_argnums=0), (slot, *terms), (slot,)))
        ways: dict[Slot, tuple[Slot, NamedSharding]] = {}
        for total in sorted(self._sums):
            home = self._home((total, None))
            for seat in self._readers[total, None]:
                if seat[0] != home[0]:
                    self._way((total, None), home, seat, ways)
        self._sending(ways)

    def _leaving(self) -> tuple[Slot, ...]:
        """Where the results lie in the end: state where it rests, the rest where it is made."""
        step, ways = self.programs.step, dict[Slot, tuple[Slot, NamedSharding]]()
        leaving: list[Slot] = []
        for atom, replaced in zip(self.programs.results, step.replaces, strict=True):
            if not isinstance(atom, int):
                sharding = self.named(self.programs.index, self._first_seat(0))
                leaving.append(
                    self._new_slot(jax.device_put(np.asarray(atom.val, atom.aval.dtype), sharding))
                )
                continue
            made = self._slot((atom, None), self._home((atom, None)))
            if replaced is None or atom == (argument := step.graph.inputs[replaced]):
                leaving.append(made)
                continue
            home = self._home((argument, None))
            wanted = self.named(argument, home)
            if wanted == self.named(atom, self._home((atom, None))):
                leaving.append(made)
            else:
                leaving.append(slot := self._new_slot())
                ways[slot] = made, wanted
        self._sending(ways)
        return tuple(leaving)


def _sent(shardings: list[NamedSharding], *values: Any) -> Sequence[Any]:
    return jax.device_put(list(values), shardings)


def _added(*terms: Any) -> list[Any]:
    return [sum(terms[1:], terms[0])]


class _Finishing:
    """What is to be done, as instructions: jitted, with what may be donated and what is let go of."""

    def __init__(self, building: _Building, leaving: frozenset[Slot]) -> None:
        self.building, self.programs = building, building.programs
        self.last_use = {slot: i for i, one in enumerate(building.made) for slot in (*one.reads, *one.makes)}
        kept = {slot for slot, content in enumerate(building.slots) if content is not None} | leaving
        self.freed = {slot: i for slot, i in self.last_use.items() if slot not in kept}
        self.jitted: dict[Any, Any] = {}

    def run(self) -> tuple[Instruction, ...]:
        frees: dict[int, list[Slot]] = {}
        for slot, i in self.freed.items():
            frees.setdefault(i, []).append(slot)
        return tuple(
            self._instruction(i, one, tuple(frees.get(i, ()))) for i, one in enumerate(self.building.made)
        )

    def _instruction(self, i: int, one: _Call | _Sending, frees: tuple[Slot, ...]) -> Instruction:
        if isinstance(one, _Sending):
            return Instruction(one.name, one.function, one.reads, one.makes, frees)
        key = one.program, one.seat
        if key not in self.jitted:
            self.jitted[key] = self._jit(one, self._donated(i, one))
        return Instruction(one.program.name, self.jitted[key], one.reads, one.makes, frees)

    def _donated(self, i: int, one: _Call) -> tuple[int, ...]:
        """Which operands' buffers become results': sums, and of what runs once, what it reads as the last; state first."""
        program = one.program
        if program in self.programs.tasks.values():
            return tuple(n for n, v in enumerate(program.reads) if v in program.sums)
        donated: list[int] = []
        results = Counter(self._type(v, one.seat) for v in program.makes)
        operands = enumerate(zip(program.reads, one.reads, strict=True))
        last_read = [(n, v) for n, (v, slot) in operands if self.freed.get(slot) == i and self._is_given_up(v)]
        for n, v in sorted(last_read, key=lambda each: each[1] not in self.programs.step.graph.inputs):
            kind = self._type(v, one.seat)
            if results[kind]:
                results[kind] -= 1
                donated.append(n)
        return tuple(donated)

    def _is_given_up(self, v: int) -> bool:
        """Whether a value is no argument that its caller keeps."""
        step = self.programs.step
        return v not in step.graph.inputs or step.graph.inputs.index(v) in step.replaces

    def _type(self, v: int, seat: Seat) -> Any:
        value = self.programs.values[v]
        return value.shape, value.dtype, self.building.spec(v, seat[0])

    def _jit(self, one: _Call, donated: tuple[int, ...]) -> Any:
        program, (stage, worker) = one.program, one.seat
        mesh = self.building.meshes[worker]
        evaluate = evaluator(program.graph, self.building.stage_shardings[stage].of_program(program), mesh)

        def run(*values: Any) -> Sequence[Any]:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return evaluate(values)

        run.__name__ = run.__qualname__ = program.name.replace(" ", "_")
        return jax.jit(
            run,
            in_shardings=tuple(self.building.named(v, one.seat) for v in program.reads),
            out_shardings=[self.building.named(v, one.seat) for v in program.makes],
            donate_argnums=donated,
        )
