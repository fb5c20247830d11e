"""A loop in which a strict memory model corrects a fast one.

The solver's memory rows are linear in the strategies; the memory of a device's kernels is not. The order of kernels is
our own, and the compiler's order differs again. In both cases the faster model proposes the best plan under a limit, at
first the cap, and the stricter model says how much the proposal needs. If it needs more than the cap, the next proposal
must keep

* to a limit that is lower by the excess, if both models nearly agree;
* to one more row, which sees the arrays that the faster model missed, if they disagree by much and there is such a row.

If nothing keeps to a lower limit, the next limit lies halfway back, and no limit below the failed one is tried again.

Lower limits and additional rows are not part of the original problem. A bound that is proven under them holds for fewer
plans. So only the first round's lower bound on the step time holds for all plans that fit the cap.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.search.solver.pbqp import MemoryConstraint

MAX_ROWS = 5
"""Largest number of additional rows; after that, only limits are lowered. Source: a choice of ours."""

BLIND = 1.1
"""If a proposal needs more than this multiple of the cap, the faster model misses an array. Source: a choice of ours."""

MARGIN = 5e-3
"""Share of the cap by which a limit is lowered beyond the excess. Source: a choice of ours; peaks come in steps."""


@dataclass(frozen=True, slots=True)
class Round[Proposal]:
    """A proposal and its memory in both models.

    Attributes:
      proposal: a plan, of any type.
      expected_bytes: its peak in the faster model.
      needed_bytes: its peak in the stricter model.
      blind_row: makes a row that the proposal overflows; None if there is no solver for it.
    """

    proposal: Proposal
    expected_bytes: float
    needed_bytes: float
    blind_row: Callable[[], MemoryConstraint] | None = None


def tightened[Proposal](
    propose: Callable[[float, tuple[MemoryConstraint, ...]], Round[Proposal] | None],
    cap_bytes: float,
    max_rounds: int,
) -> Iterator[Round[Proposal]]:
    """Proposals, each under the limits and rows that the earlier ones led to. The caller takes the first one that it
    accepts.

    Args:
      propose: the best plan that keeps to a limit and to some rows; None if there is none.
      cap_bytes: the cap of the stricter model.
      max_rounds: largest number of rounds. The loop also ends if no limit is left.
    """
    limit_bytes, kept_bytes, barren_bytes, rows = cap_bytes, cap_bytes, 0.0, ()
    for _ in range(max_rounds):
        latest = propose(limit_bytes, rows)
        if latest is None:
            barren_bytes = limit_bytes
        else:
            yield latest
            kept_bytes = min(limit_bytes, latest.expected_bytes)
            if latest.blind_row and latest.needed_bytes > BLIND * cap_bytes and len(rows) < MAX_ROWS:
                rows = (*rows, latest.blind_row())
                continue
            overshoot_bytes = max(latest.needed_bytes - cap_bytes, 0.0)
            limit_bytes = kept_bytes - overshoot_bytes - MARGIN * cap_bytes
        if limit_bytes <= 0:
            return
        if limit_bytes <= barren_bytes:
            limit_bytes = (barren_bytes + kept_bytes) / 2
            if kept_bytes - limit_bytes < MARGIN * cap_bytes:
                return
