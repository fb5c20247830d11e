"""How much time is left."""

import pytest

from search import deadline
from search.deadline import Deadline


def test_what_is_left_shrinks_to_nothing_and_no_further(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(deadline, "thread_time", lambda: now[0])
    end = Deadline.after(5.0)
    assert (end.left_s, end.is_over) == (5.0, False)
    now[0] = 103.0
    assert end.left_s == pytest.approx(2.0)
    now[0] = 105.0
    assert (end.left_s, end.is_over) == (0.0, True)
    now[0] = 109.0
    assert (end.left_s, end.is_over) == (0.0, True)
