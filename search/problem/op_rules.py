"""The factors of a graph's ops, looked up once for all ops that look alike."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, compress
from typing import Any

from autoshard.search.ir.factors import Rule, rule_for
from autoshard.search.ir.graph import Graph, Op, Step, Value

CONTROL_FLOW = frozenset({"scan", "while", "cond"})
"""Primitives without factors: the ops of their bodies have these."""


class OpRules:
    """Remembers rules."""

    def __init__(self) -> None:
        self._known: dict[Any, Rule] = {}

    def of(self, op: Op, inputs: tuple[Value, ...], is_read: tuple[bool, ...]) -> Rule:
        """An op's factors; literals, which are not read, are left out."""
        try:
            key = (op.name, inputs, is_read, op.result_values, tuple(op.params.items()))
            if key in self._known:
                return self._known[key]
        except TypeError:  # a parameter that cannot be hashed
            key = None
        rule = rule_for(op.name, inputs, op.result_values, op.params)
        rule = replace(rule, operands=tuple(compress(rule.operands, is_read)))
        if key is not None:
            self._known[key] = rule
        return rule


def primitives_without_rule(step: Step) -> dict[str, tuple[int, str]]:
    """The primitives of a step that are computed in full on every device for want of a rule, although their data could be
    split: the number of their ops, and the source line of the first one."""
    rules, found = OpRules(), dict[str, tuple[int, str]]()
    for graph, op in _ops(step.graph):
        is_read = tuple([isinstance(a, int) for a in op.inputs])
        rule = rules.of(op, tuple(map(graph.value, op.inputs)), is_read)
        if rule.is_unknown and any(factor.size > 1 for factor in rule.factors):
            count, where = found.get(op.name, (0, op.where))
            found[op.name] = (count + 1, where)
    return found


def _ops(graph: Graph) -> Iterator[tuple[Graph, Op]]:
    """All ops that have factors, each with the graph that holds it, in program order; loops and branches have bodies
    instead."""
    for op in graph.ops:
        if op.name not in CONTROL_FLOW:
            yield graph, op
            continue
        for body in chain.from_iterable(op.bodies.values()):
            yield from _ops(body)
