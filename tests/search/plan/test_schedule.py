"""Schedules as data: words, JSON, who holds what, and one order of all tasks."""

import json

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.schedule import Schedule, Task, TaskKind
from autoshard.search.plan.task_order import task_order

F, B, W = TaskKind


def words(name: str, num_stages: int, num_microbatches: int, *workers: str) -> Schedule:
    data = {"name": name, "num_stages": num_stages, "num_microbatches": num_microbatches, "workers": workers}
    return Schedule.from_json(json.loads(json.dumps(data)))


ONE = words("1f1b", 2, 2, "F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1")


def test_a_task_is_written_as_its_kind_stage_and_microbatch():
    assert ONE.workers[1] == (Task(1, 0, F), Task(1, 0, B), Task(1, 1, F), Task(1, 1, B))
    assert str(Task(12, 3, W)) == "W12.3"


def test_a_schedule_survives_json_byte_for_byte():
    text = json.dumps(ONE.to_json())
    again = Schedule.from_json(json.loads(text))
    assert again == ONE
    assert json.dumps(again.to_json()) == text
    assert ONE.to_json()["workers"] == ["F0.0 F0.1 B0.0 B0.1", "F1.0 B1.0 F1.1 B1.1"]


def test_weight_gradients_among_the_words_say_that_the_backward_pass_is_split():
    split = words("split", 1, 1, "F0.0 B0.0 W0.0")
    assert split.splits_backward
    assert split.kinds == (F, B, W)
    assert not ONE.splits_backward
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
        (["F0.0 X0.0"], r"workers\[0\]: 'X0.0' is no task"),
        (["F0.0", "F1.9"], "worker 1 has task F1.9, but stages are 0 to 1 and microbatches 0 to 1"),
        (["F2.0"], "worker 0 has task F2.0"),
        ("F0.0", "workers must be a list"),
    ],
)
def test_what_is_no_schedule_is_refused_with_its_place(workers, said: str):
    data = {"name": "mine", "num_stages": 2, "num_microbatches": 2, "workers": workers}
    with pytest.raises(PlanError, match=said):
        Schedule.from_json(data)


def test_a_missing_key_is_named():
    with pytest.raises(PlanError, match=r"plan.json: num_stages is missing"):
        Schedule.from_json({"name": "mine", "workers": []}, "plan.json")


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
