"""The circular schedule: all forward passes, then all backward passes, with several stages on each worker, far apart.

With v stages on each of p workers, stage s on worker s mod p, a microbatch goes around the workers v times. Each worker
runs all microbatches through its first stage, then all through its second; backward passes go the other way round. The
pipeline fills and drains in steps of a v-th of a worker's work. So its bubble is GPipe's divided by v, if there are as
many microbatches as workers. The residuals of all microbatches are held at once, as by GPipe.

One program for all stages can run this schedule: at any time all workers do the same.

Source: Xu et al. 2021, "GSPMD: general and scalable parallelization for ML computation graphs", section 3.3.
"""

from autoshard.cost_model.errors import InputError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def circular(num_workers: int, num_microbatches: int, stages_per_worker: int) -> Schedule:
    """The circular schedule."""

    def tasks(worker: int) -> tuple[Task, ...]:
        stages = range(worker, num_workers * stages_per_worker, num_workers)
        microbatches = range(num_microbatches)
        forward = [Task(stage, j, TaskKind.FORWARD) for stage in stages for j in microbatches]
        backward = [Task(stage, j, TaskKind.BACKWARD) for stage in reversed(stages) for j in microbatches]
        return (*forward, *backward)

    workers = tuple(map(tasks, range(num_workers)))
    return Schedule("circular", num_workers * stages_per_worker, num_microbatches, workers, False)


def check_circular(num_workers: int, num_microbatches: int) -> None:
    """Refuses numbers for which there is no circular schedule.

    Raises:
      InputError: there are fewer microbatches than workers, which would wait for one another.
    """
    if num_microbatches < num_workers:
        raise InputError(
            f"the schedule 'circular' wants at least as many microbatches as workers, got {num_microbatches} for "
            f"{num_workers}. Use {num_workers} microbatches, or schedule 'gpipe'"
        )
