"""Tracebacks that end in the user's code.

A mistake in a step is raised below some thirty frames of autoshard and JAX, and its message follows them all. JAX removes
its own frames; this module removes those of both. An error that leaves a public function (`boundary`) shows the user's
frames only. JAX's switch applies: `jax.config.update("jax_traceback_filtering", "off")`, or `JAX_TRACEBACK_FILTERING=off` in
the environment, shows the whole trace; "tracebackhide" marks the frames for IPython.

An error of autoshard is often raised from another one, that of the user's function under `jax.jit`. The frames of this cause
are appended to its own, so that the faulty line is last and Python prints one traceback. An unexpected error in autoshard's
code keeps its whole trace.
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
"""Packages whose frames are removed. Calls in autoshard pass through the standard library (`contextlib`, `functools`)."""


def boundary[**P, Result](function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorates a public function: errors that leave it show the user's frames only."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return function(*args, **kwargs)
        except Exception as e:
            _shorten(e)
            raise

    return called


def _shorten(error: Exception) -> None:
    """Removes internal frames from an error's traceback, as JAX's switch says."""
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
    """The entries of an error's traceback; for an `AutoshardError`, followed by those of its cause."""
    while error is not None:
        step = error.__traceback__
        while step is not None:
            yield step
            step = step.tb_next
        error = error.__cause__ if isinstance(error, AutoshardError) else None


def _is_fault_of_ours(error: Exception, steps: list[TracebackType]) -> bool:
    """True if autoshard's own code, below the boundary, raised another error than an `AutoshardError`. JAX adds a note to an
    error whose frames it has removed."""
    is_foreign = isinstance(error, AutoshardError | jax.errors.JaxRuntimeError) or hasattr(error, "__notes__")
    return not is_foreign and len(steps) > 1 and _is_in(steps[-1].tb_frame, OURS)


def _is_in(frame: FrameType, packages: AbstractSet[str]) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in packages
