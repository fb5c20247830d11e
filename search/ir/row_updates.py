"""Tables are updated in the rows that the step looks up, where that gives the same numbers.

JAX's gradient of a look-up is as large as the table: zeros, to which a scatter adds the contributions of the batch. The
optimizer then reads and writes every row of the table and of its state. Many optimizers (SGD, Adagrad, row-wise Adagrad)
leave a row as it is where its gradient is zero. Momentum, Adam and weight decay do not.

This pass finds the gradients of look-ups, follows them to the new state through ops that treat each row alone, and derives
that rows without a gradient stay as they are (`row_local`). Then it replaces all of it:

* *Slots.* The ids of all look-ups in the table are sorted. Each id that occurs gets a slot; there are as many slots as ids,
  since shapes are fixed. `rows` holds the id of each slot. Unused slots point behind the table.
* *Sums.* The contributions are added up by slot, so that an id that occurs twice has one gradient, as before.
* *Rows.* The touched rows of the table and its state are gathered, and the ops between gradient and new state run on them.
* *Writes.* The new rows are written over the old ones, in place: the state is donated.

A sum over all rows, as in the norm of all gradients, is taken over the touched rows. Contributions of ids outside of the
table are dropped, or belong to the first or last row, as the look-up's mode says.

The rows that pass through sharding, microbatches and pipelines are ordinary ops, so nothing else knows of this pass. The ids
depend on the inputs alone: a loop over microbatches adds up gradients of rows, not of tables.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Value, verify, without_dead_ops
from autoshard.search.ir.row_local import (
    FOLLOWED,
    Constant,
    Fact,
    Unchanged,
    fact,
    has_rows,
    is_alike_in_all_rows,
    is_row_local,
    of_rows,
    params_of_rows,
    sums_up_rows,
)

ROWS_PER_ID = 2
"""The least number of a table's rows for each id. Derived: an update of all rows passes six times over the table (zeros,
gradient, twice over the table and its state); one of rows passes about twelve times over as many rows as there are ids
(contributions, their sums, gathered and written rows)."""

LEAST_BYTES = 32 << 20
"""The least bytes of such a table. Derived: an update of rows launches about ten more kernels of 6 us; meanwhile an H100
moves 200 MB, six times this size."""


def with_row_updates(graph: Graph, replaces: Sequence[int | None]) -> Graph:
    """The graph with updates of rows where they give the same numbers and move less.

    Args:
      graph: the step's graph, with phases.
      replaces: per output, the input that it replaces in the next step, or None.
    """
    scattered = (op.result_values[0].num_bytes for op in graph.ops if op.name == "scatter-add")
    if max(scattered, default=0) < LEAST_BYTES or not (found := _Finder(graph, replaces).tables()):
        return graph
    rewritten = without_dead_ops(_Rewriter(graph, found).graph())
    verify(rewritten)
    return rewritten


@dataclass(eq=False)
class _UpdatedTable:
    """The gradients of look-ups in one table, and the values that are computed from them row by row.

    Attributes:
      num_rows: rows of the table.
      look_ups: the scatters that make the gradients.
      ops: the row-local ops that depend on them.
      sums: the reductions over rows that read them.
      states: the new values of the table and its state, each with the old one.
      is_open: False if another op reads a gradient, or a row changes without one.
    """

    num_rows: int
    look_ups: list[Op] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    sums: list[Op] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    is_open: bool = True

    def join(self, other: "_UpdatedTable") -> None:
        """Takes over another one's ops."""
        self.look_ups += other.look_ups
        self.ops += other.ops
        self.sums += other.sums
        self.states |= other.states
        self.is_open = self.is_open and other.is_open and self.num_rows == other.num_rows


