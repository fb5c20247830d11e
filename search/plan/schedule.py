"""A pipeline's schedule: the tasks of each worker, in order.

The step's layers are cut into *stages*, the batch into *microbatches*, and a stage's work on a microbatch into *tasks*:
its forward pass, its backward pass, and, if a schedule splits these, the part of the backward pass that only weight
gradients need. A *worker* is a group of devices (a submesh) that runs one task at a time, in the order written here.
Between workers, only data orders tasks:

    forward of stage s             reads the forward of stage s-1,
    backward of stage s            reads the forward of stage s and the backward of stage s+1,
    weight gradient of stage s     reads the backward of stage s,

each of the same microbatch. So a schedule is data, one executor runs any of them and one simulator prices any.

A worker may hold several stages (interleaved 1F1B, ZB-V and DualPipe-V: virtual stages), and a stage may stand on
several workers (Chimera's two directions): then each holds a copy of its weights, and their gradients are summed before
the update. All tasks of a stage and a microbatch are on one worker, as residuals stay where they are made.

One update follows all tasks: these schedules are synchronous, and give the numbers of a single device. An asynchronous
one (PipeDream, 2BW) needs no other field than a task's `kind`. An `update` among the tasks of a worker says where the
weights change. A forward pass and its backward pass read the weights of the last update before the forward pass, and
the order gives the number of versions that a worker stashes.

A task is written `F2.5` for the forward pass of stage 2 on microbatch 5, `B2.5` for the backward pass, `W2.5` for the
weight gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from autoshard.cost_model.errors import PlanError


class TaskKind(StrEnum):
    """A part of a stage's work on a microbatch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"

    @property
    def letter(self) -> str:
        """`F`, `B` or `W`."""
        return self.value[0].upper()

    __hash__ = str.__hash__  # an enum's own is not C, and simulators look up tasks by the thousand


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One stage's work on one microbatch, or a part of it.

    Attributes:
      stage: in the order of the forward pass.
      microbatch: the number of the microbatch.
      kind: its kind. If the schedule does not split the backward pass, `backward` makes the weight gradients, too.
    """

    stage: int
    microbatch: int
    kind: TaskKind

    def __str__(self) -> str:
        return f"{self.kind.letter}{self.stage}.{self.microbatch}"

    def reads(self, num_stages: int) -> tuple["Task", ...]:
        """The tasks whose results this one reads."""
        stage, microbatch = self.stage, self.microbatch
        if self.kind is TaskKind.FORWARD:
            return (Task(stage - 1, microbatch, TaskKind.FORWARD),) if stage else ()
        if self.kind is TaskKind.WEIGHT_GRADIENT:
            return (Task(stage, microbatch, TaskKind.BACKWARD),)
        own = Task(stage, microbatch, TaskKind.FORWARD)
        return (own, Task(stage + 1, microbatch, TaskKind.BACKWARD)) if stage + 1 < num_stages else (own,)


@dataclass(frozen=True)
class Schedule:
    """The tasks of each worker, in order.

    Attributes:
      name: name of its family, such as `1f1b`.
      num_stages: number of stages.
      num_microbatches: number of microbatches.
      workers: per worker, its tasks in order.
      splits_backward: whether weight gradients are tasks of their own.

    Raises:
      PlanError: a task has no such stage, microbatch or kind.

    Example:
      >>> F, B = TaskKind.FORWARD, TaskKind.BACKWARD
      >>> one = Schedule("1f1b", 1, 2, ((Task(0, 0, F), Task(0, 0, B), Task(0, 1, F), Task(0, 1, B)),), False)
      >>> one.workers_of(0), [str(task) for task in one.workers[0]]
      ((0,), ['F0.0', 'B0.0', 'F0.1', 'B0.1'])
    """

    name: str
    num_stages: int
    num_microbatches: int
    workers: tuple[tuple[Task, ...], ...]
    splits_backward: bool

    def __post_init__(self) -> None:
        for worker, tasks in enumerate(self.workers):
            for task in tasks:
                if not (0 <= task.stage < self.num_stages and 0 <= task.microbatch < self.num_microbatches):
                    raise PlanError(
                        f"schedule {self.name}: worker {worker} has task {task}, but stages are 0 to {self.num_stages - 1} "
                        f"and microbatches 0 to {self.num_microbatches - 1}"
                    )
                if task.kind is TaskKind.WEIGHT_GRADIENT and not self.splits_backward:
                    raise PlanError(
                        f"schedule {self.name}: worker {worker} has task {task}, but this schedule leaves weight gradients "
                        "in the backward passes. Say that it splits them, or leave the task out"
                    )

    @property
    def num_workers(self) -> int:
        """Groups of devices."""
        return len(self.workers)

    @property
    def kinds(self) -> tuple[TaskKind, ...]:
        """The kinds that each stage has a task of for each microbatch."""
        return tuple(TaskKind) if self.splits_backward else (TaskKind.FORWARD, TaskKind.BACKWARD)

    def tasks(self) -> Iterator[tuple[int, Task]]:
        """Each worker's tasks, in order, with the worker."""
        return ((worker, task) for worker, tasks in enumerate(self.workers) for task in tasks)

    def workers_of(self, stage: int) -> tuple[int, ...]:
        """The workers that hold a stage: several where it has replicas."""
        return self._workers_of[stage]

    def stages_of(self, worker: int) -> tuple[int, ...]:
        """The stages that a worker holds, in the order of the forward pass."""
        return self._stages_of[worker]

    @cached_property
    def worker_of(self) -> dict[Task, int]:
        """The worker of each task."""
        return {task: worker for worker, task in self.tasks()}

    @cached_property
    def _stages_of(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted({task.stage for task in tasks})) for tasks in self.workers)

    @cached_property
    def _workers_of(self) -> tuple[tuple[int, ...], ...]:
        stages = range(self.num_stages)
        return tuple(tuple(w for w, held in enumerate(self._stages_of) if s in held) for s in stages)
