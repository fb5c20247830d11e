"""A proposal that needs too much leads to a lower limit, and far too much to rows that see the missed arrays."""

from itertools import islice, pairwise

import pytest

from autoshard.search.solver.pbqp import MemoryConstraint
from autoshard.search.tightening import BLIND, MARGIN, Round, tightened

CAP_BYTES = 100.0


def asked(needs, expects=lambda limit_bytes: limit_bytes, num_rows=0, fits_above=0.0, num_rounds=20):
    """The limits and the numbers of rows of all rounds, if proposals under a limit need and are expected to need so much,
    add so many rows each, and there are none under a limit of `fits_above` or less."""
    found = []

    def propose(limit_bytes, rows):
        found.append((limit_bytes, len(rows)))
        if limit_bytes <= fits_above:
            return None
        more = tuple(MemoryConstraint(f"row {len(rows) + n}", (), 0.0) for n in range(num_rows))
        return Round(limit_bytes, expects(limit_bytes), needs(limit_bytes), lambda: more)

    for _ in islice(tightened(propose, CAP_BYTES), num_rounds):
        pass
    return found


def limits(*args, **kwargs):
    return [limit for limit, _ in asked(*args, **kwargs)]


def test_the_first_proposal_keeps_to_the_cap_alone():
    assert asked(lambda limit: 500.0, num_rows=1, num_rounds=1) == [(CAP_BYTES, 0)]


def test_a_proposal_that_fits_is_the_last_one():
    assert asked(lambda limit: limit) == [(CAP_BYTES, 0)]
    assert limits(lambda limit: limit + 5.0)[-1] + 5.0 < CAP_BYTES


def test_the_limit_falls_by_the_overshoot_and_a_margin():
    second = CAP_BYTES - 5.0 - MARGIN * CAP_BYTES
    assert limits(lambda limit: limit + 5.0) == pytest.approx([CAP_BYTES, second])
    third = second - 1.0 - MARGIN * CAP_BYTES
    assert limits(lambda limit: max(limit + 5.0, 101.0), num_rounds=3) == pytest.approx(
        [CAP_BYTES, second, third]
    )


def test_it_falls_from_what_was_expected_where_that_is_less():
    found = limits(lambda limit: 103.0, lambda limit: min(limit, 80.0), num_rounds=2)
    assert found[1] == pytest.approx(80.0 - 3.0 - MARGIN * CAP_BYTES)


@pytest.mark.parametrize("num_rows", [0, 1, 3])
def test_far_over_the_cap_the_rows_of_each_proposal_are_added_and_stay(num_rows):
    found = asked(lambda limit: BLIND * CAP_BYTES + 1.0, num_rows=num_rows, fits_above=50.0)
    rows = [rows for limit, rows in found if limit > 50.0]
    assert len(rows) > 3
    assert rows == [n * num_rows for n in range(len(rows))]


def test_hardly_over_the_cap_none_is_added():
    found = asked(lambda limit: BLIND * CAP_BYTES, num_rows=1, fits_above=50.0)
    assert not any(rows for _, rows in found)


def test_where_nothing_keeps_to_a_limit_the_next_one_lies_halfway_back():
    found = limits(lambda limit: 130.0, fits_above=75.0)
    failed = [limit for limit in found if limit <= 75.0]
    assert failed
    assert min(found) == failed[0]  # no limit below a failed one is tried again
    for before, limit in pairwise(found):
        if before in failed:
            kept = min(one for one in found[: found.index(before)] if one > 75.0)
            assert limit == pytest.approx((max(one for one in failed if one <= before) + kept) / 2)
    assert len(found) < 20  # hardly any limits are left
