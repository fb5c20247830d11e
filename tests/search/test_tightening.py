"""A proposal that needs too much leads to lower limits, and to rows that see the missed arrays."""

from itertools import islice

import pytest

from autoshard.search.solver.pbqp import MemoryConstraint
from autoshard.search.tightening import BLIND, MARGIN, MAX_ROWS, Round, tightened

CAP_BYTES = 100.0


def asked(needs, expects=lambda limit_bytes: limit_bytes, has_rows=False, fits_above=0.0, num_rounds=20):
    """The limits and the names of the rows of all rounds, if proposals under a limit need and are expected to need so
    much, and there are none under a limit of `fits_above` or less."""
    found = []

    def propose(limit_bytes, rows):
        found.append((limit_bytes, [row.name for row in rows]))
        if limit_bytes <= fits_above:
            return None
        row = (lambda: MemoryConstraint(f"row {len(rows) + 1}", (), 0.0)) if has_rows else None
        return Round(limit_bytes, expects(limit_bytes), needs(limit_bytes), row)

    for _ in islice(tightened(propose, CAP_BYTES), num_rounds):
        pass
    return found


def limits(*args, **kwargs):
    return [limit for limit, _ in asked(*args, **kwargs)]


def test_the_first_proposal_keeps_to_the_cap_alone():
    assert asked(lambda limit: 500.0, has_rows=True, num_rounds=1) == [(CAP_BYTES, [])]


def test_a_proposal_that_fits_is_the_last_one():
    assert asked(lambda limit: limit) == [(CAP_BYTES, [])]
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


def test_far_over_the_cap_limits_fall_before_rows_are_added():
    found = asked(lambda limit: BLIND * CAP_BYTES + 1.0, has_rows=True, fits_above=50.0, num_rounds=40)
    first_with_rows = next(n for n, (_, rows) in enumerate(found) if rows)
    assert all(limit < CAP_BYTES for limit, _ in found[1:first_with_rows])
    assert found[first_with_rows][0] == CAP_BYTES
    assert {limit for limit, rows in found if rows} == {CAP_BYTES}


def test_each_round_far_over_the_cap_adds_a_row_up_to_a_number_of_rounds():
    found = asked(lambda limit: 2 * BLIND * CAP_BYTES, lambda limit: 10.0, has_rows=True, fits_above=99.0)
    num_rows = [len(rows) for _, rows in found if rows]
    assert num_rows == [*range(num_rows[0], num_rows[0] + MAX_ROWS)]


def test_hardly_over_the_cap_or_without_a_row_none_is_added():
    assert all(not rows for _, rows in asked(lambda limit: BLIND * CAP_BYTES, has_rows=True, fits_above=50.0))
    assert all(not rows for _, rows in asked(lambda limit: 2 * BLIND * CAP_BYTES, fits_above=50.0))


def test_rows_stay_as_limits_fall():
    found = []

    def propose(limit_bytes, rows):
        found.append((limit_bytes, len(rows)))
        row = MemoryConstraint(f"row {len(rows) + 1}", (), 0.0)
        needed_bytes = limit_bytes + 1.0 if rows else 2 * CAP_BYTES
        return (
            Round(None, limit_bytes, needed_bytes, lambda: row) if rows or limit_bytes == CAP_BYTES else None
        )

    needed = [latest.needed_bytes for latest in tightened(propose, CAP_BYTES)]
    assert needed[-1] < CAP_BYTES
    assert found[-2:] == [(CAP_BYTES, 1), (pytest.approx(CAP_BYTES - 1.0 - MARGIN * CAP_BYTES), 1)]


def test_where_nothing_keeps_to_a_limit_the_next_one_lies_half_of_the_way_back():
    first_lower = 90.0 - 10.0 - MARGIN * CAP_BYTES
    found = limits(lambda limit: 110.0, lambda limit: 90.0, fits_above=84.0, num_rounds=2)
    assert found == pytest.approx([CAP_BYTES, first_lower, (first_lower + 90.0) / 2])


def test_it_ends_where_hardly_anything_is_left_of_that_way():
    found = limits(lambda limit: 110.0, lambda limit: 90.0, fits_above=90.0)
    assert all(limit <= 90.0 - MARGIN * CAP_BYTES for limit in found[1:])
    assert 90.0 - found[-1] < 2 * MARGIN * CAP_BYTES


def test_no_limit_is_asked_for_again_under_which_there_was_nothing():
    """A proposal half of the way back may need so much that the next limit would lie below."""
    found = limits(lambda limit: limit + 10.0, fits_above=92.0)
    barren = [limit for limit in found if limit <= 92.0]
    assert barren[0] == pytest.approx(CAP_BYTES - 10.0 - MARGIN * CAP_BYTES)
    assert barren == sorted(barren)
    assert len(found) < 12


def test_limits_that_nothing_can_keep_to_are_not_asked_for():
    found = []

    def propose(limit_bytes, rows):
        found.append(limit_bytes)
        return Round(None, 60.0, 150.0)

    list(islice(tightened(propose, CAP_BYTES, least_bytes=40.0), 5))
    assert found[1] == 50.0
    assert min(found) > 40.0


def test_nothing_under_the_cap_ends_it():
    assert asked(lambda limit: limit, fits_above=CAP_BYTES) == [(CAP_BYTES, [])]
