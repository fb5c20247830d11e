"""The pieces of a sweep."""

import numpy as np
import pytest

from autoshard.search.pipeline.stage_costs import ClusterNode, StageOption, StageTable, Submesh, prefix_sums
from autoshard.search.pipeline.sweep import Column, Places, _range_minimum, dominated


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


def test_options_stand_only_where_others_may_stand_on_all_other_devices():
    """Of three nodes of 8: four devices in the middle of a node would leave two that nobody takes."""
    nodes = (ClusterNode(8, 1.0),) * 3
    places = Places.of(nodes, table(Submesh(1, 4), Submesh(2, 8)))
    found = [
        (p, o, end)
        for p in range(places.num_devices)
        for o, end in zip(places.options[p].tolist(), places.ends[p].tolist(), strict=True)
    ]
    assert found == [
        (0, 0, 4),
        (0, 1, 16),
        (4, 0, 8),
        (8, 0, 12),
        (8, 1, 24),
        (12, 0, 16),
        (16, 0, 20),
        (20, 0, 24),
    ]


def test_where_no_row_of_options_takes_all_devices_none_stands_anywhere():
    places = Places.of((ClusterNode(8, 1.0),) * 3, table(Submesh(2, 8)))
    assert not any(map(len, places.options))


def table(*submeshes: Submesh) -> StageTable:
    ones = np.ones(4)
    options = tuple(StageOption(one, "keep", ones, ones, ones, ones, ones) for one in submeshes)
    sums = prefix_sums([ones] * len(options))
    return StageTable(options, np.ones(len(options)), sums, sums)
