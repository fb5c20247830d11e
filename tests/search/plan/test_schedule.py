"""Schedules as data: words, who holds what, and one order of all tasks."""

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order

F, B, W = TaskKind


def words(name: str, num_stages: int, num_microbatches: int, *workers: str) -> Schedule:
    tasks = tuple(tuple(map(task, line.split())) for line in workers)
    return Schedule(name, num_stages, num_microbatches, tasks, any("W" in line for line in workers))


def task(word: str) -> Task:
    stage, microbatch = word[1:].split(".")
    return Task(int(stage), int(microbatch), {"F": F, "B": B, "W": W}[word[0]])


ONE = words("1f1b", 2, 2, "F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")


def test_a_task_is_written_as_its_kind_stage_and_microbatch():
    assert ONE.workers[1] == (Task(1, 0, F), Task(1, 0, B), Task(1, 1, F), Task(1, 1, B))
    assert str(Task(12, 3, W)) == "W12.3"


def test_a_split_backward_pass_is_two_kinds_of_task():
    assert words("split", 1, 1, "F0.0 B0.0 W0.0").kinds == (F, B, W)
    assert ONE.kinds == (F, B)


def test_who_holds_what():
    two_ways = words("chimera", 2, 2, "F0.0 F1.1 B1.1 B0.0", "F0.1 F1.0 B1.0 B0.1")
    assert [two_ways.workers_of(stage) for stage in range(2)] == [(0, 1), (0, 1)]
    assert [ONE.workers_of(stage) for stage in range(2)] == [(0,), (1,)]
    assert [ONE.stages_of(worker) for worker in range(2)] == [(0,), (1,)]
    assert two_ways.worker_of[Task(1, 0, B)] == 1


@pytest.mark.parametrize(
    ("task", "read"),
    [
        (Task(0, 5, F), []),
        (Task(2, 5, F), ["F1.5"]),
        (Task(2, 5, B), ["F2.5"]),
        (Task(1, 5, B), ["F1.5", "B2.5"]),
        (Task(1, 5, W), ["B1.5"]),
    ],
)
def test_what_a_task_reads(task: Task, read: list[str]):
    assert list(map(str, task.reads(num_stages=3))) == read


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        (["F0.0", "F1.9"], "worker 1 has task F1.9, but stages are 0 to 1 and microbatches 0 to 1"),
        (["F2.0"], "worker 0 has task F2.0"),
    ],
)
def test_a_task_of_no_such_stage_or_microbatch_is_refused(workers, said: str):
    with pytest.raises(PlanError, match=said):
        words("mine", 2, 2, *workers)


def test_a_weight_gradient_needs_a_schedule_that_splits_them():
    with pytest.raises(PlanError, match=r"task W0.0, but this schedule leaves weight gradients"):
        Schedule("mine", 1, 1, ((Task(0, 0, W),),), splits_backward=False)


def test_in_the_order_of_all_tasks_each_comes_after_what_it_reads():
    order = [task for _, task in task_order(ONE)]
    assert sorted(order) == sorted(task for _, task in ONE.tasks())
    for at, task in enumerate(order):
        assert set(task.reads(2)) <= set(order[:at])
    for worker, tasks in enumerate(ONE.workers):
        assert tuple(task for w, task in task_order(ONE) if w == worker) == tasks


def test_workers_that_wait_for_one_another_are_named():
    hangs = words("mine", 2, 1, "B0.0 F0.0", "F1.0 B1.0")
    with pytest.raises(
        PlanError, match=r"worker 0 at B0.0 for F0.0, worker 1 at F1.0 for F0.0.*Put each task behind"
    ):
        task_order(hangs)
