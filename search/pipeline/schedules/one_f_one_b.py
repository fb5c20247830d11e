"""1F1B: a backward pass as soon as it can be, so that few microbatches are in flight.

A stage runs some forward passes ahead, then takes turns: one forward, one backward. With as many ahead as there are
stages behind it, the backward pass of a microbatch arrives just when the stage has run out of its lead. Stage i of p
holds the residuals of p - i microbatches at most, however many there are. The bubble is GPipe's.

That leaves transfers no time: the next forward pass waits for the backward pass that comes back. *Eager* 1F1B runs
twice as far ahead, so that a transfer to and fro has the time of one more task per stage; it costs the memory of 2(p -
i) - 1.

Sources: Narayanan et al. 2021, "Memory-efficient pipeline-parallel DNN training" (PipeDream-Flush), and 2021,
"Efficient large-scale language model training on GPU clusters using Megatron-LM", section 2.2.1; Zhuang et al. 2023,
"On optimizing the communication of model parallelism", section 4, for eager 1F1B.
"""

from collections.abc import Iterator, Sequence

from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def one_f_one_b(num_workers: int, num_microbatches: int) -> Schedule:
    """1F1B, a stage per worker."""
    return _running_ahead("1f1b", num_microbatches, range(num_workers - 1, -1, -1))


def eager_one_f_one_b(num_workers: int, num_microbatches: int) -> Schedule:
    """1F1B with transfers behind computation, a stage per worker."""
    return _running_ahead("eager-1f1b", num_microbatches, range(2 * num_workers - 2, -1, -2))


def _running_ahead(name: str, num_microbatches: int, leads: Sequence[int]) -> Schedule:
    workers = tuple(tuple(_tasks(stage, num_microbatches, lead)) for stage, lead in enumerate(leads))
    return Schedule(name, len(leads), num_microbatches, workers, False)


def _tasks(stage: int, num_microbatches: int, lead: int) -> Iterator[Task]:
    """Forward passes, the backward pass of each when the stage is so many ahead of it."""
    for j in range(num_microbatches + lead):
        if j < num_microbatches:
            yield Task(stage, j, TaskKind.FORWARD)
        if 0 <= j - lead < num_microbatches:
            yield Task(stage, j - lead, TaskKind.BACKWARD)
