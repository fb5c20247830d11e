"""A step rewritten to process its batch in microbatches, with one update.

The rewritten step is a step like any other. A `scan` over microbatches adds up gradients (and losses) in its carry; its
inputs are computed before it, and finished sums are read after it. The data alone decides the place of an op
(`batch_split`); phases are no more than names here.

*Before* the loop stand the ops whose results every microbatch reads whole: parameters cast to another type, a count of
tokens. *In* the loop stand all per-example ops, and the sums over examples. *After* the loop stand the other ops, which read
finished sums: a clipped gradient, noise, the update.

A sum may be finished early: the ops that are linear in it then run once, after the loop. Or it is finished late: these ops
run in every microbatch, and the last of their results are added up. Late costs more time, so early is the default. Late is
chosen if it holds fewer bytes in the carry, or adds up in a wider type: gradients that are computed in bfloat16 and then
converted are added up in float32.

A microbatch takes every count-th example, not a run of neighbours. So it takes equally many from each shard of a batch that
is split over devices, and no data moves between them. Per-example results are returned in the batch's order.

Source: GPipe (Huang et al. 2019, section 2) has microbatches whose gradients add up exactly, and says why the statistics of
a batch normalization prevent that; following the batch by factors is ours.
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
from autoshard.cost_model.meshes import divisors
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
from autoshard.search.memory.microbatch_body import INDEX, Microbatch, around, in_loop, in_parts
from autoshard.search.memory.positions import Scope
from autoshard.search.memory.resized_ops import Resizer
from autoshard.search.memory.statistics import with_statistics_apart
from autoshard.search.memory.written import SCOPE, Written


def microbatched(step: Step, count: int) -> Step:
    """The step with its batch split into microbatches.

    Returns:
      A step with the same arguments, and results that differ by the order of sums; for one microbatch the given step.

    Raises:
      InputError: the count is below 1, no argument is a batch, or the count does not divide the batch size.
      NotSplittableError: examples depend on one another; the message says where.
    """
    if count < 1:
        raise InputError(f"wanted at least 1 microbatch, got {count}")
    return looped(step, count) if count > 1 else step


def looped(step: Step, count: int) -> Step:
    """The step with a loop over microbatches, even for a single microbatch.

    Raises:
      InputError: no argument is a batch, or the count does not divide the batch size.
      NotSplittableError: examples depend on one another; the message says where.
    """
    graph = _Loop(taken_apart(step, count)).graph()
    verify(graph)
    return replace(step, graph=graph, num_microbatches=count)


def loop_over_microbatches(graph: Graph) -> int:
    """The index of a step's loop over microbatches, among the graph's ops."""
    return next(i for i, op in enumerate(graph.ops) if op.name == "scan" and op.scope == SCOPE)


@dataclass(frozen=True, eq=False)
class MicrobatchParts:
    """A step separated into the ops before, in and after its loop over microbatches.

    Outside of the body, values have the numbers of the step's graph. In the body, such a number stands for the microbatch's
    part of the value.

    Attributes:
      split: the states of the step's values.
      before: the ops that make the values which every microbatch reads, in program order.
      body: the graph of one microbatch. Its inputs are `consts`, `index` if there is one, and `examples`; its outputs are
        `sums`,
        `alike` and `stacks`.
      after: the ops that read the microbatches' results.
      index: in the body, the microbatch's number.
      consts: the values that the body reads whole.
      examples: the values of which the body reads a microbatch's part.
      sums: the body's results that are added up.
      alike: the body's results that are equal in every microbatch.
      stacks: the body's results that are per example, per microbatch, or reduced over microbatches.
      makers: by result of the body, the op of the step that makes it.
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
        """Number of microbatches."""
        return self.split.count

    @property
    def graph(self) -> Graph:
        """The step's graph."""
        return self.split.graph

    def deal(self, v: int) -> Callable[[Any], Any]:
        """A function from a value to the parts of all microbatches: [count, ...]."""
        return partial(in_parts, **self._around(v))

    def gather(self, v: int) -> Callable[[Any], Any]:
        """A function from the results of all microbatches, [count, ...], to the value for the whole batch."""
        state, whole = self.split.states[v], self.graph.values[v]
        if isinstance(state, Reduced):
            return partial(_reduced, state.cause)
        return partial(_collected, whole=whole.shape, **self._around(v))

    def begin(self, v: int) -> Callable[[], Any]:
        """A function that makes the zeros with which a sum begins."""
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
    """The step in parts, for a loop over that many microbatches or for a pipeline.

    Raises:
      InputError: no argument is a batch, or the count does not divide the batch size.
      NotSplittableError: examples depend on one another; the message says where.
    """
    sizes, refused = _sizes(step, count), list[NotSplittableError]()
    for size in sizes:
        try:
            return _TakingApart(_split(step, size, count)).run()
        except NotSplittableError as e:
            refused.append(e)
    raise _refusal(step, sizes[0], count, refused[0])


