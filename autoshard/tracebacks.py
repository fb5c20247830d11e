"""Tracebacks that end where the user's code does.

A mistake in a step surfaces below some thirty frames of ours and of JAX's, and the sentence that explains it behind all of
them. As JAX does for its own frames, so do we for both: an error that leaves the face (`boundary`) shows the user's frames
alone. JAX's switch is ours, too: with `jax.config.update("jax_traceback_filtering", "off")`, or that in the environment
(`JAX_TRACEBACK_FILTERING=off`), the whole trace is shown; with "tracebackhide", frames are marked for IPython.

An error of ours is often raised from another one, that of the user's function under `jax.jit`. It has that one's frames
behind its own, so that the line at fault is the last one, and Python need not print both. A fault of ours, raised by our
code and by nobody's request, keeps its trace.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from types import FrameType, TracebackType

import jax

from autoshard.cost_model.errors import AutoshardError

OURS = frozenset({"autoshard"})

INTERNAL = frozenset({*OURS, "jax", "jaxlib"}) | sys.stdlib_module_names
"""Packages whose frames are left out. Ours go through the standard library's (`contextlib`, `functools`, `pathlib`)."""


def boundary[**P, Result](function: Callable[P, Result]) -> Callable[P, Result]:
    """A function of the face: errors that leave it show the user's frames."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            _shorten(e)
            raise

    return called


def _shorten(error: Exception) -> None:
    """Leaves internal frames out of an error's traceback, as the switch says."""
    mode = jax.config.jax_traceback_filtering  # type: ignore[attr-defined]
    steps = list(_steps(error))
    if mode == "off" or _is_fault_of_ours(error, steps):
        return
    if mode == "tracebackhide":
        for step in steps:
            if _is_in(step.tb_frame, INTERNAL):
                step.tb_frame.f_locals["__tracebackhide__"] = True
        return
    kept, shown = [step for step in steps if not _is_in(step.tb_frame, INTERNAL)], None
    for step in reversed(kept):
        shown = TracebackType(shown, step.tb_frame, step.tb_lasti, step.tb_lineno)
    error.__traceback__ = shown
    if isinstance(error, AutoshardError):
        error.__cause__, error.__suppress_context__ = None, True


def _steps(error: BaseException | None) -> Iterator[TracebackType]:
    """The steps of an error's traceback; of one of ours, those of what it was raised from, too."""
    while error is not None:
        step = error.__traceback__
        while step is not None:
            yield step
            step = step.tb_next
        error = error.__cause__ if isinstance(error, AutoshardError) else None


def _is_fault_of_ours(error: Exception, steps: list[TracebackType]) -> bool:
    """Whether our own code, beneath the boundary, has raised what is none of our errors. JAX leaves a note where it has cut
    off its frames."""
    is_foreign = isinstance(error, AutoshardError | jax.errors.JaxRuntimeError) or hasattr(error, "__notes__")
    return not is_foreign and len(steps) > 1 and _is_in(steps[-1].tb_frame, OURS)


def _is_in(frame: FrameType, packages: AbstractSet[str]) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in packages
