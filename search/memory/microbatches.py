"""A step rewritten so that it goes through its batch in microbatches, and updates once.

The rewritten step is a step like any other: a `scan` over microbatches that adds up gradients (and losses) in its carry,
with what must be there before it and what needs finished sums after it. Which op belongs where follows from the data alone
(`batch_split`); phases are no more than names here.

*Before* the loop stands what its microbatches read as a whole: parameters cast to another type, a count of tokens. *In* it
stands everything for each example, and the sums over examples. *After* it stands the rest: what is made of finished sums,
such as a clipped gradient, noise, the update.

A sum may be finished early, and what is linear in it be computed once, after the loop; or late, and the last of the linear
results be added up. Late costs its ops in every microbatch, so early it is, unless late holds fewer bytes in the carry, or
adds up in a wider type: gradients that are computed in bfloat16 and then converted are added up in float32.

A microbatch takes every count-th example, not a run of neighbours: then it takes equally many from each shard of a batch
that is split over devices, and nothing moves between them. What is returned for each example comes back in the batch's
order.

Source: microbatches whose gradients add up exactly, and why the statistics of a batch normalization stand against that, are
of GPipe (Huang et al. 2019, section 2); following the batch by factors is ours.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.cost_model.errors import InputError
from autoshard.search.ir import _jax
from autoshard.search.ir.graph import EFFECTFUL, Graph, Op, Phase, Role, Step, Value, verify, without_dead_ops
from autoshard.search.memory.batch_split import batch_split
from autoshard.search.memory.batch_states import (
    WHOLE,
    Alike,
    BatchSplit,
    NotSplittableError,
    Partial,
    PerExample,
    PerMicrobatch,
    Reduced,
    State,
    Whole,
    local_value,
)
from autoshard.search.memory.microbatch_body import INDEX, Microbatch, around, dealt, in_loop
from autoshard.search.memory.positions import Scope
from autoshard.search.memory.resized_ops import Resizer
from autoshard.search.memory.statistics import with_statistics_apart
from autoshard.search.memory.written import SCOPE, Written


def microbatched(step: Step, count: int) -> Step:
    """The step that goes through its batch in that many microbatches.

    Args:
      step: the traced step.
      count: of microbatches.

    Returns:
      A step with the same arguments, and results that differ by the order of sums; for one microbatch the same step.

    Raises:
      InputError: the batch is not so many times anything.
      NotSplittableError: examples depend on one another; the message says where.
    """
    if count < 1:
        raise InputError(f"wanted at least 1 microbatch, got {count}")
    return looped(step, count) if count > 1 else step


def looped(step: Step, count: int) -> Step:
    """The same with a loop, be it for one microbatch.

    Raises:
      InputError: the batch is not so many times anything.
      NotSplittableError: examples depend on one another; the message says where.
    """
    graph = _Loop(taken_apart(step, count)).graph()
    verify(graph)
    return replace(step, graph=graph, num_microbatches=count)


def loop_over_microbatches(graph: Graph) -> int:
    """Which op of a step in microbatches is the loop over these."""
    return next(i for i, op in enumerate(graph.ops) if op.name == "scan" and op.scope == SCOPE)


@dataclass(frozen=True, eq=False)
class MicrobatchParts:
    """A step taken apart into what stands before, in and after its loop over microbatches.

    Outside of the body, values have the numbers of the step's graph. In the body, a value that also stands there has its
    number again: there, it is the microbatch's part.

    Attributes:
      split: what the step's values are to the batch.
      before: the ops that make what every microbatch reads, in program order.
      body: what one microbatch runs. Its inputs are `consts`, `index` where that is asked for, and `examples`; its outputs
        `sums`, `alike` and `stacks`.
      after: the ops that run on what the microbatches have made.
      index: in the body, the microbatch's number.
      consts: what the body reads whole.
      examples: of what it reads a microbatch's part.
      sums: what it makes to be added up.
      alike: what every microbatch makes alike.
      stacks: what it makes for each example, or to be reduced over microbatches.
      makers: by value that the body makes for others, the op that makes it in the step.
    """

    split: BatchSplit
    before: tuple[Op, ...]
    body: Graph
    after: tuple[Op, ...]
    index: int | None
    consts: tuple[int, ...]
    examples: tuple[int, ...]
    sums: tuple[int, ...]
    alike: tuple[int, ...]
    stacks: tuple[int, ...]
    makers: Mapping[int, Op]

    @property
    def count(self) -> int:
        """Of microbatches."""
        return self.split.count

    @property
    def graph(self) -> Graph:
        """The step's."""
        return self.split.graph

    def deal(self, v: int) -> Callable[[Any], Any]:
        """A function that gives each microbatch its part of a value: [count, ...]."""
        return partial(dealt, **self._around(v))

    def gather(self, v: int) -> Callable[[Any], Any]:
        """A function that makes a value of all examples from what the microbatches have made: [count, ...]."""
        state, whole = self.split.states[v], self.graph.values[v]
        if isinstance(state, Reduced):
            return partial(_reduced, state.cause)
        return partial(_collected, whole=whole.shape, **self._around(v))

    def begin(self, v: int) -> Callable[[], Any]:
        """A function that makes what a sum begins with."""
        return partial(_zeros, self.body.values[v])

    def _around(self, v: int) -> dict[str, Any]:
        state = self.split.states[v]
        if isinstance(state, PerMicrobatch):
            state = PerExample(state.dim)
        assert isinstance(state, PerExample)
        value = self.graph.values[v]
        shape, dim = around(value, state, self.count)
        return {"shape": shape, "dim": dim, "small": local_value(value, state, self.count).shape}


