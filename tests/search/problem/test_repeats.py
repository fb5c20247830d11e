"""Arrays of equal blocks that pile up: counted by hand on a schedule of all blocks."""

import pytest

from autoshard.search.problem.repeats import piled_up_from


def held(starts, ends, at):
    return sum(start <= at <= end for start, end in zip(starts, ends, strict=True))


@pytest.mark.parametrize("waits_until", [9, 40])
def test_arrays_that_outlive_the_next_block_pile_up(waits_until):
    """Blocks of four kernels; each array is freed as the next block begins, or with all others."""
    starts = [0, 4, 8, 12]
    ends = [start + 5 for start in starts] if waits_until == 9 else [waits_until] * 4
    expected = [None] * 4 if waits_until == 9 else [4, 8, 12, 16]
    assert piled_up_from(starts, ends) == expected


def test_arrays_pile_up_where_a_scheduler_has_put_other_work_between_two_blocks():
    """Ten blocks of four kernels. Seven run, then a stretch of other work frees their arrays, then the last three."""
    whole_starts = [0, 4, 8, 12, 16, 20, 24, 70, 74, 78]
    whole_ends = [60] * 7 + [90] * 3
    repeats = [1, 2, 2, 2, 1, 1, 1]
    short_starts = [0, 4, 8, 12, 52, 56, 60]  # as the short step has them: a block for each run
    ends = [48] * 4 + [72] * 3
    found = piled_up_from(short_starts, ends)
    assert [start for start, count in zip(found, repeats, strict=True) if count > 1] == [8, 12, 16]
    there = held(short_starts, ends, 40) + sum(
        count - 1 for start, count in zip(found, repeats, strict=True) if start is not None and start <= 40
    )
    assert there == held(whole_starts, whole_ends, 50) == 7


def test_one_block_piles_up_nothing():
    assert piled_up_from([3], [90]) == [None]
