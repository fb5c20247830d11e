"""Units: what is written parses to the SI number it means, and back."""

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from autoshard.cost_model.errors import InputError
from autoshard.cost_model.units import (
    exact_bytes,
    exact_flops,
    exact_rate,
    exact_seconds,
    format_bytes,
    format_flops,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_flops,
    parse_rate,
    parse_seconds,
)

SIZES = st.integers(min_value=0, max_value=2**60)
POSITIVE = st.floats(min_value=1e-9, max_value=1e18)
HALF_OF_THIRD_DIGIT = 0.0051
"""Relative error of rounding to three significant digits."""


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("70GiB", 70 * 2**30),
        ("80GB", 80 * 10**9),
        (" 1.5 KiB ", 1536),
        ("512B", 512),
        ("1e3kB", 10**6),
        ("1KB", 1000),
        ("0.1GiB", 107374182),
        (".5TiB", 2**39),
        (4096, 4096),
        (80e9, 80 * 10**9),
    ],
)
def test_parse_bytes(text, num_bytes):
    parsed = parse_bytes(text)
    assert parsed == num_bytes
    assert isinstance(parsed, int)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (parse_rate, "900GB/s", 900e9),
        (parse_rate, "400Gb/s", 50e9),
        (parse_rate, "3.35TB/s", 3.35e12),
        (parse_rate, "1GiB/s", 2.0**30),
        (parse_rate, "8b/s", 1.0),
        (parse_seconds, "5us", 5e-6),
        (parse_seconds, "1.9us", 1.9e-6),
        (parse_seconds, "0s", 0.0),
        (parse_seconds, "2min", 120.0),
        (parse_flops, "989TFLOP/s", 989e12),
        (parse_flops, "4.5PFLOP/s", 4.5e15),
    ],
)
def test_parse_is_exact(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate, parse_seconds, parse_flops])
@pytest.mark.parametrize(
    "text", ["", "GiB", "1", "five us", "1 parsec", "0x10B", "1_000B", "1..5B", "٣B", "1GiB 2"]
)
def test_what_is_no_quantity_is_refused_with_the_units(parse, text):
    with pytest.raises(InputError, match="units") as caught:
        parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("number", ["nan", "NaN", "inf", "-inf", "Infinity", "-1", "-0.5", "1e999", "1e400"])
@pytest.mark.parametrize(
    ("parse", "unit"),
    [(parse_bytes, "GiB"), (parse_rate, "GB/s"), (parse_seconds, "us"), (parse_flops, "TFLOP/s")],
)
def test_not_finite_or_negative_is_refused(parse, unit, number):
    with pytest.raises(InputError, match="must be finite and not negative"):
        parse(number + unit)


def test_a_number_that_overflows_only_with_its_unit_is_refused():
    with pytest.raises(InputError, match="must be finite"):
        parse_bytes("1e308PB")


def test_case_matters_in_units():
    assert parse_rate("8Gb/s") * 8 == parse_rate("8GB/s")
    with pytest.raises(InputError, match=r"unit 'gib' in '70gib'.*case matters.*GiB"):
        parse_bytes("70gib")


@pytest.mark.parametrize("value", [True, 1.5, None, [1], math.nan, math.inf])
def test_parse_bytes_takes_text_or_whole_numbers(value):
    with pytest.raises(InputError, match="whole number of bytes"):
        parse_bytes(value)


def test_parse_bytes_refuses_a_negative_number():
    with pytest.raises(InputError, match="cannot be negative, got -1 bytes"):
        parse_bytes(-1)


def test_tiny_numbers_are_zero_not_slow():
    assert parse_bytes("1e-99999999GiB") == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bytes(70 * 2**30), "70 GiB"),
        (format_bytes(0), "0 B"),
        (format_bytes(1023), "1020 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(-1536), "-1.5 KiB"),
        (format_seconds(0.0125), "12.5 ms"),
        (format_seconds(0), "0 s"),
        (format_seconds(0.9999e-3), "1 ms"),
        (format_seconds(90), "1.5 min"),
        (format_rate(450e9), "450 GB/s"),
        (format_flops(989e12), "989 TFLOP/s"),
        (format_seconds(math.inf), "inf"),
    ],
)
def test_format(text, expected):
    assert text == expected


@given(SIZES)
def test_exact_bytes_round_trip(num_bytes):
    assert parse_bytes(exact_bytes(num_bytes)) == num_bytes


@pytest.mark.parametrize(("parse", "exact"), [(parse_rate, exact_rate), (parse_flops, exact_flops)])
@given(value=st.floats(min_value=0, max_value=1e30))
def test_exact_rates_round_trip(parse, exact, value):
    assert parse(exact(value)) == value


@given(st.floats(min_value=0, max_value=1e9))
def test_exact_seconds_round_trip(seconds):
    assert parse_seconds(exact_seconds(seconds)) == seconds


@pytest.mark.parametrize(
    ("parse", "show"),
    [(parse_rate, format_rate), (parse_seconds, format_seconds), (parse_flops, format_flops)],
)
@given(value=POSITIVE)
def test_format_keeps_three_digits(parse, show, value):
    assert math.isclose(parse(show(value)), value, rel_tol=HALF_OF_THIRD_DIGIT)


@given(st.integers(min_value=1000, max_value=2**60))
@example(1152)
def test_format_bytes_keeps_three_digits(num_bytes):
    """And sizes are read as whole bytes: 1.12 KiB, which is 1146.88 of them, as 1146."""
    assert abs(parse_bytes(format_bytes(num_bytes)) - num_bytes) <= HALF_OF_THIRD_DIGIT * num_bytes + 1


def test_exact_text_is_short():
    assert exact_bytes(80 * 2**30) == "80GiB"
    assert exact_rate(3.35e12) == "3.35TB/s"
    assert exact_seconds(1.9e-6) == "1.9us"
    assert exact_flops(9.89e14) == "989TFLOP/s"
