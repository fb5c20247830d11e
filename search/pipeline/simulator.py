"""The simulation of a schedule: when each task runs, how long workers wait, and which residuals they hold.

Each worker runs its tasks in its order. A task starts when its worker is free and its operands have arrived. The result
of a stage arrives at another worker after a transfer. A transfer occupies no worker, and transfers do not wait for one
another: they are assumed to overlap with computation, on links that are not full. They only delay the reader's start.

Steps follow one another. A worker whose tasks are done may begin the next step while others finish this one. So a step
takes of a worker the time from its first start to its last end. The longest of these times is the time between steps,
`period_s`: if all workers repeat their times of one step a period later, each is free when a task starts, and all
operands have arrived. The zero-bubble papers count so; it needs an update that waits for no other worker. If the update
does wait for all workers, for example for the norm of all gradients, a step lasts until the last end, `makespan_s`. The
bubble of a worker is the time of a period in which it waits.

A worker holds the residuals of a stage and a microbatch from the forward pass to the end of the backward pass. If the
backward pass is split, it then holds the operands of the weight gradients until these are computed. Transferred values
that wait for their reader are not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order


@dataclass(frozen=True, slots=True)
class StageCost:
    """The costs of a stage per microbatch.

    Attributes:
      forward_s: seconds of computation, and of communication inside the stage.
      backward_s: seconds of the backward pass without the part that only weight gradients need.
      weight_gradient_s: seconds of that part. In a schedule that does not split the backward pass, both are one task.
      activation_transfer_s: seconds until the forward pass's results arrive at the next stage's worker.
      gradient_transfer_s: seconds until the backward pass's results arrive at the worker of the stage before.
      residual_bytes: bytes per device from the forward pass to the end of the backward pass.
      weight_gradient_bytes: bytes per device from the backward pass to the end of the weight gradient, if they are
        split.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float = 0.0
    activation_transfer_s: float = 0.0
    gradient_transfer_s: float = 0.0
    residual_bytes: float = 0.0
    weight_gradient_bytes: float = 0.0

    def duration_s(self, kind: TaskKind, splits_backward: bool) -> float:
        """Seconds of a task."""
        if kind is TaskKind.FORWARD:
            return self.forward_s
        if kind is TaskKind.WEIGHT_GRADIENT:
            return self.weight_gradient_s
        return self.backward_s if splits_backward else self.backward_s + self.weight_gradient_s


@dataclass(frozen=True, slots=True)
class Run:
    """A task with its time, and the memory of its worker.

    Attributes:
      task: the task.
      start_s: seconds from the start of the first task.
      end_s: seconds from the start of the first task.
      held_bytes: residuals per device while it runs.
    """

    task: Task
    start_s: float
    end_s: float
    held_bytes: float


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    Attributes:
      schedule: the simulated schedule.
      workers: per worker, its tasks with their times, in order.
    """

    schedule: Schedule
    workers: tuple[tuple[Run, ...], ...]

    @property
    def makespan_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max(runs[-1].end_s for runs in self.workers if runs)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per worker, seconds in tasks."""
        return tuple(sum(run.end_s - run.start_s for run in runs) for runs in self.workers)

    @property
    def period_s(self) -> float:
        """Seconds from step to step, if no worker waits for others between steps."""
        return max(runs[-1].end_s - runs[0].start_s for runs in self.workers if runs)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Per worker, idle seconds in a period."""
        return tuple(self.period_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """The idle share of all workers' time."""
        return sum(self.bubble_s) / (self.period_s * len(self.workers))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per worker, the largest residuals at once, per device."""
        return tuple(max((run.held_bytes for run in runs), default=0.0) for runs in self.workers)


def simulate(schedule: Schedule, stages: Sequence[StageCost]) -> Simulation:
    """Simulates a schedule.

    Raises:
      PlanError: tasks wait for one another in a circle.
    """
    assert len(stages) == schedule.num_stages, f"{len(stages)} costs for {schedule.num_stages} stages"
    duration_s = {
        (stage, kind): cost.duration_s(kind, schedule.splits_backward)
        for stage, cost in enumerate(stages)
        for kind in TaskKind
    }
    made: dict[Task, tuple[int, float]] = {}
    free_s, held_bytes = [0.0] * schedule.num_workers, [0.0] * schedule.num_workers
    workers: list[list[Run]] = [[] for _ in schedule.workers]
    for worker, task in task_order(schedule):
        start_s = free_s[worker]
        for source in task.reads(schedule.num_stages):
            where, ready_s = made[source]
            start_s = max(start_s, ready_s if where == worker else ready_s + _transfer_s(source, stages))
        end_s = start_s + duration_s[task.stage, task.kind]
        before, after = _held(task, stages[task.stage], schedule.splits_backward)
        held_bytes[worker] += before
        workers[worker].append(Run(task, start_s, end_s, held_bytes[worker]))
        held_bytes[worker] += after
        free_s[worker] = end_s
        made[task] = worker, end_s
    return Simulation(schedule, tuple(map(tuple, workers)))


def _transfer_s(source: Task, stages: Sequence[StageCost]) -> float:
    """Seconds until a task's result arrives at a reader on another worker."""
    cost = stages[source.stage]
    return cost.activation_transfer_s if source.kind is TaskKind.FORWARD else cost.gradient_transfer_s


def _held(task: Task, cost: StageCost, splits_backward: bool) -> tuple[float, float]:
    """Bytes that a task adds to its worker's residuals when it starts, and when it ends (mostly below zero)."""
    if task.kind is TaskKind.FORWARD:
        return cost.residual_bytes, 0.0
    if task.kind is TaskKind.WEIGHT_GRADIENT:
        return 0.0, -cost.weight_gradient_bytes
    return 0.0, (cost.weight_gradient_bytes if splits_backward else 0.0) - cost.residual_bytes
