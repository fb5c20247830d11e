"""A long call on the screen: a live line on a terminal and in a notebook, and plain lines in a log.

A live line shows the current stage, and a bar if the stage says its number among all ("mesh 2x4 (2 of 6)"). It disappears
with the call's end. A log gets each stage as a line. If the program already draws on the terminal with rich, it gets lines
too, above its own display.

While a live line is on a terminal, `sys.stdout` and `sys.stderr` print above it. Each is put back at the end, unless the
program has replaced it in the meantime.
"""

import contextlib
import contextvars
import html
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol, TextIO

Progress = Callable[[str], None]

BAR_WIDTH = 24
"""Characters of a bar. Source: a choice of ours."""

FRAMES_PER_S = 10
"""Updates of a live line on a terminal. Derived: one in 0.1 s, the longest delay that seems none (J. Nielsen,
"Usability Engineering", 1993, section 5.5)."""


def say(line: str) -> None:
    """Writes a line to stderr."""
    print(f"autoshard: {line}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def shown(prefix: str = "", after_s: float = 0.0) -> Generator[Progress]:
    """Shows the stages of a call.

    Args:
      prefix: stands before each stage, such as the step's name.
      after_s: seconds after which the call is long; a shorter one shows nothing.

    Yields:
      A function to call with each stage.
    """
    call = _Call(prefix)
    timer = threading.Timer(after_s, contextvars.copy_context().run, (call.open,))
    timer.daemon = True
    if after_s > 0:
        timer.start()
    else:
        call.open()
    try:
        yield call.tell
    finally:
        timer.cancel()
        call.close()


def each_stage(write: Progress) -> Progress:
    """A `Progress` that writes each stage once: lines that differ only in their count of seconds are left out."""
    written: list[str] = []

    def tell(line: str) -> None:
        stage = re.sub(r" \(\d+ s\)", "", line)
        if stage not in written[-1:]:
            written.append(stage)
            write(stage)

    return tell


def num_done(line: str) -> tuple[int, int] | None:
    """How many of how many are done while a stage such as "mesh 2x4 (2 of 6)" runs; None if the stage says no number."""
    found = re.search(r"\b(\d+) of (\d+)\b", line)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return None
    return int(found[1]) - 1, int(found[2])


class Display(Protocol):
    """A place where the stages of one call are shown."""

    def show(self, line: str) -> None:
        """Shows the current stage."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


class _Call:
    """The stages of a call, and its display as soon as it is open. A timer's thread may open it."""

    def __init__(self, prefix: str) -> None:
        self._prefix, self._line = prefix, ""
        self._lock = threading.Lock()
        self._display: Display | None = None
        self._is_over = False

    def tell(self, line: str) -> None:
        with self._lock:
            self._line = f"{self._prefix}{line}"
            if self._display is not None:
                self._display.show(self._line)

    def open(self) -> None:
        with self._lock:
            if not self._is_over:
                self._display = _display()
                if self._line:
                    self._display.show(self._line)

    def close(self) -> None:
        with self._lock:
            self._is_over = True
            if self._display is not None:
                self._display.close()


def _display() -> Display:
    """The display that suits stderr. Of several processes that JAX connects, only the first one shows anything."""
    from autoshard.search.ir import _jax  # a call that is long has imported JAX

    if _jax.process_number() > 0:
        return Silence()
    if _is_notebook():
        return Cell()
    return Line() if _is_drawable(sys.stderr) else Lines()


def is_live() -> bool:
    """True if a call is shown as a live line, rather than as lines of a log."""
    return _is_notebook() or _is_drawable(sys.stderr)


def _is_notebook() -> bool:
    from rich.console import Console  # it takes a while to import

    return "IPython" in sys.modules and Console().is_jupyter


def _is_drawable(stream: TextIO) -> bool:
    """True for a terminal on which nobody else draws."""
    if not stream.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return False
    from rich.file_proxy import FileProxy

    return not isinstance(stream, FileProxy)


class Silence:
    """No display."""

    def show(self, line: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Ends nothing."""


class Lines:
    """A line in a log for each stage."""

    def __init__(self) -> None:
        self._write = each_stage(say)

    def show(self, line: str) -> None:
        """Writes a new stage."""
        self._write(line)

    def close(self) -> None:
        """Ends nothing: the lines stay."""


class Line:
    """A live line on a terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        self._line, self._start_s, self._spinner = "", time.monotonic(), Spinner("dots")
        console = Console(file=sys.stderr)
        self._live = Live(
            console=console,
            get_renderable=self._row,
            refresh_per_second=FRAMES_PER_S,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        self._streams = [_Redirected(name, console) for name in ("stdout", "stderr")]

    def show(self, line: str) -> None:
        """Shows the current stage."""
        self._line = line
        self._live.refresh()

    def close(self) -> None:
        """Removes the line."""
        for stream in self._streams:
            stream.restore()
        self._live.stop()

    def _row(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        stage = Text(self._line, no_wrap=True, overflow="ellipsis")
        done = num_done(self._line)
        bar = [] if done is None else [ProgressBar(done[1], done[0], BAR_WIDTH)]
        seconds = Text(f"{time.monotonic() - self._start_s:.0f} s", style="dim", no_wrap=True)
        row = Table.grid(padding=(0, 1))
        row.add_row(self._spinner, stage, *bar, seconds)
        return row


class _Redirected:
    """One of Python's standard streams, if it is a terminal: printed above a live line."""

    def __init__(self, name: str, console: Any) -> None:
        from rich.file_proxy import FileProxy

        self._name, self._stream = name, getattr(sys, name)
        self._above = FileProxy(console, self._stream)
        if self._stream.isatty():
            setattr(sys, name, self._above)

    def restore(self) -> None:
        """Puts the stream back, unless someone has replaced it since."""
        self._above.flush()
        if getattr(sys, self._name) is self._above:
            setattr(sys, self._name, self._stream)


class Cell:
    """A live line in the output of a notebook's cell."""

    def __init__(self) -> None:
        from IPython.display import display  # type: ignore[import-not-found]

        self._line = ""
        self._handle: Any = display(self, display_id=True)

    def show(self, line: str) -> None:
        """Shows the current stage."""
        if line != self._line:
            self._line = line
            self._handle.update(self)

    def close(self) -> None:
        """Empties the output."""
        self.show("")

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The line as IPython shows it."""
        if not self._line:
            return {"text/plain": "", "text/html": ""}
        done = num_done(self._line)
        of = "" if done is None else f' value="{done[0]}" max="{done[1]}"'
        return {
            "text/plain": self._line,
            "text/html": f"<progress{of}></progress> <code>{html.escape(self._line)}</code>",
        }
