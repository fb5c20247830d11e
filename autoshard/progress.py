"""What a long call is doing, in one line a stage.

The program that calls us decides what is shown. So lines go to whoever passes `progress=`, and otherwise to the standard
logger `autoshard`, at level INFO; we add no handler to it and set no level. Python shows INFO where a program asks for it
(`logging.basicConfig(level=logging.INFO)`), and warnings in any case. A call that takes long and whose lines nobody sees
therefore says once, as a warning of that logger, what it is doing and how to see more.
"""

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Generator

Progress = Callable[[str], None]

LOGGER = logging.getLogger("autoshard")

PATIENCE_S = 5.0
"""How long a call may take before it says what it does. Source: a choice of ours."""


@contextlib.contextmanager
def narrated(step: str, first: str, progress: Progress | None) -> Generator[Progress]:
    """Tells of a long call.

    Args:
      step: whose.
      first: its first stage.
      progress: who wants to know; by default the logger does.

    Yields:
      What is called with each further stage.
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
    """Writes a line for each stage: one that only counts on is left out."""
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