class _Finder:
    """One walk over the graph, in program order."""

    def __init__(self, graph: Graph, replaces: Sequence[int | None]) -> None:
        self.graph, self.replaces = graph, replaces
        self.maker = {v: op for op in graph.ops for v in op.outputs}
        self.table: dict[int, _UpdatedTable] = {}
        self.facts: dict[int, Fact] = {
            v: Constant(x[()]) for v, x in graph.constants if isinstance(x, np.ndarray) and not x.shape
        }
        self.later: set[int] = set()

    def tables(self) -> list[_UpdatedTable]:
        """The tables that are updated by rows, each with its ops in program order."""
        for op in self.graph.ops:
            self._visit(op)
        for o, v in enumerate(self.graph.outputs):
            if isinstance(v, int) and v in self.table:
                self._leave(o, v)
        place = {op: i for i, op in enumerate(self.graph.ops)}
        found = [table for table in dict.fromkeys(self.table.values()) if table.is_open and self._pays(table)]
        for table in found:
            for ops in (table.look_ups, table.ops, table.sums):
                ops.sort(key=place.__getitem__)
        return found

    def _visit(self, op: Op) -> None:
        read = list(dict.fromkeys(self.table[v] for v in op.operands if v in self.table))
        if not read and self.later.isdisjoint(op.operands):
            if self._is_gradient(op):
                self._add(_UpdatedTable(op.result_values[0].shape[0], [op]), op, self._fact(op.inputs[0]))
            elif isinstance(known := self._number(op), Constant):
                self.facts[op.outputs[0]] = known
            return
        self.later.update(op.outputs)
        if read:
            self._follow(self._joined(read), op)

    def _joined(self, tables: Sequence[_UpdatedTable]) -> _UpdatedTable:
        first, *others = tables
        for other in others:
            first.join(other)
            self.table |= {v: first for v, table in self.table.items() if table is other}
        return first

    def _add(self, table: _UpdatedTable, op: Op, known: Fact) -> None:
        (v,) = op.outputs
        self.table[v], self.facts[v] = table, known
        self.later.add(v)

    def _follow(self, table: _UpdatedTable, op: Op) -> None:
        values = [self.graph.value(a) for a in op.inputs]
        by_rows = [has_rows(value, table.num_rows) for value in values]
        facts = [self._fact(a) for a in op.inputs]
        if is_row_local(op, values, by_rows):
            table.ops.append(op)
            self._add(table, op, fact(op, facts, self._source))
        elif sums_up_rows(op, facts[0]):
            table.sums.append(op)
        else:
            table.is_open = False

    def _is_gradient(self, op: Op) -> bool:
        """True if an op scatters a look-up's contributions, row by row, into zeros."""
        if op.name != "scatter-add" or self._fact(op.inputs[0]) != ZERO:
            return False
        numbers, (table, ids, new) = op.params["dimension_numbers"], map(self.graph.value, op.inputs)
        num_places = len(ids.shape) - 1
        return (
            numbers.inserted_window_dims == numbers.scatter_dims_to_operand_dims == (0,)
            and not numbers.operand_batching_dims
            and tuple(numbers.update_window_dims) == tuple(range(num_places, len(new.shape)))
            and new.shape[num_places:] == table.shape[1:]
            and (ids.dtype.kind == "i" or ids.dtype.itemsize < _INDEX.itemsize)
        )

    def _number(self, op: Op) -> Fact:
        """The number that all elements of an op's result equal, if its operands are such numbers."""
        facts = [self._fact(a) for a in op.inputs]
        is_known = bool(facts) and len(op.outputs) == 1 and all(isinstance(f, Constant) for f in facts)
        return fact(op, facts, self._source) if is_known and op.name in FOLLOWED else None

    def _fact(self, atom: Atom) -> Fact:
        """The fact about an operand, in the rows without gradient; an operand without rows is known if it is a constant."""
        if not isinstance(atom, int):
            return None if np.shape(atom.val) else Constant(np.asarray(atom.val)[()])
        if atom in self.facts:
            return self.facts[atom]
        return Unchanged(atom) if self.graph.values[atom].shape else None

    def _source(self, v: int, dtype: Any) -> int | None:
        """The value of this dtype that a value is, in a wider dtype."""
        op = self.maker.get(v)
        if op is None or op.name != "convert_element_type" or not isinstance(source := op.inputs[0], int):
            return None
        wide = op.result_values[0].dtype
        is_same = self.graph.values[source].dtype == dtype and jnp.promote_types(dtype, wide) == wide
        return source if is_same and _jax.is_inexact(dtype) else None

    def _leave(self, o: int, v: int) -> None:
        """Notes an output. It must replace an input whose rows stay as they are."""
        table, i = self.table[v], self.replaces[o]
        if i is not None and self.facts[v] == Unchanged(self.graph.inputs[i]):
            table.states[v] = self.graph.inputs[i]
        else:
            table.is_open = False

    def _pays(self, table: _UpdatedTable) -> bool:
        num_ids = sum(map(self.num_ids, table.look_ups))
        is_large = max(op.result_values[0].num_bytes for op in table.look_ups) >= LEAST_BYTES
        is_counted = table.num_rows + num_ids <= np.iinfo(_INDEX).max
        return 0 < ROWS_PER_ID * num_ids <= table.num_rows and is_large and is_counted

    def num_ids(self, look_up: Op) -> int:
        """The number of ids of a look-up."""
        return prod(self.graph.value(look_up.inputs[1]).shape[:-1])


ZERO = Constant(0.0)

_INDEX = np.dtype(np.int32)
"""Of ids. JAX has no wider integers by default."""


