"""The pipeline executor: a program per stage and kind of task, dispatched in a schedule's order, on disjoint submeshes.

The host never waits. JAX runs a computation as soon as its operands are there, so the host runs ahead. It dispatches each
worker's tasks in the schedule's order. A stage's results are sent to other stages as soon as they are made, while both
stages compute. The schedule is followed once, when the step is built. Each call then runs instructions over numbered
slots (`executors.pipeline_program`).

* A value has one slot for each worker and spec: stages that share a worker and the value's spec share the slot.
* Sums accumulate in place: their old buffers are donated to the new ones. The state is donated to the new state, if its
  last reader makes that, and so are values that only the update reads.
* A task's program runs on each replica of its stage, over the mesh's first axis, without messages between replicas. A
  value that each replica has for itself is an array with one slice per replica, on that replica's devices.
* Each replica, and each worker that holds a stage, accumulates its own sums; they are added together once, behind the
  last task.
* A transfer between submeshes of one shape goes shard by shard; between other shapes, the value gets a new layout on the
  way.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import format_mesh
from autoshard.executors.jit import mesh_of
from autoshard.executors.pipeline_jit import (
    UNFINISHED,
    Agenda,
    CompilerOptions,
    Held,
    Location,
    Name,
    Placement,
    ProgramCall,
    Sending,
)
from autoshard.executors.pipeline_program import PipelineProgram, Slot
from autoshard.executors.transfers import RepeatedTransfer, are_of_several_processes, everywhere, on_all
from autoshard.search.ir.graph import Atom
from autoshard.search.ir.spec import WHOLE
from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms, StageSharding
from autoshard.search.plan.task_order import task_order


def build(
    programs: StagePrograms,
    schedule: Schedule,
    shardings: Sequence[StageSharding],
    devices: Sequence[Any],
    on_retrace: Callable[[], None] = lambda: None,
    compiler_options: CompilerOptions = lambda stage, beside_bytes, resting_bytes: {},
    given_up: AbstractSet[int] = frozenset(),
) -> PipelineProgram:
    """Jits a step's programs, in the order of the schedule.

    Args:
      programs: the programs of each stage.
      schedule: the order of each worker's tasks.
      shardings: per stage, the specs of its values.
      devices: the workers' submeshes one after another: real or simulated.
      on_retrace: called when the step is called with other shapes; it should raise.
      compiler_options: the compiler's options for each program.
      given_up: arguments besides the state whose buffers may be reused, for values of an equal type on the same devices.

    Raises:
      InputError: there are fewer devices than the submeshes have, or stages of one worker differ in their submesh.
      PlanError: the schedule cannot be run in its order.
    """
    agenda = followed(programs, schedule, shardings, devices, compiler_options, given_up)
    step = programs.step
    arrays = [agenda.held[slot].array for slot in agenda.entering]
    abstract = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there.sharding, weak_type=a.weak_type)
        for a, there in zip(step.abstract_inputs(), arrays, strict=True)
    ]
    args, kwargs = jax.tree.unflatten(step.in_tree, abstract)
    slots = [
        jax.device_put(agenda.contents[slot], held.array.sharding) if slot in agenda.contents else None
        for slot, held in enumerate(agenda.held)
    ]
    return PipelineProgram(
        step,
        (*args, *(kwargs[k] for k in sorted(kwargs))),
        agenda.instructions(),
        tuple(slots),
        agenda.entering,
        agenda.leaving,
        agenda.state | agenda.reused,
        on_retrace,
    )


def followed(
    programs: StagePrograms,
    schedule: Schedule,
    shardings: Sequence[StageSharding],
    devices: Sequence[Any] | None,
    compiler_options: CompilerOptions = lambda stage, beside_bytes, resting_bytes: {},
    given_up: AbstractSet[int] = frozenset(),
) -> Agenda:
    """Follows the schedule: calls of programs and transfers in order, with the slots of all values.

    Args:
      programs: the programs of each stage.
      schedule: the order of each worker's tasks.
      shardings: per stage, the specs of its values.
      devices: the workers' submeshes one after another: real, simulated or compile-only; None for programs that are only
        lowered, over abstract meshes.
      compiler_options: the compiler's options for each program.
      given_up: as for `build`.

    Raises:
      InputError: there are fewer devices than the submeshes have, or stages of one worker differ in their submesh.
      PlanError: the schedule cannot be run in its order.
    """
    assert programs.num_stages == schedule.num_stages == len(shardings)
    assert programs.num_microbatches == schedule.num_microbatches
    assert all(sharding.mesh_shape[0] == programs.num_replicas for sharding in shardings)
    placement = Placement(shardings, _meshes(schedule, shardings, devices), programs)
    return _AgendaBuilder(programs, schedule, placement, compiler_options, given_up).run()


def _meshes(
    schedule: Schedule, shardings: Sequence[StageSharding], devices: Sequence[Any] | None
) -> tuple[Mesh | AbstractMesh, ...]:
    """Each worker's submesh."""
    meshes: list[Mesh | AbstractMesh] = []
    left = list(devices or ())
    for worker in range(schedule.num_workers):
        first, *others = (shardings[stage] for stage in schedule.stages_of(worker))
        if any((o.mesh_shape, o.axis_names) != (first.mesh_shape, first.axis_names) for o in others):
            raise InputError(
                f"worker {worker} runs the stages {schedule.stages_of(worker)}, whose submeshes differ. Give them one shape"
            )
        num = prod(first.mesh_shape)
        if devices is not None and len(left) < num:
            raise InputError(
                f"worker {worker} needs {num} devices for its submesh {format_mesh(first.mesh_shape)}, and {len(left)} of "
                f"{len(devices)} are left. Use fewer stages, or run on more devices"
            )
        meshes.append(mesh_of(first.mesh_shape, first.axis_names, None if devices is None else left))
        left = left[num:]
    return tuple(meshes)


