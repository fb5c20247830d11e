"""What of a plan was edited by hand since it was made.

Estimates are those of the decisions that they were made of. So beside them a plan carries a mark of each of these
decisions: some bits of a hash of its table, its name and its text. A decision that has no mark was edited or added; where
there are more marks than decisions have, some were deleted. Marks are short, as a plan has hundreds of decisions: in a
plan of a thousand, one edit in ten thousand would go unseen.
"""

import base64
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoshard.search.plan.plan import Decisions

MARK_BYTES = 3
"""Of a mark; four letters, as text."""

MARK_LETTERS = 4
"""The same in base64."""

Decision = tuple[str, str]
"""Its table, such as `arguments`, and its name there."""


def marks_of(decisions: "Decisions") -> str:
    """The marks of all decisions, one after the other."""
    return "".join(sorted(_mark(table, name, said) for table, name, said in _all(decisions)))


def edited(decisions: "Decisions", marks: str) -> tuple[Decision, ...]:
    """The decisions that have no mark; none where there are no marks at all, as nothing is known then."""
    known = _split(marks)
    if not known:
        return ()
    return tuple(
        (table, name) for table, name, said in _all(decisions) if _mark(table, name, said) not in known
    )


def num_deleted(decisions: "Decisions", marks: str) -> int:
    """How many marks belong to no decision: what was deleted, where nothing was edited."""
    return len(_split(marks) - {_mark(*decision) for decision in _all(decisions)})


def _split(marks: str) -> set[str]:
    return {marks[i : i + MARK_LETTERS] for i in range(0, len(marks), MARK_LETTERS)}


def _all(decisions: "Decisions") -> Iterator[tuple[str, str, str]]:
    yield "microbatches", "", str(decisions.microbatches)
    for table in ("mesh", "arguments", "ops", "copies", "retention"):
        for name, said in getattr(decisions, table).items():
            yield table, name, str(said)


def _mark(*decision: str) -> str:
    digest = hashlib.sha256("\n".join(decision).encode()).digest()
    return base64.b64encode(digest[:MARK_BYTES]).decode()
