"""A loop in which a strict memory model corrects a fast one.

The solver's memory rows are linear in the strategies; the memory of a device's kernels is not. The order of kernels is
our own, and the compiler's order differs again. In both cases the faster model proposes the best plan under a limit, at
first the cap, and the stricter model says how much the proposal needs. If it needs more than the cap, the faster model is
corrected in two ways:

1. The limit is lowered by the excess. This is correct if the faster model misses the same bytes everywhere. If nothing keeps
   to a limit, the next one lies halfway back, and no limit below the failed one is tried again.
2. If a proposal needs far more than the cap, the faster model misses arrays. Rows are added that see them: the memory of the
   kernels at all moments at which the proposal needs more than the cap.

Both forbid more than they must. A bound that is proven under them holds for fewer plans, so only the first round's lower
bound on the step time holds for all plans that fit the cap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.search.solver.pbqp import MemoryConstraint

MARGIN = 5e-3
"""Share of the cap by which a limit is lowered beyond the excess. Source: a choice of ours; peaks come in steps."""


BLIND = 1.1
"""If a proposal needs more than this multiple of the cap, the faster model misses an array. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class Round[Proposal]:
    """A proposal and its memory in both models.

    Attributes:
      proposal: a plan, of any type.
      expected_bytes: its peak in the faster model.
      needed_bytes: its peak in the stricter model.
      rows: makes rows of the stricter model that the proposal overflows; none if nothing describes its excess.
    """

    proposal: Proposal
    expected_bytes: float
    needed_bytes: float
    rows: Callable[[], tuple[MemoryConstraint, ...]] = tuple


def tightened[Proposal](
    propose: Callable[[float, Sequence[MemoryConstraint]], Round[Proposal] | None],
    cap_bytes: float,
    barren_bytes: float = 0.0,
) -> Iterator[Round[Proposal]]:
    """Proposals under lower and lower limits, until one fits or hardly any limits are left. A proposal far over the cap adds
    its rows to all later rounds.

    Args:
      propose: the best plan that keeps to a limit, and in some rows to the cap; None if there is none.
      cap_bytes: the cap of the stricter model.
      barren_bytes: a limit to which nothing keeps.
    """
    rows: tuple[MemoryConstraint, ...] = ()
    limit_bytes = kept_bytes = cap_bytes
    while True:
        latest = propose(limit_bytes, rows)
        if latest is None:
            barren_bytes = limit_bytes
        else:
            yield latest
            if latest.needed_bytes <= cap_bytes:
                return
            if latest.needed_bytes > BLIND * cap_bytes:
                rows = (*rows, *latest.rows())
            kept_bytes = min(limit_bytes, latest.expected_bytes)
            limit_bytes = kept_bytes - (latest.needed_bytes - cap_bytes) - MARGIN * cap_bytes
        if limit_bytes <= barren_bytes:
            limit_bytes = (barren_bytes + kept_bytes) / 2
        if kept_bytes - limit_bytes < MARGIN * cap_bytes:
            return
