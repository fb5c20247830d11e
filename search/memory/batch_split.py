"""Follows the batch through a step: the relation of each value to the examples.

A step in microbatches must give the same numbers as the whole step. So the batch is followed from the arguments through the
graph, by the factors of every op (`batch_cut`). Each value gets one of the states of `batch_states`. Two kinds of ops make a
step not splittable. A per-example op reads a finished value (the statistics of a batch normalization, the other examples of
a contrastive loss), or an op needs all examples at once. The error names the ops that are the reason.

A value that depends on the inputs alone is no such reason: it can be computed before the microbatches, from the whole batch.

The bodies of loops are followed too, until the states of the carries no longer change. No value can be finished inside a
body. Ops with effects may not run there, because they would run once for each microbatch.

A walk that is not strict continues where finished values stop a strict one. It treats two kinds of results as finished:
those of per-example ops that read sums, and those that loops finish inside. Its states show which statistics can be
rewritten (`moments`, `fission`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import EFFECTFUL, Graph, Op
from autoshard.search.memory.batch_cut import (
    IDEMPOTENT,
    MOVED,
    REDUCTIONS,
    OpCut,
    is_begun,
    operand_cut,
    rule_of,
    summed_operands,
)
from autoshard.search.memory.batch_states import (
    ALIKE,
    OF_MICROBATCH,
    WHOLE,
    BatchSplit,
    Finished,
    NotSplittableError,
    Partial,
    PerExample,
    PerMicrobatch,
    Reduced,
    State,
    is_unsplit,
    needed,
    stacked,
    uncut,
)
from autoshard.search.memory.positions import Scope


def batch_split(
    scope: Scope,
    inputs: Sequence[State],
    count: int,
    firsts: frozenset[int] | None = None,
    *,
    is_strict: bool = True,
) -> BatchSplit:
    """Follows the examples through a graph.

    Args:
      scope: the step's graph, or a body.
      inputs: the states of its inputs.
      count: number of microbatches.
      firsts: the inputs from which values may be computed before the microbatches; None for a body, in which no value can be
        finished.
      is_strict: whether it is an error if a per-example op reads a finished value, a body finishes one, or the states of a
        carry
        cannot be joined; if not, the results are finished.

    Raises:
      NotSplittableError: examples depend on one another.
    """
    return _GraphWalk(scope, inputs, count, firsts, is_strict=is_strict).run()


class _GraphWalk:
    """One walk over one graph."""

    def __init__(
        self,
        scope: Scope,
        inputs: Sequence[State],
        count: int,
        firsts: frozenset[int] | None,
        *,
        is_strict: bool,
    ) -> None:
        graph = scope.graph
        states: dict[int, State] = dict(zip(graph.inputs, inputs, strict=True))
        states |= dict.fromkeys((v for v, _ in graph.constants), WHOLE)
        known = set(firsts or ()) | {v for v, _ in graph.constants}
        zeros = {v for v, content in graph.constants if _is_number(content) and not np.any(content)}
        self.split = BatchSplit(scope, count, states, known, zeros, (), {})
        self.is_body, self.is_strict = firsts is None, is_strict

    def run(self) -> BatchSplit:
        split = self.split
        for i, op in enumerate(split.graph.ops):
            split.states.update(zip(op.outputs, self._made(i, op), strict=True))
            if op.name in ("broadcast_in_dim", "convert_element_type", "reshape", "copy"):
                split.zeros.update(op.outputs if all(map(split.is_zero, op.inputs)) else ())
        return replace(split, wanted=tuple(map(split.state, split.graph.outputs)))

    def _made(self, i: int, op: Op) -> Sequence[State]:
        """The states of an op's results. A result that depends on the inputs alone is per example or whole; it is whole if
        microbatches cannot make it."""
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
            if self.is_body and self.is_strict and isinstance(state, Finished):
                raise needed(state.cause, op)
        return made

    def _results(self, i: int, op: Op) -> Sequence[State]:
        read, num = self.split.read(op), len(op.outputs)
        if self.is_body and op.name in EFFECTFUL:
            raise uncut(op)
        if all(map(is_unsplit, read)):
            return [ALIKE if ALIKE in read else WHOLE] * num
        is_split = any(isinstance(s, PerExample) for s in read)
        if op.name == "optimization_barrier":
            return [ALIKE if is_unsplit(s) else s for s in read]
        if self._is_followed(op, read):
            return self._of_bodies(i, op, read)
        if self.is_body and (reduced := self._still_reduced(op, read)) is not None:
            return [reduced] * num
        for state in read:
            if isinstance(state, Finished | Reduced | PerMicrobatch):
                return [self._finished(state.cause, op, is_split=is_split)] * num
        if op.name in EFFECTFUL:
            return [Finished(op)] * num
        if _is_statistic(op):
            return [PerMicrobatch(s.dim, op) if isinstance(s, PerExample) else s for s in read]
        return self._cut(op, read) if is_split else self._sums(op, read)

    def _is_followed(self, op: Op, read: Sequence[State]) -> bool:
        """True if a loop or a conditional runs for each microbatch."""
        if not op.bodies:
            return False
        late = [s for s in read if isinstance(s, Finished | PerMicrobatch)]
        if any(isinstance(s, PerExample) for s in read):
            if late and self.is_strict:
                raise needed(late[0].cause, op)
            return True
        return self.is_body and not late

    def _finished(self, cause: Op, op: Op, *, is_split: bool) -> Finished:
        """The state of a result that reads a value which is complete only after the last microbatch."""
        if is_split and self.is_strict:
            raise needed(cause, op)
        return Finished(cause)

    def _still_reduced(self, op: Op, read: Sequence[State]) -> Reduced | None:
        """The state of a result made of reductions over examples, if it is still such a reduction: the op moves or rounds
        their elements, or reduces them further. None if it is not."""
        kept = {s for s in read if isinstance(s, Reduced)}
        if len(kept) != 1 or not all(isinstance(s, Reduced) or is_unsplit(s) for s in read):
            return None
        (reduced,) = kept
        is_idempotent = reduced.name in IDEMPOTENT
        is_further = op.name in (reduced.name, IDEMPOTENT.get(reduced.name)) or (
            op.name == "convert_element_type" and is_idempotent and rule_of(op, self.split.graph).is_additive
        )
        among = read[MOVED[op.name]] if op.name in MOVED else ()
        elements = read if is_further else among
        is_all = sum(isinstance(s, Reduced) for s in elements) == sum(isinstance(s, Reduced) for s in read)
        is_pure = all(isinstance(s, Reduced) for s in elements)
        return reduced if is_all and (is_idempotent or is_pure) else None

    def _cut(self, op: Op, read: Sequence[State]) -> Sequence[State]:
        """The states of the results of an op that reads per-example values."""
        cut = operand_cut(op, self.split)
        if cut is None:
            raise uncut(op)
        for i, state in enumerate(read):
            if isinstance(state, Partial) and not (i == 0 and is_begun(op, cut)):
                return [self._finished(state.cause, op, is_split=True)] * len(op.outputs)
        return [cut.result(r) or self._without(op, cut) for r in range(len(op.outputs))]

    def _without(self, op: Op, cut: OpCut) -> State:
        """The state of a result that carries no examples."""
        if cut.kind is Kind.SUM:
            return Partial(op)
        if cut.kind is Kind.REDUCE and op.name in REDUCTIONS:
            return Reduced(op.name, op)
        raise uncut(op)

    def _sums(self, op: Op, read: Sequence[State]) -> Sequence[State]:
        """The states of the results of an op that reads sums, and no per-example value."""
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
        condition = self._body(op, op.bodies["cond_jaxpr"][0], (*read[:num_cond], *carries))
        if not is_unsplit(condition.wanted[0]):
            raise uncut(op)
        return carries, {"cond_jaxpr": (condition,), "body_jaxpr": (replace(body, wanted=tuple(carries)),)}

    def _cond(self, op: Op, read: Sequence[State]) -> tuple[list[State], dict[str, tuple[BatchSplit, ...]]]:
        if not is_unsplit(read[0]):
            raise uncut(op)
        branches = [self._body(op, branch, read[1:]) for branch in op.bodies["branches"]]
        made = list(branches[0].wanted)
        for branch in branches[1:]:
            made = [self._joined(a, b, op) for a, b in zip(made, branch.wanted, strict=True)]
        return made, {"branches": tuple(replace(b, wanted=tuple(made)) for b in branches)}

    def _carried(
        self, op: Op, body: Graph, consts: Sequence[State], carries: Sequence[State], xs: Sequence[State]
    ) -> tuple[list[State], BatchSplit]:
        """The states of a loop's carries, and the split of its body. A carry's state joins the states of its initial value
        and of the body's output."""
        known = list(map(_inside, carries))
        while True:
            split = self._body(op, body, (*consts, *known, *xs))
            joined = [self._joined(a, b, op) for a, b in zip(known, split.wanted, strict=False)]
            if joined == known:
                return known, split
            known = joined

    def _joined(self, one: State, other: State, op: Op) -> State:
        """The state of a value that may have either of two states."""
        one, other = _inside(one), _inside(other)
        if one == other:
            return one
        if WHOLE in (one, other):
            state = other if one == WHOLE else one
            if isinstance(state, Reduced) and state.name not in IDEMPOTENT:
                raise uncut(op)
            return state
        if self.is_strict:
            raise uncut(op)
        return Finished(op)

    def _body(self, op: Op, body: Graph, inputs: Sequence[State]) -> BatchSplit:
        scope = self.split.scope.of_body(body, op)
        return batch_split(scope, list(map(_inside, inputs)), self.split.count, is_strict=self.is_strict)


def _is_number(content: Any) -> bool:
    return isinstance(getattr(content, "dtype", None), np.dtype)


def _inside(state: State) -> State:
    """The state of an operand inside a body: whole if it depends on no example, wherever it is made."""
    return WHOLE if is_unsplit(state) else state


def _of_iteration(state: State, op: Op) -> State:
    """The state of one iteration's slice of a stacked value."""
    if not isinstance(state, PerExample | PerMicrobatch):
        return state
    if state.dim == 0:
        raise uncut(op)
    return replace(state, dim=state.dim - 1)


def _is_statistic(op: Op) -> bool:
    """True if an op's results are statistics of each microbatch."""
    return op.name == "name" and op.params["name"] == OF_MICROBATCH
