"""A loop in which a model of memory that a search can reckon with is corrected by one that has the last word.

The solver's rows are linear in the strategies; what the kernels of a device hold is not. The kernels' order is ours, the
compiler's is its own. Either way the faster model proposes the best plan under a limit, at first the cap, and the
stricter one says what the proposal needs. Where that is more than the cap, the next proposal must keep

  * to a limit that is lower by the overshoot, where the two models are nearly of one opinion;
  * to a row that sees what the first one was blind to, where they are far apart and there is such a row.

Where nothing keeps to a lower limit, the next one lies half of the way back, and none as low as that is asked for again.

Lower limits and such rows find plans that fit; they are not part of the problem that was posed. What is proven under them
is proven of fewer plans: of all rounds' lower bounds on the step time only the first one's is a bound on what fits the cap.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoshard.search.solver.pbqp import MemoryConstraint

MAX_ROWS = 5
"""How often a row is added, before lower limits must do. Source: a choice of ours."""

BLIND = 1.1
"""From which share of the cap on the faster model is taken to miss something. Source: a choice of ours."""

MARGIN = 5e-3
"""Of the cap, by how much more than the overshoot the limit is lowered. Source: a choice of ours, as peaks come in steps."""


@dataclass(frozen=True, slots=True)
class Round[Proposal]:
    """What was proposed, and what became of it.

    Attributes:
      proposal: a plan, whatever that is to the caller.
      expected_bytes: its peak in the model that proposed it.
      needed_bytes: its peak in the one that has the last word.
      blind_row: makes a row that the proposal overflows; None where there is no solver to add it to.
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
    """Proposals, each under what the last ones taught; whoever asks takes the first that pleases.

    Args:
      propose: the best plan that keeps to a limit and to some rows; None where there is none.
      cap_bytes: what the stricter model must keep to.
      max_rounds: it ends after so many, or when no limit is left.
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
