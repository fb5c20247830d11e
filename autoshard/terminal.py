"""The terminal of the command line: what goes to stderr, what is kept away from stdout, and Ctrl-C.

What takes long runs in a thread of its own, so that Ctrl-C is heard at once: the solver's native code would only
hand it over when it is done. What the solver or the user's module writes to stdout is kept away from the
result.
"""

import contextlib
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from autoshard.progress import each_stage
from autoshard.user_warning import AutoshardWarning

INTERRUPTED = 128 + 2
"""Exit status after Ctrl-C: 128 + SIGINT, as shells have it."""


def say(line: str) -> None:
    """A line to stderr."""
    print(f"autoshard: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A status line on a terminal, and a line for each stage elsewhere."""
    if not sys.stderr.isatty():
        yield each_stage(say)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("") as status:
        yield lambda line: status.update(escape(line))


@contextlib.contextmanager
def one_line_warnings() -> Iterator[None]:
    """Warnings of ours in one line each."""

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
    """What native code writes to stdout (the solver has notes of its own) must not stand in the result."""
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def interruptible[T](work: Callable[[], T]) -> T:
    """Does the work in a thread and waits for it; Ctrl-C ends the wait at once, and the process with it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as e:  # noqa: BLE001  (handed on to the thread that waits)
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    try:
        return future.result()
    except KeyboardInterrupt:
        if (
            not future.done()
        ):  # the solver still runs, and cannot be told: leave without tearing down beneath it
            say("interrupted")
            os._exit(INTERRUPTED)
        raise
