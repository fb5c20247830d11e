"""The fingerprint of a step: a plan applies to every step with its fingerprint.

The fingerprint covers everything that decides the choices, their names and their costs: the arguments by name and role;
of each op its primitive, phase, scope, factors, and the makers of its operands; its parameters as far as they are data
(axes, dimension numbers, comparison kinds, paddings, precisions); the shapes and dtypes of all values.

It leaves out the content of literals and constants, which a plan does not depend on: another learning rate keeps its
plan. It also leaves out everything that differs from one process to the next: source lines, addresses, the order of
sets, and code, of which only the type counts. The op's factors cover the meaning of such code for the sharding. A
parameter that is None counts as absent, as later versions of JAX add such.
"""

import hashlib
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np

from autoshard.search.ir.graph import Atom, Graph, Op, Step, walk
from autoshard.search.problem.op_rules import OpRules

_NUM_DIGITS = 16
"""64 bits: two of a million steps agree by chance once in thirty million times."""


def fingerprint(step: Step) -> str:
    """The fingerprint: 16 hex digits, equal for one traced step in every process (see the module)."""
    graphs, looks = list(walk(step.graph)), _Looks()
    descriptions = [
        *((a.name, a.role.value) for a in step.arguments),
        *zip(step.results, step.replaces, strict=True),
        *((path, looks.graph(graph)) for path, graph in graphs),
        *((shape, dtype.name) for shape, dtype in looks.types),
        *looks.descriptions,
    ]
    return hashlib.sha256("\n".join(map(repr, descriptions)).encode()).hexdigest()[:_NUM_DIGITS]


class _Looks:
    """The descriptions of ops, each stored once: primitive, parameters, factors, types of operands and results.

    Attributes:
      types: shapes and dtypes, with their numbers.
      descriptions: descriptions, in the order of their numbers.
    """

    def __init__(self) -> None:
        self.types: dict[tuple[tuple[int, ...], Any], int] = {}
        self.descriptions: list[Any] = []
        self._known: dict[Any, int] = {}
        self._rules = OpRules()

    def graph(self, graph: Graph) -> tuple[Any, ...]:
        """A whole graph, in terms whose `repr` is equal in every process."""
        types = [self._type(v.shape, v.dtype) for v in graph.values]
        ops = tuple([self._op(op, graph, types) for op in graph.ops])
        constants = tuple(v for v, _ in graph.constants)
        return types, graph.inputs, constants, ops, tuple(self._atom(a) for a in graph.outputs)

    def _op(self, op: Op, graph: Graph, types: Sequence[int]) -> tuple[Any, ...]:
        atoms = tuple([a if isinstance(a, int) else self._atom(a) for a in op.inputs])
        read = tuple([types[a] if isinstance(a, int) else self._atom(a) for a in op.inputs])
        made = tuple([types[v] for v in op.outputs])
        return self._look(op, graph, read, made), op.phase.value, op.scope, atoms, op.outputs

    def _look(self, op: Op, graph: Graph, read: tuple[Any, ...], made: tuple[int, ...]) -> int:
        try:
            key = (op.name, read, made, tuple(op.params.items()))
            if key in self._known:
                return self._known[key]
        except TypeError:  # a parameter that cannot be hashed
            key = None
        params = tuple((name, data(v)) for name, v in sorted(op.params.items()) if v is not None)
        is_read = tuple(isinstance(a, int) for a in op.inputs)
        rule = None if op.bodies else self._rules.of(op, tuple(map(graph.value, op.inputs)), is_read)
        self.descriptions.append((op.name, params, read, made, rule))
        if key is not None:
            self._known[key] = len(self.descriptions) - 1
        return len(self.descriptions) - 1

    def _atom(self, atom: Atom) -> Any:
        """A value's number; of a literal, its type."""
        return atom if isinstance(atom, int) else (self._type(atom.aval.shape, atom.aval.dtype), "literal")

    def _type(self, shape: tuple[int, ...], dtype: Any) -> int:
        return self.types.setdefault((shape, dtype), len(self.types))


def data(value: Any) -> Any:
    """A parameter in terms whose `repr` is equal in every process; only the type of a parameter that is no data."""
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(data, value))
    if isinstance(value, Mapping):
        return tuple(sorted(((data(k), data(v)) for k, v in value.items()), key=repr))
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(data, value), key=repr))
    return value.name if isinstance(value, np.dtype) else type(value).__name__
