"""The limits of repeated searches, with a search and a compiler that are functions of the limit."""

from itertools import pairwise
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given

from autoshard.compiled_peaks import MAX_ROUNDS
from autoshard.limits import Trial, next_limit
from autoshard.search.plan.peak_band import PEAK_BAND
from autoshard.search.tightening import MARGIN

CAP = 1000.0


def slower_with_less(limit_bytes):
    """The step time of the plan that fills a limit."""
    return CAP / limit_bytes


def trials(compiled, step_s=slower_with_less, least=0.0, gap=0.0, holds=lambda limit_bytes: limit_bytes):
    """All trials, if the plan under a limit holds so much by prediction and the compiler makes so much of that."""
    found = list[Trial]()
    while (limit := next_limit(found, CAP)) is not None and len(found) < MAX_ROUNDS:
        if limit < least:
            found.append(Trial(limit))
            continue
        predicted = holds(limit)
        found.append(
            Trial(limit, compiled(predicted) <= CAP, predicted, compiled(predicted), step_s(predicted), gap)
        )
    return found


def fastest(found):
    return min((one for one in found if one.fits), key=lambda one: one.step_s)


def test_a_plan_that_fits_needs_no_second_limit():
    assert [one.limit_bytes for one in trials(lambda p: 0.9 * p)] == [CAP]


@given(times=st.floats(1.001, 4.0), used=st.floats(0.5, 1.0))
def test_an_error_that_is_a_ratio_is_corrected_in_one_step(times, used):
    found = trials(lambda p: times * p, lambda p: 1.0, holds=lambda limit: used * limit)
    if used * times <= 1.0:
        assert len(found) == 1
        return
    assert [one.fits for one in found] == [False, True]
    assert found[1].limit_bytes == pytest.approx((1 - MARGIN) * CAP / times)


@given(times=st.floats(1.02, 4.0))
def test_a_plan_that_fits_fills_the_cap_as_far_as_plans_do(times):
    """The overshoot in bytes, taken off the limit, would leave 60% of the cap empty if 1.6 times as much is compiled."""
    found = trials(lambda p: times * p)
    assert [one.fits for one in found] == [False, True, False], "the limit half way back is above what fits"
    assert fastest(found).compiled_bytes == pytest.approx((1 - MARGIN) * CAP)


@given(added=st.floats(0.0, PEAK_BAND[1] - 1))
def test_an_error_that_is_a_number_of_bytes_is_corrected_in_few_steps(added):
    found = trials(lambda p: p + added * CAP, lambda p: 1.0)
    assert found[-1].fits
    assert len(found) <= MAX_ROUNDS - 1


@given(
    times=st.lists(st.floats(0.7, 2.0), min_size=MAX_ROUNDS, max_size=MAX_ROUNDS),
    least=st.floats(0.0, CAP),
)
def test_limits_fall_until_a_plan_fits_and_go_half_way_back_once(times, least):
    found = trials(lambda p: times[int(p) % MAX_ROUNDS] * p, least=least)
    first = next((n for n, one in enumerate(found) if one.fits), len(found))
    planned = [one for one in found[: first + 1] if one.step_s < inf]
    assert all(lower.limit_bytes < higher.kept_bytes for higher, lower in pairwise(planned))
    assert len(found) <= first + 2
    if len(found) == first + 2:
        assert found[first].limit_bytes < found[-1].limit_bytes < planned[-2].kept_bytes


def falling(p):
    """Twice as much as predicted where the cap is full, and little more below: the second plan leaves half of it empty."""
    return 2 * p if p > 0.9 * CAP else 1.05 * p


def test_half_way_back_finds_the_faster_plan_between():
    found = trials(falling)
    assert [one.fits for one in found] == [False, True, True]
    assert fastest(found) is found[2]
    assert found[2].limit_bytes == pytest.approx((found[1].limit_bytes + CAP) / 2)


def test_half_way_back_the_plan_may_be_too_large():
    found = trials(lambda p: 2 * p if p > 0.6 * CAP else p)
    assert [one.fits for one in found] == [False, True, False]
    assert fastest(found) is found[1]


def test_half_way_back_is_not_asked_where_the_plan_is_hardly_slower():
    assert len(trials(falling, lambda p: 1.0)) == 2
    slower = slower_with_less(0.5 * CAP * (1 - MARGIN))
    within = 1 - 1 / slower
    assert len(trials(falling, gap=within + 0.01)) == 2
    assert len(trials(falling, gap=within - 0.01)) == 3


def test_half_way_to_a_limit_that_nothing_fits():
    found = trials(lambda p: 1.4 * p if p > 0.99 * CAP else p, lambda p: 1.0, least=0.85 * CAP)
    assert [one.step_s < inf for one in found] == [True, False, True]
    assert found[2].limit_bytes == pytest.approx((found[1].limit_bytes + CAP) / 2)


def test_no_limit_is_left_where_nothing_fits_between():
    assert next_limit([Trial(CAP, False, CAP, 1.1 * CAP, 1.0), Trial(0.999 * CAP)], CAP) is None


def test_a_plan_that_needs_too_much_of_the_host_has_a_lower_limit_after_it():
    assert next_limit([Trial(CAP, False, 900.0, 800.0, 1.0)], CAP) == pytest.approx((1 - MARGIN) * 900.0)
