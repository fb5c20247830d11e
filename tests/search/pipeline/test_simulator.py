"""Tasks in time, by hand."""

import pytest

from autoshard.search.pipeline.schedules.one_f_one_b import one_f_one_b
from autoshard.search.pipeline.schedules.registry import build_schedule
from autoshard.search.pipeline.schedules.zero_bubble import zb_h1
from autoshard.search.pipeline.simulator import StageCost, simulate


def starts(simulation) -> dict[str, float]:
    return {str(run.task): run.start_s for runs in simulation.workers for run in runs}


def test_a_task_starts_when_its_worker_is_free_and_what_it_reads_is_there():
    simulation = simulate(one_f_one_b(2, 2), [StageCost(1, 2), StageCost(3, 4)])
    assert starts(simulation) == {
        "F0.0": 0, "F0.1": 1, "F1.0": 1, "B1.0": 4, "F1.1": 8, "B0.0": 8, "B1.1": 11, "B0.1": 15
    }  # fmt: skip
    assert simulation.makespan_s == 17
    assert simulation.busy_s == (6, 14)
    assert simulation.bubble_s == (11, 3)


def test_a_transfer_delays_its_reader_and_no_other():
    costs = [StageCost(1, 1, activation_transfer_s=10), StageCost(1, 1, gradient_transfer_s=100)]
    assert starts(simulate(one_f_one_b(2, 2), costs)) == {
        "F0.0": 0, "F0.1": 1, "F1.0": 11, "B1.0": 12, "F1.1": 13, "B1.1": 14, "B0.0": 113, "B0.1": 115
    }  # fmt: skip


def test_between_stages_of_one_worker_nothing_is_transferred():
    """ZB-V's last two stages of the forward pass are on the last worker, its first and last on the first."""
    schedule = build_schedule("zb-v", 2, 1, 1)
    costs = [StageCost(1, 1, 1, 10, 10)] * 2
    assert simulate(schedule, costs).makespan_s == 6


def test_weight_gradients_belong_to_the_backward_pass_where_they_are_not_split():
    costs = [StageCost(1, 1, 1)]
    assert simulate(one_f_one_b(1, 1), costs).makespan_s == simulate(zb_h1(1, 1), costs).makespan_s == 3


def test_steps_follow_each_other_at_the_longest_span_of_a_worker():
    simulation = simulate(build_schedule("zb-h2", 4, 8, 4), [StageCost(1, 1, 1)] * 4)
    assert (simulation.period_s, simulation.makespan_s) == (24, 27)


def test_residuals_are_held_to_the_end_of_the_backward_pass():
    costs = [StageCost(1, 1, residual_bytes=10.0 * (s + 1)) for s in range(4)]
    assert simulate(one_f_one_b(4, 8), costs).peak_bytes == (40, 60, 60, 40)


def test_a_part_is_held_to_the_end_of_the_weight_gradient_where_it_is_split():
    """On stage 3 of 4 of ZB-H1 one forward pass is in flight, and three weight gradients wait."""
    costs = [StageCost(1, 1, 1, residual_bytes=10, weight_gradient_bytes=4)] * 4
    assert simulate(zb_h1(4, 8), costs).peak_bytes == (40, 10 * 3 + 4, 10 * 2 + 2 * 4, 10 + 3 * 4)


def test_published_bubble_rates():
    """Of all time, with F = B = W: 1F1B (p-1)/(m+p-1), ZB-H1 (p-1)/(3m+p-1), ZB-H2 0 (Qi et al. 2023)."""
    costs = [StageCost(1, 1, 1)] * 8
    share = {
        name: simulate(build_schedule(name, 8, 24, 8), costs).bubble_share
        for name in ("1f1b", "zb-h1", "zb-h2")
    }
    assert share == pytest.approx({"1f1b": 7 / 31, "zb-h1": 7 / 79, "zb-h2": 0})