def _refusal(step: Step, size: int, count: int, refused: NotSplittableError) -> NotSplittableError:
    """The error for a batch of that size. A batch of one example, and a step that takes its examples in groups, are refused
    for that reason instead of an op."""
    if size == 1:
        return NotSplittableError(
            f"the step cannot be split into microbatches: {_batch_name(step, size)} has 1 example. Take a larger batch, or "
            "leave this one in one piece"
        )
    for other in _primes(size) if count > 1 else ():
        if other != count and _is_splittable(step, size, other):
            return NotSplittableError(
                f"the step cannot be split into {count} microbatches, but into {other}: {refused.at or 'it'} takes the "
                f"examples in groups, which {count} microbatches do not divide. Take microbatches={other}",
                at=refused.at,
                other=other,
            )
    return refused


def _is_splittable(step: Step, size: int, count: int) -> bool:
    """True if the step can be split into so many microbatches of a batch of that size."""
    try:
        _TakingApart(_split(step, size, count)).run()
    except NotSplittableError:
        return False
    return True


def _primes(number: int) -> list[int]:
    """The prime divisors of a number. If a step can be split into several microbatches, it can be into a prime number."""
    return [n for n in divisors(number) if len(divisors(n)) == 2]


def batch_divisors(step: Step) -> list[int]:
    """The numbers of equal parts into which the batch can be split, in ascending order; none if there is no batch."""
    return divisors(next(iter(_batch_sizes(step)), 0))


