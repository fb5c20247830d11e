"""Ops of a flat program as parts of the step's ops: the op of the step, or of its loop over parts, that contains each."""

from autoshard.search.ir.graph import Site
from autoshard.search.problem.flat_program import FlatOp, FlatProgram

IN_BODY = 4
"""Length of the beginning of a site that names an op of the loop's body: the loop, its key, the number of the body, and the
place there."""


def outermost(op: FlatOp, loop: int) -> Site:
    """The op of the step, or of its loop's body, that contains a flat op; none contains arguments and results.

    Args:
      op: the flat op.
      loop: the index of the loop among the step's ops.
    """
    if op.name in ("input", "output"):
        return ()
    return op.site[:IN_BODY] if op.site[:1] == (loop,) else op.site[:1]


def positions_of_loop(program: FlatProgram, loop: int) -> tuple[int, int]:
    """The positions of the loop over parts: the outermost one around its first op."""
    inside = [i for i, op in enumerate(program.ops) if op.site[:1] == (loop,) and op.op]
    around = [r for r in program.loops if r[0] <= min(inside) and max(inside) < r[1]]
    return max(around, key=lambda r: r[1] - r[0])
