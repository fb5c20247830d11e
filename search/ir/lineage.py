"""Values that continue an argument: its elements, changed in place.

A value *continues* an argument if each element is computed from the argument's element at the same place without a gradient
between them. `w - 0.1 * g` continues `w`, but not the batch that the gradient comes from. A prediction does not continue
the batch, nor does a predicate on its elements. If elements are written into an argument by index (a slice of a cache), the
value is also *written* into it.

For ops with one operand, kernels, and ops without a rule, results continue every operand with their shape. Random keys
continue in any shape. Loops and branches are followed through their bodies: a loop's carry continues its initial value if
the body continues it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from autoshard.search.ir import _jax
from autoshard.search.ir.factors import rule_for
from autoshard.search.ir.graph import Atom, Graph, Op, Phase, Value

WRITES = ("dynamic_update_slice", "scatter")
"""Prefixes of primitives that write into their first operand by index."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The inputs of a graph that a value continues, and those that it is written into, as bit sets."""

    continued: int = 0
    written: int = 0

    def __or__(self, other: "Lineage") -> "Lineage":
        return Lineage(self.continued | other.continued, self.written | other.written)


NONE = Lineage()


def lineages(graph: Graph) -> dict[int, Lineage]:
    """The lineage of each value; missing values continue no input."""
    found = {v: Lineage(1 << i) for i, v in enumerate(graph.inputs)}
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD:
            for old, new in _handed_on(graph, op, found):
                found[new] = found.get(new, NONE) | old
    return found


def sources(graph: Graph) -> dict[int, int]:
    """Per value, the inputs that it depends on other than through gradients, as a bit set."""
    found = {v: 1 << i for i, v in enumerate(graph.inputs)}
    for op in graph.ops:
        if op.phase is not Phase.BACKWARD:
            read = 0
            for v in op.operands:
                read |= found.get(v, 0)
            found.update(dict.fromkeys(op.outputs, read))
    return found


def _handed_on(graph: Graph, op: Op, found: Mapping[int, Lineage]) -> Iterator[tuple[Lineage, int]]:
    """Lineages that an op passes on, each with the result that receives it."""
    if bodies := bodies_of(op):
        yield from _through(op, bodies, found)
        return
    for n, old, new in _in_place(graph, op):
        was = found.get(old, NONE)
        is_write = n == 0 and op.name.startswith(WRITES)
        yield Lineage(was.continued, was.continued if is_write else was.written), new


def _in_place(graph: Graph, op: Op) -> Iterator[tuple[int, int, int]]:
    """(operand's index, operand, result) of each pair whose elements correspond place by place."""
    inputs = [graph.value(a) for a in op.inputs]
    rule = rule_for(op.name, inputs, op.result_values, op.params)
    is_loose = bool(op.bodies) or rule.is_unknown or rule.is_kernel or len(op.operands) == 1
    for i, old in enumerate(op.inputs):
        for r, new in enumerate(op.outputs):
            same_places = is_loose or rule.operands[i] == rule.results[r]
            same_shape = inputs[i].shape == op.result_values[r].shape
            is_key = is_random(inputs[i]) and is_random(op.result_values[r])
            is_predicate = op.result_values[r].dtype == bool and inputs[i].dtype != bool
            if isinstance(old, int) and (is_key or (same_shape and same_places and not is_predicate)):
                yield i, old, new


def is_random(value: Value) -> bool:
    """True if a value may be a random key, typed or raw (uint32)."""
    return _jax.is_key_dtype(value.dtype) or value.dtype == np.uint32


# --- bodies


@dataclass(frozen=True, slots=True)
class Body:
    """The correspondence of a body's inputs and outputs with those of its op.

    Attributes:
      graph: the body.
      operands: per input of the body, the op's operand.
      num_carried: the number of carries: the first outputs, which are inputs of the next iteration.
      first_carried: the index of the first carry among the inputs.
      first_slice: the index of the first input that is a slice of its operand; None if there are no slices.
    """

    graph: Graph
    operands: Sequence[Atom]
    num_carried: int = 0
    first_carried: int = 0
    first_slice: int | None = None


def _scan(op: Op) -> list[Body]:
    num_consts, num_carried = op.loop_counts
    body = op.bodies["jaxpr"][0]
    return [Body(body, op.inputs, num_carried, num_consts, num_consts + num_carried)]


def _while(op: Op) -> list[Body]:
    skipped, num_consts = op.params["cond_nconsts"], op.params["body_nconsts"]
    body = op.bodies["body_jaxpr"][0]
    return [Body(body, op.inputs[skipped:], len(body.outputs), num_consts)]


def _cond(op: Op) -> list[Body]:
    return [Body(branch, op.inputs[1:]) for branch in op.bodies["branches"]]


_BODIES: dict[str, Any] = {"scan": _scan, "while": _while, "cond": _cond}


def bodies_of(op: Op) -> list[Body]:
    """The body of a loop, or every branch of a `cond`; empty for other ops."""
    return _BODIES[op.name](op) if op.name in _BODIES else []


def _through(op: Op, bodies: Sequence[Body], found: Mapping[int, Lineage]) -> Iterator[tuple[Lineage, int]]:
    for body in bodies:
        for i, lineage in enumerate(_of_outputs(body)):
            is_carried = body.first_slice is None or i < body.num_carried
            for n, operand in enumerate(body.operands):
                is_slice = body.first_slice is not None and n >= body.first_slice
                if is_carried != is_slice and lineage.continued >> n & 1 and isinstance(operand, int):
                    was = found.get(operand, NONE)
                    is_written = lineage.written >> n & 1
                    yield Lineage(was.continued, was.continued if is_written else was.written), op.outputs[i]


def _of_outputs(body: Body) -> list[Lineage]:
    """Per output of a body, its lineage in the body's inputs after any number of iterations."""
    inner = lineages(body.graph)
    of_outputs = [inner.get(a, NONE) if isinstance(a, int) else NONE for a in body.graph.outputs]
    for _ in range(body.num_carried):
        further = [_a_round_further(lineage, of_outputs, body) for lineage in of_outputs]
        if further == of_outputs:
            break
        of_outputs = further
    return of_outputs


def _a_round_further(lineage: Lineage, of_outputs: Sequence[Lineage], body: Body) -> Lineage:
    """An output's lineage, extended by one earlier iteration of the carries that it continues."""
    for k in range(body.num_carried):
        if lineage.continued >> body.first_carried + k & 1:
            is_written = lineage.written >> body.first_carried + k & 1
            before = of_outputs[k]
            lineage |= Lineage(before.continued, before.continued if is_written else before.written)
    return lineage