@dataclass(eq=False)
class _AgendaBuilder:
    """Builds the agenda of one step.

    Attributes:
      made: calls and transfers so far, in order.
      held: the array of each slot.
      contents: the contents of slots before the step.
      slot_of: by value, microbatch, worker and spec.
    """

    programs: StagePrograms
    schedule: Schedule
    placement: Placement
    compiler_options: CompilerOptions
    given_up: AbstractSet[int]
    made: list[ProgramCall | Sending] = field(default_factory=list[ProgramCall | Sending])
    held: list[Held] = field(default_factory=list[Held])
    contents: dict[Slot, np.ndarray] = field(default_factory=dict[Slot, np.ndarray])
    slot_of: dict[Any, Slot] = field(default_factory=dict[Any, Slot])

    def run(self) -> Agenda:
        inputs = [(v, None) for v in self.programs.step.graph.inputs]
        entering = tuple(self._slot(name, self._home(name)) for name in inputs)  # in resting shardings
        self._send(inputs)
        for worker, task in task_order(self.schedule):
            if (program := self.programs.tasks.get((task.stage, task.kind))) is not None:
                self._prepare(program.reads)
                self._call(program, (task.stage, worker), task.microbatch)
        self._prepare(tuple(self._prologue_of))
        self._finish_sums()
        for program in self.programs.epilogue:
            self._call(program, self._first_location(program.stage), None)
        leaving = self._leaving(entering)
        return Agenda(
            tuple(self.made),
            tuple(self.held),
            self.contents,
            entering,
            leaving,
            self.placement,
            self.compiler_options,
            self.given_up,
        )

    # --- slots of values

    def _first_location(self, stage: int) -> Location:
        return stage, self.schedule.workers_of(stage)[0]

    def _home(self, name: Name) -> Location:
        """The stage and worker where a value is made, or rests."""
        value, microbatch = name
        stage = self.programs.stage_of[value]
        if microbatch in (None, UNFINISHED):
            return self._first_location(stage)
        return stage, self.schedule.worker_of[Task(stage, microbatch, TaskKind.FORWARD)]

    def _slot(self, name: Name, location: Location) -> Slot:
        stage, worker = location
        key = (*name, worker, self.placement.spec(name[0], stage))
        if key not in self.slot_of:
            is_index = name[0] == self.programs.index
            held = self.placement.held(name, location)
            self.slot_of[key] = self._new_slot(held, self._indices(name) if is_index else None)
        return self.slot_of[key]

    def _indices(self, name: Name) -> np.ndarray:
        """For each replica, the number of its part of the batch."""
        assert name[1] is not None
        first = np.arange(self.programs.num_replicas, dtype=np.uint32) * np.uint32(
            self.programs.num_microbatches
        )
        return first + np.uint32(name[1])

    def _new_slot(self, held: Held, content: np.ndarray | None = None) -> Slot:
        self.held.append(held)
        if content is not None:
            self.contents[len(self.held) - 1] = content
        return len(self.held) - 1

    @cached_property
    def _readers(self) -> dict[Name, dict[Location, None]]:
        """The stages and workers that read each value."""
        found: dict[Name, dict[Location, None]] = {}
        for program, location, microbatch in self._calls():
            for value in program.reads:
                found.setdefault(self.placement.name(program, value, microbatch), {})[location] = None
        return found

    def _calls(self) -> Iterator[tuple[StageProgram, Location, int | None]]:
        for program in (*self.programs.prologue, *self.programs.epilogue):
            yield program, self._first_location(program.stage), None
        for worker, task in self.schedule.tasks():
            if (program := self.programs.tasks.get((task.stage, task.kind))) is not None:
                yield program, (task.stage, worker), task.microbatch

    # --- calls and transfers

    def _prepare(self, values: Iterable[int]) -> None:
        """Runs the programs of the prologue that make these values, just before the first reader: the first stage does
        not wait for the others' prologue."""
        for value in values:
            program = self._prologue_of.pop(value, None)
            if program is not None:
                for made in program.makes:
                    self._prologue_of.pop(made, None)
                self._prepare(program.reads)
                self._call(program, self._first_location(program.stage), None)

    @cached_property
    def _prologue_of(self) -> dict[int, StageProgram]:
        """By value, the program of the prologue that makes it, while that has not run."""
        return {value: program for program in self.programs.prologue for value in program.makes}

    def _call(self, program: StageProgram, location: Location, microbatch: int | None) -> None:
        """Runs a program, and sends its results."""
        read = [self.placement.name(program, v, microbatch) for v in program.reads]
        made = [self.placement.name(program, v, microbatch) for v in program.makes]
        reads = tuple(self._slot(name, location) for name in read)
        self.made.append(
            ProgramCall(program, location, reads, tuple(self._slot(name, location) for name in made))
        )
        self._send(name for name in made if name[0] not in program.sums)

    def _send(self, names: Iterable[Name]) -> None:
        """Sends values to all their readers."""
        moves: dict[Slot, Slot] = {}
        for name in names:
            source = self._home(name)
            for target in self._readers.get(name, ()):
                before, after = self._slot(name, source), self._slot(name, target)
                if before != after:
                    moves[after] = before
        self._sending(moves)

    def _sending(self, moves: Mapping[Slot, Slot]) -> None:
        """Sends to each slot (key) the contents of another slot (value)."""
        if moves:
            values = [self.held[slot].array for slot in moves.values()]
            transfer = RepeatedTransfer(values, [self.held[slot].array.sharding for slot in moves])
            self.made.append(Sending("send", transfer, tuple(moves.values()), tuple(moves)))

    def _finish_sums(self) -> None:
        """Adds the sums of workers and replicas together, and sends the totals."""
        by_stage: dict[int, list[int]] = {}
        for total in sorted(self.programs.sums):
            by_stage.setdefault(self.programs.stage_of[total], []).append(total)
        for stage, totals in by_stage.items():
            for total in totals:
                self._add_workers((total, UNFINISHED))
            location = self._first_location(stage)
            reads = tuple(self._slot((total, UNFINISHED), location) for total in totals)
            makes = tuple(self._slot((total, None), location) for total in totals)
            self.made.append(ProgramCall(None, location, reads, makes))
        self._send((total, None) for total in sorted(self.programs.sums))

    def _add_workers(self, name: Name) -> None:
        """Adds the sums of a stage's workers together, at its first worker."""
        stage = self.programs.stage_of[name[0]]
        first, *others = ((stage, worker) for worker in self.schedule.workers_of(stage))
        terms = [self._new_slot(self.placement.held(name, first)) for _ in others]
        self._sending(dict(zip(terms, (self._slot(name, location) for location in others), strict=True)))
        if others:
            slot = self._slot(name, first)
            self.made.append(Sending("add", jax.jit(_added, donate_argnums=0), (slot, *terms), (slot,)))

    def _leaving(self, entering: Sequence[Slot]) -> tuple[Slot, ...]:
        """The slots of the results: state where it rests, other results where they are made. Each result has a buffer of
        its own: the next call may donate any of them."""
        replaces = self.programs.step.replaces
        results = list(zip(self.programs.results, replaces, strict=True))
        made = [self._made(atom, replaced) for atom, replaced in results]
        kept = (slot for n, slot in enumerate(entering) if n not in replaces)
        taken, moves, leaving = {*self.contents, *kept}, dict[Slot, Slot](), list[Slot]()
        for slot, (_, replaced) in zip(made, results, strict=True):
            wanted = self.held[slot] if replaced is None else self._rests(replaced)
            if slot in taken or wanted != self.held[slot]:
                leaving.append(new := self._new_slot(wanted))
                moves[new] = slot
            else:
                leaving.append(slot)
                taken.add(slot)
        self._sending(moves)
        return tuple(
            self._shared(slot, atom) if replaced is None and isinstance(atom, int) else slot
            for slot, (atom, replaced) in zip(leaving, results, strict=True)
        )

    def _made(self, atom: Atom, replaced: int | None) -> Slot:
        """The slot where a result is made."""
        if isinstance(atom, int):
            return self._slot((atom, None), self._home((atom, None)))
        content = np.asarray(atom.val, atom.aval.dtype)
        held = self._on_all(content.shape, content.dtype) if replaced is None else self._rests(replaced)
        return self._new_slot(held, content)

    def _rests(self, argument: int) -> Held:
        """The worker and array of an argument between steps."""
        name = self.programs.step.graph.inputs[argument], None
        return self.held[self._slot(name, self._home(name))]

    def _on_all(self, shape: tuple[int, ...], dtype: Any) -> Held:
        """An array on the devices of all workers."""
        meshes = [mesh for mesh in self.placement.meshes if isinstance(mesh, Mesh)]
        return Held(None, jax.ShapeDtypeStruct(shape, dtype, sharding=on_all(meshes) if meshes else None))

    def _shared(self, made: Slot, value: int) -> Slot:
        """The final slot of a result that is not state. If there are several processes, all of them get the result,
        unless its spec splits it (an array of examples)."""
        stage, own = self._home((value, None))
        spec, meshes = self.placement.spec(value, stage), self.placement.meshes
        if not are_of_several_processes(meshes) or set(spec) != {WHOLE}:
            return made
        array = self.held[made].array
        others = {
            self._new_slot(Held(worker, array.update(sharding=NamedSharding(mesh, PartitionSpec())))): made
            for worker, mesh in enumerate(meshes)
            if worker != own
        }
        self._sending(others)
        shared = self._new_slot(self._on_all(array.shape, array.dtype))
        self.made.append(Sending("share", everywhere, (made, *others), (shared,)))
        return shared


def _added(*terms: Any) -> list[Any]:
    return [sum(terms[1:], terms[0])]
