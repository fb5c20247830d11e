"""Time that a collective may take beside computation.

A value exists once the kernels before it have run, and is needed when the next kernel reads it. The ops between the two
in program order are the *window* of a reshard on its way: all of the forward phase before the layer that reads a
parameter, all of the backward phase behind the product that makes a gradient, nothing between one activation and the
next. Light ops take no time of their own here, as they run when their operands exist or when their result is needed:
the cast of a parameter does not stand between it and the beginning of the step.

Inside of a loop's body, windows end with the iteration. A value that a loop slices or carries exists when an iteration
begins; a value that it stacks or passes on is needed when the iteration ends.
"""

from dataclasses import dataclass
from functools import cached_property

from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.kernels import runs_alone

Span = tuple[int, int]
"""Positions of ops from the first up to the second, without it."""


@dataclass(frozen=True, eq=False)
class Windows:
    """The windows of a program's values."""

    folded: FoldedProgram

    def between(self, maker: int, reader: int) -> Span:
        """The window between two ops; the second reads a result of the first."""
        there = self._there[maker]
        return there, max(there, self._wanted_by(reader, maker, self._wanted))

    @cached_property
    def _there(self) -> list[int]:
        """By op: the position of its loop's body from which on its results exist."""
        found: list[int] = []
        for at, op in enumerate(self.folded.program.ops):
            if op.name == "carry":
                found.append(self._loop_of_carry(at)[1])
            elif op.name == "input":
                found.append(0)
            elif self._takes_time(at):
                found.append(at + 1)
            else:
                makers = (self.folded.program.maker[v][0] for v in op.operands)
                there = (self._there_for(maker, at, found) for maker in makers)
                found.append(max(there, default=self.bodies[at][0]))
        return found

    def _there_for(self, maker: int, reader: int, there: list[int]) -> int:
        """The position of the reader's body from which on a value exists."""
        body = self.bodies[reader]
        if self.bodies[maker] == body:
            return there[maker]
        loop = self._loop_within(body, maker)
        return body[0] if loop is None else loop[1]

    @cached_property
    def _wanted(self) -> list[int]:
        """By op: the position of its loop's body at which its results are needed."""
        program = self.folded.program
        found = [0] * len(program.ops)
        for at in reversed(range(len(program.ops))):
            readers = (u for v in program.ops[at].results for u in program.uses.get(v, ()))
            wanted = (self._wanted_by(u, at, found) for u in readers)
            found[at] = min(wanted, default=self.bodies[at][1])
        return found

    def _wanted_by(self, reader: int, maker: int, wanted: list[int]) -> int:
        """The position of the maker's body at which a reader needs a value."""
        body, op = self.bodies[maker], self.folded.program.ops[reader]
        if reader <= maker or op.name in ("output", "stack"):  # for the next iteration, or the next step
            return body[1]
        if self.bodies[reader] != body:
            loop = self._loop_within(body, reader)
            return body[1] if loop is None else loop[0]
        return reader if op.name == "carry" or self._takes_time(reader) else wanted[reader]

    def _takes_time(self, at: int) -> bool:
        return runs_alone(self.folded, self.folded.class_of[at])

    @cached_property
    def bodies(self) -> list[Span]:
        """By op: the innermost loop's body in which it stands, or the whole program; a stack stands behind its loop."""
        program = self.folded.program
        found = [(0, len(program.ops))] * len(program.ops)
        for start, end in reversed(program.loops):  # inner ones last
            inside = end
            while program.ops[inside - 1].name == "stack":
                inside -= 1
            found[inside:end] = [found[start]] * (end - inside)
            found[start:inside] = [(start, end)] * (inside - start)
        return found

    def _loop_within(self, body: Span, at: int) -> Span | None:
        """The outermost loop inside a body in which an op stands; None if the op stands elsewhere."""
        loops = (
            loop for loop in self.folded.program.loops if loop[0] <= at < loop[1] and _is_inside(loop, body)
        )
        return max(loops, key=lambda loop: loop[1] - loop[0], default=None)

    def _loop_of_carry(self, at: int) -> Span:
        """The loop that a carry stands before: the next one, and the longest of those that begin there."""
        return min(
            (loop for loop in self.folded.program.loops if loop[0] > at), key=lambda loop: (loop[0], -loop[1])
        )


def _is_inside(loop: Span, body: Span) -> bool:
    return loop != body and body[0] <= loop[0] and loop[1] <= body[1]
