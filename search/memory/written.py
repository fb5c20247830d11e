"""A graph under construction: new ops are traced from a small function of arrays.

A rewrite of a step has to cut, stack and add. As functions these stay readable, and their parameters are JAX's own in every
version.
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
"""The name scope of ops that are neither the user's nor made from them."""


class Written:
    """Values and ops of a graph under construction."""

    def __init__(self, values: Sequence[Value], scope: str = SCOPE) -> None:
        self.values, self.ops, self._scope = list(values), list[Op](), scope
        self._traced: dict[tuple[Hashable, tuple[Value, ...]], Graph] = {}

    def new(self, value: Value) -> int:
        """Adds a value."""
        self.values.append(value)
        return len(self.values) - 1

    def write(
        self,
        function: Callable[..., Any],
        operands: Sequence[int],
        like: Op | None,
        output: int | None = None,
    ) -> Atom:
        """Appends the ops traced from a function of arrays; returns their result.

        Args:
          function: of the operands, with one result.
          operands: values.
          like: an op from which the new ops take phase and source; None for the forward phase and no source.
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
        """Appends the ops traced from a function of arrays; returns their results. `outputs` are the values of these
        results, if they are not new."""
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
        """The graph traced from a function; each function is traced once."""
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
            equivalence=None if like is None else like.equivalence,
        )

    def together(self, operands: Sequence[int], like: Op) -> tuple[int, ...]:
        """Appends a barrier with an op's phase and source. Returns the values behind it; none is available before all
        operands are."""
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
                like.equivalence,
            )
        )
        return outputs


def _named(function: Callable[..., Any]) -> Hashable:
    """The identity of a function; partial functions with the same arguments are equal."""
    if isinstance(function, partial):
        return function.func, function.args, tuple(function.keywords.items())
    return function
