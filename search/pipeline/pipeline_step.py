"""A step taken apart for a pipeline: its ops that run once, before and after, and those that run for each microbatch.

A loop over microbatches runs all of a microbatch before the next one; a pipeline has several of them under way. So there
is no loop: the parts that one is put together from (`search.memory.microbatches`) stand side by side, in one numbering of
values, and whoever runs them says which microbatch it is.

    prologue  once: what every microbatch reads (parameters in another type), the examples dealt out, sums set to zero;
    body      for each microbatch: forward and backward;
    epilogue  once: what is made of finished sums, such as a clipped gradient, and the update.

A value of the body is another one in each microbatch. A *sum* is a value of the prologue to which each microbatch adds a
*term*; the epilogue reads it when all have. A *piece* is what the epilogue reads of one microbatch: of a result for each
example, every microbatch's piece.

Some ops are so light that a value of theirs is made anew by whoever reads it, rather than kept or sent: a mask of
constants, a microbatch's part of the examples, a schedule's learning rate. They stand in the parts where they are made
first.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from search.ir.graph import EFFECTFUL, Op, Role, Step, Value
from search.ir.sinking import LIGHT
from search.memory.batch_states import PerExample
from search.memory.microbatch_body import INDEX
from search.memory.microbatches import MicrobatchParts, taken_apart
from search.memory.written import Written

SCOPE = "pipeline"
"""The name scope of what is neither the user's nor made from it."""

_TAKES = LIGHT | {"slice", "dynamic_slice", "concatenate", "pad"}
"""Primitives that cost no more than to read what they make."""


@dataclass(frozen=True, eq=False)
class PipelineStep:
    """A step's ops, by when they run.

    Attributes:
      step: the traced step.
      num_microbatches: in how many the body goes through the batch.
      values: all values.
      prologue: the ops that run once before, in program order.
      body: the ops that run for each microbatch.
      epilogue: the ops that run once after.
      index: the microbatch's number, as the body reads it.
      of_microbatch: the values that are others in each microbatch.
      terms: by sum, what each microbatch adds to it.
      pieces: by value of the epilogue, the value of the body that it is, and in which microbatch.
      example_dims: by value that belongs to single examples, the dim that carries them.
    """

    step: Step
    num_microbatches: int
    values: tuple[Value, ...]
    prologue: tuple[Op, ...]
    body: tuple[Op, ...]
    epilogue: tuple[Op, ...]
    index: int
    of_microbatch: frozenset[int]
    terms: Mapping[int, int]
    pieces: Mapping[int, tuple[int, int]]
    example_dims: Mapping[int, int]

    @classmethod
    def of(cls, step: Step, num_microbatches: int) -> "PipelineStep":
        """Takes a step apart.

        Raises:
          InputError: the batch is not so many times anything.
          NotSplittableError: examples depend on one another; the message says where.
        """
        return _Writing(step, taken_apart(step, num_microbatches)).run()

    def is_of_microbatch(self, value: int) -> bool:
        """Whether a value is another one in each microbatch."""
        return value in self.of_microbatch

    @property
    def ops(self) -> Iterator[Op]:
        """All ops, as they run."""
        yield from self.prologue
        yield from self.body
        yield from self.epilogue

    @property
    def constants(self) -> tuple[tuple[int, Any], ...]:
        """Values that are always the same, with their contents."""
        return self.step.graph.constants

    @cached_property
    def maker(self) -> dict[int, Op]:
        """By value, the op that makes it; a sum's is what it begins with."""
        return {v: op for op in self.ops for v in op.outputs}

    @cached_property
    def learned(self) -> frozenset[int]:
        """Parameters, and what the prologue makes of them."""
        arguments = zip(self.step.graph.inputs, self.step.arguments, strict=True)
        found = {v for v, argument in arguments if argument.role is Role.PARAMETER}
        for op in self.prologue:
            if not found.isdisjoint(op.operands):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def made_anew(self) -> frozenset[Op]:
        """The ops whose results are made by each program that reads them."""
        handed_on = {*self.terms, *self.terms.values(), *(v for v, _ in self.pieces.values())}
        small = {v for v in self.step.graph.inputs if _is_scalar((self.values[v],))}
        made = {*(v for v, _ in self.step.graph.constants), self.index}
        found: set[Op] = set()
        for op in self.ops:
            in_body = all(map(self.is_of_microbatch, op.outputs))
            is_cheap = op.name in _TAKES or (not in_body and _is_scalar(op.result_values))
            known = made | ({v for v in op.operands if not self.is_of_microbatch(v)} if in_body else small)
            is_light = is_cheap and not op.bodies and op.name not in EFFECTFUL
            if is_light and known.issuperset(op.operands) and handed_on.isdisjoint(op.outputs):
                found.add(op)
                made.update(op.outputs)
        return frozenset(found)