class _Rewriter:
    """Writes a graph's ops anew, with the updates of some tables by rows."""

    def __init__(self, graph: Graph, tables: Sequence[_UpdatedTable]) -> None:
        self.old = graph
        self.values = list(graph.values)
        self.maker = {v: op for op in graph.ops for v in op.outputs}
        self.instead: dict[Op, list[Op]] = {}
        for table in tables:
            self._rewrite(table)

    def graph(self) -> Graph:
        """The new graph."""
        ops = [new for op in self.old.ops for new in self.instead.get(op, (op,))]
        known = {*self.old.inputs, *(v for v, _ in self.old.constants)}
        return replace(self.old, values=tuple(self.values), ops=tuple(_ordered(ops, known)))

    def _rewrite(self, table: _UpdatedTable) -> None:
        self.instead |= {op: [] for op in (*table.look_ups, *table.ops, *table.sums)}
        first, ids = table.look_ups[0], [op.inputs[1] for op in table.look_ups]
        is_clipped = tuple(op.params["mode"] is lax.GatherScatterMode.CLIP for op in table.look_ups)
        places, *slots = self.spliced(partial(_slots, table.num_rows, is_clipped), ids, first)
        rows = _Rows(self, table.num_rows, places)
        for op, slot in zip(table.look_ups, slots, strict=True):
            whole = of_rows(op.result_values[0], rows.count)
            (rows.known[op.outputs[0]],) = self.spliced(partial(_added_up, whole), (slot, op.inputs[2]), op)
        for op in table.ops:
            rows.apply(op, op)
            (v,) = op.outputs
            if v in table.states:
                self.spliced(_written, (table.states[v], places, rows.known[v]), op, (v,))
        for op in table.sums:
            inputs = tuple(rows.of(a, op) for a in op.inputs)
            self.instead[op].append(replace(op, inputs=inputs))

    def new(self, value: Value) -> int:
        """The number of a new value."""
        self.values.append(value)
        return len(self.values) - 1

    def value(self, atom: Atom) -> Value:
        """The shape and dtype of an operand."""
        return self.values[atom] if isinstance(atom, int) else Value.of(atom.aval)

    def spliced(
        self,
        function: Callable[..., Any],
        operands: Sequence[Atom],
        at: Op,
        outputs: Sequence[int] | None = None,
    ) -> list[int]:
        """Adds the ops of a function of JAX in place of an op, and returns its results.

        Args:
          function: maps operands to a sequence of results.
          operands: values of the graph.
          at: the op whose place, phase, scope and source they take.
          outputs: the numbers of the results; None for new ones.
        """
        shapes = [_jax.abstract_value(v.shape, v.dtype) for v in map(self.value, operands)]
        with _jax.implicit_mesh():
            jaxpr = _jax.open_jaxpr(jax.make_jaxpr(function)(*shapes))
        number: dict[Any, Atom] = dict(zip(jaxpr.invars, operands, strict=True))
        number |= zip(jaxpr.outvars, outputs or (), strict=False)
        for eqn in jaxpr.eqns:
            for var in eqn.outvars:
                number.setdefault(var, self.new(Value.of(var.aval)))
            ((params, _),) = _jax.one_by_one(eqn)
            read = tuple(a if isinstance(a, _jax.Literal) else number[a] for a in eqn.invars)
            self.add(
                at,
                replace(at, primitive=eqn.primitive, params=params, inputs=read),
                [number[v] for v in eqn.outvars],
            )
        return [number[v] for v in jaxpr.outvars]

    def add(self, at: Op, op: Op, outputs: Sequence[int]) -> None:
        """Adds an op with these results in place of another one."""
        values = tuple(self.values[v] for v in outputs)
        self.instead[at].append(replace(op, outputs=tuple(outputs), result_values=values))


