"""A profile as trace events for ui.perfetto.dev: a track per stream, and a counter of memory by kind.

A profile knows how large a share of each slice of time a stream is busy. A slice that is busy throughout continues the
event before it. A slice that is busy for a share of its time is an event of that length, from the slice's start. So events
of a track follow one another, and their lengths add up to the stream's time.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from autoshard.search.plan.profile import Profile
from autoshard.search.plan.trace_events import Event, counter, span, trace_file, track


def trace_events(profile: Profile) -> dict[str, Any]:
    """The profile as JSON-ready trace events."""
    events = [
        event
        for number, (stream, shares) in enumerate(profile.busy.items())
        for event in (track(number, stream), *_spans(number, stream, shares, profile.seconds))
    ]
    return trace_file((*events, *_counters(profile)))


def _spans(number: int, stream: str, shares: Sequence[float], seconds: float) -> Iterator[Event]:
    slice_s = seconds / max(len(shares), 1)
    for start, share, num_slices in _runs(shares):
        yield span(number, stream, start * slice_s, share * num_slices * slice_s)


def _runs(shares: Sequence[float]) -> Iterator[tuple[int, float, int]]:
    """The first slice, the share and the number of slices of each event: busy slices in a row are one."""
    for is_full, run in groupby(enumerate(shares), key=lambda one: one[1] >= 1):
        slices = list(run)
        if is_full:
            yield slices[0][0], 1.0, len(slices)
        else:
            yield from ((start, share, 1) for start, share in slices if share > 0)


def _counters(profile: Profile) -> Iterator[Event]:
    """The memory of each slice, by kind of resident."""
    kinds, slices = list(profile.held_bytes), list(zip(*profile.held_bytes.values(), strict=True))
    for i, held in enumerate(slices):
        at_s = i * profile.seconds / len(slices)
        yield counter("memory, bytes", at_s, dict(zip(kinds, held, strict=True)))
