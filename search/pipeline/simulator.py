"""What a schedule takes: when each task runs, how long workers wait, and what they hold meanwhile.

Each worker runs its tasks in its order, each as soon as it is free and what the task reads is there. What one stage hands
to another on another worker arrives some time after it was made. Such a transfer occupies no worker, and transfers do not
wait for one another: they are taken to run beside computation, over links that are not full. What it changes is when the
reader can start.

Steps follow one another, and a worker whose tasks are done may begin the next step while others still finish this one. So
the time from a worker's first start to its last end is what a step takes of it, and the longest of these is the time
between steps, `period_s`: if all workers keep their times of one step and shift them by a period, each is free when it
must be and nothing is read before it is there. This is how the zero-bubble papers count, which needs an update that waits
for nobody; where it does wait for all (for the norm of all gradients, say), a step takes until the last end,
`makespan_s`. A worker's bubble is what of a period it waits.

In memory a worker holds the residuals of a stage and a microbatch from the forward pass to the end of the backward pass;
where that is split, the part of them that weight gradients need (with the gradients that they are multiplied with) until
these are computed. (A transferred value that waits for its reader is not counted.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order


@dataclass(frozen=True, slots=True)
class StageCost:
    """What a stage takes, per microbatch.

    Attributes:
      forward_s: of computation and of communication inside the stage.
      backward_s: without what only weight gradients need.
      weight_gradient_s: the rest of the backward pass; where a schedule doesn't split that, a part of it.
      activation_transfer_s: until what the forward pass made is on the next stage's worker.
      gradient_transfer_s: until what the backward pass made is on the worker of the stage before.
      residual_bytes: per device, from the forward pass to the end of the backward pass.
      weight_gradient_bytes: per device, from the backward pass to the end of the weight gradient, where they are split.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float = 0.0
    activation_transfer_s: float = 0.0
    gradient_transfer_s: float = 0.0
    residual_bytes: float = 0.0
    weight_gradient_bytes: float = 0.0

    def duration_s(self, kind: TaskKind, splits_backward: bool) -> float:
        """Of a task."""
        if kind is TaskKind.FORWARD:
            return self.forward_s
        if kind is TaskKind.WEIGHT_GRADIENT:
            return self.weight_gradient_s
        return self.backward_s if splits_backward else self.backward_s + self.weight_gradient_s


@dataclass(frozen=True, slots=True)
class Run:
    """A task, when it runs, and what its worker holds then.

    Attributes:
      task: of some worker.
      start_s: from the first task's start.
      end_s: likewise.
      held_bytes: residuals per device while it runs.
    """

    task: Task
    start_s: float
    end_s: float
    held_bytes: float


@dataclass(frozen=True)
class Simulation:
    """A step as its schedule would run.

    Attributes:
      schedule: what was run.
      workers: per worker: its tasks with their times, in order.
    """

    schedule: Schedule
    workers: tuple[tuple[Run, ...], ...]

    @property
    def makespan_s(self) -> float:
        """From the first start to the last end."""
        return max(runs[-1].end_s for runs in self.workers if runs)

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Per worker: in tasks."""
        return tuple(sum(run.end_s - run.start_s for run in runs) for runs in self.workers)

    @property
    def period_s(self) -> float:
        """From step to step, where workers needn't wait for one another in between."""
        return max(runs[-1].end_s - runs[0].start_s for runs in self.workers if runs)

    @property
    def bubble_s(self) -> tuple[float, ...]:
        """Per worker: idle in a period."""
        return tuple(self.period_s - busy_s for busy_s in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """Of all workers' time, what is idle."""
        return sum(self.bubble_s) / (self.period_s * len(self.workers))

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """Per worker: the most residuals at once, per device."""
        return tuple(max((run.held_bytes for run in runs), default=0.0) for runs in self.workers)


def simulate(schedule: Schedule, stages: Sequence[StageCost]) -> Simulation:
    """Runs a schedule in time.

    Args:
      schedule: any that can be run.
      stages: what each takes.

    Raises:
      PlanError: tasks wait for one another for ever.
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
    """Until what a task made is with its reader on another worker."""
    cost = stages[source.stage]
    return cost.activation_transfer_s if source.kind is TaskKind.FORWARD else cost.gradient_transfer_s


def _held(task: Task, cost: StageCost, splits_backward: bool) -> tuple[float, float]:
    """What a task adds to its worker's residuals when it starts, and (mostly less than nothing) when it ends."""
    if task.kind is TaskKind.FORWARD:
        return cost.residual_bytes, 0.0
    if task.kind is TaskKind.WEIGHT_GRADIENT:
        return 0.0, -cost.weight_gradient_bytes
    return 0.0, (cost.weight_gradient_bytes if splits_backward else 0.0) - cost.residual_bytes
