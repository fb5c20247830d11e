"""Every second is one part's."""

from autoshard.search.stopwatch import Stopwatch


def test_a_part_that_comes_again_adds_up(monkeypatch):
    readings_s = iter([10.0, 11.0, 13.0, 17.0])
    monkeypatch.setattr("search.stopwatch.perf_counter", lambda: next(readings_s))
    watch = Stopwatch(0.5)
    for part in ("solve", "strategies", "solve"):
        watch.lap(part)
    assert watch.seconds == {"trace": 0.5, "solve": 5.0, "strategies": 2.0}