def _is_scalar(values: tuple[Value, ...]) -> bool:
    return all(prod(v.shape) == 1 for v in values)


class _Writing:
    """The parts of one step in one numbering."""

    def __init__(self, step: Step, parts: MicrobatchParts) -> None:
        self.step, self.parts = step, parts
        self.once = Written(parts.graph.values, SCOPE)

    def run(self) -> PipelineStep:
        parts, once = self.parts, self.once
        once.ops += parts.before
        dealt = {v: once.write(parts.deal(v), (v,), None) for v in parts.examples}
        for v in parts.sums:
            once.write(partial(zeros, parts.body.values[v]), (), None, v)
        prologue, once.ops = tuple(once.ops), []
        pieces = {v: (v, parts.count - 1) for v in parts.alike}
        for v in parts.stacks:
            each = [once.new(parts.body.values[v]) for _ in range(parts.count)]
            pieces |= {piece: (v, m) for m, piece in enumerate(each)}
            stack = once.write(_stacked, each, parts.makers[v])
            once.write(parts.gather(v), (stack,), parts.makers[v], v)
        epilogue = (*once.ops, *parts.after)
        index = once.new(INDEX)
        number = self._numbers(index)
        body = Written((*once.values, *parts.body.values), SCOPE)
        for v in parts.examples:
            body.write(_part, (dealt[v], index), None, number(v))
        body.ops += [_renumbered(op, number) for op in parts.body.ops]
        return PipelineStep(
            self.step,
            parts.count,
            tuple(body.values),
            prologue,
            tuple(body.ops),
            epilogue,
            index,
            frozenset(range(len(once.values), len(body.values))),
            {v: number(v) for v in parts.sums},
            {piece: (number(v), m) for piece, (v, m) in pieces.items()},
            self._example_dims(number, dealt),
        )

    def _example_dims(self, number: Callable[[int], int], dealt: Mapping[int, Any]) -> dict[int, int]:
        states = {v: s for v, s in self.parts.split.states.items() if isinstance(s, PerExample)}
        whole = {v: state.dim for v, state in states.items()}
        parts = {number(v): state.dim for v, state in states.items()}
        return whole | parts | {dealt[v]: states[v].dim + 1 for v in self.parts.examples}

    def _numbers(self, index: int) -> Callable[[int], int]:
        """What a value of the body is called here."""
        parts, first = self.parts, len(self.once.values)
        outside = {*parts.consts, *(v for v, _ in parts.body.constants)}
        return lambda v: index if v == parts.index else v if v in outside else first + v


def _renumbered(op: Op, number: Callable[[int], int]) -> Op:
    inputs = tuple(number(a) if isinstance(a, int) else a for a in op.inputs)
    return replace(op, inputs=inputs, outputs=tuple(map(number, op.outputs)))


def zeros(value: Value) -> Any:
    """What a sum begins with; made by an op, also where it is a number."""
    return jnp.reshape(jnp.zeros((1, *value.shape), value.dtype), value.shape)


def _part(dealt: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(dealt, index, 0, keepdims=False)


def _stacked(*pieces: Any) -> Any:
    return jnp.stack(pieces)
