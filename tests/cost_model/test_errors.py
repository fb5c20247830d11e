"""What is quoted of others' exceptions."""

import pytest

from autoshard.cost_model.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("\n no such shape\nfor more, see"), "no such shape"),
        (ValueError(), "ValueError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_the_first_line_says_something(error, line):
    assert first_line(error) == line