def batch_halvings(step: Step) -> list[int]:
    """The batch's size, its half, the half of that, while they are whole; 1 if there is no batch."""
    size = max(1, next(iter(_batch_sizes(step)), 1))
    return [size // 2**k for k in range(size.bit_length()) if size % 2**k == 0]


def _batch_sizes(step: Step) -> list[int]:
    """Candidates for the number of examples: the first dims of batch arguments, the most frequent first, then those with the
    most elements."""
    num_arguments, num_elements = Counter[int](), Counter[int]()
    for _, shape in _batch_arguments(step):
        num_arguments[shape[0]] += 1
        num_elements[shape[0]] += prod(shape)
    return sorted(num_arguments, key=lambda n: (num_arguments[n], num_elements[n]), reverse=True)


def _sizes(step: Step, count: int) -> list[int]:
    """The candidates for the number of examples that the count divides."""
    sizes = _batch_sizes(step)
    if not sizes:
        raise InputError(
            f"the step {step.name!r} cannot be split into {count} microbatches: no argument is a batch of examples. Wanted "
            "arrays whose first dim is the examples, and which the step does not hand back as its state"
        )
    if sizes[0] % count:
        examples = "1 example" if sizes[0] == 1 else f"{sizes[0]} examples"
        remedy = "a larger batch" if sizes[0] == 1 else f"a divisor of {sizes[0]}, or another batch size"
        raise InputError(
            f"the batch cannot be split into {count} microbatches: {_batch_name(step, sizes[0])} has {examples}, which is "
            f"not a multiple of {count}. Take {remedy}"
        )
    return [size for size in sizes if size % count == 0]


def _batch_name(step: Step, size: int) -> str:
    """The first argument of so many examples."""
    return next(a.name for a, shape in _batch_arguments(step) if shape[0] == size)


def _batch_arguments(step: Step) -> list[tuple[Any, tuple[int, ...]]]:
    """The arguments that may hold examples, with their shapes."""
    values = [step.graph.values[v] for v in step.graph.inputs]
    arguments = zip(step.arguments, values, strict=True)
    return [(a, v.shape) for a, v in arguments if a.role is Role.BATCH and v.shape]


def _split(step: Step, size: int, count: int) -> BatchSplit:
    """The states of the step's values for a batch of that size; statistics are rewritten so that they can be combined, if
    need be."""
    states: list[State] = []
    firsts: set[int] = set()
    for v, argument in step.inputs:
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
    """Separates a step's graph into the ops before, in and after the loop.

    Attributes:
      outside: the ops that run outside of the loop, by their places.
      leaving: the values that come out of the loop, each with the op that makes it.
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
        """Finds the ops outside of the loop, and the values that the loop returns to them."""
        wanted = {*self.graph.made}
        for i, op in reversed(list(enumerate(self.graph.ops))):
            results = [v for v in op.outputs if v in wanted]
            leaving = [v for v in results if self._leaves(v, op, wanted)]
            self.leaving.update(dict.fromkeys(leaving, op))
            if len(leaving) < len(results) or op.name in EFFECTFUL:
                self.outside[i] = self._outside(op, {*results} - {*leaving})
                wanted.update(self.outside[i].operands)

    def _outside(self, op: Op, results: set[int]) -> Op:
        """An op outside of the loop. A barrier that also holds values of the loop is reduced to the others."""
        is_mixed = any(isinstance(s, PerExample | Partial) for s in self.split.read(op))
        if op.name != "optimization_barrier" or not is_mixed:
            return op
        held = [i for i, v in enumerate(op.outputs) if v in results]
        inputs, outputs, values = (
            tuple(each[i] for i in held) for each in (op.inputs, op.outputs, op.result_values)
        )
        return replace(op, inputs=inputs, outputs=outputs, result_values=values)

    def _leaves(self, v: int, op: Op, wanted: set[int]) -> bool:
        """True if the loop returns a value that ops outside of it read."""
        state = self.split.states[v]
        if isinstance(state, PerExample):
            return v not in self.split.firsts
        if isinstance(state, Partial):
            return self._is_finished_late(op, wanted)
        return isinstance(state, Reduced | PerMicrobatch) or (isinstance(state, Alike) and op in self.loops)

    def _is_finished_late(self, op: Op, wanted: set[int]) -> bool:
        """True if the loop adds up an op's result; False if the op runs after the loop, on finished sums."""
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
        """The ops that make the values which the loop reads whole."""
        wanted, found = set(entering), set[int]()
        for i, op in reversed(list(enumerate(self.graph.ops))):
            if not wanted.isdisjoint(op.outputs):
                found.add(i)
                wanted.update(op.operands)
        return found


def _ahead(op: Op) -> Op:
    """An op before the loop, moved to the forward phase, as the loop holds the first ops of the backward phase."""
    return replace(op.with_bodies(lambda body: body.with_ops(_ahead)), phase=Phase.FORWARD)


class _Loop:
    """Joins a step's parts, with a loop over microbatches between those before it and those after it."""

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
        """Appends the loop, the ops that make its operands and the ops that read its stacks."""
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
        """The body of a microbatch; each of its sums is added to the carry as soon as it is made."""
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
        """A scan of the parts, with that number of sliced operands."""
        parts, written = self.parts, Written(())
        written.write(partial(_counted, parts.count), (), None)
        (op,) = (op for op in written.ops if op.name == "scan")
        counts = len(parts.consts), len(self.carried), num_xs, len(parts.stacks)
        source = next(iter(parts.makers.values())).source_info
        return replace(op, params=_jax.scan_params(op.params, *counts), source_info=source, scope=SCOPE)

    def _indices(self) -> Any:
        return jnp.arange(self.parts.count, dtype=INDEX.dtype)

    def _stack(self, v: int) -> Value:
        """The type of the loop's stack of a value."""
        value = self.parts.body.values[v]
        return replace(value, shape=(self.parts.count, *value.shape))


def _collected(
    stack: Any, whole: tuple[int, ...], shape: tuple[int, ...], dim: int, small: tuple[int, ...]
) -> Any:
    """The examples of all microbatches, in the batch's order."""
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
    """A scan to start from; its operands and its body are replaced."""
    return jax.lax.scan(
        lambda total, x: (total + x, None), jnp.uint32(0), jnp.arange(count, dtype=INDEX.dtype)
    )[0]