def taken_apart(step: Step, count: int) -> MicrobatchParts:
    """The step in parts: for a loop over that many microbatches, or to be run in a pipeline.

    Raises:
      InputError: the batch is not so many times anything.
      NotSplittableError: examples depend on one another; the message says where.
    """
    refused: list[NotSplittableError] = []
    for size in _sizes(step, count):
        try:
            return _TakingApart(_split(step, size, count)).run()
        except NotSplittableError as e:
            refused.append(e)
    raise refused[0]


def batch_divisors(step: Step) -> list[int]:
    """Into how many parts the batch divides, in ascending order; none where there is no batch."""
    size = next(iter(_batch_sizes(step)), 0)
    return [n for n in range(1, size + 1) if size % n == 0]


def _batch_sizes(step: Step) -> list[int]:
    """How many examples the batch may have: what most of its arguments, and the largest, begin with, then the others."""
    num_arguments, num_elements = Counter[int](), Counter[int]()
    for _, shape in _batch_arguments(step):
        num_arguments[shape[0]] += 1
        num_elements[shape[0]] += prod(shape)
    return sorted(num_arguments, key=lambda n: (num_arguments[n], num_elements[n]), reverse=True)


def _sizes(step: Step, count: int) -> list[int]:
    """The sizes that the batch may have, of those that are so many times something."""
    sizes = _batch_sizes(step)
    if not sizes:
        raise InputError(
            f"the step {step.name!r} cannot be split into {count} microbatches: no argument is a batch of examples. Wanted "
            "arrays whose first dim is the examples, and which the step does not hand back as its state"
        )
    if sizes[0] % count:
        name = next(a.name for a, shape in _batch_arguments(step) if shape[0] == sizes[0])
        raise InputError(
            f"the batch cannot be split into {count} microbatches: {name} has {sizes[0]} examples, which is not a "
            f"multiple of {count}. Take a divisor of {sizes[0]}, or another batch size"
        )
    return [size for size in sizes if size % count == 0]


def _batch_arguments(step: Step) -> list[tuple[Any, tuple[int, ...]]]:
    """The arguments that may hold examples, with their shapes."""
    values = [step.graph.values[v] for v in step.graph.inputs]
    arguments = zip(step.arguments, values, strict=True)
    return [(a, v.shape) for a, v in arguments if a.role is Role.BATCH and v.shape]


def _split(step: Step, size: int, count: int) -> BatchSplit:
    """What the step's values are to a batch of that size, its statistics written so that they can be combined."""
    states: list[State] = []
    firsts: set[int] = set()
    for v, argument in zip(step.graph.inputs, step.arguments, strict=True):
        value = step.graph.values[v]
        is_batch = argument.role is Role.BATCH and value.shape[:1] == (size,)
        states.append(PerExample(0) if is_batch else WHOLE)
        is_counter = argument.role is Role.STATE and not _jax.is_inexact(value.dtype)
        if argument.role in (Role.BATCH, Role.FROZEN, Role.KEY) or is_counter:
            firsts.add(v)

    def follow(graph: Graph, *, is_strict: bool) -> BatchSplit:
        return batch_split(Scope.of(graph), states, count, frozenset(firsts), is_strict=is_strict)

    try:
        return follow(step.graph, is_strict=True)
    except NotSplittableError:
        apart = with_statistics_apart(step.graph, partial(follow, is_strict=False))
    return follow(apart, is_strict=True)


