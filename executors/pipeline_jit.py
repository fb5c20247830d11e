"""From what a pipeline has to do, in order, to instructions: programs jitted, slots let go of, buffers given up.

What a slot holds is let go of behind its last reader. A program's operand is donated where a result may take its buffer: a
sum to the sum with one more term; and in what runs once, what is read for the last time, state before all else.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from executors.pipeline_program import Instruction, Slot
from executors.rewrite import evaluator
from search.ir.spec import Spec, partition_spec
from search.plan.stage_programs import StageProgram, StagePrograms, StageSharding

Seat = tuple[int, int]
"""A stage on a worker."""

Name = tuple[int, int | None]
"""A value, and of which microbatch it is."""


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
      pieces: by value, the value of which it is a piece.
    """

    shardings: Sequence[StageSharding]
    meshes: Sequence[Mesh]
    pieces: Mapping[int, tuple[int, int]]

    def spec(self, value: int, stage: int) -> Spec:
        """How a value lies at a stage; a piece as what it is a piece of."""
        return self.shardings[stage].spec(self.pieces.get(value, (value, 0))[0])

    def named(self, value: int, seat: Seat) -> NamedSharding:
        """How a value lies at a seat."""
        stage, worker = seat
        spec = partition_spec(self.spec(value, stage), self.shardings[stage].axis_names)
        return NamedSharding(self.meshes[worker], spec)


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
        results = Counter(self._type(v, one.seat) for v in program.makes)
        operands = enumerate(zip(program.reads, one.reads, strict=True))
        last_read = [
            (n, v) for n, (v, slot) in operands if self.freed.get(slot) == i and self._is_given_up(v)
        ]
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
        return value.shape, value.dtype, self.seating.spec(v, seat[0])

    def _jit(self, one: Call, donated: tuple[int, ...]) -> Any:
        program, (stage, worker) = one.program, one.seat
        mesh = self.seating.meshes[worker]
        evaluate = evaluator(program.graph, self.seating.shardings[stage].of_program(program), mesh)

        def run(*values: Any) -> Sequence[Any]:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return evaluate(values)

        run.__name__ = run.__qualname__ = program.name.replace(" ", "_")
        return jax.jit(
            run,
            in_shardings=tuple(self.seating.named(v, one.seat) for v in program.reads),
            out_shardings=[self.seating.named(v, one.seat) for v in program.makes],
            donate_argnums=donated,
        )
