"""Loops and conditionals cut in two: statistics that are finished inside a body are finished in a second one, after it.

A loop over layers reports the standard deviation of each layer's activations. In microbatches the loop runs once for each of
them, and sums over that one's examples; but the square root needs the sums over all examples. So the loop is cut. The first
part makes the sums and returns them for each iteration. The second part reads no examples. It runs once, after the last
microbatch, and computes the loop's results from the sums.

    for w in ws:  h = f(h, w); y = sqrt(mean(h * h))            as the user wrote it
    for w in ws:  h = f(h, w); s = mean(h * h)                  for each microbatch
    for s in ss:  y = sqrt(s)                                   once

Values that depend on no example are recomputed in the second part. A loop cannot be cut if the second part needs examples:
then a function of the sums flows back into the work on each example.

A differentiated loop returns residuals even of a statistic whose gradient is not used. Such results are removed first,
because no op reads them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import EFFECTFUL, Atom, Graph, Op, Value, without_dead_ops
from autoshard.search.memory.batch_states import (
    BatchSplit,
    Finished,
    Partial,
    PerExample,
    PerMicrobatch,
    Reduced,
    State,
    needed,
)
from autoshard.search.memory.written import Written


def without_unread_results(graph: Graph) -> Graph:
    """The graph without unread results of its conditionals, and without unread stacks of its scans."""
    read = {a for op in graph.ops for a in op.operands} | {*graph.made}
    ops = (_without_unread(op, read) if op.name in ("scan", "cond") else op for op in graph.ops)
    return without_dead_ops(replace(graph, ops=tuple(ops)))


def _without_unread(op: Op, read: set[int]) -> Op:
    num_consts, num_carry = op.loop_counts if op.name == "scan" else (0, 0)
    kept = [r for r, v in enumerate(op.outputs) if r < num_carry or v in read]
    params = op.params
    if op.name == "scan":
        num_xs = len(op.inputs) - num_consts - num_carry
        params = _jax.scan_params(params, num_consts, num_carry, num_xs, len(kept) - num_carry)
    outputs, values = (tuple(each[r] for r in kept) for each in (op.outputs, op.result_values))
    inside = op.with_bodies(
        lambda b: without_unread_results(replace(b, outputs=tuple(b.outputs[r] for r in kept)))
    )
    return replace(inside, params=params, outputs=outputs, result_values=values)


def with_loops_cut(graph: Graph, split: BatchSplit) -> Graph:
    """The graph with each loop and conditional cut that finishes a value in its body, innermost first.

    Args:
      graph: the split's.
      split: by a walk that is not strict.

    Raises:
      NotSplittableError: a per-example op of a body reads a value that is finished there.
    """
    values, ops = list(graph.values), list[Op]()
    for i, op in enumerate(graph.ops):
        if i not in split.inner:
            ops.append(op)
            continue
        bodies = {
            key: tuple(with_loops_cut(s.graph, s) for s in splits) for key, splits in split.inner[i].items()
        }
        is_cut = any(
            b is not s.graph for key in bodies for b, s in zip(bodies[key], split.inner[i][key], strict=True)
        )
        if is_cut:
            ops.append(replace(op, bodies=bodies))
        elif op.name == "scan":
            ops += _Fission(op, split.inner[i]["jaxpr"][0], split.read(op), values).parts()
        elif op.name == "cond":
            ops += _Choice(op, split.inner[i]["branches"], values).parts()
        else:
            ops.append(op)
    is_same = len(ops) == len(graph.ops) and all(a is b for a, b in zip(ops, graph.ops, strict=True))
    return graph if is_same else replace(graph, values=tuple(values), ops=tuple(ops))


@dataclass(frozen=True, eq=False)
class _Port:
    """An input of a loop's body: a constant, a carry or a slice of a stacked array."""

    outer: Atom
    inner: int


class _Late:
    """The second part of a body, which makes some of its outputs from values of the first part.

    Attributes:
      ops: the ops that run in the second part, by their places in the body.
      handed: the values that the first part returns for the second.
      repeated: the body's inputs that the second part reads, too.
    """

    def __init__(self, split: BatchSplit, outputs: Iterable[Atom], carried: Mapping[int, Atom]) -> None:
        """`carried` gives, by input, the value that replaces it in the next iteration.

        Raises:
          NotSplittableError: the second part reads values of examples.
        """
        self._split, self._body = split, split.graph
        self._maker = self._body.made_at
        self.ops: set[int] = set()
        self.handed: dict[int, None] = {}
        self.repeated: set[int] = set()
        self._needing: set[int] = set()
        self._follow(outputs, carried)
        if self._needing:
            op = self._body.ops[min(self._needing)]
            raise needed(self._cause(op), op)

    def _follow(self, outputs: Iterable[Atom], carried: Mapping[int, Atom]) -> None:
        left, seen = list(outputs), set[Atom]()
        while left:
            v = left.pop()
            if not isinstance(v, int) or v in seen:
                continue
            seen.add(v)
            if isinstance(self._split.states[v], Partial | Reduced | PerMicrobatch):
                self.handed[v] = None
            elif v in self._maker:
                left += self._made_late(self._maker[v], v)
            else:
                self.repeated.add(v)
                left += [carried[v]] if v in carried else []

    def _made_late(self, i: int, v: int) -> tuple[int, ...]:
        """Puts an op into the second part; returns the operands of one of its results."""
        self.ops.add(i)
        sources = _sources(self._body.ops[i], v)
        if any(isinstance(self._split.states[a], PerExample) for a in sources):
            self._needing.add(i)
            return ()
        return sources

    def _cause(self, op: Op) -> Op:
        """The op because of which an op's result is finished."""
        state = next(s for v in op.outputs if isinstance(s := self._split.states[v], Finished))
        return state.cause

    @property
    def in_order(self) -> tuple[Op, ...]:
        """The ops, in program order."""
        return tuple(self._body.ops[i] for i in sorted(self.ops))


