"""The limits under which a search is repeated, until a compiled plan keeps to its memory cap.

A search predicts the peak of a plan, and the compiler measures it. Errors of predictions are ratios: a plan that is
predicted to hold p bytes and compiled to c has an error of c / p. If c exceeds the cap, the next limit is therefore
p * cap / c. A plan there compiles to the cap if its error is equal, and to less if its error is smaller. If nothing fits a
limit, the next one lies half way between it and the last plan that was too large.

Errors may also fall with the limit, and the compiler's scheduler spends the room that a plan leaves. A faster plan may
therefore exist between the first plan that fits and the last one that was too large. If the plan that fits is slower by more
than the search's gap, one limit half way between them is tried, and the faster plan counts. A smaller difference is within
what the search leaves unproven anyway.

`next_limit` is a pure function of the trials so far; who searches and compiles bounds their number and their time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

MARGIN = 5e-3
"""Share of the cap by which a limit is lowered beyond the error of the last one. Source: a choice of ours; peaks come in
steps."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A limit, and the plan that was found under it; without a plan if nothing fits the limit.

    Attributes:
      limit_bytes: the limit.
      fits: whether the plan keeps to the cap as compiled.
      predicted_bytes: the predicted peak of the plan.
      compiled_bytes: its compiled peak.
      step_s: its predicted step time; infinite without a plan.
      gap: the largest share of the step time by which a faster plan may exist under the limit, as proven by the search.
    """

    limit_bytes: float
    fits: bool = False
    predicted_bytes: float = 0.0
    compiled_bytes: float = 0.0
    step_s: float = inf
    gap: float = 0.0

    @property
    def kept_bytes(self) -> float:
        """The smallest limit that is known to allow the plan."""
        return min(self.limit_bytes, self.predicted_bytes)


def next_limit(trials: Sequence[Trial], cap_bytes: float) -> float | None:
    """The limit of the next search; None if the faster of the plans that fit is good enough, or nothing more can fit.

    Args:
      trials: all searches so far, in their order.
      cap_bytes: the cap that compiled plans must keep to.

    Example:
      >>> next_limit([Trial(1000, predicted_bytes=900, compiled_bytes=1125, step_s=1.0)], cap_bytes=1000)
      796.0
    """
    too_large = [one for one in trials if not one.fits and one.step_s < inf]
    fitting = [one for one in trials if one.fits]
    if not trials:
        return cap_bytes
    if not too_large:
        return None
    if fitting:
        return _between(trials[-1], fitting, too_large[-1])
    return _lower(trials, too_large[-1], cap_bytes)


def _lower(trials: Sequence[Trial], last: Trial, cap_bytes: float) -> float | None:
    """A limit below the last plan that was too large; half way to the highest limit that nothing fits, if it is above."""
    empty_bytes = max((one.limit_bytes for one in trials if one.step_s == inf), default=0.0)
    lower_bytes = (1 - MARGIN) * last.kept_bytes * min(1.0, cap_bytes / last.compiled_bytes)
    if lower_bytes > empty_bytes:
        return lower_bytes
    middle_bytes = (empty_bytes + last.kept_bytes) / 2
    return middle_bytes if last.kept_bytes - middle_bytes >= MARGIN * cap_bytes else None


def _between(latest: Trial, fitting: Sequence[Trial], last: Trial) -> float | None:
    """A limit between the first plan that fits and the last one that was too large; asked for once."""
    if [latest] != list(fitting):
        return None
    is_slower = (1 - last.gap) * latest.step_s > last.step_s
    return (latest.limit_bytes + last.kept_bytes) / 2 if is_slower else None
