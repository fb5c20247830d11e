"""Estimates of microbatches and arguments in host memory, and their corrections."""

import math
from types import SimpleNamespace

import pytest

from autoshard.cost_model.hardware import parse_cluster
from autoshard.search.space.variants import MISSES_BY, SECOND_ADDS, SLOPE_SHARE, Saving, Variant, Variants

CLUSTER = parse_cluster("8xH100-80GB")
STATE = ("optimizer_state",)
GIB = 1 << 30
ALL = [Variant(n, kinds) for kinds in ((), STATE) for n in (1, 2, 4, 8) if (n, kinds) != (1, ())]


SAVINGS = (Saving(4 * GIB, 0.3),)


def variants(cap_gib, savings=SAVINGS):
    """A step of 1 s with 8 GiB of activations, 4 of optimizer state and 4 of parameters and gradients."""
    arguments = {"optimizer_state": 4.0 * GIB, "parameters": 2.0 * GIB}
    fetched = {"optimizer_state": 0.5 * GIB}
    return Variants(CLUSTER, cap_gib * GIB, 1.0, 8.0 * GIB, 8.0 * GIB, arguments, fetched, list(savings))


def copied_s(visible):
    return visible * 2 * float(CLUSTER.host_link.copy_s(4 * GIB))


def test_recomputation_is_added_where_memory_is_missing():
    assert variants(16).seconds(Variant(1)) == 1.0
    assert variants(12).seconds(Variant(1)) == 1.3
    assert variants(13).seconds(Variant(1)) == pytest.approx(1 + 0.3 * 3 / 4)  # of a part of the step
    assert variants(11).seconds(Variant(1)) == math.inf


def test_microbatches_add_seconds_and_divide_activations():
    assert variants(12).seconds(Variant(2)) == pytest.approx(1 + SECOND_ADDS)
    assert variants(10).seconds(Variant(4)) == pytest.approx(1 + SECOND_ADDS * (1 + 2 * SLOPE_SHARE))
    assert variants(9.5).seconds(Variant(4)) == pytest.approx(1.15 + SECOND_ADDS * (1 + 2 * SLOPE_SHARE))
    assert variants(9).seconds(Variant(4)) == pytest.approx(1.3 + SECOND_ADDS * (1 + 2 * SLOPE_SHARE))
    assert variants(8.9).seconds(Variant(4)) == math.inf


def test_arguments_on_the_host_add_the_copies_that_computation_cannot_hide():
    assert variants(12.5).seconds(Variant(1, STATE)) == pytest.approx(1 + copied_s(0.25))
    assert variants(12.4).seconds(Variant(1, STATE)) == pytest.approx(
        1 + 0.3 * 0.1 / 4 + copied_s(0.25)
    )  # a copy needs room


def test_more_microbatches_and_more_on_the_host_need_the_least_memory():
    assert min(ALL, key=variants(12).least_bytes) == Variant(8, STATE)


def test_a_variant_that_may_fit_has_an_estimate_with_slack():
    assert variants(11.9, savings=()).seconds(Variant(2)) == math.inf
    assert variants(11.9, savings=()).seconds(Variant(2), MISSES_BY) < math.inf


def test_what_needs_no_more_memory_than_a_variant_is_known():
    larger = [one for one in ALL if one.needs_no_less_than(Variant(4, STATE))]
    assert larger == [Variant(2), Variant(4), Variant(1, STATE), Variant(2, STATE), Variant(4, STATE)]


def near(needed_bytes, seconds=0.0, recomputes=False):
    """Strategies that miss the cap."""
    step_problem = SimpleNamespace(sites=frozenset([(0,)] if recomputes else []))
    peak = SimpleNamespace(num_bytes=needed_bytes)
    return SimpleNamespace(peak=peak, cost_s=seconds, step_problem=step_problem)


def test_the_memory_of_activations_that_missed_the_cap_corrects_all_others():
    found = variants(9)
    assert found.seconds(Variant(4)) < math.inf
    found.missed(Variant(1), near(14 * GIB))  # 8 GiB of arguments, and 6 where 4 were estimated
    assert found.seconds(Variant(4)) == math.inf  # 8 GiB, and 1.5
    assert found.seconds(Variant(8)) == pytest.approx(1.2 + SECOND_ADDS * (1 + 6 * SLOPE_SHARE))
    assert found.seconds(Variant(8, STATE)) == variants(9).seconds(Variant(8, STATE))


def test_memory_that_microbatches_left_over_is_divided_by_no_number_of_them():
    found = variants(9.5)
    assert found.seconds(Variant(8)) < math.inf
    found.missed(Variant(2), near(12 * GIB))  # 8 GiB of arguments, and 4 where 2 were estimated
    assert found.seconds(Variant(8)) == math.inf  # 8 GiB, 2, and 0.5
    assert found.seconds(Variant(8, STATE)) < math.inf  # 4.5 GiB, 2, and 1


def test_memory_that_microbatches_left_over_says_nothing_of_one_microbatch():
    found = variants(9.5)
    before_s, least_bytes = found.seconds(Variant(1, STATE)), found.least_bytes(Variant(1, STATE))
    found.missed(Variant(2), near(12 * GIB))
    assert found.seconds(Variant(1, STATE)) == before_s
    assert found.least_bytes(Variant(1, STATE)) == least_bytes
    assert found.least_bytes(Variant(2, STATE)) > variants(9.5).least_bytes(Variant(2, STATE))


def test_arguments_that_alone_seem_too_large_leave_no_estimate():
    found = variants(7)
    found.missed(Variant(1, STATE), near(4 * GIB))  # less than the arguments' 4.5 GiB
    assert found.seconds(Variant(8)) == math.inf
    assert found.seconds(Variant(8, STATE)) < math.inf


def test_a_variant_that_needs_no_less_memory_than_one_that_missed_has_no_estimate():
    found = variants(16)
    found.missed(Variant(2, STATE), near(8 * GIB))
    larger = [Variant(1), Variant(2), Variant(1, STATE), Variant(2, STATE)]
    assert [found.seconds(one) for one in larger] == [math.inf] * 4
    assert max(found.seconds(Variant(4)), found.seconds(Variant(4, STATE))) < math.inf


def test_seconds_of_recomputation_that_missed_the_cap_correct_all_others():
    found = variants(9.5)
    found.missed(Variant(1), near(12 * GIB, 1.9, recomputes=True))
    added_s = SECOND_ADDS * (1 + 2 * SLOPE_SHARE)
    assert found.seconds(Variant(4)) == pytest.approx(1 + 0.9 / 2 + added_s)


def test_seconds_of_few_microbatches_correct_those_of_more():
    found = variants(12)
    found.took(Variant(2), 1.6)
    assert found.seconds(Variant(8)) == pytest.approx(1 + 0.6 * (1 + 6 * SLOPE_SHARE))


def test_seconds_with_arguments_on_the_host_correct_all_variants_that_have_them_there():
    found, more = variants(12.5), (*STATE, "parameters")
    found.took(Variant(1, STATE), 3.0)
    assert found.seconds(Variant(1, STATE)) == found.seconds(Variant(1, more)) == 3.0
    assert found.seconds(Variant(2, more)) == pytest.approx(3 + SECOND_ADDS)
    assert found.seconds(Variant(2)) == pytest.approx(1 + SECOND_ADDS)


def test_recomputation_of_the_forward_phase_is_assumed_where_none_is_known():
    found = variants(11, savings=())
    assert found.seconds(Variant(1)) == math.inf
    found.assume_recomputation(3 * GIB)  # so that 5 GiB of activations may go
    assert found.seconds(Variant(1)) == pytest.approx(4 / 3)