def _finished(split: BatchSplit) -> list[int]:
    """The finished outputs of a body that holds examples, by their places."""
    has_examples = any(isinstance(s, PerExample) for s in split.states.values())
    return [r for r, state in enumerate(split.wanted) if isinstance(state, Finished) and has_examples]


class _Fission:
    """One loop, cut in two."""

    def __init__(self, loop: Op, split: BatchSplit, read: Sequence[State], values: list[Value]) -> None:
        self.loop, self.split, self.values = loop, split, values
        self.body = split.graph
        num_consts, num_carry = loop.loop_counts
        ports = list(map(_Port, loop.inputs, self.body.inputs))
        self.consts, self.carries = ports[:num_consts], ports[num_consts : num_consts + num_carry]
        self.xs = ports[num_consts + num_carry :]
        states = zip(self.carries, read[num_consts:], strict=False)
        self.begun = {p.inner for p, state in states if isinstance(state, PerExample)}

    def parts(self) -> tuple[Op, ...]:
        """Both loops; the given loop if there is nothing to cut, or it cannot be cut."""
        finished = _finished(self.split)
        carried = {p.inner: self.body.outputs[c] for c, p in enumerate(self.carries)}
        late = _Late(self.split, [self.body.outputs[r] for r in finished], carried)
        if not finished or not self.begun.isdisjoint(late.repeated):
            return (self.loop,)
        first = [r for r in range(len(self.loop.outputs)) if r not in finished]
        handed = tuple(late.handed)
        stacks = tuple(map(self._stack, handed))
        consts, xs = (self._unfinished(ports) for ports in (self.consts, self.xs))
        begun = self._part(self.body.ops, first, consts, xs, (), dict(zip(handed, stacks, strict=True)))
        consts, xs = ([p for p in ports if p.inner in late.repeated] for ports in (self.consts, self.xs))
        xs += map(_Port, stacks, handed)
        again = self._repeated_carries(late)
        return begun, self._part(late.in_order, finished, consts, xs, again, {})

    # --- operands of the parts

    def _unfinished(self, ports: Iterable[_Port]) -> list[_Port]:
        return [p for p in ports if not isinstance(self.split.states[p.inner], Finished)]

    def _repeated_carries(self, late: _Late) -> tuple[int, ...]:
        """The carries that the second part computes once more, though the first part returns them."""
        states = self.split.wanted
        return tuple(
            c
            for c, p in enumerate(self.carries)
            if p.inner in late.repeated and not isinstance(states[c], Finished)
        )

    # --- the loops

    def _part(
        self,
        ops: tuple[Op, ...],
        results: Sequence[int],
        consts: Sequence[_Port],
        xs: Sequence[_Port],
        again: Sequence[int],
        handed: Mapping[int, int],
    ) -> Op:
        """A loop that makes some of the results.

        Args:
          ops: the ops that make them, and maybe others.
          results: of the loop, by their places.
          consts: the loop's constants.
          xs: the arrays that it iterates over.
          again: carries that it needs, but which another part returns.
          handed: the values of the body that it stacks besides, with their stacks outside.
        """
        carried = sorted((*(r for r in results if r < len(self.carries)), *again))
        ys = [r for r in results if r >= len(self.carries)]
        ports = [*consts, *(self.carries[c] for c in carried), *xs]
        made = [*carried, *ys]
        outputs = [self._like(r) if r in again else self.loop.outputs[r] for r in made]
        body = Graph(
            self.body.values,
            tuple(p.inner for p in ports),
            self.body.constants,
            ops,
            (*(self.body.outputs[r] for r in made), *handed),
        )
        return replace(
            self.loop,
            params=_jax.scan_params(
                self.loop.params, len(consts), len(carried), len(xs), len(ys) + len(handed)
            ),
            inputs=tuple(p.outer for p in ports),
            outputs=(*outputs, *handed.values()),
            result_values=(
                *(self.loop.result_values[r] for r in made),
                *(self.values[v] for v in handed.values()),
            ),
            bodies={"jaxpr": (_only(body),)},
        )

    def _like(self, r: int) -> int:
        """A new value like a result of the loop."""
        self.values.append(self.loop.result_values[r])
        return len(self.values) - 1

    def _stack(self, v: int) -> int:
        """A new value outside: the stack of one of the body."""
        value = self.body.values[v]
        self.values.append(replace(value, shape=(int(self.loop.params["length"]), *value.shape)))
        return len(self.values) - 1


