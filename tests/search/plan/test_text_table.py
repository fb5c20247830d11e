"""Text fits, and loses nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.plan.text_table import aligned, fitted

LONG = "state['params']['" + "['".join(f"block_{n}']" for n in range(20)) + "['kernel']"


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)


def test_what_fits_stays_as_it_is():
    text = "a  b\n\n  c" + " " * 5 + "d" * 60
    assert fitted(text) == text


def test_a_long_last_column_goes_on_below_itself():
    rows = [("P('data')", "12x", "short"), ("P()", "3x", "one, " * 20 + "two")]
    lines = fitted("\n".join(aligned(rows, right=(1,)))).splitlines()
    start = lines[0].index("short")
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 3
    assert lines[1].startswith("  P()         3x  one, one,")
    assert lines[2].index("one") == start


def test_where_the_last_column_has_no_room_lines_go_on_at_the_left():
    lines = fitted("  " + "x" * 70 + "  " + "y " * 10).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("    y y")


def test_a_path_is_broken_before_its_keys():
    lines = fitted(f"  P()  1x  {LONG}").splitlines()
    assert len(lines) > 2
    assert all(re.fullmatch(r" {11}(\['\w+'\])+", line) for line in lines[1:])


def test_text_is_as_wide_as_the_terminal(monkeypatch):
    text = "word " * 60
    for columns in (60, 120, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        widest = max(map(len, fitted(text).splitlines()))
        assert min(columns, len(text)) - 6 < widest <= columns


LINES = st.text(st.sampled_from("ab |/,[]. "), max_size=300)


@given(LINES)
def test_nothing_is_lost_and_all_fits(line):
    parts = fitted(line).split("\n")
    assert all(len(part) <= 80 for part in parts) or not line.strip()
    assert "".join("".join(parts).split()) == "".join(line.split())
