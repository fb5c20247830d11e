"""Searches of a sweep at once, in several processes.

A search is sequential and deterministic, so a sweep uses several cores by several searches at once, and finds the same
rows with any number of processes. Each process traces the step itself, as a traced step cannot be sent. Processes are
spawned, because JAX's threads do not survive a fork.
"""

import functools
import multiprocessing
import os
import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace

from autoshard.cost_model.errors import InputError, first_line
from autoshard.no_device import use_no_device
from autoshard.sweep.cases import Case
from autoshard.sweep.searches import Answer, Searches, Source
from autoshard.user_warning import AutoshardWarning

KILLED = "its process was killed, as happens when the host's memory runs out"


def at_once(
    source: Source, cases: Sequence[Case], time_limit_s: float | None, processes: int
) -> Iterator[tuple[int, Answer]]:
    """The answers as they come, from several processes. If the iteration is left, the processes end.

    Raises:
      InputError: the step cannot be sent to a process, or cannot be traced.
    """
    try:
        sent = pickle.dumps(source)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise InputError(
            f"processes= wants a step of a module, with arguments that can be pickled: {first_line(e)}. Leave it out to "
            "search in this process"
        ) from None
    with _pool(min(processes, len(cases))) as pool:
        numbers = {pool.submit(_answered, sent, case, time_limit_s): n for n, case in enumerate(cases)}
        for future in as_completed(numbers):
            yield numbers[future], _result(future)


def _result(future: "Future[Answer]") -> Answer:
    try:
        return future.result()
    except BrokenProcessPool:
        return Answer(reason=KILLED)


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes end with the context, whatever they do."""
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _begin)
    try:
        yield pool
        pool.shutdown()
    finally:
        for child in set(multiprocessing.active_children()) - others:
            child.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _begin() -> None:
    """Prepares a process: Ctrl-C is for the one that waits, nothing is written to stdout, and devices are left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    use_no_device()


@functools.cache
def _searches(sent: bytes, time_limit_s: float | None) -> Searches:
    """The searches of a process, with the steps that it has traced."""
    return Searches(pickle.loads(sent), time_limit_s)


def _answered(sent: bytes, case: Case, time_limit_s: float | None) -> Answer:
    """An answer, in its process."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AutoshardWarning)
        answer = _searches(sent, time_limit_s).answer(case)
    ours = (str(one.message) for one in caught if issubclass(one.category, AutoshardWarning))
    return replace(answer, warned=tuple(dict.fromkeys(ours)))
