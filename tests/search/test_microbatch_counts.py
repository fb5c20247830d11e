"""How many microbatches may pay, and what those that were tried tell of more."""

import pytest

from autoshard.search.microbatch_counts import SLOPE_SHARE, least_s


def test_nothing_is_said_before_some_were_tried():
    assert least_s(8, 1.0, {}) == 1.0


def test_each_is_taken_to_add_a_share_of_what_the_first_ones_added():
    """Two that last 0.3 s longer, or four that last 0.9 s longer: each more adds a share of 0.3 s."""
    for tried_s in ({2: 1.3, 4: 9.0}, {4: 1.9}):
        assert least_s(8, 1.0, tried_s) == pytest.approx(1.0 + SLOPE_SHARE * 7 * 0.3)


def test_few_that_are_no_slower_say_nothing_of_more():
    assert least_s(8, 1.0, {2: 0.9}) == 1.0
