"""A graph that is being written: new ops are what a small function of arrays traces to.

Whoever rewrites a step has to cut, stack, add: written as functions, these stay readable, and their parameters are JAX's own
in every version.
"""

# JAX types these functions only in part.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Value
from autoshard.search.ir.trace import build_graph

SCOPE = "microbatches"
"""The name scope of what is neither the user's nor made from it."""


class Written:
    """Values and ops of a graph that is being written."""

    def __init__(self, values: Sequence[Value], scope: str = SCOPE) -> None:
        self.values, self.ops, self._scope = list(values), list[Op](), scope
        self._traced: dict[tuple[Hashable, tuple[Value, ...]], Graph] = {}

    def new(self, value: Value) -> int:
        """One more value."""
        self.values.append(value)
        return len(self.values) - 1

    def write(
        self,
        function: Callable[..., Any],
        operands: Sequence[int],
        like: Op | None,
        output: int | None = None,
    ) -> Atom:
        """Appends the ops that a function of arrays traces to; their result.

        Args:
          function: of the operands, with one result.
          operands: values.
          like: an op whose phase and source these have; None for the forward phase and no source.
          output: the value that the result is; None for a new one.
        """
        (result,) = self.write_all(function, operands, like, () if output is None else (output,))
        return result

    def write_all(
        self,
        function: Callable[..., Any],
        operands: Sequence[int],
        like: Op | None,
        outputs: Sequence[int] = (),
    ) -> tuple[Atom, ...]:
        """Appends the ops that a function of arrays traces to; its results. `outputs` are the values that these are, if they
        are no new ones."""
        graph = self._graph(function, tuple(self.values[v] for v in operands))
        number: dict[int, int] = dict(zip(graph.inputs, operands, strict=True))
        made = zip(graph.outputs, outputs, strict=False)
        number |= {result: output for result, output in made if isinstance(result, int)}
        for op in graph.ops:
            for v in op.outputs:
                number[v] = number[v] if v in number else self.new(graph.values[v])
            self.ops.append(self._placed(op, number, like))
        return tuple(number[v] if isinstance(v, int) else v for v in graph.outputs)

    def _graph(self, function: Callable[..., Any], inputs: tuple[Value, ...]) -> Graph:
        """What a function traces to; one that comes again is not traced again."""
        key = _named(function), inputs
        if key not in self._traced:
            abstract = [_jax.abstract_value(v.shape, v.dtype) for v in inputs]
            self._traced[key] = build_graph(jax.make_jaxpr(function)(*abstract))
        return self._traced[key]

    def _placed(self, op: Op, number: dict[int, int], like: Op | None) -> Op:
        return replace(
            op,
            inputs=tuple(number[a] if isinstance(a, int) else a for a in op.inputs),
            outputs=tuple(number[v] for v in op.outputs),
            phase=Phase.FORWARD if like is None else like.phase,
            source_info=None if like is None else like.source_info,
            scope=self._scope,
            likes=None if like is None else like.likes,
        )

    def together(self, operands: Sequence[int], like: Op) -> tuple[int, ...]:
        """Appends a barrier, with an op's phase and source; the values behind it, none before all are there."""
        results = tuple(self.values[v] for v in operands)
        outputs = tuple(map(self.new, results))
        barrier = _jax.optimization_barrier_p
        self.ops.append(
            Op(
                barrier,
                {},
                tuple(operands),
                outputs,
                results,
                like.phase,
                self._scope,
                like.source_info,
                {},
                like.likes,
            )
        )
        return outputs


def _named(function: Callable[..., Any]) -> Hashable:
    """What a function is, whoever made it: functions with the same arguments given are one."""
    if isinstance(function, partial):
        return function.func, function.args, tuple(function.keywords.items())
    return function
