"""Orders of kernels: by hand, and against schedulers that look at everything anew before each step."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.device.kernel_order import Clock, Ties, latency_hiding, memory_saving, program_order
from search.device.kernel_times import KernelTime
from search.device.lowering import Lowered
from search.device.timeline import peak, seconds
from tests.search.device.programs import buffer, collective, kernel, needed, programs


def positions(lowered: Lowered) -> list[int]:
    return [k.position for k in lowered.kernels]


def plain(*kernels) -> Lowered:
    """Kernels whose buffers take a byte each."""
    made = [b for k in kernels for b in (*k.reads, *k.makes)]
    return Lowered(kernels, tuple(buffer(1.0) for _ in range(max(made) + 1)))


# --- by hand


def test_as_written_collectives_end_where_they_start():
    lowered = plain(kernel(0, [], [0]), collective(1, [0], [1]), kernel(2, [1], [2]))
    assert program_order(lowered) == (0, 1, ~1, 2)


def test_memory_is_saved_by_doing_next_what_frees_most():
    # two large arrays (0, 1), each reduced to a small one (2, 3); as written, both are there at once
    kernels = (kernel(0, [], [0]), kernel(1, [], [1]), kernel(2, [0], [2]), kernel(3, [1], [3]))
    lowered = Lowered(kernels, (buffer(10.0), buffer(10.0), buffer(1.0), buffer(1.0)))
    saving = memory_saving(lowered)
    assert positions(saving) == [0, 2, 1, 3]
    assert peak(lowered, program_order(lowered)).num_bytes == 10 + 10 + 1
    assert peak(saving, program_order(saving)).num_bytes == 10 + 1


def test_what_becomes_the_last_reader_comes_earlier_than_it_would_have():
    # 0 (10) is read by 1 and 2: alone neither frees it; after 1, which makes little, 2 does, and goes before 3 (2)
    kernels = (kernel(0, [], [0]), kernel(1, [0], [1]), kernel(2, [0], [2]), kernel(3, [], [3]))
    lowered = Lowered(kernels, (buffer(10.0), buffer(1.0), buffer(3.0), buffer(2.0)))
    assert positions(memory_saving(lowered)) == [3, 0, 1, 2]
    late = (*kernels[:3], kernel(3, [1], [3]))
    assert positions(memory_saving(Lowered(late, lowered.buffers))) == [0, 1, 2, 3]


def test_arguments_free_nothing():
    kernels = (kernel(0, [0], [2]), kernel(1, [1], [3]))
    buffers = (buffer(9.0, is_argument=True), buffer(5.0), buffer(1.0), buffer(1.0))
    assert positions(memory_saving(Lowered(kernels, buffers))) == [1, 0]


def test_a_weight_gradient_is_put_off_into_the_window_of_a_later_collective():
    # dy (0) is read by the weight gradient (1) and by the input's gradient (2), which is reduced (3) for the layer below
    lowered = plain(
        kernel(0, [], [0]),
        kernel(1, [0], [1]),
        kernel(2, [0], [2]),
        collective(3, [2], [3], kind="all-reduce"),
        kernel(4, [3], [4]),
    )
    assert latency_hiding(lowered, Ties.EARLIEST) == (0, 2, 3, 1, ~3, 4)
    assert seconds(lowered, program_order(lowered)) == 5.0
    assert seconds(lowered, latency_hiding(lowered, Ties.EARLIEST)) == 4.0


def test_a_window_is_no_longer_than_its_collective():
    lowered = plain(
        *(kernel(i, [], [i]) for i in range(4)),
        collective(4, [3], [4], time_s=2.0),
        kernel(5, [0, 1, 2, 4], [5]),
    )
    order = latency_hiding(lowered, Ties.LATEST)
    assert len(order[order.index(4) + 1 : order.index(~4)]) == 2
    assert sorted(k for k in order if k >= 0) == list(range(6))


def test_of_two_that_lie_equally_deep_either_may_be_listed_first():
    lowered = plain(kernel(0, [], [0]), kernel(1, [], [1]))
    assert latency_hiding(lowered, Ties.LATEST) == (0, 1)
    assert latency_hiding(lowered, Ties.EARLIEST) == (1, 0)


@pytest.mark.parametrize(("clock", "in_window"), [(Clock.OURS, 1), (Clock.XLA, 3)])
def test_a_window_is_filled_by_one_clock_or_the_other(clock, in_window):
    lowered = plain(
        *(kernel(i, [], [i]) for i in range(4)),
        replace(collective(4, [3], [4]), time=KernelTime(seconds=1.0, scheduled_s=3.0, apart_s=1.0)),
        kernel(5, [0, 1, 2, 4], [5]),
    )
    order = latency_hiding(lowered, Ties.LATEST, clock)
    assert order.index(~4) - order.index(4) - 1 == in_window


# --- laws of every order


@given(programs(), st.sampled_from(Ties))
def test_every_kernel_runs_once_after_all_that_it_waits_for(lowered, ties):
    for found, order in (
        (lowered, program_order(lowered)),
        (lowered, latency_hiding(lowered, ties)),
        (memory_saving(lowered), program_order(memory_saving(lowered))),
    ):
        collectives = {k for k, one in enumerate(found.kernels) if one.collective is not None}
        assert sorted(k for k in order if k >= 0) == list(range(len(found.kernels)))
        assert sorted(~k for k in order if k < 0) == sorted(collectives)
        for k in range(len(found.kernels)):
            ended = [~n if n in collectives else n for n in needed(found.kernels, k)]
            assert all(order.index(n) < order.index(k) for n in ended)
        assert all(order.index(k) < order.index(~k) for k in collectives)


@given(programs(), st.sampled_from(Ties))
def test_loops_stay_whole_and_in_each_one_collective_is_under_way_at_a_time(lowered, ties):
    order = latency_hiding(lowered, ties)
    loops = [lowered.kernels[k if k >= 0 else ~k].loops for k in order]
    for loop in {loop for inside in loops for loop in inside}:
        at = [n for n, inside in enumerate(loops) if loop in inside]
        assert at == list(range(at[0], at[-1] + 1))
    for body in set(loops):
        inside = [k for k, where in zip(order, loops, strict=True) if where == body]
        borders = [k for k in inside if k < 0 or lowered.kernels[k].collective is not None]
        assert borders[1::2] == [~k for k in borders[::2]]


@given(programs())
def test_kernels_wait_for_the_same_ones_by_their_new_numbers(lowered):
    found = memory_saving(lowered)
    for k, one in enumerate(found.kernels):
        waits = {found.kernels[n].position for n in needed(found.kernels, k)}
        assert waits == needed(lowered.kernels, one.position)


# --- the list scheduler, against one that reckons what everything frees before each step


def units(lowered: Lowered, members: Sequence[int], depth: int) -> list[list[int]]:
    """Kernels at this depth of loops, one by one; what an inner loop holds together."""
    return [
        list(unit)
        for _, unit in groupby(members, lambda k: lowered.kernels[k].loops[::-1][depth : depth + 1] or k)
    ]


def waits(lowered: Lowered, unit: list[int]) -> set[int]:
    return set().union(*(needed(lowered.kernels, k) for k in unit)) - set(unit)


def greedy(lowered: Lowered) -> list[int]:
    """Of what could come next, always the first that lets the memory grow least."""
    left, found = units(lowered, range(len(lowered.kernels)), 0), []
    made = {id(u): {b for k in u for b in lowered.kernels[k].makes} for u in left}
    read = {id(u): {b for k in u for b in lowered.kernels[k].reads} - made[id(u)] for u in left}

    def growth(unit: list[int]) -> float:
        wanted = set().union(*(read[id(u)] for u in left if u is not unit))
        freed = [b for b in read[id(unit)] - wanted if not lowered.buffers[b].is_argument]
        return sum(lowered.buffers[b].num_bytes for b in made[id(unit)]) - sum(
            lowered.buffers[b].num_bytes for b in freed
        )

    while left:
        ready = [unit for unit in left if waits(lowered, unit) <= set(found)]
        best = min(ready, key=growth)
        found += best
        left.remove(best)
    return found


@given(programs())
def test_the_next_kernel_is_always_one_that_frees_most(lowered):
    assert positions(memory_saving(lowered)) == [lowered.kernels[k].position for k in greedy(lowered)]


# --- the latency-hiding scheduler, against its description


def backwards(lowered: Lowered, members: Sequence[int], depth: int, ties: Ties) -> list[int]:
    """From the last to the first: a collective's end as soon as nothing else waits for it, and then what lies deepest among
    collectives, until that takes as long as the collective."""
    left = units(lowered, members, depth)
    number = {id(unit): n for n, unit in enumerate(left)}
    all_units = list(left)

    def is_collective(unit: list[int]) -> bool:
        (first, *_) = unit
        return len(lowered.kernels[first].loops) == depth and lowered.kernels[first].collective is not None

    def deep(unit: list[int]) -> int:
        below = [u for u in all_units if waits(lowered, unit) & set(u)]
        return max(map(deep, below), default=0) + is_collective(unit)

    def taken(collectives: bool) -> list[int] | None:
        """The deepest that nothing left waits for, taken off; None if there is none."""
        wanted = set().union(*(waits(lowered, unit) for unit in (*left, *under_way)))
        free = [u for u in left if not wanted & set(u) and is_collective(u) == collectives]
        if not free:
            return None
        sign = 1 if ties is Ties.LATEST else -1
        best = max(free, key=lambda unit: (deep(unit), sign * number[id(unit)]))
        left.remove(best)
        return best

    def body(unit: list[int]) -> list[int]:
        is_loop = len(lowered.kernels[unit[0]].loops) > depth
        return backwards(lowered, unit, depth + 1, ties) if is_loop else unit

    def time_s(unit: list[int]) -> float:
        return sum(lowered.kernels[k].time.scheduled_s for k in unit)

    listed: list[int] = []
    under_way: list[list[int]] = []
    while left:
        if (moving := taken(collectives=True)) is None:
            listed += body(taken(collectives=False) or [])
            continue
        under_way = [moving]
        listed.append(~moving[0])
        left_s = time_s(moving)
        while left_s > 0 and (unit := taken(collectives=False)) is not None:
            listed += body(unit)
            left_s -= time_s(unit)
        listed.append(moving[0])
        under_way = []
    return listed


@given(programs(), st.sampled_from(Ties))
def test_windows_are_filled_from_the_last_kernel_to_the_first(lowered, ties):
    found = latency_hiding(lowered, ties)
    assert list(found[::-1]) == backwards(lowered, range(len(lowered.kernels)), 0, ties)
