"""What ties a plan to a step: two steps with one fingerprint can be told the same decisions.

It is made of all that decides which choices there are, what they are called, and what they cost: the arguments by
name and role; of each op its primitive, phase, scope, factors, and who makes what it reads; its parameters as far as they
are data (axes, dimension numbers, comparison kinds, paddings, precisions); the shapes and dtypes of all values.

It leaves out what a plan survives: the content of literals and constants, so that another learning rate keeps its
plan. And it leaves out what differs from one process to the next: source lines, addresses, the order of sets, and
code, of which only its type is said; what code in a parameter means for the sharding, the op's factors say. A
parameter that is None counts as absent, as later versions of JAX add such.
"""

import hashlib
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np

from search.ir.factors import Rule
from search.ir.graph import Atom, Graph, Op, Step, walk
from search.problem.numbering import Numbering
from search.problem.op_rules import OpRules

_NUM_DIGITS = 16
"""64 bits: two of a million steps agree by chance once in thirty million times."""


def fingerprint(step: Step) -> str:
    """16 hex digits: the same for the same traced step in every process (see the module)."""
    graphs = list(walk(step.graph))
    values = [v for _, graph in graphs for v in graph.values]
    types = dict.fromkeys((v.shape, v.dtype) for v in values)
    number = {type_: n for n, type_ in enumerate(types)}
    type_of = [number[v.shape, v.dtype] for v in values]
    known, rules = OpRules(), Numbering[Rule]()
    rule_of = [rules.of(_rule(op, graph, known)) for _, graph in graphs for op in graph.ops if not op.bodies]
    said = [
        *((a.name, a.role.value) for a in step.arguments),
        *zip(step.results, step.replaces, strict=True),
        *((path, _graph(graph)) for path, graph in graphs),
        *((shape, dtype.name) for shape, dtype in types),
        type_of,
        *rules.things,
        rule_of,
    ]
    return hashlib.sha256("\n".join(map(repr, said)).encode()).hexdigest()[:_NUM_DIGITS]


def _rule(op: Op, graph: Graph, known: OpRules) -> Rule:
    is_read = tuple([isinstance(a, int) for a in op.inputs])
    return known.of(op, tuple(map(graph.value, op.inputs)), is_read)


def _graph(graph: Graph) -> tuple[Any, ...]:
    constants = tuple(v for v, _ in graph.constants)
    return graph.inputs, constants, tuple(map(_op, graph.ops)), tuple(map(_atom, graph.outputs))


def _op(op: Op) -> tuple[Any, ...]:
    params = tuple((name, data(v)) for name, v in sorted(op.params.items()) if v is not None)
    return op.name, op.phase.value, op.scope, tuple(map(_atom, op.inputs)), op.outputs, params


def _atom(atom: Atom) -> Any:
    """A value's number; of a literal, its type."""
    return atom if isinstance(atom, int) else (atom.aval.shape, atom.aval.dtype.name)


def data(value: Any) -> Any:
    """A parameter in terms whose `repr` is the same in every process; of what is no data, its type."""
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
