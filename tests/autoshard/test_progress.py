"""What is said of a long call: to who asks, to the logger, on the screen, and in a hint where nobody would see it."""

import contextlib
import io
import logging
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard import AutoshardWarning, progress

pytestmark = pytest.mark.devices

W, X = jnp.linspace(-1, 1, 256).reshape(16, 16), jnp.linspace(0, 1, 384).reshape(24, 16)


def step(w, x):
    return w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)


def slow(w, x):
    time.sleep(0.3)
    return step(w, x)


def test_each_stage_of_a_first_call_is_told():
    lines = []
    parallel = autoshard.parallelize(step, mesh=(2, 4), progress=lines.append)
    for _ in range(2):
        parallel(W, X)
    assert lines == ["tracing", "mesh 2x4 (1 of 1)", "compiling"]


def test_what_is_planned_by_init_is_compiled_at_the_first_call():
    lines = []
    parallel = autoshard.parallelize(step, mesh=(8,), progress=lines.append)
    w = parallel.init(lambda: W, args=(X,))
    assert lines == ["tracing", "mesh 8 (1 of 1)"]
    parallel(parallel(w, X), X)
    assert lines[2:] == ["compiling"]


def test_by_default_the_logger_is_told(caplog):
    caplog.set_level(logging.INFO, "autoshard")
    autoshard.parallelize(step, mesh=(8,))(W, X)
    autoshard.search(step, W, X, cluster="8xCPU", mesh=(8,))
    said = [(r.name, r.levelno, r.getMessage()) for r in caplog.records]
    lines = ["step: tracing", "step: mesh 8 (1 of 1)"]
    assert said == [("autoshard", logging.INFO, line) for line in (*lines, "step: compiling", *lines)]


def test_a_library_has_no_handlers():
    assert logging.getLogger("autoshard").handlers == []
    assert logging.getLogger("autoshard").level == logging.NOTSET


@pytest.fixture
def impatient(monkeypatch):
    """A process that has given no hint yet, and gives it soon."""
    monkeypatch.setattr(progress, "PATIENCE_S", 0.1)
    monkeypatch.setattr(progress, "UNSAID", threading.Lock())


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_where_nobody_sees_the_stages_a_process_gives_one_hint(caplog, level):
    caplog.set_level(level)
    parallel = autoshard.parallelize(slow, mesh=(8,))
    parallel(parallel.init(lambda: W, args=(X,)), X)
    for _ in range(2):
        narrate(0.3)
    hints = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(hints) == (level == logging.WARNING)
    assert all("slow has been planned or compiled for" in hint and "now: tracing" in hint for hint in hints)


@pytest.mark.usefixtures("impatient")
def test_a_level_of_the_logger_s_own_turns_the_hint_off(caplog):
    caplog.set_level(logging.WARNING, "autoshard")
    narrate(0.3)
    assert caplog.records == []


def test_who_asks_gets_no_hint(caplog, monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_S", 0.05)
    autoshard.parallelize(slow, mesh=(8,), progress=lambda line: None).lower(W, X)
    assert caplog.records == []


TICKS = ("compiling (0 s), trace 1 s", "compiling (1 s), trace 1 s", "mesh 8 (1 of 1)")


def test_a_logger_is_told_each_stage_once_however_long_it_takes(caplog):
    caplog.set_level(logging.INFO, "autoshard")
    with progress.narrated("step", "tracing", None) as tell:
        for line in TICKS:
            tell(line)
    assert [r.getMessage() for r in caplog.records] == [
        "step: tracing",
        "step: compiling, trace 1 s",
        "step: mesh 8 (1 of 1)",
    ]


def narrate(seconds):
    """A call of one stage, as a step's first call narrates it."""
    with progress.narrated("step", "tracing", None):
        time.sleep(seconds)


@pytest.fixture
def plain_python(monkeypatch):
    """To be called by a test: logging as Python starts with it, without pytest's handlers; and calls are soon long."""

    def start():
        monkeypatch.setattr(logging.root, "handlers", [])
        monkeypatch.setattr(progress, "NOTICED_S", 0.05)

    return start


def test_without_logging_a_long_call_writes_plain_lines_and_a_short_one_none(
    plain_python, capsys, monkeypatch
):
    plain_python()
    narrate(0.3)
    assert capsys.readouterr() == ("", "autoshard: step: tracing\n")
    monkeypatch.setattr(progress, "NOTICED_S", 60.0)
    narrate(0.0)
    assert capsys.readouterr() == ("", "")
    assert logging.getLogger("autoshard").handlers == []
    assert logging.getLogger("autoshard").level == logging.NOTSET


@contextlib.contextmanager
def handling(name, level):
    """Logging as a program configures it; gives what its handler writes."""
    logger, written = logging.getLogger(name), io.StringIO()
    handler, before = logging.StreamHandler(written), logger.level
    logger.addHandler(handler)
    logger.setLevel(level)
    try:
        yield written
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.parametrize("name", ["", "autoshard"])
@pytest.mark.parametrize(("level", "shown"), [(logging.INFO, "step: tracing\n"), (logging.WARNING, "")])
def test_a_program_that_configures_logging_gets_each_stage_once_at_most(
    plain_python, capsys, name, level, shown
):
    plain_python()
    with handling(name, level=level) as written:
        narrate(0.2)
    assert written.getvalue() == shown
    assert capsys.readouterr() == ("", "")


def test_handlers_that_hide_the_stages_leave_the_live_line(plain_python, capsys, monkeypatch):
    """Orbax adds a handler to the root logger when it is imported."""
    plain_python()
    monkeypatch.setattr(progress.display, "is_live", lambda: True)
    with handling("", logging.WARNING) as written:
        narrate(0.2)
    assert (written.getvalue(), capsys.readouterr().err) == ("", "autoshard: step: tracing\n")


@pytest.mark.parametrize(
    ("attribute", "value"), [("level", logging.ERROR), ("propagate", False), ("disabled", True)]
)
def test_a_logger_that_is_turned_off_shows_nothing(plain_python, capsys, monkeypatch, attribute, value):
    plain_python()
    monkeypatch.setattr(logging.getLogger("autoshard"), attribute, value)
    narrate(0.2)
    assert capsys.readouterr() == ("", "")


def unknown(w, x):
    return w + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x).sum()


@pytest.mark.parametrize(
    "call",
    [
        lambda: autoshard.search(unknown, W, X, cluster="8xCPU", mesh=(8,)),
        lambda: autoshard.parallelize(unknown, mesh=(8,))(W, X),
        lambda: autoshard.parallelize(unknown, mesh=(8,)).init(lambda: W, args=(X,)),
    ],
)
def test_a_warning_points_at_the_users_line(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    assert [w.filename for w in said if w.category is AutoshardWarning] == [__file__]
