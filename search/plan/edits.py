"""What of a plan was edited by hand since it was made.

Estimates are those of the decisions that they were made of. So beside them a plan carries a mark of each of these
decisions: some bits of a hash of its table, its name and its text. A decision that has no mark was edited or added; where
there are more marks than decisions have, some were deleted. Marks are short, as a plan has hundreds of decisions: in a
plan of a thousand, one edit in ten thousand would go unseen.
"""

import base64
import hashlib
from collections.abc import Iterator

from autoshard.search.plan.values import PlanValues

MARK_BYTES = 3
"""Of a mark; four letters, as text."""

MARK_LETTERS = 4
"""The same in base64."""

Decision = tuple[str, str]
"""Its table, such as `arguments`, and its name there."""


def marks_of(plan: PlanValues) -> str:
    """The marks of all decisions, one after the other."""
    return "".join(sorted(_mark(*decision) for decision in _all(plan)))


def edited(plan: PlanValues) -> tuple[Decision, ...]:
    """The decisions that have no mark; none where there are no marks at all, as nothing is known then."""
    known = _split(plan.marks)
    if not known:
        return ()
    return tuple((table, name) for table, name, said in _all(plan) if _mark(table, name, said) not in known)


def num_deleted(plan: PlanValues) -> int:
    """How many marks belong to no decision: what was deleted, where nothing was edited."""
    return len(_split(plan.marks) - {_mark(*decision) for decision in _all(plan)})


def is_edited(plan: PlanValues) -> bool:
    """Whether the estimates are those of another plan: decisions were edited, added or deleted since, or anything else."""
    return not plan.is_sealed or bool(edited(plan) or num_deleted(plan))


def _split(marks: str) -> set[str]:
    return {marks[i : i + MARK_LETTERS] for i in range(0, len(marks), MARK_LETTERS)}


def _all(plan: PlanValues) -> Iterator[tuple[str, str, str]]:
    yield "microbatches", "", str(plan.microbatches)
    for n, sharding in enumerate(plan.shardings):
        for table in ("mesh", "arguments", "ops", "copies"):
            for name, said in getattr(sharding, table).items():
                yield f"{table} {n}" if n else table, name, str(said)
    if plan.attention:
        yield "attention", "", plan.attention
    for name, said in plan.retention.items():
        yield "retention", name, said
    if plan.is_pipeline:
        yield "schedule", "", f"{plan.schedule} {plan.workers}"
        for n, stage in enumerate(plan.stages):
            yield "stages", f"stage {n}", f"{stage.first_op} {stage.replicas} {stage.sharding}"


def _mark(*decision: str) -> str:
    digest = hashlib.sha256("\n".join(decision).encode()).digest()
    return base64.b64encode(digest[:MARK_BYTES]).decode()