class _TakingApart:
    """One step's graph, taken apart into what stands before, in and after the loop.

    Attributes:
      outside: the ops that run on all examples, by their places, as they do.
      leaving: the values that come out of the loop.
    """

    def __init__(self, split: BatchSplit) -> None:
        self.split, self.graph = split, split.graph
        self.loops = {split.graph.ops[i] for i in split.inner}
        self.outside: dict[int, Op] = {}
        self.leaving: dict[int, Op] = {}

    def run(self) -> MicrobatchParts:
        self._sort_out()
        if not self.leaving:
            raise NotSplittableError(
                "the step has nothing to run in microbatches: nothing that it returns depends both on examples and on what "
                "is learned. Wanted a training step that takes a batch and hands back its parameters"
            )
        body = Microbatch(self.split, Resizer(), ())
        body.run(self._looped())
        consts, examples = self._of_kind(body.entered, Whole), self._of_kind(body.entered, PerExample)
        leaving = sorted(self.leaving)
        sums, alike = self._of_kind(leaving, Partial), self._of_kind(leaving, Alike)
        stacks = self._of_kind(leaving, PerExample | Reduced | PerMicrobatch)
        index = () if body.index is None else (body.index,)
        before = self._before(consts)
        return MicrobatchParts(
            self.split,
            tuple(_ahead(self.graph.ops[i]) for i in sorted(before)),
            body.graph((*consts, *index, *examples), (*sums, *alike, *stacks)),
            tuple(self.outside[i] for i in sorted(self.outside.keys() - before)),
            body.index,
            consts,
            examples,
            sums,
            alike,
            stacks,
            self.leaving,
        )

    def _of_kind(self, values: Iterable[int], kind: Any) -> tuple[int, ...]:
        return tuple(v for v in values if isinstance(self.split.states[v], kind))

    def _sort_out(self) -> None:
        """What runs outside, and what the loop has to hand out for that."""
        wanted = {*self.graph.made}
        for i, op in reversed(list(enumerate(self.graph.ops))):
            results = [v for v in op.outputs if v in wanted]
            leaving = [v for v in results if self._leaves(v, op, wanted)]
            self.leaving.update(dict.fromkeys(leaving, op))
            if len(leaving) < len(results) or op.name in EFFECTFUL:
                self.outside[i] = self._outside(op, {*results} - {*leaving})
                wanted.update(self.outside[i].operands)

    def _outside(self, op: Op, results: set[int]) -> Op:
        """An op outside of the loop; of a barrier that also holds what is in there, the rest."""
        is_mixed = any(isinstance(s, PerExample | Partial) for s in self.split.read(op))
        if op.name != "optimization_barrier" or not is_mixed:
            return op
        held = [i for i, v in enumerate(op.outputs) if v in results]
        inputs, outputs, values = (
            tuple(each[i] for i in held) for each in (op.inputs, op.outputs, op.result_values)
        )
        return replace(op, inputs=inputs, outputs=outputs, result_values=values)

    def _leaves(self, v: int, op: Op, wanted: set[int]) -> bool:
        """Whether the loop makes a value that is wanted whole."""
        state = self.split.states[v]
        if isinstance(state, PerExample):
            return v not in self.split.firsts
        if isinstance(state, Partial):
            return self._is_finished_late(op, wanted)
        return isinstance(state, Reduced | PerMicrobatch) or (isinstance(state, Alike) and op in self.loops)

    def _is_finished_late(self, op: Op, wanted: set[int]) -> bool:
        """Whether a sum is added up as an op makes it, rather than that be computed of finished sums."""
        sums = [a for a in op.operands if isinstance(self.split.states[a], Partial)]
        is_source = not sums or any(isinstance(s, PerExample) for s in self.split.read(op))
        if is_source or op.bodies or op.name == "optimization_barrier":
            return True
        widths = {self.graph.values[v].itemsize for v in sums}
        width = op.result_values[0].itemsize
        if widths != {width}:
            return max(widths) < width
        held = sum(self.graph.values[v].num_bytes for v in {*sums} - wanted - {*self.leaving})
        return sum(v.num_bytes for v in op.result_values) < held

    def _looped(self) -> list[int]:
        """The ops that run in every microbatch."""
        wanted, found = set(self.leaving), list[int]()
        for i, op in reversed(list(enumerate(self.graph.ops))):
            if not wanted.isdisjoint(op.outputs):
                found.append(i)
                wanted.update(a for a in op.operands if not isinstance(self.split.states[a], Whole))
        return found[::-1]

    def _before(self, entering: Iterable[int]) -> set[int]:
        """The ops that make what the loop reads as a whole."""
        wanted, found = set(entering), set[int]()
        for i, op in reversed(list(enumerate(self.graph.ops))):
            if not wanted.isdisjoint(op.outputs):
                found.add(i)
                wanted.update(op.operands)
        return found


