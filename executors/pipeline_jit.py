"""From a pipeline's agenda to instructions: jitted programs, freed slots, donated buffers.

A slot is freed behind its last reader. A program's operand is donated where a result may take its buffer: a sum to the
sum with one more term; and in a program that runs once, an operand at its last reader, state first. A value that is sent
to another process is not donated. The transfer may be unfinished when the next program is dispatched, and JAX waits for
that in one process only.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.executors.jit import Program, given_away, shard_bytes
from autoshard.executors.pipeline_program import Slot, StepInstruction
from autoshard.executors.rewrite import evaluator
from autoshard.executors.transfers import are_of_several_processes
from autoshard.search.ir import _jax
from autoshard.search.ir._jax import with_weak_type
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import WHOLE, Spec, partition_spec
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms, StageSharding

Location = tuple[int, int]
"""A stage on a worker: (stage, worker)."""

Name = tuple[int, int | None]
"""A value and its microbatch; None for none. With a microbatch, each replica has a value of its own."""

UNFINISHED = -1
"""The place of the microbatch in the name of a sum, as long as its stage's replicas and workers add to it."""

CompilerOptions = Callable[[int, int, int], dict[str, str]]
"""The compiler's options for a program, given its stage, the bytes on a device beside its operands, and the bytes of its
operands and results."""


@dataclass(frozen=True, slots=True)
class Held:
    """The array of a slot.

    Attributes:
      worker: the worker on whose devices it lies; None for a result on the devices of all.
      array: its shape, dtype and sharding.
    """

    worker: int | None
    array: jax.ShapeDtypeStruct


@dataclass(frozen=True, eq=False)
class ProgramCall:
    """A program to run, with the slots of its operands and results.

    Attributes:
      program: a stage's program; None for the sum over its replicas.
    """

    program: StageProgram | None
    location: Location
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]

    @property
    def name(self) -> str:
        """The name for messages and the compiler."""
        return f"reduce {self.location[0]}" if self.program is None else self.program.name


@dataclass(frozen=True, eq=False)
class Sending:
    """A transfer of values between slots, or the sum of the workers' sums."""

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """The placement of values on stages and workers.

    Attributes:
      shardings: per stage, the specs of its values.
      meshes: per worker, its submesh.
      programs: the programs of all stages.
    """

    shardings: Sequence[StageSharding]
    meshes: Sequence[Mesh | AbstractMesh]
    programs: StagePrograms

    def name(self, program: StageProgram, value: int, microbatch: int | None) -> Name:
        """The name of a value that a program reads or makes, for a microbatch or once."""
        programs = self.programs
        if value in programs.pieces:
            whole, part = programs.pieces[value]
            return whole, part % programs.num_microbatches
        if value in programs.sums and program not in programs.epilogue:
            return value, UNFINISHED
        return value, microbatch if programs.is_of_replica(value) else None

    def spec(self, value: int, stage: int) -> Spec:
        """The spec of a value at a stage."""
        return self.shardings[stage].spec(value)

    def named(self, name: Name, location: Location) -> NamedSharding:
        """The sharding of a value at a stage on a worker. A value that each replica has for itself has one more
        dimension, the first, split over replicas."""
        stage, worker = location
        axis_names, spec = self.shardings[stage].axis_names, self.spec(name[0], stage)
        kind = "pinned_host" if self.programs.values[name[0]].is_on_host else None
        if name[1] is None:
            return NamedSharding(self.meshes[worker], partition_spec(spec, axis_names), memory_kind=kind)
        own = PartitionSpec(axis_names[0], *partition_spec((WHOLE, *spec[1:]), axis_names))
        return NamedSharding(self.meshes[worker], own, memory_kind=kind)

    def held(self, name: Name, location: Location) -> Held:
        """The array of a value at a stage on a worker."""
        value, own = self.programs.values[name[0]], name[1] is not None
        shape = (self.programs.num_replicas, *value.shape) if own else value.shape
        return Held(
            location[1], jax.ShapeDtypeStruct(shape, value.dtype, sharding=self.named(name, location))
        )


