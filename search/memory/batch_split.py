"""Which values of a step belong to single examples, which are sums over examples, and which neither.

A step that runs in microbatches must give the same numbers. So the batch is followed from the arguments through the graph,
by the factors of every op. Each value is one of:

* `Whole`: it depends on no example (parameters, keys), or on the inputs alone and is needed in one piece (a count of tokens,
  which divides each example's loss): then it is computed before the microbatches, from the whole batch;
* `PerExample`: one of its dims carries the examples; each microbatch makes its part;
* `Partial`: a sum over examples, or something linear in such sums: a microbatch's contributions add up (gradients, losses);
* `Reduced`: a maximum or the like over examples; the reduction over microbatches ends it;
* `Alike`: it depends on no example, but an op makes it that also makes others that do; each microbatch makes it;
* `Finished`: made of sums or reductions in another way than linearly; computed after the last microbatch.

Where something for each example reads what is finished (the statistics of a batch normalization, the other examples of a
contrastive loss), or an op can do with nothing less than all examples, the step is not splittable.

A microbatch takes every count-th example. So a dim that carries examples is read as three, of which the middle one has the
size of that count: places apart by `stride` belong to neighbouring examples. That says all: dims that a reshape has merged
or cut stay followed, and where a step cuts the batch itself, each of its parts is cut in turn.

The bodies of loops are analysed likewise, carries until nothing changes; nothing can be finished inside.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
from jax import numpy as jnp

from cost_model.errors import InputError
from search.ir.factors import Kind, Rule, rule_for
from search.ir.graph import EFFECTFUL, Atom, Graph, Op, Value
from search.memory.positions import own_row


class NotSplittableError(InputError):
    """A step whose examples depend on one another: in microbatches, its numbers would be others."""


@dataclass(frozen=True, slots=True)
class Whole:
    """It depends on no example, or is computed before the microbatches."""


@dataclass(frozen=True, slots=True)
class Alike:
    """Every microbatch makes the same."""


@dataclass(frozen=True, slots=True)
class PerExample:
    """The dim that carries the examples, and how many places apart in it neighbouring examples are."""

    dim: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Partial:
    """A sum over examples, and the op that sums."""

    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class Reduced:
    """A maximum, a minimum, a product, or truth of all or any, over examples."""

    cause: Op = field(compare=False)


@dataclass(frozen=True, slots=True)
class Finished:
    """It takes all examples at once, because of an op."""

    cause: Op = field(compare=False)


State = Whole | Alike | PerExample | Partial | Reduced | Finished
WHOLE, ALIKE = Whole(), Alike()

REDUCTIONS = frozenset({"reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"})


@dataclass(frozen=True, eq=False)
class BatchSplit:
    """What each value of a graph is.

    Attributes:
      graph: the graph.
      count: of microbatches.
      maker: by value, the op that makes it.
      states: by value.
      firsts: the values that depend on the batch and other inputs alone, not on what is learned.
      zeros: the values that are zero.
      wanted: what each output has to be: of a loop's carry that is a sum, a `Partial` also where it is `Whole`.
      inner: by op with bodies, their own splits.
    """

    graph: Graph
    count: int
    maker: dict[int, Op]
    states: dict[int, State]
    firsts: set[int]
    zeros: set[int]
    wanted: tuple[State, ...]
    inner: dict[int, dict[str, tuple["BatchSplit", ...]]]

    @property
    def entering(self) -> list[State]:
        """What the graph's inputs are."""
        return [self.states[v] for v in self.graph.inputs]

    def state(self, atom: Atom) -> State:
        """What an operand is."""
        return self.states[atom] if isinstance(atom, int) else WHOLE

    def read(self, op: Op) -> list[State]:
        """What an op's operands are."""
        return [self.state(a) for a in op.inputs]

    def is_zero(self, atom: Atom) -> bool:
        """Whether an operand is zero."""
        return atom in self.zeros if isinstance(atom, int) else not np.any(atom.val)


def is_unsplit(state: State) -> bool:
    """Whether it depends on no example."""
    return isinstance(state, Whole | Alike)


def local_value(value: Value, state: State, count: int) -> Value:
    """A microbatch's part of a value."""
    if not isinstance(state, PerExample):
        return value
    shape = list(value.shape)
    shape[state.dim] //= count
    return replace(value, shape=tuple(shape))


# --- one op


