"""Steps drawn at random, on meshes and along plans drawn at random: do many devices come to one device's numbers?

    python -m benchmarks.random_steps [--count 200] [--seed 0] [--jobs 2]

A seed stands for a training step (`tests.zoo.drawn`), a mesh of 8 or 6 simulated devices and a plan: the fastest, the one
of the smallest peak, or one drawn among all that are possible. Three questions are asked of it:

* numbers: three steps in float64 on one device and on many agree to a relative 1e-9, states and metrics;
* file: the plan, saved and loaded, is accepted for its step and decides the same;
* calls: another step of that seed, with manners of users' steps (`tests.zoo.drawn.manners`), is decorated and called
  (`tests.executors.called`): one device's numbers, no array deleted that is still held, one search.

Each line is a seed of which one does not hold: its mesh, its plan, and what was said first. A seed is tried again by
`--seed SEED --count 1`, which shows the step as well. Every process does one seed at a time, and one that dies or is not
done in time takes only this one along.
"""

import argparse
import faulthandler
import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from tests.executors.called import Called
from tests.executors.trial import Planned, Trial
from tests.simulated import simulate_devices

LIMIT_S = 240
"""After which a process is taken to hang. A seed takes some 10 s."""

FATAL = re.compile(r"^F\d{4} .*?\] (.*)|^(Fatal Python error: .*|Timeout .*)", re.MULTILINE)
"""What a process that dies of C++ says, and one that Python ends."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a seed; empty where it holds."""

    numbers: str
    file: str
    calls: str


def main() -> None:
    options = _options()
    simulate_devices()
    seeds = range(options.seed, options.seed + options.count)
    print("seed | mesh | plan | what does not hold", flush=True)
    with ThreadPoolExecutor(options.jobs) as threads:
        shares = [seeds[n :: options.jobs] for n in range(options.jobs)]
        outcomes = [*chain(*threads.map(_outcomes, shares))]
    print(f"{len(outcomes)} seeds")
    for field in fields(Outcome):
        failures = [getattr(o, field.name) for o in outcomes if getattr(o, field.name)]
        print(f"{field.name}: {len(outcomes) - len(failures)} hold, {len(failures)} do not")
    if options.count == 1:
        print(Trial.of(options.seed).drawn, Called.of(options.seed), sep="\n\n")
    sys.exit(any(getattr(o, field.name) for o in outcomes for field in fields(Outcome)))


def _outcomes(seeds: Sequence[int]) -> list[Outcome]:
    """One after the other, in a process of its own."""
    with TemporaryDirectory() as folder:
        worker = Worker(Path(folder) / "said")
        return [_outcome(seed, worker) for seed in seeds]


def _outcome(seed: int, worker: "Worker") -> Outcome:
    outcome = Outcome(*(worker.failure(question, seed) for question in QUESTIONS))
    trial = Trial.of(seed)
    mesh = "x".join(map(str, trial.mesh))
    drawn = {"calls": ("", Called.of(seed).mode)}
    for field in fields(Outcome):
        if said := getattr(outcome, field.name):
            where = " | ".join(drawn.get(field.name, (mesh, trial.plan)))
            print(f"{seed} | {where} | {field.name}: {said}", flush=True)
    return outcome


class Worker:
    """A process that is asked about seeds, and is started again where it dies."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._pool = self._started()

    def _started(self) -> ProcessPoolExecutor:
        self._log.write_text("")
        return ProcessPoolExecutor(1, get_context("spawn"), _prepare, (self._log,))

    def failure(self, question: Callable[[int], None], seed: int) -> str:
        """What is said against it; empty where nothing is."""
        error = self._pool.submit(question, seed).exception()
        if not isinstance(error, BrokenProcessPool):
            return _first_lines(error) if error else ""
        said = FATAL.search(self._log.read_text())
        self._pool = self._started()
        return f"the process died: {said[0] if said else 'it said nothing'}"


def _prepare(log: Path) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    simulate_devices()
    jax.config.update("jax_enable_x64", True)


def numbers_equal(seed: int) -> None:
    """Asserts the first."""
    jax.clear_caches()
    with _limited():
        _planned(seed).assert_numbers_equal()


def plan_survives(seed: int) -> None:
    """Asserts the second."""
    with _limited():
        _planned(seed).assert_plan_survives_its_file()


def calls_hold(seed: int) -> None:
    """Asserts the third."""
    jax.clear_caches()
    with _limited():
        Called.of(seed).hold()


QUESTIONS = (numbers_equal, plan_survives, calls_hold)


@functools.lru_cache(maxsize=1)
def _planned(seed: int) -> Planned:
    return Trial.of(seed).planned()


@contextmanager
def _limited() -> Iterator[None]:
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _first_lines(error: BaseException) -> str:
    said = " ".join(str(error).split()).replace("|", "\\|")
    return f"{type(error).__name__}: {said:.300}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200, metavar="N", help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the first of them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="how many at a time")
    return parser.parse_args()


if __name__ == "__main__":
    main()
