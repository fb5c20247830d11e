"""The graph: one traced training step, in program order.

A `Graph` is a flat list of ops over numbered values. Calls are inlined; `scan`, `while` and `cond` stay ops
and hold their bodies as inner graphs. A `Step` is the outermost graph with what it knows of the user's
function: the pytree path of every argument, what each argument is for, and which result replaces which
argument in the next step.

JAX's weak types decide to what dtype a Python number adapts. The trace has done that, so values have none: a step is one
graph whether its state began as Python numbers or came back from a checkpoint. Only the `Step` knows which of its arguments
and results are weak, for executors to hand back what `jax.jit` would.

Everything is frozen. `verify` is the specification: it is run after every pass that makes a graph.
"""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

import jax
import numpy as np

from autoshard.search.ir import _jax


class Phase(StrEnum):
    """Where in the step an op stands."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


class Role(StrEnum):
    """What an argument of the step is for."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer_state"
    STATE = "state"
    """State that is neither: step counters, running statistics."""
    FROZEN = "frozen"
    """What the step reads as a whole and does not hand back: frozen weights, tables, masks."""
    BATCH = "batch"
    KEY = "key"


@dataclass(frozen=True, slots=True)
class Value:
    """One array: its shape, its dtype, and whether it lies in the host's memory (pinned) rather than in a device's."""

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
        """Whether an array of it can be split over devices."""
        return not _jax.is_stored_alike(self.dtype)


Atom = int | Any
"""An op's operand: the number of a value, or a `jax.extend.core.Literal`."""


@dataclass(frozen=True, slots=True)
class Likes:
    """Of an op in a step that was shortened, and in the whole one beside it: which ops are its like.

    Attributes:
      block: the repeated block that it is of, by number; -1 where it is of none.
      place: what it shares with its likes in other blocks: which of these there are, and which of their ops; None where it
        has none.
      stand_in: which op of the whole step stands for it in the shortened one, by number.
      repeats: for how many it stands.
    """

    block: int
    place: tuple[int, int] | None
    stand_in: int
    repeats: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One equation: a JAX primitive applied to values.

    `result_values` are the shapes and dtypes of `outputs`; `bodies` the inner graphs of control flow, by
    parameter name; `likes` is known in a step that was shortened, and in the whole one beside it.
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
    likes: Likes | None = None

    @property
    def repeats(self) -> int:
        """For how many ops alike it stands."""
        return 1 if self.likes is None else self.likes.repeats

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
        """The same with the file's folder and name alone, wherever that folder is."""
        return _jax.short_source_line(self.source_info)

    @property
    def where(self) -> str:
        """Where it stands, for a message: `at file:line`, or the name scope where no line is known."""
        return f"at {self.source}" if self.source else f"in the scope {self.scope!r}"

    @property
    def is_transfer(self) -> bool:
        """Whether it takes an array between a device's memory and its host's."""
        return self.name == "device_put" and _jax.names_memory(self.params)

    @property
    def loop_counts(self) -> tuple[int, int]:
        """Of a `scan`: how many leading inputs are constants, and how many follow as carries."""
        return _jax.scan_counts(self.params)

    @property
    def operands(self) -> tuple[int, ...]:
        """The inputs that are values, literals left out."""
        return tuple([a for a in self.inputs if isinstance(a, int)])


@dataclass(frozen=True, eq=False)
class Graph:
    """Ops in program order over numbered values.

    Attributes:
      values: every value; an index into it is a value's number.
      inputs: the values that come from outside.
      constants: values with a fixed content, with that content.
      ops: each reads values made before it.
      outputs: what leaves: values or literals.
    """

    values: tuple[Value, ...]
    inputs: tuple[int, ...]
    constants: tuple[tuple[int, Any], ...]
    ops: tuple[Op, ...]
    outputs: tuple[Atom, ...]

    def value(self, atom: Atom) -> Value:
        """What an operand or output is, a literal's own array included."""
        return self.values[atom] if isinstance(atom, int) else Value.of(atom.aval)

    @property
    def made(self) -> tuple[int, ...]:
        """The outputs that are values, literals left out."""
        return tuple([a for a in self.outputs if isinstance(a, int)])

    @cached_property
    def num_ops(self) -> int:
        """Ops here and in all bodies."""
        return sum(1 + sum(b.num_ops for bs in op.bodies.values() for b in bs) for op in self.ops)


@dataclass(frozen=True, slots=True)
class Argument:
    """One flat argument of the step: its pytree path and role, and in a step that was shortened the paths of those alike for
    which it stands too, and what it shares with its likes."""

    name: str
    role: Role
    alike: tuple[str, ...] = ()
    place: Hashable = None

    @property
    def names(self) -> tuple[str, ...]:
        """The paths of all arguments for which it stands, its own first."""
        return (self.name, *self.alike)

    @property
    def repeats(self) -> int:
        """For how many it stands."""
        return 1 + len(self.alike)


@dataclass(frozen=True, eq=False)
class Step:
    """A traced training step.

    Attributes:
      name: the user's function.
      graph: what it computes.
      arguments: one per graph input.
      results: one pytree path per graph output.
      replaces: for each output, the input of its shape and dtype that it replaces in the next step (state), or None.
      in_tree: the pytree of `(args, kwargs)`.
      out_tree: the pytree of the result.
      trace_s: seconds that tracing took.
      num_microbatches: in how many the graph goes through the batch.
      retyped: results that replace an argument of another shape or dtype, and so not its memory, each with that argument.
      doubtful: results that may replace arguments, which are nowhere in `replaces`, each with those arguments.
      placements: what the user's code says of how values lie on devices, which is left out, each with its source line.
      weak_arguments: those whose type is weak in JAX's promotion, by number.
      weak_results: the results whose type is, by number.
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

    @cached_property
    def rests_as(self) -> tuple[int | None, ...]:
        """For each output, the input in whose place it comes to rest: that which it replaces, if it has its shape."""
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
"""Where an op stands in the nested graph: the path of its graph, as `walk` yields it, then its index."""


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
"""Primitives that do more than make their results."""


def without_dead_ops(graph: Graph) -> Graph:
    """The graph without the ops that nothing needs."""
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
