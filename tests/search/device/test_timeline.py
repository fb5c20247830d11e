"""A schedule's memory and time, against a device that runs every loop's body, and against the longest path."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.device.kernel_order import memory_saving, program_order
from autoshard.search.device.latency_hiding import latency_hiding
from autoshard.search.device.lowering import TO_HOST, Kernel, Lowered
from autoshard.search.device.timeline import Occupancy, peak, seconds, timetable
from autoshard.search.problem.live_ranges import Resident
from autoshard.search.problem.memory_rows import Origin
from autoshard.search.problem.strategy_graph import Port
from tests.search.device.programs import buffer, collective, kernel, programs

RUNS = 3
"""Of every loop: the first has not stacked all yet, the last does not need all any more."""


def test_the_peak_counts_what_is_still_to_be_read():
    # a (4) is read again at the end; b (8) dies where c (2) is made
    lowered = Lowered(
        (kernel(0, [], [0]), kernel(1, [0], [1]), kernel(2, [1], [2]), kernel(3, [0, 2], [3])),
        (buffer(4.0), buffer(8.0), buffer(2.0), buffer(1.0)),
    )
    found = peak(lowered, program_order(lowered))
    assert (found.num_bytes, found.position) == (4 + 8 + 2, 2)


def test_workspace_and_arguments_count():
    lowered = Lowered(
        (kernel(0, [0], [1]), kernel(1, [1], [2], workspace=16.0)),
        (buffer(100.0, is_argument=True), buffer(8.0), buffer(2.0)),
    )
    assert peak(lowered, program_order(lowered)).num_bytes == 100 + 8 + 2 + 16


def test_what_a_loop_reads_from_outside_lives_to_its_end():
    loop = ((1, 3),)
    lowered = Lowered(
        (
            kernel(0, [], [0]),
            kernel(1, [0], [1], loops=loop),
            kernel(2, [1], [2], loops=loop),
            kernel(3, [3], []),
        ),
        (buffer(10.0), buffer(3.0, loop), buffer(4.0, loop), buffer(1.0, is_argument=True)),
    )
    assert peak(lowered, program_order(lowered)).num_bytes == 10 + 3 + 4 + 1


def test_what_an_inner_loop_reads_from_outside_of_both_lives_to_the_outer_ones_end():
    outer = ((1, 4),)
    inner = ((1, 2), *outer)
    lowered = Lowered(
        (
            kernel(0, [], [0]),
            kernel(1, [0], [1], loops=inner),
            kernel(2, [], [2], loops=outer),
            kernel(3, [2], [3], loops=outer),
        ),
        (buffer(10.0), buffer(1.0, inner), buffer(20.0, outer), buffer(5.0, outer)),
    )
    found = peak(lowered, program_order(lowered))
    assert (found.num_bytes, found.position) == (10 + 20 + 5, 3)


def test_what_an_inner_loop_stacks_is_there_from_its_start_in_every_run_of_the_outer():
    outer = ((0, 4),)
    inner = ((1, 3), *outer)
    lowered = Lowered(
        (
            kernel(0, [], [0], loops=outer),
            kernel(1, [], [1], loops=inner),
            kernel(2, [1], [2], loops=inner),
            kernel(3, [2], [], loops=outer),
        ),
        (buffer(30.0, outer), buffer(3.0, inner), buffer(20.0, outer), buffer(1.0)),
    )
    found = peak(lowered, program_order(lowered))
    assert (found.num_bytes, found.position) == (30, 0)
    grown = Lowered(lowered.kernels, (buffer(22.0, outer), *lowered.buffers[1:]))
    assert peak(grown, program_order(grown)).num_bytes == 20 + 3


def test_an_all_reduce_is_done_in_place_but_joined_ones_in_a_flat_copy():
    arguments = (buffer(0.0, is_argument=True),)
    alone = Lowered(
        (kernel(0, [0], [1]), collective(1, [1], [2], kind="all-reduce")),
        (*arguments, buffer(8.0), buffer(8.0)),
    )
    two = Lowered(
        (kernel(0, [0], [1]), kernel(1, [0], [2]), collective(2, [1, 2], [3, 4], kind="all-reduce")),
        (*arguments, *(buffer(4.0) for _ in range(4))),
    )
    assert peak(alone, program_order(alone)).num_bytes == 8
    assert peak(two, program_order(two)).num_bytes == 16


def test_the_peak_names_the_arrays_that_are_there_and_their_origins():
    early, late = (Origin(Port(node, ()), (0,)) for node in (1, 2))
    lowered = Lowered(
        (collective(0, [], [0]), kernel(1, [0], [1]), collective(2, [1], [2]), kernel(3, [2], [3])),
        (buffer(1.0, origin=early), buffer(1.0), buffer(8.0, origin=late), buffer(1.0)),
    )
    assert peak(lowered, program_order(lowered)).held == ((late, 8.0),)


@given(programs(), st.floats(0.0, 40.0))
def test_peaks_are_the_highest_places_of_all_stretches_above_a_limit(lowered, limit_bytes):
    """Place by place: where the bytes by kind of resident add up to more than the limit."""
    order = program_order(lowered)
    total = sum(Occupancy(lowered).course(order).values(), np.zeros(len(order)))
    stretches = [
        [*places]
        for is_over, places in groupby(range(len(order)), lambda at: total[at] > limit_bytes)
        if is_over
    ]
    highest = sorted((max(total[places]) for places in stretches), reverse=True) or [max(total)]
    found = Occupancy(lowered).peaks(order, limit_bytes)
    assert [one.num_bytes for one in found] == pytest.approx(highest)


# --- memory, against a device that runs


def run(lowered: Lowered, places: Sequence[int], order: Sequence[int]) -> list[tuple[int, tuple[int, ...]]]:
    """What a device runs: places of the order, each with the numbers of the runs of the loops around it, outermost first."""

    def outermost(at: int, depth: int):
        loops = ran(lowered, order[at]).loops[::-1]
        return loops[depth] if depth < len(loops) else None

    def nested(places: Sequence[int], around: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        for loop, inside in groupby(places, lambda at: outermost(at, len(around))):
            if loop is None:
                yield from ((at, around) for at in inside)
            else:
                body = tuple(inside)
                for n in range(RUNS):
                    yield from nested(body, (*around, n))

    return list(nested(places, ()))


def ran(lowered: Lowered, k: int) -> Kernel:
    return lowered.kernels[k if k >= 0 else ~k]


def held(lowered: Lowered, order: Sequence[int]) -> list[dict[int, float]]:
    """Per place of the order: the bytes of each buffer that is there in the worst of its runs.

    A buffer is there from its first use to its last; one that lies in a loop, anew in every run. What an all-reduce makes
    lies where its operand does.
    """
    trace = run(lowered, range(len(order)), order)
    first: dict[tuple[int, tuple[int, ...]], int] = {}
    last: dict[tuple[int, tuple[int, ...]], int] = {}
    for time, (at, runs) in enumerate(trace):
        kernel = ran(lowered, order[at])
        for b in (*kernel.reads, *kernel.makes):
            which = b, runs[: len(lowered.buffers[b].loops)]
            first.setdefault(which, time)
            last[which] = time
    worst: list[dict[int, float]] = [{} for _ in order]
    for time, (at, _) in enumerate(trace):
        there = {b for (b, runs) in first if first[b, runs] <= time <= last[b, runs]}
        there |= {b for b, one in enumerate(lowered.buffers) if one.is_argument}
        there -= written_over(ran(lowered, order[at]))
        now = {b: lowered.buffers[b].num_bytes for b in sorted(there)}
        worst[at] = max(worst[at], now, key=lambda found: sum(found.values()))
    return worst


def written_over(kernel: Kernel) -> set[int]:
    is_all_reduce = kernel.collective is not None and kernel.collective.kind == "all-reduce"
    return set(kernel.makes) if is_all_reduce and len(kernel.makes) == 1 else set()


ORDERS = (
    lambda lowered: (lowered, program_order(lowered)),
    lambda lowered: (lowered, latency_hiding(lowered)),
    lambda lowered: (memory_saving(lowered), program_order(memory_saving(lowered))),
)


@given(programs(), st.sampled_from(ORDERS))
def test_the_peak_is_what_a_device_holds_that_runs_every_loop(lowered, in_order):
    lowered, order = in_order(lowered)
    worst = held(lowered, order)
    totals = [
        sum(now.values()) + ran(lowered, k).workspace_bytes for now, k in zip(worst, order, strict=True)
    ]
    highest = totals.index(max(totals))
    found = peak(lowered, order)
    assert found.num_bytes == totals[highest]
    assert found.position == ran(lowered, order[highest]).position
    residents = dict.fromkeys(Resident, 0.0)
    for b, num_bytes in worst[highest].items():
        residents[lowered.buffers[b].resident] += num_bytes
    residents[Resident.TEMPORARIES] += ran(lowered, order[highest]).workspace_bytes
    assert dict(found.residents) == {r: num_bytes for r, num_bytes in residents.items() if num_bytes > 0}
    assert sum(num_bytes for _, num_bytes in found.residents) == found.num_bytes


# --- time, against the longest path


def longest_path(lowered: Lowered, order: Sequence[int]) -> float:
    """When the last of an order is done: kernels wait for the one before, collectives for one another as well, ends for
    their collective."""

    @cache
    def done(at: int) -> float:
        """When what stands at a place lets the next one go."""
        if at < 0:
            return 0.0
        k = order[at]
        if k < 0:
            return max(done(at - 1), arrived(order.index(~k)))
        return done(at - 1) + (ran(lowered, k).time.seconds if ran(lowered, k).collective is None else 0.0)

    @cache
    def arrived(at: int) -> float:
        """When the collective that starts at a place is done."""
        before = [n for n in range(at) if order[n] >= 0 and ran(lowered, order[n]).collective is not None]
        free = arrived(before[-1]) if before else 0.0
        return max(done(at - 1), free) + ran(lowered, order[at]).time.seconds

    started = [at for at, k in enumerate(order) if k >= 0 and ran(lowered, k).collective is not None]
    return max([done(len(order) - 1), *map(arrived, started)])


def test_one_stream_of_collectives():
    kernels = (
        collective(0, [0], [1], time_s=2.0),
        collective(1, [0], [2], time_s=2.0, kind="all-to-all"),
        kernel(2, [1, 2], [3]),
    )
    lowered = Lowered(kernels, (buffer(1.0, is_argument=True), *(buffer(1.0) for _ in range(3))))
    assert seconds(lowered, (0, 1, ~0, ~1, 2)) == pytest.approx(5.0)


def test_a_step_ends_when_its_last_collective_does():
    lowered = Lowered((kernel(0, [], [0], 2.0), collective(1, [], [1], time_s=5.0)), (buffer(1.0),) * 2)
    assert seconds(lowered, (1, 0, ~1)) == 5.0
    assert seconds(lowered, (0, 1, ~1)) == 7.0


@st.composite
def scheduled(draw):
    """Kernels, and an order in which each collective ends somewhere after its start."""
    count = draw(st.integers(1, 8))
    kernels = tuple(
        draw(st.sampled_from((kernel, collective)))(k, [], [], time_s=float(draw(st.integers(0, 5))))
        for k in range(count)
    )
    order = list(draw(st.permutations(range(count))))
    for k in range(count):
        if kernels[k].collective is not None:
            order.insert(draw(st.integers(order.index(k) + 1, len(order))), ~k)
    return Lowered(kernels, ()), tuple(order)


def test_a_timetable_says_when_kernels_run_and_how_long_collectives_are_waited_for():
    kernels = (collective(0, [], [0], time_s=5.0), kernel(1, [], [1], 2.0), kernel(2, [0], [2], 1.0))
    lowered = Lowered(kernels, (buffer(1.0),) * 3)
    assert [*timetable(lowered, (0, 1, ~0, 2))] == [(0.0, 5.0), (0.0, 2.0), (2.0, 5.0), (5.0, 6.0)]


@given(scheduled())
def test_two_streams_take_as_long_as_the_longest_path(case):
    assert seconds(*case) == longest_path(*case)


@given(programs(), st.sampled_from(ORDERS))
def test_the_course_is_what_such_a_device_holds_at_its_fullest_and_no_less_anywhere(lowered, in_order):
    lowered, order = in_order(lowered)
    worst = held(lowered, order)
    course = Occupancy(lowered).course(order)
    found = peak(lowered, order)
    totals = [sum(kind[place] for kind in course.values()) for place in range(len(order))]
    assert max(totals) == found.num_bytes
    at = totals.index(max(totals))
    assert {kind: there[at] for kind, there in course.items() if there[at] > 0} == dict(found.residents)
    for total, now, k in zip(totals, worst, order, strict=True):
        assert total >= sum(now.values()) + ran(lowered, k).workspace_bytes


@pytest.mark.parametrize(("loops", "end_s"), [(((0, 2),), 6.0), ((), 3.0)])
def test_a_loop_ends_when_its_copies_to_the_host_have_ended(loops, end_s):
    """A copy of 4 s in a loop of 2 s is waited for before the kernel behind the loop; outside of loops it is not."""
    lowered = Lowered(
        (
            kernel(0, [], [0], loops=loops),
            collective(1, [0], [1], time_s=4.0, kind=TO_HOST, axes=(), loops=loops),
            kernel(2, [], [2], loops=loops),
            kernel(3, [], [3]),
        ),
        (buffer(1.0, loops), buffer(0.0, loops), buffer(1.0, loops), buffer(1.0)),
    )
    assert [end for _, end in timetable(lowered, (0, 1, 2, 3, ~1))][3] == end_s
