"""The clock of the searches for one cap."""

import pytest

from autoshard.search.options import Options
from autoshard.time_share import MAX_ROUNDS, TimeShare

CAP = 20 << 30


def test_searches_for_one_cap_share_one_clock():
    """If each takes all of its time, all of them end within a quarter of the first one's."""
    share = TimeShare(Options(CAP))
    given_s = []
    for _ in range(MAX_ROUNDS):
        options = share.options(CAP, None)
        given_s.append(options.limit_s)
        options.new_clock().spend(options.limit_s)
    assert given_s == pytest.approx([15.0, *[0.75] * 5])
    assert share.clock.now_s == pytest.approx(1.25 * 15.0)


def test_a_later_search_for_a_cap_has_half_of_the_time_that_an_early_one_left():
    share = TimeShare(Options(CAP))
    share.options(CAP, None).new_clock().spend(3.0)
    assert share.options(CAP, None).limit_s == pytest.approx(0.75 + (18.75 - 3.0 - 5 * 0.75) / 2)
