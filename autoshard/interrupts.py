"""Ctrl-C while modules load: an interrupted import would print a traceback, so the process ends at once instead."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, NoReturn

INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C: 128 + SIGINT, the shells' convention."""


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """A context in which Ctrl-C ends the process."""
    before = signal.getsignal(signal.SIGINT)
    is_ours = before is signal.default_int_handler  # a background process ignores it
    if is_ours:
        signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        if is_ours:
            signal.signal(signal.SIGINT, before)


def _leave(*_: Any) -> NoReturn:
    print("autoshard: interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
