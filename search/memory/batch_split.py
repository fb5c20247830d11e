"""Follows the batch through a step: what each of its values is to the examples.

A step that runs in microbatches must give the same numbers. So the batch is followed from the arguments through the graph,
by the factors of every op (`batch_cut`), and each value becomes one of the states of `batch_states`. Where something for
each example reads what is finished (the statistics of a batch normalization, the other examples of a contrastive loss), or
an op can do with nothing less than all examples, the step is not splittable, and the error says which ops are the reason.

What depends on the inputs alone is no such reason: it can be computed before the microbatches, from the whole batch.

The bodies of loops are followed likewise, carries until nothing changes; nothing can be finished inside, and nothing that
has effects may run there, or it would run once for each microbatch.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.search.ir.factors import Kind
from autoshard.search.ir.graph import EFFECTFUL, Graph, Op
from autoshard.search.memory.batch_cut import REDUCTIONS, Cut, is_begun, operand_cut, summed_operands
from autoshard.search.memory.batch_states import (
    ALIKE,
    WHOLE,
    BatchSplit,
    Finished,
    NotSplittableError,
    Partial,
    PerExample,
    Reduced,
    State,
    Whole,
    is_unsplit,
    needed,
    stacked,
    uncut,
)
from autoshard.search.memory.positions import Scope


def batch_split(
    scope: Scope, inputs: Sequence[State], count: int, firsts: frozenset[int] | None = None
) -> BatchSplit:
    """Follows the examples through a graph.

    Args:
      scope: the step's graph, or a body.
      inputs: what its inputs are.
      count: of microbatches.
      firsts: the inputs from which values may be computed before the microbatches; None for a body, in which nothing can
        be finished.

    Raises:
      NotSplittableError: examples depend on one another.
    """
    return _Walk(scope, inputs, count, firsts).run()


class _Walk:
    """One walk over one graph."""

    def __init__(
        self, scope: Scope, inputs: Sequence[State], count: int, firsts: frozenset[int] | None
    ) -> None:
        graph = scope.graph
        states: dict[int, State] = dict(zip(graph.inputs, inputs, strict=True))
        states |= dict.fromkeys((v for v, _ in graph.constants), WHOLE)
        known = set(firsts or ()) | {v for v, _ in graph.constants}
        zeros = {v for v, content in graph.constants if _is_number(content) and not np.any(content)}
        self.split = BatchSplit(scope, count, states, known, zeros, (), {})
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
                raise needed(state.cause, op)
        return made

    def _results(self, i: int, op: Op) -> Sequence[State]:
        read, num = self.split.read(op), len(op.outputs)
        if self.is_body and op.name in EFFECTFUL:
            raise uncut(op)
        if all(map(is_unsplit, read)):
            return [ALIKE if ALIKE in read else WHOLE] * num
        is_split = any(isinstance(s, PerExample) for s in read)
        for state in read:
            if isinstance(state, Finished | Reduced):
                if is_split:
                    raise needed(state.cause, op)
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
            raise uncut(op)
        for i, state in enumerate(read):
            if isinstance(state, Partial) and not (i == 0 and is_begun(op, cut)):
                raise needed(state.cause, op)
        return [cut.result(r) or self._without(op, cut) for r in range(len(op.outputs))]

    def _without(self, op: Op, cut: Cut) -> State:
        """A result that carries no examples."""
        if cut.kind is Kind.SUM:
            return Partial(op)
        if cut.kind is Kind.REDUCE and op.name in REDUCTIONS:
            return Reduced(op)
        raise uncut(op)

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
            made = [_joined(a, b, op) for a, b in zip(made, branch.wanted, strict=True)]
        return made, {"branches": tuple(replace(b, wanted=tuple(made)) for b in branches)}

    def _carried(
        self, op: Op, body: Graph, consts: Sequence[State], carries: Sequence[State], xs: Sequence[State]
    ) -> tuple[list[State], BatchSplit]:
        """What a loop's carries are: what they begin as, and what the body makes of that."""
        known = list(map(_inside, carries))
        while True:
            split = self._body(op, body, (*consts, *known, *xs))
            joined = [_joined(a, b, op) for a, b in zip(known, split.wanted, strict=False)]
            if joined == known:
                return known, split
            known = joined

    def _body(self, op: Op, body: Graph, inputs: Sequence[State]) -> BatchSplit:
        scope = self.split.scope.of_body(body, op)
        return batch_split(scope, list(map(_inside, inputs)), self.split.count)


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
        raise uncut(op)
    return replace(state, dim=state.dim - 1)


def _joined(one: State, other: State, op: Op) -> State:
    """What a value is that may be either."""
    one, other = _inside(one), _inside(other)
    if one == other or isinstance(other, Whole):
        return one
    if isinstance(one, Whole):
        return other
    raise uncut(op)
