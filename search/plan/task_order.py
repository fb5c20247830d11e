"""All workers' tasks in one order, in which each comes after those that it reads.

Workers wait for one another only for data, so each runs ahead until it lacks an operand. If all wait, their orders
contradict one another: the schedule would hang on any executor. An executor that dispatches from one thread does so in
this order. It goes around the workers, one task of each at a time, so all of them have work early.
"""

from collections import defaultdict, deque

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.schedule import Schedule, Task
from autoshard.search.plan.text_table import few


def task_order(schedule: Schedule) -> tuple[tuple[int, Task], ...]:
    """Each task with its worker.

    Raises:
      PlanError: some tasks wait for one another, or for one that no worker has.
    """
    done: set[Task] = set()
    order: list[tuple[int, Task]] = []
    waiting: dict[Task, list[int]] = defaultdict(list)
    left = [iter(tasks) for tasks in schedule.workers]
    at = [next(tasks, None) for tasks in left]
    runnable = deque(range(schedule.num_workers))
    while runnable:
        worker = runnable.popleft()
        task = at[worker]
        if task is None:
            continue
        missing = next((one for one in task.reads(schedule.num_stages) if one not in done), None)
        if missing is not None:
            waiting[missing].append(worker)
            continue
        done.add(task)
        order.append((worker, task))
        at[worker] = next(left[worker], None)
        runnable.extend((worker, *waiting.pop(task, ())))
    if waiting:
        _refuse(schedule, waiting, at)
    return tuple(order)


def _refuse(schedule: Schedule, waiting: dict[Task, list[int]], at: list[Task | None]) -> None:
    """Raises the error that names the waiting workers and the tasks that they wait for."""
    waits = [f"worker {w} at {at[w]} for {task}" for task, workers in waiting.items() for w in workers]
    raise PlanError(
        f"schedule {schedule.name} cannot be run: these tasks wait for others that never run: "
        f"{few(waits)}. Put each task behind those that it reads"
    )
