"""The error band of predicted peaks, and the peak that the compiler gave a plan.

A predicted peak is a model's. On models that its rules have never seen it is off by so much that a plan may not fit although
its predicted peak does. The compiler's own peak has no such error. A plan holds it if the compiler was asked, and a file
keeps it as long as nothing in the file is edited. Without a compiled peak, the summary says the error band.
"""

from dataclasses import dataclass, replace
from typing import Any

PEAK_BAND = (0.79, 1.36)
"""The least and the largest compiled peak of a plan for a model that no rule was made for, as shares of its predicted peak.
A plan far below its cap may be compiled to more than that, up to the cap: XLA's scheduler spends the room that is left.
Source: docs/benchmarks.md, "Models measured once" (predictions up to 26% too high), "Plans under a cap" (31 plans, up to 36%
more than their cap) and "Plans under a cap, with the compiler as judge"."""


@dataclass(frozen=True, slots=True)
class Range:
    """The peaks that a plan's program may turn out to have."""

    least_bytes: int
    most_bytes: int


def band(peak_bytes: float) -> Range:
    """The compiled peaks that a predicted peak may stand for.

    Example:
      >>> band(1000)
      Range(least_bytes=790, most_bytes=1360)
    """
    least, most = PEAK_BAND
    return Range(round(least * peak_bytes), round(most * peak_bytes))


def is_known(platform: str) -> bool:
    """True if the band is that of programs for this platform: of GPUs, and not of simulated devices."""
    return platform != "cpu"


def may_exceed(peak_bytes: float, cap_bytes: float) -> bool:
    """True if a plan with this predicted peak may be compiled to more than its cap.

    Example:
      >>> may_exceed(700, 1000), may_exceed(990, 1000)
      (False, True)
    """
    return PEAK_BAND[1] * peak_bytes > cap_bytes


def doubt(peak_bytes: float, cap_bytes: float) -> str:
    """The end of a line with a predicted peak: a word of doubt, if the plan may exceed its cap.

    Example:
      >>> doubt(700, 1000), doubt(990, 1000), doubt(1010, 1000)
      ('', '; it may not fit', '; by prediction it does not fit')
    """
    if peak_bytes > cap_bytes:
        return "; by prediction it does not fit"
    return "; it may not fit" if may_exceed(peak_bytes, cap_bytes) else ""


def compiled[Planned: Any](plan: Planned, peak_bytes: int | None) -> Planned:
    """A plan of any kind with the peak of its compiled program."""
    return replace(plan, estimates=replace(plan.estimates, compiled_peak_bytes=peak_bytes))


def compiled_as[Planned: Any](plan: Planned, file: Any) -> Planned:
    """A plan whose estimates were made anew, with the compiled peak in its file. The peak is dropped if the file was edited,
    or if another version of JAX compiled it.

    Args:
      plan: the plan with new estimates.
      file: the plan as it was read.
    """
    is_of_it = not file.is_edited and file.jax == plan.jax
    return compiled(plan, file.estimates.compiled_peak_bytes if is_of_it else None)
