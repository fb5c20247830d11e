"""Whether a schedule computes a step: every task once, each stage's on a microbatch in one place, and none waits for
ever.

Schedules are data and may be written by hand, so whoever runs one asks here first. What a valid one holds in memory
follows from the orders alone: a microbatch is in flight on a stage from its forward pass until its backward pass has
ended, with its weight gradient where that is split off.
"""

from collections import Counter

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order


def check(schedule: Schedule) -> None:
    """Passes a schedule that computes a step.

    Raises:
      PlanError: a task is missing, is there twice, is apart from the others of its stage and microbatch, or waits for ever.
    """
    _check_each_once(schedule)
    _check_together(schedule)
    task_order(schedule)


def in_flight(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Per worker and stage on it: the most microbatches whose residuals, or parts of them, are held at once."""
    last = TaskKind.WEIGHT_GRADIENT if schedule.splits_backward else TaskKind.BACKWARD
    return tuple(_most_held(tasks, last) for tasks in schedule.workers)


def in_flight_together(schedule: Schedule) -> tuple[int, ...]:
    """Per worker: the same of all its stages at once, each counted."""
    last = TaskKind.WEIGHT_GRADIENT if schedule.splits_backward else TaskKind.BACKWARD
    alike = (tuple(Task(0, t.microbatch, t.kind) for t in tasks) for tasks in schedule.workers)
    return tuple(_most_held(tasks, last).get(0, 0) for tasks in alike)


def _most_held(tasks: tuple[Task, ...], last: TaskKind) -> dict[int, int]:
    held, most = Counter[int](), Counter[int]()
    for task in tasks:
        held[task.stage] += task.kind is TaskKind.FORWARD
        most[task.stage] = max(most[task.stage], held[task.stage])
        held[task.stage] -= task.kind is last
    return dict(most)


def _check_each_once(schedule: Schedule) -> None:
    count = Counter(task for _, task in schedule.tasks())
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    for task in (Task(s, j, kind) for s in stages for j in microbatches for kind in schedule.kinds):
        if count[task] != 1:
            where = sorted({worker for worker, one in schedule.tasks() if one == task})
            came = f"{count[task]} times, on workers {where}" if where else "by no worker"
            raise PlanError(
                f"schedule {schedule.name}: {task}, the {task.kind.replace('_', ' ')} of stage {task.stage} on microbatch "
                f"{task.microbatch}, is to be run once, but is run {came}. Write it once"
            )


def _check_together(schedule: Schedule) -> None:
    for task, worker in schedule.worker_of.items():
        forward = schedule.worker_of[Task(task.stage, task.microbatch, TaskKind.FORWARD)]
        if forward != worker:
            raise PlanError(
                f"schedule {schedule.name}: {task} is on worker {worker}, but its residuals are made on worker {forward}, "
                "where its forward pass is. Put both on one worker"
            )
