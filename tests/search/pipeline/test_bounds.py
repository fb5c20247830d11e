"""Bounds of pipelines, against schedules run in time."""

from itertools import product

import numpy as np
import pytest

from autoshard.search.pipeline.bounds import dispatch_s, least_makespan_s
from autoshard.search.pipeline.schedules.registry import FAMILIES, build_schedule
from autoshard.search.pipeline.simulator import StageCost, simulate

pytestmark = pytest.mark.pure


def costs(rng: np.random.Generator, num_stages: int) -> list[StageCost]:
    """Of stages that have nothing in common; some have no weight gradients."""
    seconds = rng.exponential(size=(num_stages, 3)) * rng.choice([0.1, 1.0, 3.0], size=(num_stages, 1))
    sends = rng.exponential(scale=0.1, size=(num_stages, 2))
    return [StageCost(*map(float, (*s, *t))) for s, t in zip(seconds, sends, strict=True)]


@pytest.mark.parametrize("name", FAMILIES)
def test_no_schedule_is_faster_than_its_bound(name):
    rng, family = np.random.default_rng(0), FAMILIES[name]
    per_worker = family.stages_per_worker or 2
    for workers, m in product((1, 2, 3, 4), (1, 2, 4, 8, 12)):
        if not family.suits(workers, m):
            continue
        schedule = build_schedule(name, workers * per_worker, m, workers)
        assert schedule.splits_backward == family.splits_backward
        for _ in range(8):
            stages = costs(rng, workers * per_worker)
            took_s = simulate(schedule, stages).makespan_s
            assert least_makespan_s(name, stages, m, workers) <= took_s * (1 + 1e-9)


@pytest.mark.parametrize("name", FAMILIES)
def test_workers_hold_the_stages_that_a_family_says(name):
    family = FAMILIES[name]
    per_worker = family.stages_per_worker or 2
    schedule = build_schedule(name, 4 * per_worker, 8, 4)
    held = family.stages_of_workers(4 * per_worker, 4)
    assert [tuple(sorted(stages)) for stages in held] == [schedule.stages_of(w) for w in range(4)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "interleaved-1f1b", "circular"])
def test_the_bound_of_equal_stages_is_what_they_take(name):
    """Where backward passes are whole: the textbook's bubble, by any number of stages on a worker."""
    per_worker = FAMILIES[name].stages_per_worker or 2
    stages = [StageCost(1.0, 1.5, 0.5)] * (4 * per_worker)
    took_s = simulate(build_schedule(name, len(stages), 8, 4), stages).makespan_s
    assert least_makespan_s(name, stages, 8, 4) == pytest.approx(took_s)
    assert took_s == pytest.approx((8 * per_worker + 3) * 3.0)


def test_hosts_hand_out_weight_gradients_one_by_one():
    assert dispatch_s("zb-h1", 8, 2) == pytest.approx(1.5 * dispatch_s("1f1b", 8, 2))
