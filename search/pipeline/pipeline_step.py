"""A step taken apart for a pipeline: ops that run once before the microbatches, for each of them, and once after.

A loop over microbatches (`search.memory.microbatches`) finishes one microbatch before the next one; a pipeline has
several in flight. So the loop is opened: the ops before it, in it and behind it stand side by side, in one numbering of
values, and the executor says for which microbatch they run. Earlier rewritings of the step, such as recomputation, stay
as they are.

    prologue  once: values that all microbatches read (parameters in another dtype), the examples in parts, sums of zero;
    body      for each microbatch: forward and backward;
    epilogue  once: values made of finished sums, such as a clipped gradient, and the update.

Each microbatch has its own instance of a value of the body. A *sum* is a value of the prologue to which each microbatch
adds a *term*; the epilogue reads it when all have. A *piece* is a value of one microbatch that the epilogue reads: a
result for each example has a piece of every microbatch.

Some ops are *duplicated*: their values are so cheap that every program that reads them computes them itself, and none
is stored or sent. Examples are a mask of constants, a microbatch's part of the examples, and a schedule's learning
rate. They stand in the part of the step that makes them first.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.search.ir.graph import EFFECTFUL, Atom, Op, Phase, Role, Site, Step, Value
from autoshard.search.ir.sharding import Place
from autoshard.search.ir.sinking import CHEAP
from autoshard.search.memory.microbatch_body import INDEX
from autoshard.search.memory.microbatches import loop_over_microbatches, looped
from autoshard.search.memory.written import Written

SCOPE = "pipeline"
"""The name scope of ops that the pipeline adds."""

_TAKES = CHEAP | {"slice", "dynamic_slice", "concatenate", "pad"}
"""Primitives that cost no more than a read of their results."""


@dataclass(frozen=True, eq=False)
class PipelineStep:
    """The ops of a step, by when they run.

    Attributes:
      step: the traced step, with its loop over microbatches.
      num_microbatches: number of microbatches of each replica.
      num_replicas: number of replicas; the body is the work of one of them.
      values: all values.
      prologue: the ops that run once before, in program order.
      body: the ops that run for each microbatch.
      epilogue: the ops that run once after.
      index: the number of a part of the batch, as the body reads it; the parts of all replicas are numbered together.
      of_microbatch: the values of which each microbatch has its own instance.
      terms: by sum, the term that each microbatch adds to it.
      pieces: by value of the epilogue, the value of the body that it is, and the number of the part.
      constants: values that are always equal, with their contents.
      origins: by value of the body, its number in the body of the loop.
      on_the_fly: values that the compiler computes where they are read and does not store; the backward phase computes
        those of the forward phase again.
      like: by value that the pipeline added, the value whose spec it has: one of which it is a part, or which it
        replaces.
    """

    step: Step
    num_microbatches: int
    num_replicas: int
    values: tuple[Value, ...]
    prologue: tuple[Op, ...]
    body: tuple[Op, ...]
    epilogue: tuple[Op, ...]
    index: int
    of_microbatch: frozenset[int]
    terms: Mapping[int, int]
    pieces: Mapping[int, tuple[int, int]]
    constants: tuple[tuple[int, Any], ...]
    origins: Mapping[int, int]
    on_the_fly: frozenset[int] = frozenset()
    like: Mapping[int, int] = field(default_factory=dict[int, int])

    @classmethod
    def of(cls, step: Step, num_microbatches: int, num_replicas: int = 1) -> "PipelineStep":
        """Takes a step apart.

        Raises:
          InputError: the batch does not divide into so many parts.
          NotSplittableError: examples depend on one another; the message says where.
        """
        return cls.of_loop(looped(step, num_microbatches * num_replicas), num_replicas)

    @classmethod
    def of_loop(cls, step: Step, num_replicas: int = 1) -> "PipelineStep":
        """Takes a step apart that has a loop over its parts: microbatches times replicas."""
        return _Opening(step, num_replicas).run()

    def is_of_microbatch(self, value: int) -> bool:
        """True if each microbatch has its own instance of a value."""
        return value in self.of_microbatch

    @property
    def ops(self) -> Iterator[Op]:
        """All ops, in the order in which they run."""
        yield from self.prologue
        yield from self.body
        yield from self.epilogue

    @cached_property
    def maker(self) -> dict[int, Op]:
        """By value, the op that makes it; for a sum, the op that makes its initial value."""
        return {v: op for op in self.ops for v in op.outputs}

    def original(self, value: int) -> int:
        """The value of the opened loop whose spec a value has."""
        while value in self.like:
            value = self.like[value]
        return value

    @cached_property
    def loop(self) -> int:
        """The index of the loop among the step's ops."""
        return loop_over_microbatches(self.step.graph)

    @cached_property
    def _place_of(self) -> dict[int, Place]:
        """By value of the opened loop, its place in the step."""
        graph, path = self.step.graph, (self.loop, "jaxpr", 0)
        body = graph.ops[self.loop].bodies["jaxpr"][0]
        found: dict[int, Place] = {v: ("input", (), i) for i, v in enumerate(graph.inputs)}
        for i, op in enumerate(graph.ops):
            found |= {v: ("result", (i,), r) for r, v in enumerate(op.outputs)}
        inner: dict[int, Place] = {v: ("input", path, i) for i, v in enumerate(body.inputs)}
        for i, op in enumerate(body.ops):
            inner |= {v: ("result", (*path, i), r) for r, v in enumerate(op.outputs)}
        return found | {v: inner[u] for v, u in self.origins.items() if u in inner}

    @cached_property
    def _names(self) -> dict[Site, str]:
        """The primitives of the step's ops, by site."""
        graph, path = self.step.graph, (self.loop, "jaxpr", 0)
        found: dict[Site, str] = {(i,): op.name for i, op in enumerate(graph.ops)}
        return found | {
            (*path, i): op.name for i, op in enumerate(graph.ops[self.loop].bodies["jaxpr"][0].ops)
        }

    def place_of(self, value: int) -> Place | None:
        """The place in the step of a value, or of the value whose spec it has; None if only a pipeline has it."""
        return self._place_of.get(self.original(value))

    def site_of(self, op: Op) -> Site | None:
        """The site in the step of an op, or of the op of which it is a part; None if only a pipeline has it."""
        what, site, _ = self.place_of(op.outputs[0]) or ("", (), 0)
        return site if what == "result" and self._names[site] == op.name else None

    @cached_property
    def learned(self) -> frozenset[int]:
        """Parameters, and values that the prologue makes of them."""
        return self._made_of(Role.PARAMETER)

    @cached_property
    def weights(self) -> frozenset[int]:
        """Parameters and frozen weights, and values that the prologue makes of them."""
        return self._made_of(Role.PARAMETER, Role.FROZEN)

    def _made_of(self, *roles: Role) -> frozenset[int]:
        """The arguments of some roles, and values that the prologue makes of them."""
        found = {v for v, argument in self.step.inputs if argument.role in roles}
        for op in self.prologue:
            if not found.isdisjoint(op.operands):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def backward_ops(self) -> frozenset[Op]:
        """The ops of the body that belong to the backward phase, or read values of it."""
        made: set[int] = set()
        found: set[Op] = set()
        for op in self.body:
            if op not in self.duplicated and (
                op.phase is not Phase.FORWARD or not made.isdisjoint(op.operands)
            ):
                found.add(op)
                made.update(op.outputs)
        return frozenset(found)

    @cached_property
    def forward_ops(self) -> tuple[Op, ...]:
        """The ops of the body to which a cut assigns stages, in program order."""
        return tuple(op for op in self.body if op not in self.duplicated and op not in self.backward_ops)

    @cached_property
    def duplicated(self) -> frozenset[Op]:
        """The ops whose results are computed by each program that reads them."""
        handed_on = {*self.terms, *self.terms.values(), *(v for v, _ in self.pieces.values())}
        small = {v for v in self.step.graph.inputs if _is_scalar((self.values[v],))}
        made = {*(v for v, _ in self.constants), self.index}
        found: set[Op] = set()
        for op in self.ops:
            in_body = all(map(self.is_of_microbatch, op.outputs))
            is_a_read = op.name in _TAKES or (not in_body and _is_scalar(op.result_values))
            is_cheap = is_a_read and not op.bodies and op.name not in EFFECTFUL
            if is_cheap and handed_on.isdisjoint(op.outputs):
                read = [v for v in op.operands if v not in made]
                if self.of_microbatch.isdisjoint(read) if in_body else small.issuperset(read):
                    found.add(op)
                    made.update(op.outputs)
        return frozenset(found)


