"""A schedule that does not compute a step is refused with the task that is wrong."""

from dataclasses import replace

import pytest

from autoshard.cost_model.errors import PlanError
from autoshard.search.pipeline.schedules.one_f_one_b import one_f_one_b
from autoshard.search.pipeline.validity import check, in_flight
from autoshard.search.plan.schedule import Schedule, Task, TaskKind

GOOD = one_f_one_b(2, 2)


def with_workers(*workers: tuple[Task, ...]) -> Schedule:
    return replace(GOOD, workers=workers)


def test_a_good_one_passes():
    check(GOOD)


def test_a_missing_task_is_named():
    with pytest.raises(
        PlanError, match=r"B0.1, the backward of stage 0 on microbatch 1, .* run by no worker"
    ):
        check(with_workers(GOOD.workers[0][:-1], GOOD.workers[1]))


def test_a_task_twice_is_named_with_its_workers():
    with pytest.raises(PlanError, match=r"F0.0.* is run 2 times, on workers \[0, 1\]"):
        check(with_workers(GOOD.workers[0], (GOOD.workers[0][0], *GOOD.workers[1])))


def test_a_missing_weight_gradient_is_named():
    with pytest.raises(PlanError, match=r"W0.0, the weight gradient of stage 0"):
        check(replace(GOOD, splits_backward=True))


def test_residuals_stay_where_they_are_made():
    moved = Task(1, 1, TaskKind.BACKWARD)
    first, second = GOOD.workers
    with pytest.raises(PlanError, match=r"B1.1 is on worker 0, but its residuals are made on worker 1"):
        check(with_workers((*first[:-1], moved, first[-1]), tuple(t for t in second if t != moved)))


def test_a_deadlock_is_found():
    with pytest.raises(PlanError, match="cannot be run"):
        check(with_workers(GOOD.workers[0], GOOD.workers[1][::-1]))


def test_replicas_are_counted_apart():
    kinds = TaskKind.FORWARD, TaskKind.BACKWARD
    both = Schedule("mine", 1, 3, tuple(tuple(Task(0, j, kind) for kind in kinds) for j in range(3)), False)
    check(both)
    assert in_flight(both) == ({0: 1},) * 3
