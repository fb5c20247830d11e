"""A loop in which a strict memory model corrects a fast one.

The solver's memory rows are linear in the strategies; the memory of a device's kernels is not. The order of kernels is
our own, and the compiler's order differs again. In both cases the faster model proposes the best plan under a limit, at
first the cap, and the stricter model says how much the proposal needs. If it needs more than the cap, there are two ways
to correct the faster model:

1. The limit is lowered by the excess. This is correct if the faster model misses the same bytes everywhere. If nothing
   keeps to a limit, the next one lies halfway back, and no limit below the failed one is tried again.
2. Rows are added that see the arrays that the faster model missed at the peaks of the proposals so far.

Lower limits usually lead to a proposal that fits within a few rounds, but they forbid more than they must. Additional rows
come second. By then the caller may ask for proposals that beat the best one so far.

Lower limits and additional rows are not part of the original problem. A bound that is proven under them holds for fewer
plans. So only the first round's lower bound on the step time holds for all plans that fit the cap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.search.solver.pbqp import MemoryConstraint

MAX_ROWS = 5
"""Largest number of times that rows are added. Source: a choice of ours."""

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

    def is_blind(self, cap_bytes: float) -> bool:
        """True if the faster model misses arrays of the proposal that a row would see."""
        return self.blind_row is not None and self.needed_bytes > BLIND * cap_bytes


def tightened[Proposal](
    propose: Callable[[float, Sequence[MemoryConstraint]], Round[Proposal] | None],
    cap_bytes: float,
    least_bytes: float = 0.0,
) -> Iterator[Round[Proposal]]:
    """Proposals: under the cap; under lower and lower limits, until one fits; then both again with more rows.

    Args:
      propose: the best plan that keeps to a limit and to some rows; None if there is none.
      cap_bytes: the cap of the stricter model.
      least_bytes: a limit to which nothing keeps.
    """
    rows: tuple[MemoryConstraint, ...] = ()
    for _ in range(1 + MAX_ROWS):
        missed = list[Round[Proposal]]()
        for latest in _with_lower_limits(propose, rows, cap_bytes, least_bytes):
            yield latest
            missed += [latest] * latest.is_blind(cap_bytes)
            if rows and missed:
                break  # more rows say more than lower limits
        if not missed:
            return
        rows = (*rows, *(one.blind_row() for one in missed if one.blind_row))


def _with_lower_limits[Proposal](
    propose: Callable[[float, Sequence[MemoryConstraint]], Round[Proposal] | None],
    rows: Sequence[MemoryConstraint],
    cap_bytes: float,
    barren_bytes: float,
) -> Iterator[Round[Proposal]]:
    """Proposals with some rows under lower and lower limits, until one fits or hardly any limits are left."""
    limit_bytes = kept_bytes = cap_bytes
    while True:
        latest = propose(limit_bytes, rows)
        if latest is None:
            barren_bytes = limit_bytes
        else:
            yield latest
            if latest.needed_bytes <= cap_bytes:
                return
            kept_bytes = min(limit_bytes, latest.expected_bytes)
            limit_bytes = kept_bytes - (latest.needed_bytes - cap_bytes) - MARGIN * cap_bytes
        if limit_bytes <= barren_bytes:
            limit_bytes = (barren_bytes + kept_bytes) / 2
        if kept_bytes - limit_bytes < MARGIN * cap_bytes:
            return
