"""Updates by the host, written into a step: each is one op, `host_update`, and its operands are copied to the host.

The op applies JAX's `compute_on` to the ops that it replaces. Its results are in the host's memory; `search.memory.offload`
has them fetched where the device reads them.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.search.ir import _jax
from autoshard.search.ir.graph import Graph, Op, Step
from autoshard.search.memory.host_updates import HostUpdate
from autoshard.search.memory.written import Written

SCOPE = "updated on the host"
"""The name scope of these updates and of the copies to the host that they need."""


def with_host_updates(step: Step, updates: Sequence[HostUpdate]) -> tuple[Step, tuple[int, ...]]:
    """The step with updates as single ops, and copies of their operands on the host.

    An operand is copied as soon as it is made. Returns also the origin of each op: its index before, or -1.
    """
    if not updates:
        return step, tuple(range(len(step.graph.ops)))
    writing = _Writing(step.graph, updates)
    graph = writing.run()
    return replace(step, graph=graph), tuple(writing.origin)


class _Writing:
    """One walk over a graph, which puts each update in the place of its last op."""

    def __init__(self, graph: Graph, updates: Sequence[HostUpdate]) -> None:
        self.graph, self.written = graph, Written(graph.values, SCOPE)
        self.last = {update.moved[-1]: update for update in updates}
        self.moved = {i for update in updates for i in update.moved}
        self.repeated = {i for update in updates for i in update.repeated}
        self.like = {v: graph.ops[i] for i, u in sorted(self.last.items(), reverse=True) for v in u.brought}
        self.is_needed = self._needed()
        self.origin: list[int] = []
        self.sent: dict[int, int] = {}
        self.constants: dict[Hashable, int] = {}

    def run(self) -> Graph:
        """The graph with its updates."""
        self._send((*self.graph.inputs, *(v for v, _ in self.graph.constants)))
        for i, op in enumerate(self.graph.ops):
            if i in self.last:
                self._update(i)
            elif i not in self.moved and self.is_needed[i]:
                self._append(op, i)
                self._send(op.outputs)
        return replace(self.graph, values=tuple(self.written.values), ops=tuple(self.written.ops))

    def _append(self, op: Op, origin: int) -> None:
        self.written.ops.append(op)
        self.origin.append(origin)

    def _send(self, values: Iterable[int]) -> None:
        """Copies the operands of updates among these values to the host."""
        for v in (v for v in values if v in self.like):
            copy = self.written.write(_to_host, [v], self.like[v])
            assert isinstance(copy, int)
            self.sent[v] = copy
            self.origin.append(-1)

    def _update(self, i: int) -> None:
        """Writes the update whose last op this is."""
        update, values = self.last[i], self.written.values
        for v in update.results:
            values[v] = replace(values[v], is_on_host=True)
        inputs = (*update.state, *(self.sent[v] for v in update.brought))
        inputs += tuple(self._constant(self.graph.ops[i]) for i in update.fills)
        made = tuple(values[v] for v in update.results)
        function, last = HostFunction(self.graph, update), self.graph.ops[i]
        one = replace(last, primitive=function, params={}, inputs=inputs, outputs=update.results, bodies={})
        self._append(replace(one, result_values=made, scope=SCOPE), i)

    def _constant(self, fill: Op) -> int:
        """The constant of an op that fills an array, on the host: JAX asks that all operands be in one memory."""
        (content,) = (np.asarray(a.val, a.aval.dtype) for a in fill.inputs if not isinstance(a, int))
        key = content.dtype, content.tobytes()
        if key not in self.constants:
            made = self.written.write(lambda: _to_host(jnp.asarray(content)), [], None)
            assert isinstance(made, int)
            self.constants[key] = made
            self.origin += [-1] * (len(self.written.ops) - len(self.origin))
        return self.constants[key]

    def _needed(self) -> list[bool]:
        """Per op, whether the device computes it: of those that updates repeat, only those that it reads itself."""
        live = {*self.graph.made, *self.like}
        is_needed = [True] * len(self.graph.ops)
        for i, op in reversed([*enumerate(self.graph.ops)]):
            is_needed[i] = i not in self.repeated or not live.isdisjoint(op.outputs)
            if is_needed[i] and i not in self.moved:
                live.update(op.operands)
        return is_needed


def _to_host(x: Any) -> Any:
    return jax.device_put(x, jax.memory.Space.Host)


@dataclass(frozen=True, eq=False)
class HostFunction:
    """The function that the host computes, as the primitive of an op: JAX's `compute_on` for some ops of a graph."""

    graph: Graph
    update: HostUpdate

    name = "host_update"
    multiple_results = True

    def get_bind_params(self, params: dict[str, Any]) -> dict[str, Any]:
        """As JAX's primitives have it."""
        return params

    def bind(self, *operands: Any) -> list[Any]:
        """Applies the function to arrays in the host's memory; its results are there, too."""
        return _jax.on_host(self._computed)(*operands)

    def _computed(self, *operands: Any) -> list[Any]:
        num_fills = len(self.update.fills)
        env: dict[int, Any] = dict(zip(self.update.operands, operands, strict=False))
        constants = dict(zip(self.update.fills, operands[len(operands) - num_fills :], strict=True))
        for i in sorted((*self.update.moved, *self.update.repeated)):
            op = self.graph.ops[i]
            read = [env[a] if isinstance(a, int) else a.val for a in op.inputs]
            read = [constants[i]] if i in constants else read
            env.update(zip(op.outputs, _jax.bind(op.primitive, read, op.params), strict=True))
        return [env[v] for v in self.update.results]