@dataclass(eq=False)
class _Rows:
    """The touched rows of arrays.

    Attributes:
      rewriter: collects the ops.
      num_rows: rows of the table.
      places: the value that holds the numbers of the touched rows.
      known: per value, its touched rows.
    """

    rewriter: _Rewriter
    num_rows: int
    places: int
    known: dict[int, int] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of slots."""
        return self.rewriter.values[self.places].shape[0]

    def of(self, atom: Atom, at: Op) -> Atom:
        """The touched rows of an operand, made in place of an op; an operand without rows as it is."""
        if not isinstance(atom, int) or not has_rows(self.rewriter.values[atom], self.num_rows):
            return atom
        if atom not in self.known:
            maker = self.rewriter.maker.get(atom)
            if maker is not None and self._can_apply(maker):
                self.apply(maker, at)
            else:
                (self.known[atom],) = self.rewriter.spliced(_gathered, (atom, self.places), at)
        return self.known[atom]

    def apply(self, op: Op, at: Op) -> None:
        """Applies a row-local op to touched rows, in place of an op."""
        inputs = tuple(self.of(a, at) for a in op.inputs)
        (v,) = op.outputs
        self.known[v] = new = self.rewriter.new(of_rows(op.result_values[0], self.count))
        params = params_of_rows(op, self.count)
        self.rewriter.add(at, replace(op, params=params, inputs=inputs), [new])

    def _can_apply(self, op: Op) -> bool:
        values = [self.rewriter.value(a) for a in op.inputs]
        by_rows = [has_rows(value, self.num_rows) for value in values]
        return is_alike_in_all_rows(op) or (any(by_rows) and is_row_local(op, values, by_rows))


def _ordered(ops: Sequence[Op], known: set[int]) -> list[Op]:
    """The ops in their order, each after the ops that make its operands."""
    maker, ordered = {v: op for op in ops for v in op.outputs}, list[Op]()
    for op in ops:
        waiting = [op]
        while waiting:
            missing = [v for v in waiting[-1].operands if v not in known]
            if missing:
                waiting.append(maker[missing[0]])
                continue
            made = waiting.pop()
            if known.isdisjoint(made.outputs) or not made.outputs:
                ordered.append(made)
                known.update(made.outputs)
    return ordered


# --- the parts of an update by rows


def _slots(num_rows: int, is_clipped: Sequence[bool], *ids: jax.Array) -> tuple[jax.Array, ...]:
    """The numbers of touched rows `[slots, 1]`, ascending, and per look-up the slot of each id `[ids, 1]`.

    There are as many slots as ids. Unused ones stand for rows behind the table. An id outside of the table has no slot
    (the slot behind the last), or that of the first or last row.

    Args:
      num_rows: rows of the table.
      is_clipped: per look-up, whether ids outside of the table count as the first or last row.
      ids: per look-up, of shape [..., 1].
    """
    flat = [lax.reshape(x.astype(_INDEX), (x.size,)) for x in ids]
    inside = [lax.bitwise_and(x >= 0, x < num_rows) for x in flat]
    bounded = [
        lax.clamp(_int(0), x, _int(num_rows - 1)) if clip else lax.select(ok, x, lax.full_like(x, num_rows))
        for x, ok, clip in zip(flat, inside, is_clipped, strict=True)
    ]
    joined = lax.concatenate(bounded, 0) if len(bounded) > 1 else bounded[0]
    count = joined.size
    ordered, origin = lax.sort((joined, lax.iota(_INDEX, count)), num_keys=1)
    is_new = lax.ne(lax.slice(ordered, (1,), (count,)), lax.slice(ordered, (0,), (count - 1,)))
    slot_in_order = lax.cumsum(lax.pad(is_new.astype(_INDEX), _int(0), ((1, 0, 0),)))
    column = partial(lax.reshape, new_sizes=(count, 1))
    behind = lax.iota(_INDEX, count) + _int(num_rows)
    rows = lax.scatter(
        behind, column(slot_in_order), ordered, _numbers(1), indices_are_sorted=True, mode=_DROP
    )
    slots = lax.scatter(
        lax.full_like(origin, 0), column(origin), slot_in_order, _numbers(1), unique_indices=True, mode=_DROP
    )
    found, first = list[jax.Array](), 0
    for ok, clip in zip(inside, is_clipped, strict=True):
        slot = lax.slice(slots, (first,), (first + ok.size,))
        slot = slot if clip else lax.select(ok, slot, lax.full_like(slot, count))
        found.append(lax.reshape(slot, (ok.size, 1)))
        first += ok.size
    return (column(rows), *found)


def _added_up(whole: Value, slots: jax.Array, new: jax.Array) -> tuple[jax.Array]:
    """The sums of contributions, by slot."""
    zeros = lax.full(whole.shape, 0, whole.dtype)
    rows = lax.reshape(new, (slots.shape[0], *whole.shape[1:]))
    return (lax.scatter_add(zeros, slots, rows, _numbers(len(whole.shape)), mode=_DROP),)


def _gathered(table: jax.Array, rows: jax.Array) -> tuple[jax.Array]:
    """Rows of an array; for a row behind it, its last one."""
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(range(1, table.ndim)), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    at, sizes = lax.reshape(rows, (rows.size, 1)), (1, *table.shape[1:])
    clip = lax.GatherScatterMode.CLIP
    return (lax.gather(table, at, numbers, sizes, unique_indices=True, indices_are_sorted=True, mode=clip),)


def _written(table: jax.Array, rows: jax.Array, new: jax.Array) -> tuple[jax.Array]:
    """An array with some rows replaced; rows behind it are dropped."""
    return (
        lax.scatter(
            table, rows, new, _numbers(table.ndim), unique_indices=True, indices_are_sorted=True, mode=_DROP
        ),
    )


_DROP = lax.GatherScatterMode.FILL_OR_DROP


def _int(number: int) -> Any:
    return np.asarray(number, _INDEX)[()]


def _numbers(rank: int) -> lax.ScatterDimensionNumbers:
    """Of a scatter of rows into an array of this rank."""
    return lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, rank)), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