@dataclass(frozen=True, slots=True)
class Cut:
    """An op that runs for a microbatch.

    Attributes:
      rule: its factors.
      factor: which of them carries the examples.
      stride: how many places of the factor neighbouring examples are apart.
      own: where each example looks up its own row: the first operand's dim of rows, and the indices' column that says them.
    """

    rule: Rule
    factor: int
    stride: int
    own: tuple[int, int] | None = None

    @property
    def kind(self) -> Kind:
        """The factor's."""
        return self.rule.factors[self.factor].kind

    def operand(self, i: int) -> PerExample | None:
        """How an operand carries the examples, if it does."""
        return self._row() if i == 0 and self.own else self._carried(self.rule.operands[i])

    def result(self, r: int) -> PerExample | None:
        """How a result carries the examples, if it does."""
        return self._carried(self.rule.results[r]) or self._row()

    def _row(self) -> PerExample | None:
        return PerExample(self.own[0]) if self.own else None

    def _carried(self, dims: Sequence[tuple[int, ...]]) -> PerExample | None:
        for d, factors in enumerate(dims):
            if self.factor in factors:
                minor = factors[factors.index(self.factor) + 1 :]
                return PerExample(d, self.stride * prod(self.rule.factors[f].size for f in minor))
        return None


def cut_at(rule: Rule, dims: Sequence[tuple[int, ...]], state: PerExample, count: int) -> Cut | None:
    """The cut of a rule that cuts these dims so; None where the examples are in no single factor."""
    minor = 1
    for f in reversed(dims[state.dim]):
        stride, size = state.stride // minor, rule.factors[f].size
        if state.stride % minor == 0 and stride and size % (stride * count) == 0:
            return Cut(rule, f, stride)
        minor *= size
    return None


def rule_of(op: Op, graph: Graph) -> Rule:
    """An op's factors."""
    return rule_for(op.name, [graph.value(a) for a in op.inputs], op.result_values, op.params)


def operand_cut(op: Op, split: BatchSplit) -> Cut | None:
    """How an op is cut that reads something for each example; None where it cannot be."""
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


def _own_rows(op: Op, rule: Rule, split: BatchSplit) -> Cut | None:
    """The cut of a look-up in which each example finds its own row."""
    if op.name not in ("gather", "scatter-add", "scatter-sub"):
        return None
    row, indices, *_ = split.read(op)
    if not isinstance(indices, PerExample) or indices.stride != 1:
        return None
    own = own_row(op, split.graph, split.maker, indices.dim)
    if own is None or not (row == PerExample(own[0]) or is_unsplit(row)):
        return None
    cut = cut_at(rule, rule.operands[1], indices, split.count)
    return None if cut is None else replace(cut, own=own)


def is_looked_up(op: Op, cut: Cut) -> bool:
    """Whether examples are chosen by indices, which count from the batch's first."""
    if "dimension_numbers" not in op.params or not op.name.startswith(("gather", "scatter")):
        return False
    numbers = op.params["dimension_numbers"]
    is_gather = op.name == "gather"
    chosen = numbers.start_index_map if is_gather else numbers.scatter_dims_to_operand_dims
    absent = numbers.collapsed_slice_dims if is_gather else numbers.inserted_window_dims
    carried = cut.operand(0)
    return carried is not None and carried.dim in chosen and carried.dim in absent


def is_begun(op: Op, cut: Cut) -> bool:
    """Whether an op adds sums over examples to its first operand."""
    return op.name in ("scatter-add", "scatter-sub") and cut.operand(0) is None


_PRODUCTS = frozenset({"mul", "dot_general", "conv_general_dilated", "ragged_dot_general"})
"""Linear in each operand."""

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
    """The operands in which an op of sums is linear, together; None where it is not."""
    states = split.read(op)
    partial = tuple(i for i, s in enumerate(states) if isinstance(s, Partial))
    if not all(jnp.issubdtype(v.dtype, np.number) for v in op.result_values):
        return None
    if op.name in _PRODUCTS:
        return partial if len(partial) == 1 else None
    if op.name == "div" and not jnp.issubdtype(op.result_values[0].dtype, np.inexact):
        return None
    if op.name == "select_n":
        linear = tuple(range(1, len(states)))
    elif rule_of(op, split.graph).is_additive:
        linear = tuple(range(len(states)))
    else:
        linear = _LINEAR.get(op.name, ())
    return linear if set(partial) <= set(linear) else None


# --- a graph


