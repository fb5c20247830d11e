"""ZB-V: next to no bubble in the memory of 1F1B.

A microbatch goes down the workers and comes up again: worker w of p holds stages w and 2p-1-w. So the first worker also
holds the last stage, and backward passes begin there at once. All workers hold equally much: p microbatches of a
worker's layers, like the first worker of 1F1B.

The order comes from running the pipeline in slots of one task each. Forward pass, backward pass and weight gradient are
assumed to take equally long. A worker takes the first possible task of

    the backward pass that goes up (it is the last of its microbatch, others wait for it on the way),
    a forward pass for which there is memory, of its later stage first,
    a weight gradient, where a forward pass waits for memory,
    the backward pass that goes down,
    a weight gradient.

The first 2p slots fill every worker with 2p forward passes: the first worker has run 2p - 1 of them when its first
microbatch comes up again. At the end, weight gradients fill the slots until the last backward pass. With at least twice
as many microbatches as workers there is no bubble on up to 4 workers, one slot of 6 per microbatch on up to 9, and 3
slots on 12. (The paper's own orders have none; these rules are ours.)

Source: Qi et al. 2023, "Zero bubble pipeline parallelism", section 6, and 2024, "Pipeline parallelism with controllable
memory".
"""

from dataclasses import dataclass, field

from autoshard.search.plan.schedule import Schedule, Task, TaskKind

F, B, W = TaskKind
DOWN, UP = 0, 1
"""A worker's two stages: the one that microbatches reach first, and the other one."""


@dataclass(slots=True)
class _Worker:
    """A worker while slots pass: its tasks so far, and the next one of each kind and stage."""

    stages: tuple[int, int]
    num_stages: int
    num_microbatches: int
    tasks: list[Task] = field(default_factory=list[Task])
    count: dict[tuple[TaskKind, int], int] = field(default_factory=dict[tuple[TaskKind, int], int])
    held: int = 0

    def next(self, kind: TaskKind, chunk: int, done: set[Task]) -> Task | None:
        """The next task of a kind and stage, if all its operands are there."""
        microbatch = self.count.get((kind, chunk), 0)
        if microbatch == self.num_microbatches:
            return None
        task = Task(self.stages[chunk], microbatch, kind)
        return task if done.issuperset(task.reads(self.num_stages)) else None

    def pick(self, done: set[Task]) -> Task | None:
        """The worker's task in this slot."""
        forward = self.next(F, UP, done) or self.next(F, DOWN, done)
        weight_gradient = self.next(W, UP, done) or self.next(W, DOWN, done)
        has_room = self.held < self.num_stages
        return (
            self.next(B, DOWN, done)
            or (forward and (forward if has_room else weight_gradient))
            or self.next(B, UP, done)
            or weight_gradient
        )

    def do(self, task: Task) -> None:
        """Adds a task."""
        key = task.kind, self.stages.index(task.stage)
        self.count[key] = self.count.get(key, 0) + 1
        self.held += (task.kind is F) - (task.kind is W)
        self.tasks.append(task)


def zb_v(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-V, two stages per worker."""
    num_stages = 2 * num_workers
    workers = [_Worker((w, num_stages - 1 - w), num_stages, num_microbatches) for w in range(num_workers)]
    done: set[Task] = set()
    while len(done) < len(TaskKind) * num_stages * num_microbatches:
        slot = [(worker, worker.pick(done)) for worker in workers]
        for worker, task in slot:
            if task is not None:
                worker.do(task)
        before = len(done)
        done.update(task for _, task in slot if task is not None)
        assert len(done) > before, "no worker can go on"
    return Schedule("zb-v", num_stages, num_microbatches, tuple(tuple(w.tasks) for w in workers), True)
