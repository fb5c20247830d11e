"""The memory of a pipeline's devices, program by program, in the order in which the host dispatches them.

JAX allocates memory when a program is dispatched, and frees an array behind its last reader. So the schedule, and the
operands and results of each program, decide which arrays lie on a stage's devices when a program begins:

* *once*: arguments that rest there, results of the prologue, copies of other stages' values, and the sums;
* *in flight*: of each microbatch, results of tasks and values sent by other stages, until their last reader there has run.

A program adds its results, and its temporaries (`search.pipeline.task_memory`). Behind the tasks, the sums of replicas are
added together, and the update runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.ir.spec import WHOLE, Spec, num_shards
from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.stage_programs import StageProgram, StagePrograms, StageSharding
from autoshard.search.plan.task_order import task_order

Job = tuple[int, TaskKind]
"""A stage, and a kind of task."""


@dataclass(frozen=True, eq=False)
class StageMemory:
    """The memory of a pipeline's stages, in bytes on a device.

    Attributes:
      programs: the programs of all stages.
      schedule: the order of their tasks.
      shardings: per stage, the specs of its values.
    """

    programs: StagePrograms
    schedule: Schedule
    shardings: Sequence[StageSharding]

    def task_peaks(self, temporary_bytes: Mapping[Job, float]) -> tuple[float, ...]:
        """The peak of each worker's devices while tasks run."""
        held = [self._once_bytes(worker) for worker in range(self.schedule.num_workers)]
        highest = list(held)
        for worker, task in task_order(self.schedule):
            job = task.stage, task.kind
            if job in self.programs.tasks:
                made_bytes = self._made_bytes[job]
                highest[worker] = max(
                    highest[worker], held[worker] + made_bytes + temporary_bytes.get(job, 0.0)
                )
                held[worker] += made_bytes - self._freed_bytes[job]
                for stage, sent_bytes in self._sent_bytes[job].items():
                    reader = Task(stage, task.microbatch, TaskKind.FORWARD)
                    held[self.schedule.worker_of[reader]] += sent_bytes
        return tuple(highest)

    def prologue_peak(self, stage: int, temporary_bytes: float) -> float:
        """The peak of a stage's devices before its first task. Results for other stages lie there, too."""
        made = {v for p in self.programs.prologue if p.stage == stage for v in p.makes}
        resting_bytes = sum(
            self.bytes_of(v, stage) for v in self._once(stage) & {*self.programs.step.graph.inputs}
        )
        made_bytes = sum(self.bytes_of(v, stage, v in self.programs.sums) for v in made)
        return resting_bytes + made_bytes + temporary_bytes

    def update_peak(self, stage: int, temporary_bytes: float) -> float:
        """The peak of a stage's devices behind all tasks."""
        read = self._read_by(stage, self.programs.epilogue)
        resting = self._once(stage) & (read | {*self.programs.step.graph.inputs})
        resting_bytes = sum(self.bytes_of(v, stage) for v in resting - self.programs.sums)
        sums = {v for v in self.programs.sums if self.programs.stage_of[v] == stage}
        sum_bytes = sum(self.bytes_of(v, stage, is_own=True) for v in sums)
        total_bytes = sum(self.bytes_of(v, stage) for v in sums | (read & self.programs.sums))
        replaced = {
            v
            for v, r in zip(self.programs.results, self.programs.step.replaces, strict=True)
            if r is not None and isinstance(v, int)
        }
        made = {v for p in self.programs.epilogue if p.stage == stage for v in p.makes} - replaced
        fresh_bytes = sum(self.bytes_of(v, stage) for v in made)
        transposed_bytes = sum(
            self.bytes_of(v, stage, is_own=True) for v in sums if self._is_transposed(v, stage)
        )
        adding_bytes = 0.0 if self.programs.num_replicas == 1 else transposed_bytes + total_bytes
        copied_bytes = sum(
            self.bytes_of(v, stage) for v in self.programs.copied if self.programs.stage_of[v] == stage
        )
        return resting_bytes + max(
            sum_bytes + adding_bytes,
            total_bytes + fresh_bytes + temporary_bytes,
            fresh_bytes + copied_bytes,
        )

    def _is_transposed(self, v: int, stage: int) -> bool:
        """Whether a sum is copied before it is reduced and scattered: replicas get parts along another dimension than its
        first of a size above one."""
        dim, shape = self.shardings[stage].spec(v)[0], self.programs.values[v].shape
        return dim != WHOLE and any(size > 1 for size in shape[:dim])

    # --- values that lie there once

    def _once_bytes(self, worker: int) -> float:
        """The bytes that a worker's devices hold as long as tasks run."""
        found: dict[tuple[int, Spec], float] = {}
        for stage in self.schedule.stages_of(worker):
            is_home = self.schedule.workers_of(stage)[0] == worker
            for v in self._once(stage) if is_home else self._read_by(stage, self.programs.tasks.values()):
                if not self.programs.is_of_replica(v):
                    spec = self.shardings[stage].spec(v)
                    found[v, spec] = self.bytes_of(v, stage, is_own=v in self.programs.sums)
        return sum(found.values())

    def _once(self, stage: int) -> frozenset[int]:
        """The values that lie at a stage while tasks run, one for all microbatches."""
        programs = self.programs
        later = {v for program in programs.epilogue for v in program.makes} | programs.pieces.keys()
        read = self._read_by(stage, (*programs.tasks.values(), *programs.epilogue))
        own = {v for v in programs.step.graph.inputs if programs.stage_of[v] == stage}
        later |= {v for v in programs.sums if programs.stage_of[v] != stage}
        return frozenset(v for v in (read | own) - later if not programs.is_of_replica(v))

    def _read_by(self, stage: int, programs: Iterable[StageProgram]) -> frozenset[int]:
        return frozenset(v for program in programs if program.stage == stage for v in program.reads)

    # --- values of each microbatch

    @cached_property
    def _made_bytes(self) -> dict[Job, float]:
        return {
            (stage, kind): sum(self.bytes_of(v, stage) for v in program.makes if v not in program.sums)
            for (stage, kind), program in self.programs.tasks.items()
        }

    @cached_property
    def _freed_bytes(self) -> dict[Job, float]:
        """By task, the bytes of values whose last reader at the stage it is."""
        found = dict.fromkeys(self.programs.tasks, 0.0)
        for stage in range(self.programs.num_stages):
            last: dict[int, TaskKind] = {}
            for kind in TaskKind:
                if (program := self.programs.tasks.get((stage, kind))) is not None:
                    touched = (v for v in (*program.reads, *program.makes) if v not in program.sums)
                    last |= {v: kind for v in touched if self.programs.is_of_microbatch(v)}
            for v, kind in last.items():
                if v not in self._kept:
                    found[stage, kind] += self.bytes_of(v, stage)
        return found

    @cached_property
    def _sent_bytes(self) -> dict[Job, dict[int, float]]:
        """By task, the bytes of its results at each stage to which they are sent."""
        maker = {v: job for job, program in self.programs.tasks.items() for v in program.makes}
        found: dict[Job, dict[int, float]] = {job: {} for job in self.programs.tasks}
        for transfer in self.programs.transfers:
            if transfer.is_per_microbatch and transfer.value in maker:
                there = found[maker[transfer.value]]
                num_bytes = self.bytes_of(transfer.value, transfer.target)
                there[transfer.target] = there.get(transfer.target, 0.0) + num_bytes
        return found

    @cached_property
    def _kept(self) -> frozenset[int]:
        """The values that the epilogue reads of every microbatch."""
        parts: dict[int, int] = {}
        for v, _ in self.programs.pieces.values():
            parts[v] = parts.get(v, 0) + 1
        return frozenset(v for v, count in parts.items() if count > self.programs.num_replicas)

    def bytes_of(self, v: int, stage: int, is_own: bool = False) -> float:
        """Bytes of a value on a stage's device; 0 if it is on the host. Values that each replica has for itself are not
        split over replicas."""
        return 0.0 if self.programs.values[v].is_on_host else self._local_bytes(v, stage, is_own)

    def host_bytes(self, stage: int) -> float:
        """Bytes on the host, for each device of a stage: of arguments that rest there. New state takes their place."""
        programs = self.programs
        hosted = (v for v in programs.step.graph.inputs if programs.values[v].is_on_host)
        return sum(self._local_bytes(v, stage) for v in hosted if programs.stage_of[v] == stage)

    def _local_bytes(self, v: int, stage: int, is_own: bool = False) -> float:
        """Bytes of a value for each device of a stage, wherever it is."""
        sharding, value = self.shardings[stage], self.programs.values[v]
        own = is_own or self.programs.is_of_replica(v)
        return value.num_bytes / num_shards(sharding.spec(v)[own:], sharding.mesh_shape[own:])

    def is_whole(self, v: int, stage: int) -> bool:
        """True if a value is not split over replicas."""
        return self.shardings[stage].spec(v)[0] == WHOLE
