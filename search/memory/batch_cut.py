"""One op, cut along the examples: the factor that carries them, and the effect on sums over them.

The factor rules decide. An operand's dim that carries examples is made of factors; the factor that holds the examples must
be the same for all such operands. If it is parallel, the results carry examples too; if it is summed, they are sums over
examples. Look-ups are exceptions. Their indices count from the batch's first example (`positions` says when that is
harmless), and a scatter adds its sums to an array that must be counted once.

Devices hold runs of neighbours, so no rule splits the dim along which arrays are joined, cut or padded. A microbatch holds
every count-th example. It has its part of each piece if all pieces begin at multiples of that count. (A step may join two
views of a batch, and later separate them.) So here such a dim has a minor factor, the greatest that divides all these
places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import numpy as np
from jax import numpy as jnp

from autoshard.search.ir.factors import Factor, Kind, Rule, rule_for
from autoshard.search.ir.graph import Graph, Op
from autoshard.search.memory.batch_states import BatchSplit, Partial, PerExample, State, is_unsplit
from autoshard.search.memory.positions import own_row

REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})

IDEMPOTENT = {"reduce_max": "max", "reduce_min": "min", "reduce_and": "and", "reduce_or": "or"}
"""Reductions for which repeated elements make no difference, and the ops that reduce two elements."""

_ALL = slice(None)

MOVED: dict[str, slice] = {
    **dict.fromkeys(
        ("broadcast_in_dim", "reshape", "squeeze", "expand_dims", "transpose", "rev", "tile"), _ALL
    ),
    **dict.fromkeys(("copy", "name", "concatenate", "stack", "unstack", "slice", "split"), _ALL),
    **dict.fromkeys(("gather", "dynamic_slice"), slice(0, 1)),
    "dynamic_update_slice": slice(0, 2),
    "select_n": slice(1, None),
}
"""Primitives that move elements, and the operands from which these elements come."""


@dataclass(frozen=True, slots=True)
class OpCut:
    """An op that runs for a microbatch.

    Attributes:
      rule: its factors.
      factor: the one that carries the examples.
      stride: distance of neighbouring examples, in places of the factor.
      own: for a look-up in which each example reads its own row: the first operand's dim of rows, and the indices' column
        that
        holds the row numbers.
    """

    rule: Rule
    factor: int
    stride: int
    own: tuple[int, int] | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the factor."""
        return self.rule.factors[self.factor].kind

    def operand(self, i: int) -> PerExample | None:
        """The place of the examples in an operand, if it carries them."""
        return self._row() if i == 0 and self.own else self._carried(self.rule.operands[i])

    def result(self, r: int) -> PerExample | None:
        """The place of the examples in a result, if it carries them."""
        return self._carried(self.rule.results[r]) or self._row()

    def _row(self) -> PerExample | None:
        return PerExample(self.own[0]) if self.own else None

    def _carried(self, dims: Sequence[tuple[int, ...]]) -> PerExample | None:
        for d, factors in enumerate(dims):
            if self.factor in factors:
                minor = factors[factors.index(self.factor) + 1 :]
                return PerExample(d, self.stride * prod(self.rule.factors[f].size for f in minor))
        return None


def cut_at(rule: Rule, dims: Sequence[tuple[int, ...]], state: PerExample, count: int) -> OpCut | None:
    """The cut of a rule for operands or results with these dims, whose examples are placed so; None if no single factor
    holds them."""
    minor = 1
    for f in reversed(dims[state.dim]):
        stride, size = state.stride // minor, rule.factors[f].size
        if state.stride % minor == 0 and stride and size % (stride * count) == 0:
            return OpCut(rule, f, stride)
        minor *= size
    return None


def rule_of(op: Op, graph: Graph) -> Rule:
    """An op's factors. A microbatch holds every count-th example, which are no neighbours for a window."""
    rule = rule_for(op.name, [graph.value(a) for a in op.inputs], op.result_values, op.params).in_rows
    pieces = _pieces(op.name, op.params)
    return _in_runs(rule, pieces) if pieces else rule


def _pieces(name: str, params: dict[str, Any]) -> dict[int, tuple[int, ...]]:
    """The dims along which an op joins, cuts or pads, each with the places where pieces begin and end, except the ends of
    arrays."""
    if name in ("concatenate", "split"):
        return {params["dimension" if name == "concatenate" else "axis"]: ()}
    if name == "slice":
        strides = params["strides"] or (1,) * len(params["start_indices"])
        places = enumerate(zip(params["start_indices"], params["limit_indices"], strides, strict=True))
        return {d: (start, limit) for d, (start, limit, stride) in places if stride == 1}
    if name == "pad":
        edges = enumerate(params["padding_config"])
        return {d: (abs(low), abs(high)) for d, (low, high, interior) in edges if not interior}
    return {}


