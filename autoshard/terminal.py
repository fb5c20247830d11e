"""The terminal of the command line: one-line warnings on stderr, a clean stdout, and Ctrl-C.

Long work runs in a thread of its own, so that Ctrl-C takes effect at once: the solver's native code would delay it until
the code returns. Native output on stdout, such as the solver's, is dropped; `commands` redirects the user's prints to
stderr.
"""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from autoshard.display import say
from autoshard.user_warning import AutoshardWarning


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """A context in which autoshard's warnings are printed in one line each."""

    def show(message: Warning | str, category: type[Warning], *args: Any, **kwargs: Any) -> None:
        if issubclass(category, AutoshardWarning):
            say(f"warning: {message}")
        else:
            ordinary(message, category, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.simplefilter("always", AutoshardWarning)
        ordinary, warnings.showwarning = warnings.showwarning, show
        yield


@contextlib.contextmanager
def native_stdout_dropped() -> Iterator[None]:
    """A context that drops output to stdout's file descriptor, such as the native solver's, so that it is no part of the
    result."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


COLOURS = MappingProxyType({"~": 33, "+": 32, "-": 31})
"""By the sign of a line, its colour in ANSI's numbers: yellow, green and red."""


def with_signs_coloured(text: str) -> str:
    """Text whose lines with a sign (`~`, `+`, `-`) have its colour, if stdout is a terminal that shows colours and
    `NO_COLOR` is not set (no-color.org). A line goes on over the indented lines below it."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown"):
        return text
    lines, colour = list[str](), None
    for line in text.split("\n"):
        colour = colour if line.startswith("   ") and colour else COLOURS.get(line[:1])
        lines.append(f"\x1b[{colour}m{line}\x1b[0m" if colour else line)
    return "\n".join(lines)


class AbandonedError(KeyboardInterrupt):
    """Ctrl-C while a thread works on: the process must end without a teardown under it."""


def interruptible[T](work: Callable[[], T]) -> T:
    """Does the work in a thread and waits for it; Ctrl-C ends the wait at once.

    Raises:
      AbandonedError: Ctrl-C, and the work goes on, as the solver's native code cannot be stopped.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001  (raised in the thread that waits)
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if future.done():
            raise
        raise AbandonedError from None