def _ahead(op: Op) -> Op:
    """An op before the loop, which holds the first of the backward phase."""
    bodies = {
        key: tuple(replace(b, ops=tuple(map(_ahead, b.ops))) for b in each) for key, each in op.bodies.items()
    }
    return replace(op, phase=Phase.FORWARD, bodies=bodies)


class _Loop:
    """A step's parts put together, with a loop over microbatches between what is before it and what is after."""

    def __init__(self, parts: MicrobatchParts) -> None:
        self.parts = parts
        self.carried = (*parts.sums, *parts.alike)

    def graph(self) -> Graph:
        """The step's graph in microbatches."""
        parts = self.parts
        written = Written(parts.graph.values)
        written.ops += parts.before
        self._write(written)
        written.ops += parts.after
        return without_dead_ops(replace(parts.graph, values=tuple(written.values), ops=tuple(written.ops)))

    def _write(self, written: Written) -> None:
        """Appends the loop, with what goes in and what comes out."""
        parts = self.parts
        xs = [written.write(parts.deal(v), (v,), None) for v in parts.examples]
        begun = [written.write(parts.begin(v), (), None) for v in self.carried]
        index = [] if parts.index is None else [written.write(self._indices, (), None)]
        stacks = [written.new(self._stack(v)) for v in parts.stacks]
        outputs = (*self.carried, *stacks)
        written.ops.append(
            replace(
                self._scan(len(index) + len(xs)),
                inputs=(*parts.consts, *begun, *index, *xs),
                outputs=outputs,
                result_values=tuple(written.values[v] for v in outputs),
                bodies={"jaxpr": (self._body(),)},
            )
        )
        for v, stack in zip(parts.stacks, stacks, strict=True):
            written.write(parts.gather(v), (stack,), parts.makers[v], v)

    def _body(self) -> Graph:
        """What a microbatch runs, its sums added to those of the ones before as soon as they are made."""
        parts = self.parts
        inner = Written(parts.body.values)
        before = {v: inner.new(inner.values[v]) for v in self.carried}
        sums, added = {*parts.sums}, dict[int, int]()
        for op in parts.body.ops:
            inner.ops.append(op)
            for v in (v for v in op.outputs if v in sums):
                added[v] = inner.write(jax.lax.add, (before[v], v), in_loop(parts.makers[v]))
        num_consts = len(parts.consts)
        inputs = (*parts.consts, *before.values(), *parts.body.inputs[num_consts:])
        outputs = (*(added[v] for v in parts.sums), *parts.alike, *parts.stacks)
        values, ops = tuple(inner.values), tuple(inner.ops)
        return without_dead_ops(Graph(values, inputs, parts.body.constants, ops, outputs))

    def _scan(self, num_xs: int) -> Op:
        """A scan of these numbers of operands and results."""
        parts, written = self.parts, Written(())
        written.write(partial(_counted, parts.count), (), None)
        (op,) = (op for op in written.ops if op.name == "scan")
        counts = len(parts.consts), len(self.carried), num_xs, len(parts.stacks)
        source = next(iter(parts.makers.values())).source_info
        return replace(op, params=_jax.scan_params(op.params, *counts), source_info=source, scope=SCOPE)

    def _indices(self) -> Any:
        return jnp.arange(self.parts.count, dtype=INDEX.dtype)

    def _stack(self, v: int) -> Value:
        """What the loop stacks up of a value."""
        value = self.parts.body.values[v]
        return replace(value, shape=(self.parts.count, *value.shape))


def _collected(
    stack: Any, whole: tuple[int, ...], shape: tuple[int, ...], dim: int, small: tuple[int, ...]
) -> Any:
    """The examples of all microbatches, in their order."""
    assert stack.shape[1:] == small
    apart = jnp.reshape(stack, (shape[dim], *shape[:dim], *shape[dim + 1 :]))
    return jnp.reshape(jnp.moveaxis(apart, 0, dim), whole)


def _reduced(reduction: Op, stack: Any) -> Any:
    """The reduction of the microbatches' reductions."""
    (result,) = _jax.bind(reduction.primitive, [stack], {**reduction.params, "axes": (0,)})
    return result


def _zeros(value: Value) -> Any:
    return jnp.zeros(value.shape, value.dtype)


def _counted(count: int) -> Any:
    """A loop, to begin with."""
    return jax.lax.scan(
        lambda total, x: (total + x, None), jnp.uint32(0), jnp.arange(count, dtype=INDEX.dtype)
    )[0]
