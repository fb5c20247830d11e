"""The decisions of a plan that were edited by hand since it was made.

Estimates belong to the decisions that they were made of. So a plan carries a mark of each of these: some bits of a hash
of the decision's table, name and text. A decision without a mark was edited or added. If marks are left over, decisions
were deleted. Marks are short, as a plan has hundreds of decisions: in a plan of a thousand, one edit in ten thousand
goes unseen.
"""

import base64
import hashlib
from collections.abc import Iterator

from autoshard.search.plan.values import PlanValues

MARK_BYTES = 3
"""Bytes of a mark."""

MARK_LETTERS = 4
"""Letters of a mark in base64."""

Decision = tuple[str, str]
"""A table, such as `arguments`, and a name in it."""


def marks_of(plan: PlanValues) -> str:
    """The marks of all decisions, one after the other."""
    return "".join(sorted(_mark(*decision) for decision in _all(plan)))


def edited(plan: PlanValues) -> tuple[Decision, ...]:
    """The decisions without a mark; none for a plan without marks, as nothing is known of it."""
    known = _split(plan.marks)
    if not known:
        return ()
    return tuple((table, name) for table, name, text in _all(plan) if _mark(table, name, text) not in known)


def num_deleted(plan: PlanValues) -> int:
    """Number of marks without a decision: deleted decisions, if none was edited."""
    return len(_split(plan.marks) - {_mark(*decision) for decision in _all(plan)})


def is_edited(plan: PlanValues) -> bool:
    """True if the estimates belong to another plan: decisions, or other parts of the plan, were edited since."""
    return not plan.is_sealed or bool(edited(plan) or num_deleted(plan))


def _split(marks: str) -> set[str]:
    return {marks[i : i + MARK_LETTERS] for i in range(0, len(marks), MARK_LETTERS)}


def _all(plan: PlanValues) -> Iterator[tuple[str, str, str]]:
    yield "microbatches", "", str(plan.microbatches)
    for n, sharding in enumerate(plan.shardings):
        for table in ("mesh", "arguments", "ops", "copies"):
            for name, text in getattr(sharding, table).items():
                yield f"{table} {n}" if n else table, name, str(text)
    if plan.attention:
        yield "attention", "", plan.attention
    if plan.overlap < 1:
        yield "overlap", "", str(plan.overlap)
    for name, text in plan.retention.items():
        yield "retention", name, text
    if plan.is_pipeline:
        yield "schedule", "", f"{plan.schedule} {plan.workers}"
        for n, stage in enumerate(plan.stages):
            yield "stages", f"stage {n}", f"{stage.first_op} {stage.replicas} {stage.sharding}"


def _mark(*decision: str) -> str:
    digest = hashlib.sha256("\n".join(decision).encode()).digest()
    return base64.b64encode(digest[:MARK_BYTES]).decode()
