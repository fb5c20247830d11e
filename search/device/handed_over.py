"""Copies of a program's arguments and results in the order of dimensions that a product needs.

Inside a program, XLA lays an array out as its readers need it. An array that one program passes to another is
row-major, as in JAX. A product with batch dimensions needs these first (`search.problem.layouts`), but queries, keys
and values, say, have their heads behind the positions. So the reading program writes such an array out, once for every
order that its products need. The program that made the array does too, if it reads it as well.

A loop may read a stack that is an argument one part at a time. Then XLA writes out the whole stack before the loop, in
the order of the first product. Where another product needs another order, it writes out the part, inside the loop. (A
stack that a loop makes needs no such copy: the product reads the part, and the stack is written from it.)
"""

from dataclasses import dataclass

from autoshard.search.ir.spec import shard_shape
from autoshard.search.problem.flat_program import FlatProgram
from autoshard.search.problem.fusion import Fusion, is_part, is_view
from autoshard.search.problem.layouts import PRODUCT, Order, batch_first, large, placed
from autoshard.search.problem.reshard_paths import ReshardPaths


@dataclass(frozen=True, slots=True)
class TurnedCopy:
    """The copy of an operand that a product needs if the operand is an argument of its program.

    Attributes:
      buffer: the array, or the stack of which it is a part.
      order: the product's order of the operand's dimensions.
      num_bytes: bytes of the copy of an array, or of one part.
      is_part: whether the array is a loop's part of a stack.
      num_parts: number of parts that the loop reads.
    """

    buffer: int
    order: Order
    num_bytes: float
    is_part: bool
    num_parts: int = 1


def turned(paths: ReshardPaths, fusion: Fusion, i: int, operand: int, buffer: int) -> TurnedCopy | None:
    """The copy of an operand that an op needs if the array under its views is row-major.

    Returns:
      None where the op reads the operand in its present order, or computes it on the fly.
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
    """A value's order of dimensions if the array under its views is row-major; None if that is not known."""
    op, rows = program.ops[program.maker[v][0]], large(program.values[v].shape)
    if not is_view(op):
        return rows
    (viewed,) = op.operands
    below = _by_rows(program, viewed)
    if below is None or op.name == "rev":
        return None
    if list(below) == sorted(below) and op.name != "transpose":
        return rows
    if op.op is None:  # a loop's part of a stack, or a value that enters a loop
        return None if is_part(op) else below
    place = placed(program, op, viewed)
    return None if place is None else tuple(place[d] for d in below)


def _is_part_of_stack(program: FlatProgram, v: int) -> bool:
    op = program.ops[program.maker[v][0]]
    return is_view(op) and (is_part(op) or _is_part_of_stack(program, op.operands[0]))
