"""Whether a schedule computes a step, and how many microbatches it holds: both follow from the orders alone.

A microbatch is in flight on a stage from its forward pass until its backward pass has ended, with its weight gradient where
that is split off.
"""

from collections import Counter

from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order


def check(schedule: Schedule) -> None:
    """Every task once, each stage's on a microbatch on one worker, and none waits for ever."""
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    wanted = [Task(s, j, kind) for s in stages for j in microbatches for kind in schedule.kinds]
    assert sorted(task for _, task in schedule.tasks()) == sorted(wanted)
    for task, worker in schedule.worker_of.items():
        assert worker == schedule.worker_of[Task(task.stage, task.microbatch, TaskKind.FORWARD)]
    task_order(schedule)


def in_flight(schedule: Schedule) -> tuple[dict[int, int], ...]:
    """Per worker and stage on it: the most microbatches whose residuals, or parts of them, are held at once."""
    last = TaskKind.WEIGHT_GRADIENT if schedule.splits_backward else TaskKind.BACKWARD
    return tuple(_most_held(tasks, last) for tasks in schedule.workers)


def in_flight_together(schedule: Schedule) -> tuple[int, ...]:
    """Per worker: the most microbatches of all its stages at once, each counted."""
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
