"""Each test's marker says what it needs; each test sees the simulated devices and a wide terminal; none has a time limit.

A `pure` test compiles no program and starts no process, so that `pytest -m pure` is quick. A `devices` test does, on
simulated devices; a `compiler` test asks XLA for programs of GPUs. A test needs what it or its file is marked with, or
else its room, or else nothing. One that takes long and whose law a cheaper test shows in small is `slow` besides: it runs
where `-m` says `slow`. A long one that is not slow begins `first`: if it began last, one worker would wait for it. Laws are
tried on a few drawn examples, the same in each run; `--hypothesis-profile thorough` draws many.
"""

import gc
import os
import sys
from functools import cache
from pathlib import Path

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.simulated import keep_programs, simulate_devices

simulate_devices()
UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("quick", UNTIMED, max_examples=10, derandomize=True)
settings.register_profile("thorough", UNTIMED, max_examples=200)
settings.load_profile("quick")

NEEDS = ("pure", "devices", "compiler")

OF_ROOM = {"executors": "devices", "gpu": "compiler"}
"""By folder, where it is not `pure`."""

YOUNG_VALUES = 500_000
"""So many that were made since the last collection may be garbage: some 100 MB. Source: a choice of ours."""


class Purity:
    """Fails pure tests that compile a program or start a process, at the line that does."""

    def __init__(self) -> None:
        self.is_wanted = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.is_wanted = item.get_closest_marker("pure") is not None
        try:
            return (yield)
        finally:
            self.is_wanted = False

    def hear(self, event: str, *_, **__) -> None:
        """Listens to JAX's events and to Python's."""
        if self.is_wanted and event in ("/jax/core/compile/backend_compile_duration", "subprocess.Popen"):
            pytest.fail(f"a pure test wanted {event}: give it shapes or NumPy arrays, or mark it `devices`")


def keep_bytecode() -> None:
    """Has Python keep what it compiles, also where the environment says otherwise: each worker, each process that a test
    starts and each later run would compile all sources again."""
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def pytest_configure(config):
    gc.disable()
    keep_bytecode()
    if hasattr(config, "cache"):
        keep_programs(config.cache.mkdir("programs"))
    purity = Purity()
    config.pluginmanager.register(purity)
    jax.monitoring.register_event_duration_secs_listener(purity.hear)
    sys.addaudithook(purity.hear)


@cache
def need_of_room(file: Path) -> str:
    room, *_ = file.relative_to(Path(__file__).parent).parts
    return OF_ROOM.get(room, "pure")


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(config, items):
    for item in items:
        if not any(map(item.get_closest_marker, NEEDS)):
            item.add_marker(need_of_room(item.path))
    if "slow" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: item.get_closest_marker("first") is None)


def pytest_collection_finish():
    """Modules and tests stay: the garbage collector need not look at them."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Collects cycles where many values may be in some, and never within a test, when most values are alive."""
    if gc.get_count()[0] > YOUNG_VALUES:
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def _kept_from_the_collector():
    """A full collection would look at the caches that a module's tests fill, and take longer with each module."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    """One in which no line of what is printed is broken; tests of that say otherwise."""
    monkeypatch.setenv("COLUMNS", "1000")
