"""A profile's trace has each stream's time, in events that follow one another, and the memory of each slice."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.search.plan.profile import Profile
from autoshard.search.plan.profile_trace import trace_events

SHARES = st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=4, max_size=4).map(tuple)


def of(events, phase):
    return [one for one in events if one["ph"] == phase]


@given(st.dictionaries(st.sampled_from(["forward", "backward", "to host"]), SHARES))
def test_events_of_a_track_follow_one_another_and_add_up_to_the_streams_time(busy):
    events = trace_events(Profile(2.0, busy))["traceEvents"]
    names = {one["tid"]: one["args"]["name"] for one in of(events, "M")}
    assert sorted(names.values()) == sorted(busy)
    for track, stream in names.items():
        slices = [one for one in of(events, "X") if one["tid"] == track]
        assert sum(one["dur"] for one in slices) == pytest.approx(1e6 * 2.0 * sum(busy[stream]) / 4)
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(slices))


def test_memory_is_counted_by_kind_at_the_start_of_each_slice():
    profile = Profile(2.0, held_bytes={"parameters": (8, 8), "residuals": (0, 4)})
    counters = of(json.loads(json.dumps(trace_events(profile)))["traceEvents"], "C")
    assert [(one["ts"], one["args"]) for one in counters] == [
        (0.0, {"parameters": 8, "residuals": 0}),
        (1e6, {"parameters": 8, "residuals": 4}),
    ]
