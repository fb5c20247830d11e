"""ZB-H1 and ZB-H2: weight gradients fill the time in which a worker would wait.

Other stages wait only for the gradient of a stage's input. The work that only weight gradients need (W) is a task of
its own and may come later. So backward passes (B) reach the first stage sooner, and W fills idle time. Both schedules
are 1F1B with B as the backward pass and W some microbatches behind, so far that all workers hold equally much:

    ZB-H1: p - i - 1 forward passes ahead on stage i of p, W i microbatches behind: p in flight, as 1F1B's first stage;
    ZB-H2: 2 (p - i - 1) ahead, W 2i behind: 2p - 1 in flight, and where F = B = W no bubble at all.

The bubble is (p-1)(F + B - W) and (p-1)(F + B - 2W).

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 2.
"""

from collections.abc import Iterator

from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def zb_h1(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-H1, a stage per worker."""
    return _delayed("zb-h1", num_workers, num_microbatches, 1)


def zb_h2(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-H2, a stage per worker."""
    return _delayed("zb-h2", num_workers, num_microbatches, 2)


def _delayed(name: str, num_workers: int, num_microbatches: int, pace: int) -> Schedule:
    workers = tuple(
        tuple(_tasks(stage, num_microbatches, pace * (num_workers - stage - 1), pace * stage))
        for stage in range(num_workers)
    )
    return Schedule(name, num_workers, num_microbatches, workers, True)


def _tasks(stage: int, num_microbatches: int, lead: int, delay: int) -> Iterator[Task]:
    """Forward passes, each backward pass so many behind, each weight gradient so many behind that."""
    for j in range(num_microbatches + lead + delay):
        for kind, microbatch in (
            (TaskKind.FORWARD, j),
            (TaskKind.BACKWARD, j - lead),
            (TaskKind.WEIGHT_GRADIENT, j - lead - delay),
        ):
            if 0 <= microbatch < num_microbatches:
                yield Task(stage, microbatch, kind)
