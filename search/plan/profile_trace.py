"""A profile as trace events for ui.perfetto.dev: a track per stream, and a counter of memory by kind.

A profile knows how large a share of each slice of time a stream is busy. A slice that is busy throughout continues the
event before it. A slice that is busy for a share of its time is an event of that length, from the slice's start. So events
of a track follow one another, and their lengths add up to the stream's time.

Source: "Trace Event Format", the JSON that Chrome's tracing and Perfetto read.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from autoshard.search.plan.profile import Profile

MICROSECONDS = 1e6
"""Per second: trace events are in microseconds."""


def trace_events(profile: Profile) -> dict[str, Any]:
    """The profile as JSON-ready trace events."""
    events = [
        event
        for track, (stream, shares) in enumerate(profile.busy.items())
        for event in (_name(track, stream), *_slices(track, stream, shares, profile.seconds))
    ]
    return {"traceEvents": [*events, *_counters(profile)], "displayTimeUnit": "ms"}


def _name(track: int, stream: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": stream}}


def _slices(track: int, stream: str, shares: Sequence[float], seconds: float) -> Iterator[dict[str, Any]]:
    slice_s = seconds / max(len(shares), 1)
    for start, share, num_slices in _runs(shares):
        yield {
            "ph": "X",
            "name": stream,
            "pid": 0,
            "tid": track,
            "ts": start * slice_s * MICROSECONDS,
            "dur": share * num_slices * slice_s * MICROSECONDS,
        }


def _runs(shares: Sequence[float]) -> Iterator[tuple[int, float, int]]:
    """The first slice, the share and the number of slices of each event: busy slices in a row are one."""
    for is_full, run in groupby(enumerate(shares), key=lambda one: one[1] >= 1):
        slices = list(run)
        if is_full:
            yield slices[0][0], 1.0, len(slices)
        else:
            yield from ((start, share, 1) for start, share in slices if share > 0)


def _counters(profile: Profile) -> Iterator[dict[str, Any]]:
    """The memory of each slice, by kind of resident."""
    kinds, slices = list(profile.held_bytes), list(zip(*profile.held_bytes.values(), strict=True))
    for i, held in enumerate(slices):
        at_s = i * profile.seconds / len(slices)
        args = dict(zip(kinds, held, strict=True))
        yield {"ph": "C", "name": "memory, bytes", "pid": 0, "ts": at_s * MICROSECONDS, "args": args}
