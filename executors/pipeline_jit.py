"""From what a pipeline has to do, in order, to instructions: programs jitted, slots let go of, buffers given up.

What a slot holds is let go of behind its last reader. A program's operand is donated where a result may take its buffer: a
sum to the sum with one more term; and in what runs once, what is read for the last time, state before all else. But what has
been sent to another process may not have left yet when the program is handed out: JAX waits for that in one process only.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from executors.pipeline_program import Instruction, Slot
from executors.rewrite import evaluator
from executors.transfers import are_of_several_processes
from search.ir.sharding import StepSharding
from search.ir.spec import WHOLE, Spec, partition_spec
from search.plan.stage_programs import StageProgram, StagePrograms, StageSharding

Seat = tuple[int, int]
"""A stage on a worker."""

Name = tuple[int, int | None]
"""A value, and of which microbatch it is; None for none. All but the latter are apart for each replica."""

UNFINISHED = -1
"""Said of a sum in a microbatch's place, as long as its stage's replicas and workers add to it."""


@dataclass(frozen=True, eq=False)
class Call:
    """A program that is to run: what it reads and makes lies in slots."""

    program: StageProgram
    seat: Seat
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class Sending:
    """Values that are to go elsewhere, or replicas' sums that are to be added up."""

    name: str
    function: Callable[..., Sequence[Any]]
    reads: tuple[Slot, ...]
    makes: tuple[Slot, ...]


@dataclass(frozen=True, eq=False)
class Seating:
    """Where and how values lie.

    Attributes:
      shardings: of each stage.
      meshes: of each worker.
      programs: what stages run.
    """

    shardings: Sequence[StageSharding]
    meshes: Sequence[Mesh]
    programs: StagePrograms

    def name(self, program: StageProgram, value: int, microbatch: int | None) -> Name:
        """What a program that runs for a microbatch, or once, means by a value."""
        programs = self.programs
        if value in programs.pieces:
            whole, part = programs.pieces[value]
            return whole, part % programs.num_microbatches
        if value in programs.sums and program not in programs.epilogue:
            return value, UNFINISHED
        return value, microbatch if programs.is_of_replica(value) else None

    def spec(self, value: int, stage: int) -> Spec:
        """How a value lies at a stage."""
        return self.shardings[stage].spec(value)

    def named(self, name: Name, seat: Seat) -> NamedSharding:
        """How a value lies at a seat; what each replica has for itself has one more dim, the first, split over them."""
        stage, worker = seat
        axis_names, spec = self.shardings[stage].axis_names, self.spec(name[0], stage)
        if name[1] is None:
            return NamedSharding(self.meshes[worker], partition_spec(spec, axis_names))
        own = partition_spec((WHOLE, *spec[1:]), axis_names)
        return NamedSharding(self.meshes[worker], PartitionSpec(axis_names[0], *own))


