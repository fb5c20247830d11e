"""How much time is left, by the processor and by the work done."""

import pytest

from autoshard.search.solver import clock
from autoshard.search.solver.clock import PROCESSOR, Deadline, WorkClock


@pytest.fixture
def now(monkeypatch):
    """What the processor's clock says."""
    now = [100.0]
    monkeypatch.setattr(clock, "thread_time", lambda: now[0])
    return now


def test_what_is_left_shrinks_to_nothing_and_no_further(now):
    end = Deadline.after(5.0, PROCESSOR)
    assert (end.left_s, end.is_over) == (5.0, False)
    now[0] = 103.0
    assert end.left_s == pytest.approx(2.0)
    now[0] = 105.0
    assert (end.left_s, end.is_over) == (0.0, True)
    now[0] = 109.0
    assert (end.left_s, end.is_over) == (0.0, True)


def test_only_work_moves_a_clock_that_counts_it(now):
    worked, by_processor = WorkClock(), PROCESSOR
    ends = [Deadline.after(5.0, one) for one in (worked, by_processor)]
    worked.spend(2.0)
    by_processor.spend(2.0)
    now[0] += 4.0
    assert [end.left_s for end in ends] == pytest.approx([3.0, 1.0])
    assert [one.counts_work for one in (worked, by_processor)] == [True, False]


def test_a_share_is_one_of_what_is_left():
    worked = WorkClock()
    whole = Deadline.after(5.0, worked)
    worked.spend(1.0)
    part = whole.share(1 / 4)
    worked.spend(1.0)
    assert (whole.left_s, part.left_s, part.is_over) == (3.0, 0.0, True)
