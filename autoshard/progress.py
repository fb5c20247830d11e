"""Progress of a long call, stage by stage.

Stages go to `progress=`, if the user gives it. Otherwise they go to the standard logger `autoshard` at level INFO. Python
shows INFO only on request (`logging.basicConfig(level=logging.INFO)`), and handlers show it in the program's own form.

If the logger shows no stage, the screen does (`autoshard.display`), for a call of more than a second: a live line on a
terminal and in a notebook, plain lines in a log. So each stage is shown once. A program that has configured logging gets no
plain lines, but one warning per process with the current stage and the way to see more. It may still get a live line, as
some libraries configure logging when they are imported (Orbax does). A handler, a level or `propagate = False` on the logger
`autoshard` itself turns the screen off, and a level turns the warning off, too: who sets it knows the way. No handler is
added here, and no level set.
"""

import contextlib
import logging
import threading
from collections.abc import Generator

from autoshard import display
from autoshard.display import Progress, each_stage

LOGGER = logging.getLogger("autoshard")

NOTICED_S = 1.0
"""Seconds after which a call shows its stages: the user notices the delay. Source: J. Nielsen, "Usability Engineering",
1993, section 5.5."""

PATIENCE_S = 5.0
"""Seconds after which a silent call logs its stage. Derived: twice in the 10 s for which a user's attention lasts, by the
same section."""

UNSAID = threading.Lock()
"""Taken by the first hint and never released, so that a process gives one."""


@contextlib.contextmanager
def narrated(step: str, first: str, progress: Progress | None) -> Generator[Progress]:
    """Reports the stages of a long call.

    Args:
      step: the step's name.
      first: the call's first stage.
      progress: receives the stages; by default the logger does, or the screen.

    Yields:
      A function to call with each further stage.
    """
    with _receiver(step, progress) as tell:
        tell(first)
        yield tell


def _receiver(step: str, progress: Progress | None) -> contextlib.AbstractContextManager[Progress]:
    if progress is not None:
        return contextlib.nullcontext(progress)
    return display.shown(f"{step}: ", NOTICED_S) if _is_on_screen() else _logged(step)


def _is_on_screen() -> bool:
    """True if the screen shows the stages, since the logger shows none and the program has not asked for silence."""
    has_own_setup = LOGGER.handlers or LOGGER.level > logging.INFO or not LOGGER.propagate
    if has_own_setup or not LOGGER.isEnabledFor(logging.WARNING):
        return False
    if not LOGGER.hasHandlers():
        return True
    return not LOGGER.isEnabledFor(logging.INFO) and display.is_live()


@contextlib.contextmanager
def _logged(step: str) -> Generator[Progress]:
    """Logs each stage once; or a hint, if the level hides the stages of a long call."""
    stages: list[str] = []
    log = each_stage(lambda line: LOGGER.info("%s: %s", step, line))
    timer = threading.Timer(PATIENCE_S, lambda: _hint(step, stages[-1]))
    timer.daemon = True
    if _hides_unasked():
        timer.start()

    def tell(line: str) -> None:
        stages.append(line)
        log(line)

    try:
        yield tell
    finally:
        timer.cancel()


def _hides_unasked() -> bool:
    """True if the program's logging hides the stages, and nobody asked the logger `autoshard` itself to be silent."""
    is_asked = LOGGER.level != logging.NOTSET or not LOGGER.hasHandlers()
    return not is_asked and not LOGGER.isEnabledFor(logging.INFO)


def _hint(step: str, stage: str) -> None:
    """Logs the stage of a long call and the way to see all stages, once per process."""
    if not UNSAID.acquire(blocking=False):
        return
    LOGGER.warning(
        "%s has been planned or compiled for %.0f s; now: %s. This is said once. The logger 'autoshard' says all stages at "
        "level INFO (logging.basicConfig(level=logging.INFO))",
        step,
        PATIENCE_S,
        stage,
    )