def batch_split(
    graph: Graph, inputs: Sequence[State], count: int, firsts: frozenset[int] | None = None
) -> BatchSplit:
    """Follows the examples through a graph.

    Args:
      graph: the step's, or a body.
      inputs: what its inputs are.
      count: of microbatches.
      firsts: the inputs from which values may be computed before the microbatches; None for a body, in which nothing can
        be finished.

    Raises:
      NotSplittableError: examples depend on one another.
    """
    return _Walk(graph, inputs, count, firsts).run()


class _Walk:
    """One walk over one graph."""

    def __init__(
        self, graph: Graph, inputs: Sequence[State], count: int, firsts: frozenset[int] | None
    ) -> None:
        states: dict[int, State] = dict(zip(graph.inputs, inputs, strict=True))
        states |= dict.fromkeys((v for v, _ in graph.constants), WHOLE)
        known = set(firsts or ()) | {v for v, _ in graph.constants}
        maker = {v: op for op in graph.ops for v in op.outputs}
        zeros = {v for v, content in graph.constants if _is_number(content) and not np.any(content)}
        self.split = BatchSplit(graph, count, maker, states, known, zeros, (), {})
        self.is_body = firsts is None

    def run(self) -> BatchSplit:
        split = self.split
        for i, op in enumerate(split.graph.ops):
            split.states.update(zip(op.outputs, self._made(i, op), strict=True))
            if op.name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
                split.zeros.update(op.outputs if all(map(split.is_zero, op.inputs)) else ())
        return replace(split, wanted=tuple(map(split.state, split.graph.outputs)))

    def _made(self, i: int, op: Op) -> Sequence[State]:
        """What an op's results are; what the inputs alone decide and microbatches cannot make comes first."""
        is_first = not self.is_body and self.split.firsts.issuperset(op.operands)
        try:
            made = self._results(i, op)
        except NotSplittableError:
            if not is_first:
                raise
            made = [WHOLE] * len(op.outputs)
        if is_first:
            self.split.firsts.update(op.outputs)
            made = [s if isinstance(s, PerExample) else WHOLE for s in made]
        for state in made:
            if self.is_body and isinstance(state, Finished | Reduced):
                raise _needed(state.cause, op)
        return made

    def _results(self, i: int, op: Op) -> Sequence[State]:
        read, num = self.split.read(op), len(op.outputs)
        if all(map(is_unsplit, read)):
            return [ALIKE if ALIKE in read else WHOLE] * num
        is_split = any(isinstance(s, PerExample) for s in read)
        for state in read:
            if isinstance(state, Finished | Reduced):
                if is_split:
                    raise _needed(state.cause, op)
                return [Finished(state.cause)] * num
        if op.name in EFFECTFUL:
            return [Finished(op)] * num
        if op.name == "optimization_barrier":
            return [ALIKE if is_unsplit(s) else s for s in read]
        if op.bodies and (is_split or self.is_body):
            return self._of_bodies(i, op, read)
        return self._cut(op, read) if is_split else self._sums(op, read)

    def _cut(self, op: Op, read: Sequence[State]) -> Sequence[State]:
        """An op that reads something for each example."""
        cut = operand_cut(op, self.split)
        if cut is None:
            raise _uncut(op)
        for i, state in enumerate(read):
            if isinstance(state, Partial) and not (i == 0 and is_begun(op, cut)):
                raise _needed(state.cause, op)
        return [cut.result(r) or self._without(op, cut) for r in range(len(op.outputs))]

    def _without(self, op: Op, cut: Cut) -> State:
        """A result that carries no examples."""
        if cut.kind is Kind.SUM:
            return Partial(op)
        if cut.kind is Kind.REDUCE and op.name in REDUCTIONS:
            return Reduced(op)
        raise _uncut(op)

    def _sums(self, op: Op, read: Sequence[State]) -> Sequence[State]:
        """An op that reads sums, and nothing for each example."""
        cause = next(s.cause for s in read if isinstance(s, Partial))
        linear = None if op.bodies else summed_operands(op, self.split)
        if linear is None:
            return [Finished(cause)] * len(op.outputs)
        is_linear = self.is_body or all(
            isinstance(read[i], Partial) or self.split.is_zero(op.inputs[i]) for i in linear
        )
        return [Partial(cause) if is_linear else Finished(cause)] * len(op.outputs)

    # --- control flow

    def _of_bodies(self, i: int, op: Op, read: Sequence[State]) -> Sequence[State]:
        if op.name == "scan":
            made, inner = self._scan(op, read)
        elif op.name == "while":
            made, inner = self._while(op, read)
        else:
            made, inner = self._cond(op, read)
        self.split.inner[i] = inner
        return [ALIKE if is_unsplit(s) else s for s in made]

    def _scan(self, op: Op, read: Sequence[State]) -> tuple[list[State], dict[str, tuple[BatchSplit, ...]]]:
        num_consts, num_carry = op.loop_counts
        first_x = num_consts + num_carry
        xs = [_of_iteration(s, op) for s in read[first_x:]]
        carries, body = self._carried(
            op, op.bodies["jaxpr"][0], read[:num_consts], read[num_consts:first_x], xs
        )
        ys = body.wanted[num_carry:]
        return [*carries, *map(stacked, ys)], {"jaxpr": (replace(body, wanted=(*carries, *ys)),)}

    def _while(self, op: Op, read: Sequence[State]) -> tuple[list[State], dict[str, tuple[BatchSplit, ...]]]:
        num_cond, num_body = op.params["cond_nconsts"], op.params["body_nconsts"]
        num_consts = num_cond + num_body
        carries, body = self._carried(
            op, op.bodies["body_jaxpr"][0], read[num_cond:num_consts], read[num_consts:], ()
        )
        condition = self._body(op.bodies["cond_jaxpr"][0], (*read[:num_cond], *carries))
        if not is_unsplit(condition.wanted[0]):
            raise _uncut(op)
        return carries, {"cond_jaxpr": (condition,), "body_jaxpr": (replace(body, wanted=tuple(carries)),)}

    def _cond(self, op: Op, read: Sequence[State]) -> tuple[list[State], dict[str, tuple[BatchSplit, ...]]]:
        if not is_unsplit(read[0]):
            raise _uncut(op)
        branches = [self._body(branch, read[1:]) for branch in op.bodies["branches"]]
        made = list(branches[0].wanted)
        for branch in branches[1:]:
            made = [_joined(a, b, op) for a, b in zip(made, branch.wanted, strict=True)]
        return made, {"branches": tuple(replace(b, wanted=tuple(made)) for b in branches)}

    def _carried(
        self, op: Op, body: Graph, consts: Sequence[State], carries: Sequence[State], xs: Sequence[State]
    ) -> tuple[list[State], BatchSplit]:
        """What a loop's carries are: what they begin as, and what the body makes of that."""
        known = list(map(_inside, carries))
        while True:
            split = self._body(body, (*consts, *known, *xs))
            joined = [_joined(a, b, op) for a, b in zip(known, split.wanted, strict=False)]
            if joined == known:
                return known, split
            known = joined

    def _body(self, body: Graph, inputs: Sequence[State]) -> BatchSplit:
        return batch_split(body, list(map(_inside, inputs)), self.split.count)


