"""Orders of kernels: by hand, and against a scheduler that looks at everything anew before each step."""

from collections.abc import Sequence
from itertools import groupby

from hypothesis import given

from autoshard.search.device.kernel_order import memory_saving, program_order
from autoshard.search.device.lowering import Lowered
from autoshard.search.device.timeline import peak
from tests.search.device.programs import assert_all_run_once, buffer, collective, kernel, needed, programs


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


# --- laws of every order


@given(programs())
def test_every_kernel_runs_once_after_all_that_it_waits_for(lowered):
    for found, order in (
        (lowered, program_order(lowered)),
        (memory_saving(lowered), program_order(memory_saving(lowered))),
    ):
        assert_all_run_once(found, order)


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