class _Choice:
    """One conditional, cut in two; both parts take the same branch."""

    def __init__(self, choice: Op, splits: Sequence[BatchSplit], values: list[Value]) -> None:
        self.choice, self.splits, self.values = choice, splits, values

    def parts(self) -> tuple[Op, ...]:
        """Both conditionals; the given one if there is nothing to cut."""
        finished = sorted({r for split in self.splits for r in _finished(split)})
        if not finished:
            return (self.choice,)
        late = [_Late(split, [split.graph.outputs[r] for r in finished], {}) for split in self.splits]
        first = [r for r in range(len(self.choice.outputs)) if r not in finished]
        handed = [(b, v) for b, each in enumerate(late) for v in each.handed]
        stacks = tuple(self._like(self.splits[b].graph.values[v]) for b, v in handed)
        places = range(len(self.choice.inputs) - 1)
        states = self.splits[0].entering
        read = [p for p in places if not isinstance(states[p], Finished)]
        again = [p for p in places if any(self._input(b, p) in each.repeated for b, each in enumerate(late))]
        begun = [self._handing_out(b, read, first, handed) for b in range(len(late))]
        made = [self._made_late(b, each, again, finished, handed) for b, each in enumerate(late)]
        return self._part(first, read, (), stacks, begun), self._part(finished, again, stacks, (), made)

    def _input(self, b: int, place: int) -> int:
        """A branch's input for an operand."""
        return self.splits[b].graph.inputs[place]

    def _like(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _handing_out(
        self, b: int, read: Sequence[int], results: Sequence[int], handed: Sequence[tuple[int, int]]
    ) -> Graph:
        """A branch of the first part: some of the results, its values for the second part, and zeros for those of other
        branches."""
        graph = self.splits[b].graph
        written = Written(graph.values)
        written.ops += graph.ops
        values = (self.splits[branch].graph.values[v] for branch, v in handed)
        out = [
            v if branch == b else written.write(partial(_zeros, value), (), None)
            for (branch, v), value in zip(handed, values, strict=True)
        ]
        return _only(
            Graph(
                tuple(written.values),
                tuple(self._input(b, p) for p in read),
                graph.constants,
                tuple(written.ops),
                (*(graph.outputs[r] for r in results), *out),
            )
        )

    def _made_late(
        self,
        b: int,
        late: _Late,
        read: Sequence[int],
        results: Sequence[int],
        handed: Sequence[tuple[int, int]],
    ) -> Graph:
        """A branch of the second part, which makes the other results."""
        graph = self.splits[b].graph
        values = list(graph.values)
        entering = list[int]()
        for branch, v in handed:
            if branch != b:
                values.append(self.splits[branch].graph.values[v])
            entering.append(v if branch == b else len(values) - 1)
        inputs = (*(self._input(b, p) for p in read), *entering)
        outputs = tuple(graph.outputs[r] for r in results)
        return _only(Graph(tuple(values), inputs, graph.constants, late.in_order, outputs))

    def _part(
        self,
        results: Sequence[int],
        read: Sequence[int],
        entering: Sequence[int],
        stacks: Sequence[int],
        bodies: Sequence[Graph],
    ) -> Op:
        which, *operands = self.choice.inputs
        return replace(
            self.choice,
            inputs=(which, *(operands[p] for p in read), *entering),
            outputs=(*(self.choice.outputs[r] for r in results), *stacks),
            result_values=(
                *(self.choice.result_values[r] for r in results),
                *(self.values[v] for v in stacks),
            ),
            bodies={"branches": tuple(bodies)},
        )


def _zeros(value: Value) -> Any:
    return jnp.zeros(value.shape, value.dtype)


def _sources(op: Op, v: int) -> tuple[int, ...]:
    """The operands from which an op makes a result; a barrier makes each result from one operand."""
    if op.name != "optimization_barrier":
        return op.operands
    source = op.inputs[op.outputs.index(v)]
    return (source,) if isinstance(source, int) else ()


def _only(body: Graph) -> Graph:
    """A body without unused ops, and without the operands that barriers hold for these."""
    live, kept = {a for a in body.outputs if isinstance(a, int)}, list[Op]()
    for op in reversed(body.ops):
        if op.name == "optimization_barrier":
            op = _held(op, [i for i, v in enumerate(op.outputs) if v in live])
        if op.name in EFFECTFUL or not live.isdisjoint(op.outputs):
            kept.append(op)
            live.update(op.operands)
    return replace(body, ops=tuple(reversed(kept)))


def _held(op: Op, held: Sequence[int]) -> Op:
    """A barrier reduced to some of its operands."""
    inputs, outputs, values = (
        tuple(each[i] for i in held) for each in (op.inputs, op.outputs, op.result_values)
    )
    return replace(op, inputs=inputs, outputs=outputs, result_values=values)
