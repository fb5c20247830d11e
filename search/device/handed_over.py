"""Who wants what a program is handed in another order than it lies.

Inside of a program XLA lays an array out as its readers want it. What one program hands to another lies row by row, as JAX
has it. A product with batch dimensions wants these first (`search.problem.layouts`), and queries, keys and values, say, have
their heads behind the positions. So the program writes such an array out, once for every order that its products want; and
so does the one that made it, if it reads it as well.

Of a stack that comes in and of which a loop reads a part at a time, XLA writes out the whole before the loop, in the order
that the first product wants. Where another product wants another order, it writes out the part, inside the loop. (What a
loop stacks up is none of this: the product reads the part, and the stack is written from it.)
"""

from dataclasses import dataclass

from autoshard.search.ir.spec import shard_shape
from autoshard.search.problem.flat_program import FlatProgram
from autoshard.search.problem.fusion import Fusion, is_part, is_view
from autoshard.search.problem.layouts import PRODUCT, Order, batch_first, large, placed
from autoshard.search.problem.reshard_paths import ReshardPaths


@dataclass(frozen=True, slots=True)
class TurnedCopy:
    """What a product has written out if it is handed over.

    Attributes:
      buffer: the array, or the stack of which it is a part.
      order: of the product's operand.
      num_bytes: of the copy of an array, or of one part.
      is_part: whether it is a loop's part of a stack.
      num_parts: how many parts the loop reads.
    """

    buffer: int
    order: Order
    num_bytes: float
    is_part: bool
    num_parts: int = 1


def turned(paths: ReshardPaths, fusion: Fusion, i: int, operand: int, buffer: int) -> TurnedCopy | None:
    """How an op has an operand written out if the array that it is a view of lies row by row.

    Args:
      paths: of the program.
      fusion: likewise.
      i: the op.
      operand: by number.
      buffer: the array.

    Returns:
      None where the op reads the operand as it lies, or computes it on the fly.
    """
    program = paths.program
    op, v = program.ops[i], program.ops[i].operands[operand]
    if op.name != PRODUCT or not fusion.is_stored(fusion.seen_through(v)) or paths.to_reader(i, operand).path:
        return None
    spec = paths.spec(paths.graph.ports[paths.folded.class_of[i], operand, False])
    part = shard_shape(spec, program.values[v].shape, paths.costed.resharder.mesh.shape)
    lies = _by_rows(program, v)
    if lies is None:
        return None
    order = batch_first(op, operand, part, tuple(d for d in lies if part[d] > 1))
    if order is None:
        return None
    return TurnedCopy(buffer, order, paths.local_bytes(v, spec), _is_part_of_stack(program, v))


def _by_rows(program: FlatProgram, v: int) -> Order | None:
    """How a value lies if the array that it is a view of lies row by row; None if that is not known."""
    op, rows = program.ops[program.maker[v][0]], large(program.values[v].shape)
    if not is_view(op):
        return rows
    (viewed,) = op.operands
    below = _by_rows(program, viewed)
    if below is None or op.name == "rev":
        return None
    if list(below) == sorted(below) and op.name != "transpose":
        return rows
    if op.op is None:  # a loop's part of a stack, or what comes into a loop
        return None if is_part(op) else below
    place = placed(program, op, viewed)
    return None if place is None else tuple(place[d] for d in below)


def _is_part_of_stack(program: FlatProgram, v: int) -> bool:
    op = program.ops[program.maker[v][0]]
    return is_view(op) and (is_part(op) or _is_part_of_stack(program, op.operands[0]))
