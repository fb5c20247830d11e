"""The graph of one microbatch: a step's ops, made for fewer examples.

Values keep their numbers: in the body, a number stands for the microbatch's part. Whole values come in from outside. A
per-example op may read one at a dim of the examples (the zeros that a gradient begins with, a mask that is alike for all).
Then the microbatch needs its part of that value too. The part is computed like the whole, but smaller, as far back as each
element depends on its own place's elements alone. Beyond that, the part is cut from the whole. Large values made from little
data (random bits from a key) are made inside the loop and cut there, behind a barrier that depends on the microbatch's
number. Otherwise the compiler would make them once and keep all of them.

A sum that begins with a whole value gets that value in the first microbatch, and zero in the others.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import EFFECTFUL, Atom, Graph, Op, Phase, Value, without_dead_ops
from autoshard.search.memory.batch_cut import (
    OpCut,
    cut_at,
    is_begun,
    is_looked_up,
    operand_cut,
    rule_of,
    summed_operands,
)
from autoshard.search.memory.batch_states import (
    WHOLE,
    BatchSplit,
    NotSplittableError,
    Partial,
    PerExample,
    PerMicrobatch,
    Reduced,
    State,
    Whole,
    is_unsplit,
    local_value,
    stacked,
)
from autoshard.search.memory.resized_ops import Resizer
from autoshard.search.memory.written import Written

INDEX = Value((), np.dtype(np.uint32))
"""The type of a microbatch's number."""


def around(value: Value, state: PerExample, count: int) -> tuple[tuple[int, ...], int]:
    """A value's shape with the microbatches as a dim of their own, and the index of that dim."""
    size = value.shape[state.dim] // (count * state.stride)
    dims = (size, count) if state.stride == 1 else (size, count, state.stride)
    return (*value.shape[: state.dim], *dims, *value.shape[state.dim + 1 :]), state.dim + 1


def in_parts(examples: Any, shape: tuple[int, ...], dim: int, small: tuple[int, ...]) -> Any:
    """Each microbatch's examples: [count, ...]."""
    return jnp.reshape(jnp.moveaxis(jnp.reshape(examples, shape), dim, 0), (shape[dim], *small))


def is_derived(op: Op, cut: OpCut, split: BatchSplit) -> bool:
    """Whether each part of an op's results can be made from parts of its operands."""
    r = [cut.result(r) for r in range(len(op.outputs))]
    return (
        cut.kind is Kind.PARALLEL
        and None not in r
        and all(map(is_unsplit, split.read(op)))
        and not (op.bodies or op.name in EFFECTFUL or op.name.startswith(("random_", "rng_", "iota_2x32")))
        and not (op.name == "iota" and r[0] == PerExample(op.params["dimension"], cut.stride))
        and not is_looked_up(op, cut)
    )


