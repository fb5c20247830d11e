"""What a proposal is taught by one that needed too much: lower limits, and rows that see what was not seen."""

from itertools import islice

import pytest

from autoshard.search.solver.pbqp import MemoryConstraint
from autoshard.search.tightening import BLIND, MARGIN, MAX_ROWS, Round, tightened

CAP_BYTES = 100.0


def asked(needs, expects=lambda limit_bytes: limit_bytes, has_rows=False, max_rounds=20):
    """The limits and the numbers of rows of all rounds, if proposals under a limit need and are expected to need so much."""
    found = []

    def propose(limit_bytes, rows):
        found.append((limit_bytes, [row.name for row in rows]))
        row = (lambda: MemoryConstraint(f"row {len(found)}", (), 0.0)) if has_rows else None
        return Round(limit_bytes, expects(limit_bytes), needs(limit_bytes), row)

    for _ in tightened(propose, CAP_BYTES, max_rounds):
        pass
    return found


def test_the_first_proposal_keeps_to_the_cap_alone():
    assert asked(lambda limit: 500.0, has_rows=True, max_rounds=1) == [(CAP_BYTES, [])]


def test_the_limit_falls_by_the_overshoot_and_a_margin():
    limits = [limit for limit, _ in asked(lambda limit: limit + 5.0, max_rounds=3)]
    second = CAP_BYTES - 5.0 - MARGIN * CAP_BYTES
    assert limits == pytest.approx([CAP_BYTES, second, second - MARGIN * CAP_BYTES])
    assert second + 5.0 < CAP_BYTES


def test_it_falls_from_what_was_expected_where_that_is_less():
    limits = [limit for limit, _ in asked(lambda limit: 103.0, lambda limit: min(limit, 80.0), max_rounds=2)]
    assert limits[1] == pytest.approx(80.0 - 3.0 - MARGIN * CAP_BYTES)


def test_a_proposal_that_keeps_to_the_cap_but_does_not_please_lowers_it_by_the_margin():
    assert asked(lambda limit: 50.0, max_rounds=2)[1][0] == pytest.approx(CAP_BYTES * (1 - MARGIN))


def test_far_over_the_cap_rows_are_added_before_limits_fall():
    found = asked(lambda limit: BLIND * CAP_BYTES + 1.0, has_rows=True)
    assert [names for _, names in found[:3]] == [[], ["row 1"], ["row 1", "row 2"]]
    assert [len(names) for _, names in found[: MAX_ROWS + 2]] == [*range(MAX_ROWS + 1), MAX_ROWS]
    assert {limit for limit, _ in found[: MAX_ROWS + 1]} == {CAP_BYTES}
    assert found[MAX_ROWS + 1][0] < CAP_BYTES
    assert [len(n) for _, n in asked(lambda limit: BLIND * CAP_BYTES, has_rows=True, max_rounds=2)] == [0, 0]
    assert [len(n) for _, n in asked(lambda limit: 2 * BLIND * CAP_BYTES, max_rounds=2)] == [0]


def test_where_nothing_keeps_to_a_limit_the_next_one_lies_half_of_the_way_back():
    limits = []

    def propose(limit_bytes, rows):
        limits.append(limit_bytes)
        return Round(None, 90.0, 110.0) if limit_bytes > 84.0 else None

    first_lower = 90.0 - 10.0 - MARGIN * CAP_BYTES
    for _ in tightened(propose, CAP_BYTES, 3):
        pass
    assert limits == pytest.approx([CAP_BYTES, first_lower, (first_lower + 90.0) / 2])


def test_it_ends_where_hardly_anything_is_left_of_that_way():
    limits = []

    def propose(limit_bytes, rows):
        limits.append(limit_bytes)
        return Round(None, 90.0, 110.0) if limit_bytes >= 90.0 else None

    list(tightened(propose, CAP_BYTES, 100))
    assert all(limit <= 90.0 - MARGIN * CAP_BYTES for limit in limits[1:])
    assert 90.0 - limits[-1] < 2 * MARGIN * CAP_BYTES


def test_no_limit_is_asked_for_again_under_which_there_was_nothing():
    """A proposal half of the way back may need so much that the next limit would lie below."""
    limits = []

    def propose(limit_bytes, rows):
        limits.append(limit_bytes)
        return Round(None, limit_bytes, limit_bytes + 10.0) if limit_bytes > 92.0 else None

    list(tightened(propose, CAP_BYTES, 100))
    barren = [limit for limit in limits if limit <= 92.0]
    assert barren[0] == pytest.approx(CAP_BYTES - 10.0 - MARGIN * CAP_BYTES)
    assert barren == sorted(barren)
    assert all(limit > barren[0] for limit in limits if limit not in barren[:1])
    assert len(limits) < 12


def test_it_ends_after_its_rounds_or_when_no_limit_is_left():
    assert len(asked(lambda limit: 101.0, max_rounds=7)) == 7
    assert len(asked(lambda limit: 250.0, max_rounds=7)) == 1
    assert all(limit > 0 for limit, _ in asked(lambda limit: limit + 30.0))


def test_whoever_is_pleased_asks_for_no_more():
    calls = []

    def propose(limit_bytes, rows):
        calls.append(limit_bytes)
        return Round(None, 1.0, 1.0)

    next(islice(tightened(propose, CAP_BYTES, 9), 1, None))
    assert len(calls) == 2
