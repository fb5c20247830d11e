"""DualPipe-V: DualPipe cut in half, its two directions folded into a V on half as many workers.

DualPipe sends microbatches through the workers from both ends, with two copies of the weights. Folded in the middle,
worker w of p holds stages w and 2p-1-w, one copy of each, and a microbatch goes down and comes up again. In its main phase a
worker pairs the forward pass of one stage with the backward pass of the other, so that communication of one hides behind
computation of the other. Before and after, weight gradients are split off and fill bubbles. With F, B and W of one stage and
nothing gained by pairing, the paper's bubble is (p-1)(F + 2B - W), as it takes a pair for one task; here a pair's results
are read as each is made, and the bubble is shorter: (p-1) F where F = B = W. In flight are 2p + 1 of a stage.

Each worker goes through eight phases, listed below: how often, and what.

Source: DeepSeek-AI 2024, "DeepSeek-V3 technical report", section 3.2.1, and the DualPipe repository's description of
DualPipeV, cut in half after Qi et al. 2024.
"""

from collections.abc import Iterator

from autoshard.cost_model.errors import InputError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind

_KINDS = {"F": TaskKind.FORWARD, "B": TaskKind.BACKWARD, "W": TaskKind.WEIGHT_GRADIENT}
_NUM_CHUNKS = 2


def dualpipe_v(num_workers: int, num_microbatches: int) -> Schedule:
    """DualPipe-V, two stages per worker."""
    workers = tuple(tuple(_tasks(w, num_workers, num_microbatches)) for w in range(num_workers))
    return Schedule("dualpipe-v", 2 * num_workers, num_microbatches, workers, True)


def check_dualpipe_v(num_workers: int, num_microbatches: int) -> None:
    """Refuses numbers for which there is no such schedule.

    Raises:
      InputError: too few microbatches to get from the first phases to the last.
    """
    if num_microbatches < 2 * num_workers:
        raise InputError(
            f"DualPipe-V wants at least two microbatches per worker, {2 * num_workers} for {num_workers} workers; got "
            f"{num_microbatches}. Use more, or schedule 'zb-v'"
        )


def _phases(worker: int, num_workers: int, num_microbatches: int) -> Iterator[str]:
    """Words: `F0` and `F1` are forward passes of the worker's first and second stage, `B0` and `B1` backward passes with
    their weight gradients, `b0` and `b1` without; `W` is the weight gradient that waits longest."""
    behind, num_tail = num_workers - worker - 1, worker + 1
    yield from 2 * behind * ["F0"]
    yield from num_tail * ["F0", "F1"]
    yield from behind * ["b1", "W", "F1"]
    yield from (num_microbatches - 2 * num_workers + num_tail) * ["F0", "B1", "F1", "B0"]
    yield from behind * ["B1", "F1", "B0"]
    whole = num_tail  # of the 2 x num_tail backward passes of this phase, the first half
    drain = num_tail * ["1", "0"]
    yield from (("B" if i < whole else "b") + chunk for i, chunk in enumerate(drain))
    yield from behind * ["W", "b0"]
    yield from num_tail * ["W"]


def _tasks(worker: int, num_workers: int, num_microbatches: int) -> Iterator[Task]:
    """The words as tasks, each stage's microbatches in their order."""
    stage = (worker, 2 * num_workers - 1 - worker)
    done = {(letter, chunk): 0 for letter in "FB" for chunk in range(_NUM_CHUNKS)}
    waiting: list[Task] = []
    for word in _phases(worker, num_workers, num_microbatches):
        if word == "W":
            yield waiting.pop(0)
            continue
        letter, chunk = word[0].upper(), int(word[1])
        microbatch = done[letter, chunk]
        done[letter, chunk] += 1
        yield Task(stage[chunk], microbatch, _KINDS[letter])
        gradient = Task(stage[chunk], microbatch, TaskKind.WEIGHT_GRADIENT)
        if word[0] == "B":
            yield gradient
        elif word[0] == "b":
            waiting.append(gradient)
