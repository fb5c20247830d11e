"""Programs folded otherwise than `fold` would fold them."""

from autoshard.search.problem.flat_program import FlatProgram
from autoshard.search.problem.folding import FoldedProgram, _folded


def partitioned(program: FlatProgram, members: tuple[tuple[int, ...], ...]) -> FoldedProgram:
    """The classes are these ops, by position."""
    return _folded(program, members, tuple(range(len(members))))


def apart(program: FlatProgram) -> FoldedProgram:
    """Every op is a class of its own."""
    return partitioned(program, tuple((i,) for i in range(len(program.ops))))