def _is_scalar(values: tuple[Value, ...]) -> bool:
    return all(prod(v.shape) == 1 for v in values)


class _Opening:
    """Opens a loop over microbatches.

    Values outside of it keep their numbers; those of its body are numbered behind them.

    Attributes:
      outer: by input of the body that is a value from outside, that value.
      first: the number of the body's first value.
    """

    def __init__(self, step: Step, num_replicas: int) -> None:
        self.step, self.graph, self.num_replicas = step, step.graph, num_replicas
        self.at = loop_over_microbatches(step.graph)
        self.loop = step.graph.ops[self.at]
        self.inner = self.loop.bodies["jaxpr"][0]
        self.num_consts, self.num_carry = self.loop.loop_counts
        self.count = int(self.loop.params["length"])
        self.once = Written(step.graph.values, SCOPE)
        self.outer = dict(zip(self.inner.inputs[: self.num_consts], self.loop.inputs, strict=False))
        self.first = 0

    def run(self) -> PipelineStep:
        once, graph, adding = self.once, self.graph, self._adding()
        additions = frozenset(adding.values())
        for total in adding:
            once.write(partial(zeros, graph.values[total]), (), None, total)
        begun, once.ops = tuple(once.ops), []
        made = {outer: v for outer, v in zip(self.loop.outputs, self.inner.outputs, strict=True)}
        stacks = {v: [once.new(self.inner.value(made[v])) for _ in range(self.count)] for v in self._stacks}
        for v, each in stacks.items():
            once.write(_stacked, each, self.loop, v)
        alike = {v: self._apart(v) for v in self._alike(adding)}
        epilogue, index = (*once.ops, *graph.ops[self.at + 1 :]), once.new(INDEX)
        self.first = len(once.values)
        body = self._body(index, [op for op in self.inner.ops if op not in additions])
        pieces = {piece: (self._number(made[v]), self.count - 1) for v, piece in alike.items()}
        pieces |= {v: (self._number(made[s]), m) for s, each in stacks.items() for m, v in enumerate(each)}
        read = {v for op in (*body.ops, *epilogue) for v in op.operands} | {*graph.made}
        constants = ((self._number(v), content) for v, content in self.inner.constants)
        return PipelineStep(
            self.step,
            self.count // self.num_replicas,
            self.num_replicas,
            tuple(body.values),
            (*_live(graph.ops[: self.at], read), *begun),
            tuple(body.ops),
            epilogue,
            index,
            frozenset(range(self.first, len(body.values))),
            {total: self._number(op.inputs[1]) for total, op in adding.items()},
            pieces,
            (*graph.constants, *constants),
            {self.first + v: v for v in range(len(self.inner.values))},
        )

    @property
    def _stacks(self) -> tuple[int, ...]:
        return self.loop.outputs[self.num_carry :]

    def _adding(self) -> dict[int, Op]:
        """By sum of the loop, the op of the body that adds to it."""
        maker = self.inner.maker
        begins = self.inner.inputs[self.num_consts : self.num_consts + self.num_carry]
        carried = zip(self.loop.outputs, self.inner.outputs, begins, strict=False)
        found = {outer: (maker.get(made), begin) for outer, made, begin in carried if isinstance(made, int)}
        return {
            outer: op
            for outer, (op, begin) in found.items()
            if op is not None and op.name == "add" and op.inputs[0] == begin
        }

    def _alike(self, adding: Mapping[int, Op]) -> list[int]:
        """The loop's carries that are no sums: every microbatch makes the same value."""
        return [v for v in self.loop.outputs[: self.num_carry] if v not in adding]

    def _apart(self, v: int) -> int:
        """The piece that represents a value which every microbatch makes alike. If the step returns the value, it is a
        copy of the piece."""
        if v not in self.graph.made:
            return v
        piece = self.once.new(self.graph.values[v])
        self.once.write(jnp.copy, (piece,), self.loop, v)
        return piece

    def _body(self, index: int, ops: Sequence[Op]) -> Written:
        """The ops that run for each microbatch."""
        body = Written((*self.once.values, *self.inner.values), SCOPE)
        makers = self.graph.maker
        num_whole = self.num_consts + self.num_carry
        for examples, inner in zip(self.loop.inputs[num_whole:], self.inner.inputs[num_whole:], strict=True):
            assert isinstance(examples, int), "examples are dealt out before the loop"
            if makers[examples].name == "iota":
                self.outer[inner] = index
            else:
                body.write(_part, (examples, index), None, self._number(inner))
        body.ops += [
            replace(
                op, inputs=tuple(map(self._atom, op.inputs)), outputs=tuple(map(self._number, op.outputs))
            )
            for op in ops
        ]
        return body

    def _atom(self, atom: Atom) -> Atom:
        return self.outer.get(atom, self.first + atom) if isinstance(atom, int) else atom

    def _number(self, value: Atom) -> int:
        """The number of a value of the body in the opened step."""
        number = self._atom(value)
        assert isinstance(number, int), f"a microbatch makes nothing of the literal {value}"
        return number


def _live(ops: Sequence[Op], read: set[Atom]) -> tuple[Op, ...]:
    """The ops whose results are read, by later ops or by one another, and those with effects."""
    read, kept = {*read}, list[Op]()
    for op in reversed(ops):
        if op.name in EFFECTFUL or not read.isdisjoint(op.outputs):
            kept.append(op)
            read.update(op.operands)
    return tuple(reversed(kept))


def zeros(value: Value) -> Any:
    """The initial value of a sum. An op makes it even for scalars."""
    return jnp.reshape(jnp.zeros((1, *value.shape), value.dtype), value.shape)


def _part(examples: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(examples, index, 0, keepdims=False)


def _stacked(*pieces: Any) -> Any:
    return jnp.stack(pieces)
