"""The screen during a long call: a live line on a terminal and in a notebook, lines elsewhere, and nothing left over."""

import contextlib
import io
import os
import pty
import re
import sys
import time
import types

import pytest
from rich.console import Console
from rich.live import Live

from autoshard import display
from autoshard.search.ir import _jax


class Terminal:
    """A terminal: `stream` is the program's side, and `shown` reads the user's."""

    def __init__(self):
        self._users, programs = pty.openpty()
        self.stream = os.fdopen(programs, "w", encoding="utf-8")

    def shown(self):
        self.stream.close()
        chunks = []
        with contextlib.suppress(OSError):  # the other end is closed
            while True:
                chunks.append(os.read(self._users, 4096))
        return b"".join(chunks).decode()

    def close(self):
        self.stream.close()
        os.close(self._users)


@pytest.fixture
def opened(monkeypatch):
    """To be called by a test: makes stderr a terminal. (pytest sets stderr anew between a fixture and its test.)"""
    terminals = []

    def new():
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "100")
        terminals.append(Terminal())
        monkeypatch.setattr(sys, "stderr", terminals[-1].stream)
        return terminals[-1]

    yield new
    monkeypatch.undo()
    for one in terminals:
        one.close()


def rows_left(shown):
    """The rows that a user sees in the end, of text with rich's control codes: erase the row, go up a row."""
    rows, at = [""], 0
    for found in re.finditer(r"\x1b\[(\d*)([A-Za-z])|\x1b\[\?25[lh]|\r|\n|([^\x1b\r\n]+)", shown):
        if found[2] == "K":
            rows[at] = ""
        elif found[2] == "A":
            at -= int(found[1])
        elif found[0] == "\n":
            at += 1
            rows += [""] * (at == len(rows))
        elif found[3]:
            rows[at] += found[3]
    return [row for row in rows if row.strip()]


def test_a_terminal_shows_a_live_line_with_a_bar_and_is_clean_afterwards(opened):
    terminal = opened()
    with display.shown("step: ") as tell:
        tell("tracing")
        tell("mesh 2x4 (2 of 4)")
        print("a warning", file=sys.stderr)
        assert sys.stderr is not terminal.stream
    assert sys.stderr is terminal.stream
    shown = terminal.shown()
    assert "step: tracing" in shown
    (done, left) = re.findall(r"(━+)\x1b", shown.partition("mesh 2x4 (2 of 4)")[2])[:2]
    assert len(done) * 3 == pytest.approx(len(left), abs=3)
    assert rows_left(shown) == ["a warning"]
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_a_stream_that_the_program_replaces_during_a_call_stays_its_own(opened):
    opened()
    own = io.StringIO()
    with display.shown():
        sys.stderr = own
    assert sys.stderr is own


def test_a_pipe_keeps_its_stream_while_stderr_is_a_terminal(opened, capsys):
    terminal = opened()
    with display.shown() as tell:
        tell("tracing")
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in terminal.shown()


def test_a_program_that_draws_on_the_terminal_itself_gets_lines_above_its_display(opened):
    terminal = opened()
    with (
        Live("my epochs", console=Console(file=terminal.stream), redirect_stdout=False),
        display.shown() as tell,
    ):
        tell("tracing")
    assert rows_left(terminal.shown()) == ["autoshard: tracing", "my epochs"]


@pytest.mark.parametrize("dumb", [True, False])
def test_a_log_gets_each_stage_once(capsys, monkeypatch, dumb):
    if dumb:
        monkeypatch.setenv("TERM", "dumb")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with display.shown("step: ") as tell:
        for line in ("tracing", "compiling (0 s)", "compiling (1 s)"):
            tell(line)
    assert capsys.readouterr() == ("", "autoshard: step: tracing\nautoshard: step: compiling\n")


def test_a_call_becomes_long_while_one_stage_runs(capsys):
    with display.shown(after_s=0.1) as tell:
        tell("tracing")
        tell("mesh 8")
        time.sleep(0.4)
        tell("compiling")
    assert capsys.readouterr().err == "autoshard: mesh 8\nautoshard: compiling\n"


def test_of_several_processes_the_first_speaks(capsys, monkeypatch):
    monkeypatch.setattr(_jax, "process_number", lambda: 1)
    with display.shown() as tell:
        tell("tracing")
    assert capsys.readouterr() == ("", "")


class Notebook(types.ModuleType):
    """Stands in for IPython's display: what a cell shows, after each change."""

    def __init__(self):
        super().__init__("IPython.display")
        self.outputs = []

    def display(self, shown, display_id):
        assert display_id is True
        self.update(shown)
        return self

    def update(self, shown):
        self.outputs.append(shown._repr_mimebundle_())


def test_a_notebook_shows_a_live_line_with_a_bar_and_is_clean_afterwards(monkeypatch, capsys):
    notebook = Notebook()
    monkeypatch.setitem(sys.modules, "IPython", types.ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    with display.shown("step: ") as tell:
        tell("tracing <lambda>")
        tell("mesh 2x4 (2 of 4)")
    empty = {"text/plain": "", "text/html": ""}
    assert notebook.outputs == [
        empty,
        {
            "text/plain": "step: tracing <lambda>",
            "text/html": "<progress></progress> <code>step: tracing &lt;lambda&gt;</code>",
        },
        {
            "text/plain": "step: mesh 2x4 (2 of 4)",
            "text/html": '<progress value="1" max="4"></progress> <code>step: mesh 2x4 (2 of 4)</code>',
        },
        empty,
    ]
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("line", "done"),
    [
        ("mesh 2x4 (2 of 6)", (1, 6)),
        ("compiling 3 of 3 (12 s)", (2, 3)),
        ("tracing", None),
        ("2 of its layers", None),
        ("7 of 3", None),
        ("0 of 0", None),
    ],
)
def test_a_stage_tells_how_many_are_done_before_it(line, done):
    assert display.num_done(line) == done