@dataclass(frozen=True, eq=False)
class StageRun:
    """A program of a stage, as a step runs it.

    Attributes:
      program: the program, jitted for the first of its calls, which are all equal.
      location: its stage and worker.
      count: number of its calls in a step.
      held_bytes: most bytes on a device when it is dispatched: its operands and all other arrays there, without its
        results and temporaries.
    """

    program: Program
    location: Location
    count: int
    held_bytes: int

    @property
    def beside_bytes(self) -> int:
        """The part of `held_bytes` that is not the program's operands."""
        return self.held_bytes - sum(map(shard_bytes, self.program.args))


@dataclass(frozen=True, eq=False)
class Agenda:
    """A schedule that was followed once: calls and transfers in order, and the arrays of all slots.

    Attributes:
      made: calls and transfers, in order.
      held: the array of each slot.
      contents: the contents of slots before the step.
      entering: the slot of each argument.
      leaving: the slot of each result.
      placement: the placement of values.
      compiler_options: the compiler's options for each program.
      given_up: numbers of arguments besides the state that may be donated.
    """

    made: Sequence[ProgramCall | Sending]
    held: Sequence[Held]
    contents: Mapping[Slot, np.ndarray]
    entering: tuple[Slot, ...]
    leaving: tuple[Slot, ...]
    placement: Placement
    compiler_options: CompilerOptions
    given_up: AbstractSet[int] = frozenset()

    @cached_property
    def state(self) -> frozenset[int]:
        """The numbers of the arguments that a result replaces."""
        return frozenset(r for r in self.placement.programs.step.replaces if r is not None)

    @cached_property
    def reused(self) -> frozenset[int]:
        """The numbers of the arguments besides the state whose buffers are donated to results of a program."""
        calls = ((i, one) for i, one in enumerate(self.made) if isinstance(one, ProgramCall))
        donated = {one.reads[n] for i, one in calls for n in self._donated(i)}
        return frozenset(n for n in self.given_up if self.entering[n] in donated)

    def instructions(self) -> tuple[StepInstruction, ...]:
        """The jitted instructions, each with the slots that it frees."""
        pairs = enumerate(zip(self.made, self._frees, strict=True))
        return tuple(self._instruction(i, one, frees) for i, (one, frees) in pairs)

    @cached_property
    def runs(self) -> tuple[StageRun, ...]:
        """The programs of all stages, in the order in which they first run."""
        return tuple(
            StageRun(
                self._jitted(calls[0]),
                self._call(calls[0]).location,
                len(calls),
                max(self._held_bytes[i] for i in calls),
            )
            for calls in self._calls.values()
        )

    def _instruction(self, i: int, one: ProgramCall | Sending, frees: tuple[Slot, ...]) -> StepInstruction:
        function = one.function if isinstance(one, Sending) else self._programs[self._key(one)].fn
        return StepInstruction(one.name, function, one.reads, one.makes, frees)

    @cached_property
    def _programs(self) -> dict[Any, Program]:
        """The jitted programs, by program, stage and worker."""
        return {key: run.program for key, run in zip(self._calls, self.runs, strict=True)}

    @cached_property
    def _calls(self) -> dict[Any, list[int]]:
        """The positions of calls, by program, stage and worker."""
        found: dict[Any, list[int]] = {}
        for i, one in enumerate(self.made):
            if isinstance(one, ProgramCall):
                found.setdefault(self._key(one), []).append(i)
        return found

    def _key(self, one: ProgramCall) -> Any:
        return one.program, one.location

    def _call(self, i: int) -> ProgramCall:
        one = self.made[i]
        assert isinstance(one, ProgramCall), f"{one.name} is no call"
        return one

    # --- freed slots, and bytes held

    @cached_property
    def _freed(self) -> dict[Slot, int]:
        """By slot, the position behind which it is freed."""
        last_use = {slot: i for i, one in enumerate(self.made) for slot in (*one.reads, *one.makes)}
        kept = {*self.contents, *self.leaving}
        return {slot: i for slot, i in last_use.items() if slot not in kept}

    @cached_property
    def _frees(self) -> tuple[tuple[Slot, ...], ...]:
        frees: list[list[Slot]] = [[] for _ in self.made]
        for slot, i in self._freed.items():
            frees[i].append(slot)
        return tuple(map(tuple, frees))

    @cached_property
    def _num_bytes(self) -> tuple[int, ...]:
        """By slot, its bytes on one device; 0 for a result on the devices of all workers."""
        return tuple(0 if held.worker is None else shard_bytes(held.array) for held in self.held)

    @cached_property
    def _held_bytes(self) -> tuple[int, ...]:
        """Per call, the bytes that its worker's devices hold when it is dispatched. JAX allocates memory at dispatch, so
        the order of instructions counts, not the order in which devices run them."""
        there = {*self.entering, *self.contents}
        held = [0] * len(self.placement.meshes)
        found: list[int] = []

        def change(slots: Iterable[Slot], sign: int) -> None:
            for slot in slots:
                if (worker := self.held[slot].worker) is not None:
                    held[worker] += sign * self._num_bytes[slot]

        change(there, 1)
        for one, frees in zip(self.made, self._frees, strict=True):
            found.append(held[one.location[1]] if isinstance(one, ProgramCall) else 0)
            new = [slot for slot in dict.fromkeys(one.makes) if slot not in there]
            change(new, 1)
            there.update(new)
            gone = [slot for slot in frees if slot in there and slot not in self._of_caller]
            change(gone, -1)
            there.difference_update(gone)
        return tuple(found)

    @cached_property
    def _of_caller(self) -> frozenset[Slot]:
        """The slots of arguments that their caller keeps."""
        return frozenset(slot for n, slot in enumerate(self.entering) if n not in self.state | self.reused)

    # --- programs

    def _jitted(self, i: int) -> Program:
        """The jitted program of a call, which all equal calls share."""
        one, donated = self._call(i), self._donated(i)
        args = tuple(self.held[slot].array for slot in one.reads)
        results = [self.held[slot].array for slot in one.makes]
        reused = Counter((a.shape, a.dtype, a.sharding) for a in (args[n] for n in donated))
        fresh = [x for x in results if not _taken_from(reused, (x.shape, x.dtype, x.sharding))]
        read_bytes = sum(map(shard_bytes, args))
        resting_bytes = read_bytes + sum(map(shard_bytes, fresh))
        calls = self._calls[self._key(one)]
        beside_bytes = max(self._held_bytes[at] for at in calls) - read_bytes
        jitted = jax.jit(
            self._function(one),
            in_shardings=tuple(a.sharding for a in args),
            out_shardings=[x.sharding for x in results],
            donate_argnums=given_away(*donated),
            compiler_options=self.compiler_options(one.location[0], beside_bytes, resting_bytes) or None,
        )
        mesh = self.placement.meshes[one.location[1]]
        return Program(one.name, jitted, args, mesh, frozenset(donated), resting_bytes)

    def _donated(self, i: int) -> tuple[int, ...]:
        """The operands whose buffers become results': a task's sums; in a program that runs once, operands that nothing
        reads later, state first."""
        one, programs = self._call(i), self.placement.programs
        if one.program is None:
            return tuple(range(len(one.reads))) if programs.num_replicas == 1 else ()
        reads = one.program.reads
        if one.program in programs.tasks.values():
            return tuple(n for n, v in enumerate(reads) if v in one.program.sums)
        donated: list[int] = []
        results = Counter(self._type(slot) for slot in one.makes)
        last_read = [
            (n, v)
            for n, (v, slot) in enumerate(zip(reads, one.reads, strict=True))
            if self._freed.get(slot) == i and slot not in self._lent and self._is_given_up(v)
        ]
        for n, _ in sorted(last_read, key=lambda each: each[1] not in programs.step.graph.inputs):
            if _taken_from(results, self._type(one.reads[n])):
                donated.append(n)
        return tuple(donated)

    def _is_given_up(self, v: int) -> bool:
        """Whether a value may be donated: it is not an argument that its caller keeps."""
        inputs = self.placement.programs.step.graph.inputs
        return v not in inputs or inputs.index(v) in self.state | self.given_up

    def _type(self, slot: Slot) -> Any:
        array = self.held[slot].array
        return array.shape, array.dtype, array.sharding

    @cached_property
    def _lent(self) -> frozenset[Slot]:
        """The slots that other processes may read at any time."""
        if not are_of_several_processes(self.placement.meshes):
            return frozenset()
        return frozenset(slot for one in self.made if isinstance(one, Sending) for slot in one.reads)

    def _function(self, one: ProgramCall) -> Callable[..., Sequence[Any]]:
        if one.program is None:
            return _reduced
        program, (stage, worker) = one.program, one.location
        mesh = self.placement.meshes[worker]
        inner = self._of_replicas if program in self.placement.programs.tasks.values() else self._once
        function = inner(program, self.placement.shardings[stage].of_program(program), mesh)

        def run(*values: Any) -> Sequence[Any]:
            with _jax.on_mesh(mesh):
                return function(*values)

        run.__name__ = run.__qualname__ = program.name.replace(" ", "_")
        return run

    def _of_replicas(
        self, program: StageProgram, sharding: StepSharding, mesh: Mesh | AbstractMesh
    ) -> Callable[..., Sequence[Any]]:
        """The function of a task's program: each replica computes for itself."""
        axis = mesh.axis_names[0]
        own_mesh = mesh.abstract_mesh.update_axis_types({axis: AxisType.Manual})
        evaluate = evaluator(program.graph, sharding, own_mesh)
        is_own = [self.placement.name(program, v, 0)[1] is not None for v in program.reads]

        def of_replica(*values: Any) -> Sequence[Any]:
            own = [x[0] if is_one else x for x, is_one in zip(values, is_own, strict=True)]
            return [x[None] for x in evaluate(own)]

        return jax.shard_map(
            of_replica,
            mesh=mesh,
            in_specs=tuple(PartitionSpec(axis) if is_one else PartitionSpec() for is_one in is_own),
            out_specs=[PartitionSpec(axis)] * len(program.makes),
            axis_names={axis},
            check_vma=False,
        )

    def _once(
        self, program: StageProgram, sharding: StepSharding, mesh: Mesh | AbstractMesh
    ) -> Callable[..., Sequence[Any]]:
        """The function of a program that runs once. It makes the zeros with which each replica begins a sum, and reads
        pieces from the replicas that have them."""
        evaluate, programs = evaluator(program.graph, sharding, mesh), self.placement.programs

        def run(*values: Any) -> Sequence[Any]:
            read = [
                x[programs.pieces[v][1] // programs.num_microbatches] if v in programs.pieces else x
                for v, x in zip(program.reads, values, strict=True)
            ]
            return [
                jnp.broadcast_to(x, (programs.num_replicas, *x.shape))
                if v in programs.sums
                else with_weak_type(x, v in self._weak)
                for v, x in zip(program.makes, evaluate(read), strict=True)
            ]

        return run

    @cached_property
    def _weak(self) -> frozenset[int]:
        """The values that leave the step with a weak type."""
        programs = self.placement.programs
        leaving = (programs.results[o] for o in programs.step.weak_results)
        return frozenset(v for v in leaving if isinstance(v, int))


def _taken_from(left: Counter[Any], kind: Any) -> bool:
    """Takes one item of a kind, if one is left; says whether one was."""
    is_left = left[kind] > 0
    left[kind] -= is_left
    return is_left


def _reduced(*sums: Any) -> list[Any]:
    """The replicas' sums, added up in their own type, as one program adds gradients up: `jnp.sum` would send narrow types as
    float32, which takes twice the time."""
    return [jax.lax.reduce(x, np.zeros((), x.dtype), jax.lax.add, (0,)) for x in sums]
