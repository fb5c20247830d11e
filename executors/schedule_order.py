"""One order for all tasks of a schedule: each worker's own, and no task before those whose results it reads.

One process hands out the work of all workers, and does not wait for it; so any such order will do. This one goes around the
workers, a task of each at a time, so that work for all of them is handed out early.
"""

from collections.abc import Iterator

from cost_model.errors import PlanError
from search.plan.schedule import Schedule, Task, TaskKind


def dispatch_order(schedule: Schedule) -> Iterator[tuple[int, Task]]:
    """The tasks in an order in which they can be handed out, each with its worker.

    Raises:
      PlanError: there is none: workers wait for each other.
    """
    left = [list(reversed(tasks)) for tasks in schedule.workers]
    done: set[Task] = set()
    while any(left):
        ready = [w for w, tasks in enumerate(left) if tasks and _reads(tasks[-1], schedule) <= done]
        if not ready:
            waiting = ", ".join(f"{tasks[-1]} on worker {w}" for w, tasks in enumerate(left) if tasks)
            raise PlanError(
                f"schedule {schedule.name}: no worker can go on, as each waits for another ({waiting}). "
                "Put tasks after those whose results they read"
            )
        for worker in ready:
            task = left[worker].pop()
            done.add(task)
            yield worker, task


def _reads(task: Task, schedule: Schedule) -> set[Task]:
    """The tasks whose results a task reads."""
    stage, last = task.stage, schedule.num_stages - 1
    if task.kind is TaskKind.FORWARD:
        found = [Task(stage - 1, task.microbatch, TaskKind.FORWARD)] if stage else []
    elif task.kind is TaskKind.WEIGHT_GRADIENT:
        found = [Task(stage, task.microbatch, TaskKind.BACKWARD)]
    else:
        found = [Task(stage, task.microbatch, TaskKind.FORWARD)]
        found += [Task(stage + 1, task.microbatch, TaskKind.BACKWARD)] if stage < last else []
    return set(found)
