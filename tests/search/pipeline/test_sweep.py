"""The pieces of a sweep."""

import numpy as np
import pytest

from search.pipeline.sweep import Column, _range_minimum, dominated


@pytest.mark.parametrize("seed", range(20))
def test_range_minimum(seed: int):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 40))
    values = np.where(rng.random((5, size)) < 0.3, np.inf, rng.random((5, size)))
    lasts = np.minimum(np.arange(size) + rng.integers(0, size, (5, size)), size - 1)
    expected = [
        [min(row[k + 1 : last + 1], default=np.inf) for k, last in enumerate(ends)]
        for row, ends in zip(values, lasts.tolist(), strict=True)
    ]
    assert np.array_equal(_range_minimum(values, lasts), expected)


def test_more_stages_are_kept_only_where_they_take_less_time():
    column = Column(np.array([1, 2, 4]), np.array([[3.0, np.inf], [3.0, 5.0], [2.0, 5.0]]))
    kept = column.without(dominated(column))
    assert np.array_equal(kept.latency_s, [[3.0, np.inf], [np.inf, 5.0], [2.0, np.inf]])
    assert kept.row(3) is None
    assert np.array_equal(kept.row(2), [np.inf, 5.0])
