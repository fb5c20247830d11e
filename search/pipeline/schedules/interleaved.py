"""Interleaved 1F1B: each worker holds several stages, far apart, and the bubble is so many times shorter.

With v stages on each of p workers, stage s on worker s mod p, the pipeline fills in steps of a v-th of a worker's work.
Microbatches go in groups of p: a worker runs the group through its first stage, then through its second, and so on;
backward passes from its last stage to its first. Ahead of its first backward pass, worker r runs

    2 (p - r - 1) + (v - 1) p

forward passes; then it takes turns. The first worker holds the residuals of v p + p - 1 stages' microbatches, which is
p (1 + (p-1)/(p v)) microbatches of all its layers; and transfers are v times as many. The last group must be whole.

Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM", section
2.2.2; Korthikanti et al. 2022, "Reducing activation recomputation in large Transformer models", section 4.2, for the
memory.
"""

from collections.abc import Iterator

from autoshard.cost_model.errors import InputError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind


def interleaved_one_f_one_b(num_workers: int, num_microbatches: int, stages_per_worker: int) -> Schedule:
    """Interleaved 1F1B."""
    workers = tuple(
        tuple(_tasks(worker, num_workers, num_microbatches, stages_per_worker))
        for worker in range(num_workers)
    )
    num_stages = num_workers * stages_per_worker
    return Schedule("interleaved-1f1b", num_stages, num_microbatches, workers, False)


def check_interleaved(num_workers: int, num_microbatches: int) -> None:
    """Refuses numbers for which there is no interleaved schedule.

    Raises:
      InputError: the microbatches are no whole number of groups.
    """
    if num_microbatches % num_workers:
        raise InputError(
            f"interleaved 1F1B wants microbatches in groups of as many as there are workers; got {num_microbatches} for "
            f"{num_workers} workers. Use {_multiples(num_microbatches, num_workers)}, or schedule '1f1b'"
        )


def _multiples(num_microbatches: int, num_workers: int) -> str:
    below = num_microbatches // num_workers * num_workers
    return f"{below} or {below + num_workers}" if below else str(num_workers)


def _tasks(worker: int, num_workers: int, num_microbatches: int, stages_per_worker: int) -> Iterator[Task]:
    """Forward passes by group, each followed by a backward pass once the worker is far enough ahead."""
    total = num_microbatches * stages_per_worker
    lead = min(2 * (num_workers - worker - 1) + (stages_per_worker - 1) * num_workers, total)

    def place(k: int) -> tuple[int, int]:
        """The place of the k-th pass: the number of the stage among the worker's, and the microbatch."""
        group, inside = divmod(k, num_workers * stages_per_worker)
        chunk, j = divmod(inside, num_workers)
        return chunk, group * num_workers + j

    for k in range(total + lead):
        if k < total:
            chunk, j = place(k)
            yield Task(chunk * num_workers + worker, j, TaskKind.FORWARD)
        if k >= lead:
            chunk, j = place(k - lead)
            yield Task((stages_per_worker - 1 - chunk) * num_workers + worker, j, TaskKind.BACKWARD)