class Microbatch:
    """Writes one graph as a microbatch runs it.

    Attributes:
      split: the states of the graph's values.
      present: the values that are available.
      entered: the whole values that come from outside, in the order of their first use.
      index: the microbatch's number; None until an op needs it.
    """

    def __init__(self, split: BatchSplit, resizer: Resizer, present: Iterable[int]) -> None:
        graph, self.count = split.graph, split.count
        values = list(graph.values)
        for v, state in split.states.items():
            values[v] = local_value(values[v], state, self.count)
        self.split, self.resizer, self.written = split, resizer, Written(values)
        self.present = {*present, *(v for v, _ in graph.constants)}
        self.entered: dict[int, None] = {}
        self.index: int | None = None
        self._parts: dict[tuple[int, PerExample], Atom] = {}
        self._once: dict[int, Atom] = {}
        self._generated: dict[int, int] = {}

    def run(self, ops: Iterable[int]) -> None:
        """Writes these ops, by their places in the graph, in program order."""
        for i in ops:
            op = self.split.graph.ops[i]
            read = self.split.read(op)
            if i in self.split.inner:
                op = self._control_flow(op, self.split.inner[i])
            elif not all(map(is_unsplit, read)):
                op = self._for_fewer(op, read)
            else:
                op = replace(op, inputs=tuple(map(self._whole, op.inputs)))
            is_first = [isinstance(self.split.states[v], Whole) for v in op.outputs]
            if any(is_first) and not all(map(is_unsplit, read)):
                op = self._without(op, is_first)
            self.written.ops.append(in_loop(op))
            self.present.update(op.outputs)

    def _without(self, op: Op, is_first: Sequence[bool]) -> Op:
        """An op of which some results are made before the loop, from all examples; here, these results are new values."""
        outputs = zip(op.outputs, is_first, strict=True)
        return replace(
            op,
            outputs=tuple(self.written.new(self.written.values[v]) if first else v for v, first in outputs),
        )

    def graph(self, inputs: Sequence[int], outputs: Sequence[Atom]) -> Graph:
        """The body."""
        values, ops = tuple(self.written.values), tuple(self.written.ops)
        return without_dead_ops(Graph(values, tuple(inputs), self.split.graph.constants, ops, tuple(outputs)))

    def asked_index(self) -> int:
        """The microbatch's number, as a value."""
        if self.index is None:
            self.index = self.written.new(INDEX)
        return self.index

    # --- operands

    def read(self, atom: Atom, wanted: State | None) -> Atom:
        """An operand, converted to the state in which an op reads it."""
        state = self.split.state(atom)
        if isinstance(wanted, PerMicrobatch):
            wanted = PerExample(wanted.dim)
        if isinstance(wanted, PerExample) and is_unsplit(state):
            assert isinstance(atom, int)
            return self._part(atom, wanted)
        if isinstance(wanted, Partial) and is_unsplit(state) and not self.split.is_zero(atom):
            return self._in_the_first(atom)
        return self._whole(atom)

    def _whole(self, atom: Atom) -> Atom:
        if isinstance(atom, int) and atom not in self.present:
            self.entered[atom] = None
            self.present.add(atom)
        return atom

    def _part(self, v: int, wanted: PerExample) -> Atom:
        """A microbatch's part of a whole value."""
        if (v, wanted) not in self._parts:
            op = self.split.scope.maker.get(v)
            cut = None if op is None else self._cut_of_result(op, op.outputs.index(v), wanted)
            if op is not None and cut is not None:
                self._derive(op, cut)
            else:
                self._parts[v, wanted] = self._taken(v, wanted)
        return self._parts[v, wanted]

    def _cut_of_result(self, op: Op, r: int, wanted: PerExample) -> OpCut | None:
        rule = rule_of(op, self.split.graph)
        cut = cut_at(rule, rule.results[r], wanted, self.count)
        return cut if cut is not None and is_derived(op, cut, self.split) else None

    def _derive(self, op: Op, cut: OpCut) -> None:
        """Makes an op's results for this microbatch."""
        carried = [cut.result(r) for r in range(len(op.outputs))]
        values = tuple(
            local_value(v, state, self.count)
            for v, state in zip(op.result_values, carried, strict=True)
            if state
        )
        small = self._resized(
            op, [cut.operand(i) if isinstance(a, int) else None for i, a in enumerate(op.inputs)], values
        )
        outputs = tuple(map(self.written.new, values))
        self.written.ops.append(in_loop(replace(small, outputs=outputs)))
        for v, state, part in zip(op.outputs, carried, outputs, strict=True):
            assert state is not None
            self._parts[v, state] = part

    def _taken(self, v: int, wanted: PerExample) -> Atom:
        """The part cut from a whole value, which comes from outside or is made here."""
        op = self.split.scope.maker.get(v)
        whole = self._made_here(op, v) if op is not None and self._is_generated(op) else self._whole(v)
        value = self.split.graph.values[v]
        shape, dim = around(value, wanted, self.count)
        small = local_value(value, wanted, self.count).shape
        take = partial(_part_of, shape=shape, dim=dim, small=small)
        return self.written.write(take, (whole, self.asked_index()), op and in_loop(op))

    def _is_generated(self, op: Op) -> bool:
        """True if an op makes much data from little, and depends on no example."""
        num_bytes = sum(self.split.graph.value(a).num_bytes for a in op.inputs)
        return (
            all(map(is_unsplit, self.split.read(op)))
            and not op.bodies
            and op.name not in EFFECTFUL
            and self.count * num_bytes < sum(v.num_bytes for v in op.result_values)
        )

    def _made_here(self, op: Op, v: int) -> int:
        if v not in self._generated:
            inputs = tuple(self._whole(a) for a in op.inputs)
            held = tuple(a for a in inputs if isinstance(a, int))
            if held:
                through = dict(zip(held, self._behind_the_index(held, op), strict=False))
                inputs = tuple(through[a] if isinstance(a, int) else a for a in inputs)
            outputs = tuple(map(self.written.new, op.result_values))
            self.written.ops.append(in_loop(replace(op, inputs=inputs, outputs=outputs)))
            self._generated.update(zip(op.outputs, outputs, strict=True))
        return self._generated[v]

    def _behind_the_index(self, held: tuple[int, ...], like: Op) -> tuple[int, ...]:
        """Values behind a barrier with the microbatch's number."""
        inputs = (*held, self.asked_index())
        values = tuple(self.written.values[v] for v in inputs)
        outputs = tuple(map(self.written.new, values))
        phase, source = in_loop(like).phase, like.source_info
        self.written.ops.append(
            Op(
                _jax.optimization_barrier_p,
                {},
                inputs,
                outputs,
                values,
                phase,
                like.scope,
                source,
                {},
                like.equivalence,
            )
        )
        return outputs

    def _in_the_first(self, atom: Atom) -> Atom:
        """A whole value in the first microbatch, zero in the others."""
        if not isinstance(atom, int):
            whole = np.asarray(atom.val, atom.aval.dtype)[()]
            return self.written.write(partial(_first, whole), (self.asked_index(),), None)
        if atom not in self._once:
            self._whole(atom)
            self._once[atom] = self.written.write(_first, (atom, self.asked_index()), None)
        return self._once[atom]

    # --- ops

    def _wanted(self, op: Op, read: Sequence[State], cut: OpCut | None) -> list[State | None]:
        """The states in which an op that depends on examples reads its operands; None for a whole operand."""
        if op.name == "optimization_barrier":
            return list(read)
        if any(isinstance(s, Reduced) for s in read):
            return [None] * len(read)
        if cut is not None:
            wanted: list[State | None] = [cut.operand(i) for i in range(len(read))]
            if is_begun(op, cut):
                wanted[0] = Partial(op)
            return wanted
        linear = summed_operands(op, self.split) or ()
        return [Partial(op) if i in linear else None for i in range(len(read))]

    def _for_fewer(self, op: Op, read: Sequence[State]) -> Op:
        is_cut = op.name != "optimization_barrier" and any(isinstance(s, PerExample) for s in read)
        cut = operand_cut(op, self.split) if is_cut else None
        results = tuple(self.written.values[v] for v in op.outputs)
        small = self._resized(op, self._wanted(op, read, cut), results)
        return small if cut is None or cut.own is None else self._in_own_rows(small, cut.own[1])

    def _in_own_rows(self, op: Op, column: int) -> Op:
        """A look-up in the microbatch's rows, by their numbers in the microbatch."""
        row, indices, *others = op.inputs
        assert isinstance(indices, int)
        own = self.written.write(partial(_divided, self.count, column), (indices,), op)
        return replace(op, inputs=(row, own, *others))

    def _resized(self, op: Op, wanted: Sequence[State | None], results: tuple[Value, ...]) -> Op:
        inputs = tuple(self.read(a, s) for a, s in zip(op.inputs, wanted, strict=True))
        was = [self.split.graph.value(a) for a in op.inputs]
        now = [self.written.values[a] if isinstance(a, int) else Value.of(a.aval) for a in inputs]
        small = self.resizer.resized(op, inputs, (was, now), results)
        if small is None:
            raise NotSplittableError(
                f"the step cannot be split into microbatches: {op.name} {op.where} has the batch's size among its "
                "parameters, and no rule says how to make it smaller. Leave such a step in one piece, or write this op "
                "in terms of others",
                at=f"{op.name} {op.where}",
            )
        return small

    # --- control flow

    def _control_flow(self, op: Op, inner: dict[str, tuple[BatchSplit, ...]]) -> Op:
        bodies = {key: tuple(map(self._body, splits)) for key, splits in inner.items()}
        inputs = tuple(self.read(a, s) for a, s in zip(op.inputs, _entering(op, inner), strict=True))
        takes_index = any(body.index is not None for each in bodies.values() for body, _ in each)
        if takes_index:
            op, inputs = _with_index(op, inputs, self.asked_index())
        graphs = {
            key: tuple(body.whole_graph(outputs, takes_index) for body, outputs in each)
            for key, each in bodies.items()
        }
        results = tuple(self.written.values[v] for v in op.outputs)
        return replace(op, inputs=inputs, result_values=results, bodies=graphs)

    def _body(self, split: BatchSplit) -> "tuple[Microbatch, tuple[Atom, ...]]":
        """A body for one microbatch, and its outputs."""
        body = Microbatch(split, self.resizer, split.graph.inputs)
        body.run(range(len(split.graph.ops)))
        outputs = zip(split.graph.outputs, split.wanted, strict=True)
        return body, tuple(body.read(a, wanted) for a, wanted in outputs)

    def whole_graph(self, outputs: Sequence[Atom], takes_index: bool) -> Graph:
        """A complete body, with the microbatch's number ahead of its inputs, if it takes that."""
        index = (self.asked_index(),) if takes_index else ()
        return self.graph((*index, *self.split.graph.inputs), outputs)