def _is_number(content: Any) -> bool:
    return isinstance(getattr(content, "dtype", None), np.dtype)


def _inside(state: State) -> State:
    """What an operand is in a body: there, it is of no matter where it was made."""
    return WHOLE if is_unsplit(state) else state


def _of_iteration(state: State, op: Op) -> State:
    """What an iteration gets of something stacked."""
    if not isinstance(state, PerExample):
        return state
    if state.dim == 0:
        raise _uncut(op)
    return replace(state, dim=state.dim - 1)


def stacked(state: State) -> State:
    """What becomes of something for each iteration."""
    return replace(state, dim=state.dim + 1) if isinstance(state, PerExample) else state


def _joined(one: State, other: State, op: Op) -> State:
    """What a value is that may be either."""
    one, other = _inside(one), _inside(other)
    if one == other or isinstance(other, Whole):
        return one
    if isinstance(one, Whole):
        return other
    raise _uncut(op)


_REMEDY = "Microbatches would change the numbers: leave such a step in one piece"


def _needed(cause: Op, reader: Op) -> NotSplittableError:
    return NotSplittableError(
        f"the step cannot be split into microbatches: {reader.name} {reader.where} needs, for each example, what "
        f"{cause.name} {cause.where} makes of all examples together. {_REMEDY}, or let each example do without the others"
    )


def _uncut(op: Op) -> NotSplittableError:
    return NotSplittableError(
        f"the step cannot be split into microbatches: {op.name} {op.where} takes all examples together, and no rule says "
        f"how to do it in parts. {_REMEDY}, or let it work on each example by itself"
    )
