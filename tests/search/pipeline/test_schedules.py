"""Each family's schedules: valid, with the orders, bubbles and memory of their papers."""

import pytest

from autoshard.cost_model.errors import InputError
from autoshard.search.pipeline.schedules.registry import FAMILIES, build_schedule
from autoshard.search.pipeline.simulator import Simulation, StageCost, simulate
from autoshard.search.plan.schedule import Schedule
from tests.search.pipeline.validity import check, in_flight, in_flight_together

SIZES = [(1, 2), (2, 4), (4, 8), (4, 12), (6, 12), (8, 24)]
"""Workers and microbatches."""

TIMES = [(1, 1, 1), (1, 1.5, 0.5), (2, 3, 1), (3, 2.5, 2)]
"""F, B and W of a worker's layers, W no longer than F or B."""


def family(name: str, num_workers: int, num_microbatches: int, chunks: int = 2) -> Schedule:
    num_stages = num_workers * (FAMILIES[name].stages_per_worker or chunks)
    return build_schedule(name, num_stages, num_microbatches, num_workers)


def timed(schedule: Schedule, times: tuple[float, float, float] = (1, 1, 1), per: int = 1) -> Simulation:
    """With every stage taking those times, in so many parts."""
    return simulate(schedule, [StageCost(*(t / per for t in times))] * schedule.num_stages)


@pytest.mark.parametrize(
    ("name", "workers", "microbatches"),
    [
        (name, workers, microbatches)
        for name in FAMILIES
        for workers, microbatches in SIZES
        if name != "chimera" or workers % 2 == 0  # its pipelines need an even number of stages
    ],
)
def test_every_family_is_valid(name: str, workers: int, microbatches: int):
    schedule = family(name, workers, microbatches)
    check(schedule)
    assert schedule.name == name
    assert (schedule.num_workers, schedule.num_microbatches) == (workers, microbatches)


@pytest.mark.parametrize("microbatches", [1, 3, 5, 7])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b", "zb-h1", "zb-h2", "zb-v"])
def test_any_number_of_microbatches_will_do(name: str, microbatches: int):
    check(family(name, 4, microbatches))


@pytest.mark.parametrize(("workers", "microbatches"), SIZES)
@pytest.mark.parametrize("times", TIMES)
class TestBubbles:
    """(p-1)(F+B+W) and its fractions."""

    def test_of_gpipe_and_1f1b(self, workers: int, microbatches: int, times):
        for name in ("gpipe", "1f1b", "eager-1f1b"):
            simulation = timed(family(name, workers, microbatches), times)
            assert simulation.bubble_s == pytest.approx([(workers - 1) * sum(times)] * workers)
            assert simulation.makespan_s == pytest.approx((microbatches + workers - 1) * sum(times))

    def test_of_interleaved_1f1b_and_circular(self, workers: int, microbatches: int, times):
        for name in ("interleaved-1f1b", "circular"):
            for chunks in (2, 3):
                simulation = timed(family(name, workers, microbatches, chunks), times, chunks)
                assert max(simulation.bubble_s) == pytest.approx((workers - 1) * sum(times) / chunks)

    def test_of_zb_h1(self, workers: int, microbatches: int, times):
        f, b, w = times
        bubble_s = max(timed(family("zb-h1", workers, microbatches), times).bubble_s)
        assert bubble_s == pytest.approx((workers - 1) * (f + b - w))

    def test_of_zb_h2(self, workers: int, microbatches: int, times):
        f, b, w = times
        bubble_s = max(timed(family("zb-h2", workers, microbatches), times).bubble_s)
        assert bubble_s == pytest.approx((workers - 1) * (f + b - 2 * w))


def test_zb_h2_has_no_bubble_where_all_parts_take_as_long():
    assert max(timed(family("zb-h2", 8, 16)).bubble_s) == 0


