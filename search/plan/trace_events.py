"""Trace events for ui.perfetto.dev: tracks with spans, and counters.

Source: "Trace Event Format", the JSON that Chrome's tracing and Perfetto read.
"""

from collections.abc import Iterable, Mapping
from typing import Any

MICROSECONDS = 1e6
"""Per second: trace events are in microseconds."""

Event = dict[str, Any]


def trace_file(events: Iterable[Event]) -> dict[str, Any]:
    """Events as the JSON-ready content of a file."""
    return {"traceEvents": [*events], "displayTimeUnit": "ms"}


def track(number: int, name: str) -> Event:
    """The name of a track."""
    return {"ph": "M", "name": "thread_name", "pid": 0, "tid": number, "args": {"name": name}}


def span(number: int, name: str, start_s: float, seconds: float, **besides: Any) -> Event:
    """A span of time on a track."""
    times = {"ts": start_s * MICROSECONDS, "dur": seconds * MICROSECONDS}
    return {"ph": "X", "name": name, "pid": 0, "tid": number, **times, **besides}


def counter(name: str, at_s: float, values: Mapping[str, float]) -> Event:
    """The values of a counter from a time on."""
    return {"ph": "C", "name": name, "pid": 0, "ts": at_s * MICROSECONDS, "args": dict(values)}