def _in_runs(rule: Rule, pieces: dict[int, tuple[int, ...]]) -> Rule:
    """A rule with a parallel minor factor in the dims of these pieces; all their places are multiples of its size."""
    factors = list(rule.factors)
    operands, results = list(map(list, rule.operands)), list(map(list, rule.results))
    arrays = [dims for dims in (*operands, *results) if dims]
    for d, places in pieces.items():
        sizes = {prod(factors[f].size for f in dims[d]) for dims in arrays}
        run = gcd(*places, *sizes)
        if len(sizes) > 1 and run > 1:
            factors.append(Factor(run))
            minor = len(factors) - 1
            for dims in arrays:
                factors.append(Factor(prod(factors[f].size for f in dims[d]) // run, Kind.UNSPLITTABLE))
                dims[d] = (len(factors) - 1, minor)
    made = (tuple(map(tuple, each)) for each in (operands, results))
    return replace(rule, factors=tuple(factors), operands=next(made), results=next(made))


def operand_cut(op: Op, split: BatchSplit) -> OpCut | None:
    """The cut of an op that reads per-example operands; None if there is none."""
    rule, read = rule_of(op, split.graph), split.read(op)
    if (own := _own_rows(op, rule, split)) is not None:
        return own
    cuts = {
        cut_at(rule, rule.operands[i], state, split.count)
        for i, state in enumerate(read)
        if isinstance(state, PerExample)
    }
    cut = cuts.pop()
    if cut is None or cuts or cut.kind is Kind.UNSPLITTABLE or is_looked_up(op, cut):
        return None
    return cut


def _own_rows(op: Op, rule: Rule, split: BatchSplit) -> OpCut | None:
    """The cut of a look-up in which each example reads its own row."""
    if op.name != "gather" and not op.name.startswith("scatter"):
        return None
    row, indices, *_ = split.read(op)
    places = range(len(rule.operands[1]) - 1) if is_unsplit(indices) else _of_neighbours(indices)
    for dim in places if isinstance(row, PerExample) or not is_unsplit(indices) else ():
        own = own_row(op, split.scope, dim)
        if own is not None and (row == PerExample(own[0]) or is_unsplit(row)):
            cut = cut_at(rule, rule.operands[1], PerExample(dim), split.count)
            return None if cut is None else replace(cut, own=own)
    return None


def _of_neighbours(state: State) -> tuple[int, ...]:
    """The dim that carries examples one by one, if any does."""
    return (state.dim,) if isinstance(state, PerExample) and state.stride == 1 else ()


def is_looked_up(op: Op, cut: OpCut) -> bool:
    """True if examples are chosen by indices, which count from the batch's first."""
    if op.name != "gather" and not op.name.startswith("scatter"):
        return False
    numbers = op.params["dimension_numbers"]
    chosen = numbers.start_index_map if op.name == "gather" else numbers.scatter_dims_to_operand_dims
    carried = cut.operand(0)
    return carried is not None and carried.dim in chosen


def is_begun(op: Op, cut: OpCut) -> bool:
    """True if an op adds sums over examples to its first operand."""
    return op.name in ("scatter-add", "scatter-sub") and cut.operand(0) is None


_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated"})
"""Linear in each of the first two operands."""

_LINEAR: dict[str, tuple[int, ...]] = {
    "div": (0,),
    "gather": (0,),
    "dynamic_slice": (0,),
    "dynamic_update_slice": (0, 1),
    "scatter-add": (0, 2),
    "scatter-sub": (0, 2),
}
"""Linear in these operands together."""


def summed_operands(op: Op, split: BatchSplit) -> tuple[int, ...] | None:
    """The operands in which an op of sums is jointly linear; None if it is not linear in all its sums."""
    states = split.read(op)
    partial = tuple(i for i, s in enumerate(states) if isinstance(s, Partial))
    if not all(jnp.issubdtype(v.dtype, np.number) for v in op.result_values):
        return None
    if op.name in _PRODUCTS:
        return partial if partial in ((0,), (1,)) else None
    if op.name == "div" and not jnp.issubdtype(op.result_values[0].dtype, np.inexact):
        return None
    if op.name == "select_n":
        linear = tuple(range(1, len(states)))
    elif rule_of(op, split.graph).is_additive:
        linear = tuple(range(len(states)))
    else:
        linear = _LINEAR.get(op.name, ())
    return linear if set(partial) <= set(linear) else None
