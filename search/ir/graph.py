"""The graph: one traced training step, in program order.

A `Graph` is a flat list of ops over numbered values. Calls are inlined; `scan`, `while` and `cond` stay ops
and hold their bodies as inner graphs. A `Step` is the outermost graph with facts about the user's function: the pytree path
and the role of every argument, and which result replaces which argument in the next step.

JAX's weak types decide to which dtype a Python number adapts. The trace has applied them, so values have none: a step has
one graph whether its state began as Python numbers or was restored from a checkpoint. Only the `Step` records its weak
arguments and results, so that executors return the types that `jax.jit` would.

Everything is frozen. `verify` is the specification: it runs after every pass that makes a graph.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autoshard.search.ir import _jax


class Phase(StrEnum):
    """The phase of the step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """The purpose of an argument of the step."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    STATE = "state"
    """Other state: step counters, running statistics."""
    FROZEN = "frozen"
    """Weights, tables and masks that the step reads and does not change."""
    BATCH = "batch"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Value:
    """One array: its shape, its dtype, and whether it lies in the host's pinned memory rather than a device's."""

    shape: tuple[int, ...]
    dtype: Any
    is_on_host: bool = False

    @classmethod
    def of(cls, aval: Any) -> "Value":
        """The value of an abstract value; tokens and others without a shape count as empty arrays."""
        shape, dtype = getattr(aval, "shape", (0,)), getattr(aval, "dtype", np.dtype(bool))
        return cls(tuple(shape), dtype, _jax.is_on_host(aval))

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return _jax.itemsize(self.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def has_shards(self) -> bool:
        """True if JAX can split an array of this dtype over devices."""
        return not _jax.is_stored_alike(self.dtype)


Atom = int | Any
"""An op's operand: the number of a value, or a `jax.extend.core.Literal`."""


@dataclass(frozen=True, slots=True)
class Equivalence:
    """The equivalence class of an op, in a shortened step and in the whole step that it represents.

    Attributes:
      block: the number of the op's repeated block; -1 outside of repeated blocks.
      place: the number of the group of equivalent blocks, and the op's index in its block; None if the op has no
        equivalent in another block.
      representative: the number of the op of the whole step that represents it in the shortened one.
      repeats: the number of ops that it represents.
    """

    block: int
    place: tuple[int, int] | None
    representative: int
    repeats: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One equation: a JAX primitive applied to values.

    `result_values` are the shapes and dtypes of `outputs`; `bodies` the inner graphs of control flow, by
    parameter name; `equivalence` is set in a shortened step, and in the whole step that it represents.
    """

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    result_values: tuple[Value, ...]
    phase: Phase
    scope: str
    source_info: Any
    bodies: dict[str, tuple["Graph", ...]]
    equivalence: Equivalence | None = None

    @property
    def repeats(self) -> int:
        """The number of equivalent ops that it represents."""
        return 1 if self.equivalence is None else self.equivalence.repeats

    @property
    def name(self) -> str:
        """The primitive's name."""
        return self.primitive.name

    @property
    def source(self) -> str:
        """`file:line` of the user's code, or an empty string."""
        return _jax.source_line(self.source_info)

    @property
    def short_source(self) -> str:
        """`folder/file:line` of the user's code, independent of the folder's location, or an empty string."""
        return _jax.short_source_line(self.source_info)

    @property
    def where(self) -> str:
        """The op's place in a message: `at file:line`, or its name scope if no line is known."""
        return f"at {self.source}" if self.source else f"in the scope {self.scope!r}"

    @property
    def is_transfer(self) -> bool:
        """True if it copies an array between a device's memory and the host's."""
        return self.name == "device_put" and _jax.names_memory(self.params)

    @property
    def is_host_update(self) -> bool:
        """True if the host computes it, in its own memory (`search.memory.host_updates`)."""
        return self.name == "host_update"

    @property
    def loop_counts(self) -> tuple[int, int]:
        """The numbers of constants and of carries among the inputs of a `scan`, which begin with them in this order."""
        return _jax.scan_counts(self.params)

    @property
    def sliced(self) -> tuple[Atom, ...]:
        """The inputs of a `scan` of which each iteration gets a slice."""
        return self.inputs[sum(self.loop_counts) :]

    @property
    def carried(self) -> tuple[int, ...]:
        """The outputs of a `scan` that are the last carries."""
        return self.outputs[: self.loop_counts[1]]

    @property
    def stacked(self) -> tuple[int, ...]:
        """The outputs of a `scan` that hold a slice of each iteration."""
        return self.outputs[self.loop_counts[1] :]

    @property
    def operands(self) -> tuple[int, ...]:
        """The inputs that are values rather than literals."""
        return tuple([a for a in self.inputs if isinstance(a, int)])

    def with_bodies(self, change: Callable[["Graph"], "Graph"]) -> "Op":
        """The op with each of its bodies changed."""
        if not self.bodies:
            return self
        return replace(self, bodies={key: tuple(map(change, each)) for key, each in self.bodies.items()})


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops in program order over numbered values.

    Attributes:
      values: every value; an index into it is a value's number.
      inputs: the numbers of the input values.
      constants: values with a fixed content, with that content.
      ops: each reads values made before it.
      outputs: the results: values or literals.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]

    def value(self, atom: Atom) -> Value:
        """The shape and dtype of an operand or output, which may be a literal."""
        return self.values[atom] if isinstance(atom, int) else Value.of(atom.aval)

    @property
    def made(self) -> tuple[int, ...]:
        """The outputs that are values rather than literals."""
        return tuple([a for a in self.outputs if isinstance(a, int)])

    @cached_property
    def maker(self) -> dict[int, Op]:
        """By value, the op that makes it."""
        return {v: op for op in self.ops for v in op.outputs}

    @cached_property
    def made_at(self) -> dict[int, int]:
        """By value, the index of the op that makes it."""
        return {v: i for i, op in enumerate(self.ops) for v in op.outputs}

    def with_ops(self, change: Callable[[Op], Op]) -> "Graph":
        """The graph with each of its ops changed."""
        return replace(self, ops=tuple(map(change, self.ops)))

    @cached_property
    def num_ops(self) -> int:
        """Number of ops in this graph and in all bodies."""
        return sum(1 + sum(b.num_ops for bs in op.bodies.values() for b in bs) for op in self.ops)


@dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument of the step: its pytree path and role. In a shortened step, `alike` holds the paths of the further
    arguments that it represents, and `place` the key that it shares with its equivalents."""

    name: str
    role: Role
    alike: tuple[str, ...] = ()
    place: Hashable = None

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all arguments that it represents, its own first."""
        return (self.name, *self.alike)

    @property
    def repeats(self) -> int:
        """The number of arguments that it represents."""
        return 1 + len(self.alike)


@dataclass(frozen=True, eq=False)
class Step:
    """A traced training step.

    Attributes:
      name: the name of the user's function.
      graph: the computation.
      arguments: one per graph input.
      results: one pytree path per graph output.
      replaces: for each output, the input of its shape and dtype that it replaces in the next step (state), or None.
      in_tree: the pytree of `(args, kwargs)`.
      out_tree: the pytree of the result.
      trace_s: seconds that tracing took.
      num_microbatches: the number of microbatches that the graph splits the batch into.
      retyped: (result, argument) pairs in which the result replaces an argument of another shape or dtype, and so cannot
        reuse its memory.
      doubtful: results that may replace arguments, but are not in `replaces`, each with those arguments.
      placements: the user's ignored sharding annotations, each with its source line.
      weak_arguments: the numbers of arguments whose type is weak in JAX's promotion.
      weak_results: the numbers of results whose type is weak.
      spelled_out: the step as it was traced, if its attention has been replaced by blockwise ops.
    """

    name: str
    graph: Graph
    arguments: tuple[Argument, ...]
    results: tuple[str, ...]
    replaces: tuple[int | None, ...]
    in_tree: Any
    out_tree: Any
    trace_s: float = 0.0
    num_microbatches: int = 1
    retyped: tuple[tuple[int, int], ...] = ()
    doubtful: tuple[tuple[int, tuple[int, ...]], ...] = ()
    placements: tuple[str, ...] = ()
    weak_arguments: frozenset[int] = frozenset()
    weak_results: frozenset[int] = frozenset()
    spelled_out: "Step | None" = None

    @property
    def inputs(self) -> Iterator[tuple[int, Argument]]:
        """The graph's inputs, each with the argument that it is."""
        return zip(self.graph.inputs, self.arguments, strict=True)

    @cached_property
    def rests_as(self) -> tuple[int | None, ...]:
        """Per output, the input whose layout at rest it takes: the one that it replaces, if the shapes are equal."""
        graph, found = self.graph, list(self.replaces)
        for o, i in self.retyped:
            same_shape = graph.value(graph.outputs[o]).shape == graph.values[graph.inputs[i]].shape
            found[o] = i if same_shape else None
        return tuple(found)

    def abstract_inputs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shape and dtype of every flat argument."""
        values = enumerate(self.graph.values[v] for v in self.graph.inputs)
        return tuple(_jax.abstract_value(v.shape, v.dtype, i in self.weak_arguments) for i, v in values)


Site = tuple[Any, ...]
"""An op's position in the nested graph: the path of its graph, as `walk` yields it, then its index."""


def walk(graph: Graph, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Graph]]:
    """The graph and all its bodies, each with its path: op index, parameter name, position, and so on."""
    yield path, graph
    for i, op in enumerate(graph.ops):
        for param, bodies in op.bodies.items():
            for j, body in enumerate(bodies):
                yield from walk(body, (*path, i, param, j))


EFFECTFUL = frozenset(
    {"debug_callback", "debug_print", "io_callback", "pure_callback", "run_state", "swap", "addupdate"}
)
"""Primitives with side effects."""


def without_dead_ops(graph: Graph) -> Graph:
    """The graph without ops whose results are unused; ops with side effects stay."""
    live = {*graph.made}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if op.name in EFFECTFUL or not live.isdisjoint(op.outputs):
            kept.append(op)
            live.update(op.operands)
    constants = tuple(c for c in graph.constants if c[0] in live)
    return Graph(graph.values, graph.inputs, constants, tuple(reversed(kept)), graph.outputs)


def verify(graph: Graph) -> None:
    """Asserts that the graph is well formed: each value is made once, before it is read."""
    made = set(graph.inputs) | {v for v, _ in graph.constants}
    assert len(made) == len(graph.inputs) + len(graph.constants), "an input or constant is listed twice"
    for op in graph.ops:
        for v in op.operands:
            assert v in made, f"{op.name} at {op.source} reads value {v} before it is made"
        for v in op.outputs:
            assert v not in made, f"{op.name} at {op.source} makes value {v} again"
            made.add(v)
        for bodies in op.bodies.values():
            for body in bodies:
                verify(body)
    assert made <= set(range(len(graph.values))), "a value has no shape"
    assert made.issuperset(graph.made), "an output is never made"
