"""GPipe: all forward passes, then all backward passes, the last microbatch's first.

Of every microbatch the residuals are held at once, so it is for few of them, or for stages that recompute. Its bubble is
that of 1F1B: while the pipeline fills and while it drains, (stages - 1) x (forward + backward) of one microbatch.

Source: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism", figure 2.
"""

from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def gpipe(num_workers: int, num_microbatches: int) -> Schedule:
    """GPipe's schedule, a stage per worker."""
    microbatches = range(num_microbatches)

    def tasks(stage: int) -> tuple[Task, ...]:
        forward = [Task(stage, j, TaskKind.FORWARD) for j in microbatches]
        backward = [Task(stage, j, TaskKind.BACKWARD) for j in reversed(microbatches)]
        return (*forward, *backward)

    return Schedule("gpipe", num_workers, num_microbatches, tuple(map(tasks, range(num_workers))), False)