def _part_of(whole: Any, index: Any, shape: tuple[int, ...], dim: int, small: tuple[int, ...]) -> Any:
    parts = jnp.reshape(whole, shape)
    return jnp.reshape(jax.lax.dynamic_slice_in_dim(parts, index, 1, dim), small)


def _divided(count: int, column: int, indices: Any) -> Any:
    """Indices of which one column is divided by the count, rounded down; no index is negative."""
    places = jax.lax.broadcasted_iota(np.int32, indices.shape, indices.ndim - 1)
    return jax.lax.div(indices, jnp.where(places == column, count, 1).astype(indices.dtype))


def _first(whole: Any, index: Any) -> Any:
    return jnp.where(index == 0, whole, jnp.zeros_like(whole))


def _entering(op: Op, inner: dict[str, tuple[BatchSplit, ...]]) -> list[State]:
    """The states in which an op's bodies read its operands."""
    if op.name == "scan":
        states = inner["jaxpr"][0].entering
        first_x = sum(op.loop_counts)
        return [*states[:first_x], *map(stacked, states[first_x:])]
    if op.name == "while":
        (condition,), (body,) = inner["cond_jaxpr"], inner["body_jaxpr"]
        return [*condition.entering[: op.params["cond_nconsts"]], *body.entering]
    return [WHOLE, *inner["branches"][0].entering]


def _with_index(op: Op, inputs: tuple[Atom, ...], index: int) -> tuple[Op, tuple[Atom, ...]]:
    """A loop or a conditional that passes the microbatch's number to its bodies, as their first operand."""
    if op.name == "scan":
        num_consts, num_carry = op.loop_counts
        num_xs, num_ys = len(op.inputs) - num_consts - num_carry, len(op.outputs) - num_carry
        params = _jax.scan_params(op.params, num_consts + 1, num_carry, num_xs, num_ys)
        return replace(op, params=params), (index, *inputs)
    if op.name == "while":
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        params = {**op.params, "cond_nconsts": num_cond + 1, "body_nconsts": num_body + 1}
        entering = (index, *inputs[:num_cond], index, *inputs[num_cond:])
        return replace(op, params=params), entering
    return op, (inputs[0], index, *inputs[1:])


def in_loop(op: Op) -> Op:
    """An op in the loop over microbatches, which holds the forward and the backward phase: an update becomes backward."""
    if op.phase is not Phase.UPDATE:
        return op
    return replace(op.with_bodies(lambda body: body.with_ops(in_loop)), phase=Phase.BACKWARD)
