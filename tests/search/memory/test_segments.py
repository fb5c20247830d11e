"""Cuts of a chain, against all cuts."""

from itertools import combinations

import numpy as np
import pytest

from autoshard.search.memory.segments import segments


def kept_and_working(size, last, made_at, ends):
    """What crosses, and the most that one segment makes."""
    segment = np.searchsorted(ends, np.arange(ends[-1] + 1))
    kept = sum(s for s, u, m in zip(size, last, made_at, strict=True) if segment[u] > segment[m])
    made = np.bincount(segment[made_at], size)
    return kept, made.max()


@pytest.mark.parametrize("seed", range(10))
def test_nothing_less_crosses_between_segments_of_that_length(seed):
    """Of all cuts into segments that make at most a half, a quarter, ... of everything."""
    rng, count = np.random.default_rng(seed), 9
    made_at = np.arange(count)
    size = rng.integers(1, 9, count).astype(float)
    last = np.minimum(made_at + rng.integers(0, 3, count), count - 1)
    found = segments(size, last, made_at, count)
    assert kept_and_working(size, last, made_at, found.ends) == (found.kept_bytes, found.working_bytes)
    cuts = [(*inner, count - 1) for n in range(count) for inner in combinations(range(count - 1), n)]
    all_cuts = [kept_and_working(size, last, made_at, ends) for ends in cuts]
    for n in range(4):
        limit = size.sum() / 2**n
        least = min((kept for kept, working in all_cuts if working <= limit), default=np.inf)
        assert found.kept_bytes + found.working_bytes <= least + limit


def test_layers_are_cut_where_one_array_crosses():
    """Four layers that make 1 + 8 + 8 bytes each, of which only the last one's 1 byte goes on."""
    size = [8.0, 8.0, 1.0] * 4
    last = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]
    found = segments(size, last, range(12), 12)
    assert found.ends == (2, 5, 8, 11)
    assert (found.kept_bytes, found.working_bytes) == (3.0, 17.0)
    assert [found.of(at) for at in (0, 2, 3, 11)] == [0, 0, 1, 3]


def test_nothing_is_cut_where_everything_crosses():
    """All is read at the end: a cut would keep what it is to save."""
    assert segments([4.0] * 6, [5] * 6, range(6), 6).ends == (5,)


def test_of_what_stands_for_many_all_is_kept_and_one_is_made_at_a_time():
    """A layer that stands for ten is cut no finer than one that stands for itself, and what crosses is kept ten times."""
    size = [8.0, 8.0, 1.0] * 4
    last = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 11]
    repeats = [1] * 3 + [10] * 3 + [1] * 6
    found = segments(size, last, range(12), 12, repeats)
    assert found.ends == (2, 5, 8, 11)
    assert (found.kept_bytes, found.working_bytes) == (1.0 + 10.0 + 1.0, 17.0)
    together = segments([s * n for s, n in zip(size, repeats, strict=True)], last, range(12), 12)
    assert together.ends != found.ends
