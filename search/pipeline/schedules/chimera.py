"""Chimera: two pipelines in opposite directions over the same workers, each where the other would wait.

Each worker holds two stages: stage w of the pipeline that goes down and stage p-1-w of the one that goes up, so every
stage stands on two workers, whose weight gradients are summed. Of every p microbatches one half goes each way. In slots
of one task (a forward and a backward pass taken to be as long), microbatch j of a half runs

    forward on stage s at slot s + 2j,      backward at slot 2p - 1 - s + 2j,

as in 1F1B. For an even p the slots of both directions and all groups of p, 2p slots apart, are all different on each
worker: so the schedule is the tasks in the order of their slots. p - 2 slots are idle, where 1F1B has 2(p - 1); where
backward passes take longer, something more between groups.

Source: Li and Hoefler 2021, "Chimera: efficiently training large-scale neural networks with bidirectional pipelines",
section 3.
"""

from collections.abc import Iterator

from autoshard.cost_model.errors import InputError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def chimera(num_workers: int, num_microbatches: int) -> Schedule:
    """Chimera with two pipelines, a stage of each per worker."""
    workers: list[list[tuple[int, Task]]] = [[] for _ in range(num_workers)]
    for worker, slot, task in _placed(num_workers, num_microbatches):
        workers[worker].append((slot, task))
    orders = tuple(tuple(task for _, task in sorted(tasks)) for tasks in workers)
    return Schedule("chimera", num_workers, num_microbatches, orders, False)


def check_chimera(num_workers: int, num_microbatches: int) -> None:
    """Refuses numbers for which there is no such schedule.

    Raises:
      InputError: an odd number of stages or of microbatches.
    """
    for what, count in (("stages", num_workers), ("microbatches", num_microbatches)):
        if count % 2:
            raise InputError(
                f"Chimera wants an even number of {what}, as two pipelines meet; got {count}. Use {count + 1}, or schedule "
                "'1f1b'"
            )


def _placed(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, int, Task]]:
    """Worker, slot and task of all tasks."""
    for first in range(0, num_microbatches, num_stages):
        half = min(num_stages, num_microbatches - first) // 2
        for j in range(half):
            for s in range(num_stages):
                for worker, microbatch in ((s, first + j), (num_stages - 1 - s, first + half + j)):
                    start = 2 * (first + j)
                    yield worker, start + s, Task(s, microbatch, TaskKind.FORWARD)
                    last = 2 * num_stages - 1 - s
                    yield worker, start + last, Task(s, microbatch, TaskKind.BACKWARD)