class Finishing:
    """What is to be done, as instructions: jitted, with what may be donated and what is let go of."""

    def __init__(
        self,
        programs: StagePrograms,
        made: Sequence[Call | Sending],
        kept: AbstractSet[Slot],
        seating: Seating,
    ) -> None:
        self.programs, self.made, self.seating = programs, made, seating
        self.last_use = {slot: i for i, one in enumerate(made) for slot in (*one.reads, *one.makes)}
        self.freed = {slot: i for slot, i in self.last_use.items() if slot not in kept}
        self.lent = _lent(made, seating.meshes)
        self.jitted: dict[Any, Any] = {}

    def run(self) -> tuple[Instruction, ...]:
        frees: dict[int, list[Slot]] = {}
        for slot, i in self.freed.items():
            frees.setdefault(i, []).append(slot)
        return tuple(self._instruction(i, one, tuple(frees.get(i, ()))) for i, one in enumerate(self.made))

    def _instruction(self, i: int, one: Call | Sending, frees: tuple[Slot, ...]) -> Instruction:
        if isinstance(one, Sending):
            return Instruction(one.name, one.function, one.reads, one.makes, frees)
        key = one.program, one.seat
        if key not in self.jitted:
            self.jitted[key] = self._jit(one, self._donated(i, one))
        return Instruction(one.program.name, self.jitted[key], one.reads, one.makes, frees)

    def _donated(self, i: int, one: Call) -> tuple[int, ...]:
        """Which operands' buffers become results': sums, and of what runs once, what it reads as the last; state first."""
        program = one.program
        if program in self.programs.tasks.values():
            return tuple(n for n, v in enumerate(program.reads) if v in program.sums)
        donated: list[int] = []
        results = Counter(self._type(program, v, one.seat) for v in program.makes)
        operands = enumerate(zip(program.reads, one.reads, strict=True))
        last_read = [
            (n, v)
            for n, (v, slot) in operands
            if self.freed.get(slot) == i and slot not in self.lent and self._is_given_up(v)
        ]
        for n, v in sorted(last_read, key=lambda each: each[1] not in self.programs.step.graph.inputs):
            kind = self._type(program, v, one.seat)
            if results[kind]:
                results[kind] -= 1
                donated.append(n)
        return tuple(donated)

    def _is_given_up(self, v: int) -> bool:
        """Whether a value is no argument that its caller keeps."""
        step = self.programs.step
        return v not in step.graph.inputs or step.graph.inputs.index(v) in step.replaces

    def _type(self, program: StageProgram, v: int, seat: Seat) -> Any:
        value, name = self.programs.values[v], self.seating.name(program, v, None)
        return value.shape, value.dtype, self.seating.named(name, seat)

    def _jit(self, one: Call, donated: tuple[int, ...]) -> Any:
        program, seat = one.program, one.seat
        mesh = self.seating.meshes[seat[1]]
        inner = self._of_replicas if program in self.programs.tasks.values() else self._once
        function = inner(program, self.seating.shardings[seat[0]].of_program(program), mesh)

        def run(*values: Any) -> Sequence[Any]:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*values)

        run.__name__ = run.__qualname__ = program.name.replace(" ", "_")
        named = partial(self.seating.name, program, microbatch=0)
        return jax.jit(
            run,
            in_shardings=tuple(self.seating.named(named(v), seat) for v in program.reads),
            out_shardings=[self.seating.named(named(v), seat) for v in program.makes],
            donate_argnums=donated,
        )

    def _of_replicas(
        self, program: StageProgram, sharding: StepSharding, mesh: Mesh
    ) -> Callable[..., Sequence[Any]]:
        """A task's program: each replica computes for itself."""
        axis = mesh.axis_names[0]
        own_mesh = mesh.abstract_mesh.update_axis_types({axis: AxisType.Manual})
        evaluate = evaluator(program.graph, sharding, own_mesh)
        is_own = [self.seating.name(program, v, 0)[1] is not None for v in program.reads]

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
        self, program: StageProgram, sharding: StepSharding, mesh: Mesh
    ) -> Callable[..., Sequence[Any]]:
        """A program that runs once: it makes the zeros that each replica begins a sum with, and reads the pieces of some."""
        evaluate, programs = evaluator(program.graph, sharding, mesh), self.programs

        def run(*values: Any) -> Sequence[Any]:
            read = [
                x[programs.pieces[v][1] // programs.num_microbatches] if v in programs.pieces else x
                for v, x in zip(program.reads, values, strict=True)
            ]
            return [
                jnp.broadcast_to(x, (programs.num_replicas, *x.shape)) if v in programs.sums else x
                for v, x in zip(program.makes, evaluate(read), strict=True)
            ]

        return run


def _lent(made: Sequence[Call | Sending], meshes: Sequence[Mesh]) -> frozenset[Slot]:
    """What other processes may read at any time."""
    if not are_of_several_processes(meshes):
        return frozenset()
    return frozenset(slot for one in made if isinstance(one, Sending) for slot in one.reads)
