"""Progress of a long call, one line per stage.

The calling program decides which lines are shown. Lines go to `progress=`, and otherwise to the standard logger `autoshard`
at level INFO; the library adds no handler and sets no level. Python shows INFO only on request
(`logging.basicConfig(level=logging.INFO)`), but shows warnings always. So a long call whose lines nobody sees logs one
warning, with its current stage and the way to see more.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Generator

Progress = Callable[[str], None]

LOGGER = logging.getLogger("autoshard")

PATIENCE_S = 5.0
"""Seconds after which a silent call logs its stage. Source: a choice of ours."""


@contextlib.contextmanager
def narrated(step: str, first: str, progress: Progress | None) -> Generator[Progress]:
    """Reports the stages of a long call.

    Args:
      step: the step's name.
      first: the call's first stage.
      progress: receives the stages; by default the logger does.

    Yields:
      A function to call with each further stage.
    """
    stages: list[str] = []
    timer = threading.Timer(PATIENCE_S, lambda: _hint(step, stages[-1]))
    timer.daemon = True

    def tell(line: str) -> None:
        stages.append(line)
        (progress or _log(step))(line)

    tell(first)
    if progress is None and not LOGGER.isEnabledFor(logging.INFO):
        timer.start()
    try:
        yield tell
    finally:
        timer.cancel()


def each_stage(write: Progress) -> Progress:
    """A `Progress` that writes each stage once: lines that differ only in their count of seconds are left out."""
    written: list[str] = []

    def tell(line: str) -> None:
        stage = re.sub(r" \(\d+ s\)", "", line)
        if stage not in written[-1:]:
            written.append(stage)
            write(stage)

    return tell


def _log(step: str) -> Progress:
    return lambda line: LOGGER.info("%s: %s", step, line)


def _hint(step: str, stage: str) -> None:
    LOGGER.warning(
        "%s has been planned or compiled for %.0f s; now: %s. This is said once. The logger 'autoshard' says all stages at "
        "level INFO (logging.basicConfig(level=logging.INFO))",
        step,
        PATIENCE_S,
        stage,
    )