@pytest.mark.parametrize(("workers", "most"), [(1, 0), (2, 0), (4, 0), (6, 1), (8, 1), (12, 3)])
def test_zb_v_has_next_to_no_bubble_in_the_memory_of_1f1b(workers: int, most: int):
    for rounds in (2, 3):
        schedule = family("zb-v", workers, rounds * workers)
        assert max(timed(schedule).bubble_s) <= most
        assert in_flight_together(schedule) == (2 * workers,) * workers


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_dualpipe_v_stays_within_its_papers_bubble_and_memory(workers: int, microbatches: int, times):
    f, b, w = times
    schedule = family("dualpipe-v", workers, microbatches)
    assert max(timed(schedule, times).bubble_s) <= (workers - 1) * (f + 2 * b - w) + 1e-9
    assert in_flight_together(schedule) == (2 * workers + 1,) * workers


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_dualpipe_v_waits_for_half_of_that_where_all_parts_take_as_long(workers: int, microbatches: int):
    assert max(timed(family("dualpipe-v", workers, microbatches)).bubble_s) == workers - 1


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_chimera_waits_for_two_tasks_less_than_it_has_stages(workers: int, groups: int):
    """D - 2 slots, where forward and backward passes take as long; and between D/2 + 1 and D microbatches in flight."""
    schedule = family("chimera", workers, groups * workers)
    assert max(timed(schedule, (1, 0.5, 0.5)).bubble_s) == workers - 2
    held = in_flight_together(schedule)
    assert (min(held), max(held)) == (workers // 2 + 1, workers)
    assert all(schedule.workers_of(s) == tuple(sorted({s, workers - 1 - s})) for s in range(workers))


@pytest.mark.parametrize(("workers", "microbatches"), [(2, 4), (4, 8), (8, 24)])
def test_in_flight(workers: int, microbatches: int):
    p, m = workers, microbatches

    def of(name: str) -> list[int]:
        return [held[stage] for stage, held in enumerate(in_flight(family(name, p, m)))]

    assert of("gpipe") == [m] * p
    assert of("circular") == [m] * p
    assert of("1f1b") == [p - i for i in range(p)]
    assert of("eager-1f1b") == [2 * (p - i) - 1 for i in range(p)]
    assert of("zb-h1") == [p] * p
    assert of("zb-h2") == [2 * p - 1] * p


@pytest.mark.parametrize("chunks", [2, 3])
def test_in_flight_of_interleaved_1f1b(chunks: int):
    """p (1 + (p-1)/(p v)) microbatches of all the worker's layers."""
    held = in_flight_together(family("interleaved-1f1b", 4, 8, chunks))[0]
    assert held / chunks == pytest.approx(4 * (1 + 3 / (4 * chunks)))


def test_interleaved_1f1b_runs_microbatches_in_groups():
    schedule = family("interleaved-1f1b", 2, 4)
    assert " ".join(map(str, schedule.workers[1])) == (
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    )


def test_eager_1f1b_hides_transfers_that_1f1b_waits_for():
    costs = [StageCost(1, 1, 1, activation_transfer_s=0.5, gradient_transfer_s=0.5)] * 4
    eager, plain = (simulate(family(name, 4, 16), costs) for name in ("eager-1f1b", "1f1b"))
    assert eager.makespan_s == pytest.approx(plain.busy_s[0] + 9 + 6 * 0.5)
    assert plain.makespan_s > eager.makespan_s + 4


@pytest.mark.parametrize(
    ("name", "stages", "microbatches", "workers", "said"),
    [
        ("2f2b", 4, 8, 4, "no schedule is called '2f2b'. Choose one of gpipe, 1f1b"),
        ("1f1b", 8, 8, 4, r"wants 1 x 4 stages on 4 workers, got 8. Use 4 stages"),
        ("zb-v", 4, 8, 4, r"wants 2 x 4 stages on 4 workers, got 4. Use 8 stages"),
        ("interleaved-1f1b", 8, 6, 4, r"got 6 for 4 workers. Use 4 or 8, or schedule '1f1b'"),
        ("circular", 8, 3, 4, r"at least as many microbatches as workers, got 3 for 4"),
        ("interleaved-1f1b", 4, 8, 4, r"two or more stages on each worker.*Use 8 stages"),
        ("dualpipe-v", 8, 7, 4, r"8 for 4 workers; got 7"),
        ("chimera", 3, 8, 3, r"even number of stages.*got 3. Use 4"),
        ("chimera", 4, 7, 4, r"even number of microbatches.*got 7. Use 8"),
        ("gpipe", 4, 0, 4, "at least one of microbatches, got 0"),
    ],
)
def test_what_cannot_be_built_is_refused_with_what_can(name, stages, microbatches, workers, said: str):
    with pytest.raises(InputError, match=said):
        build_schedule(name, stages, microbatches, workers)
