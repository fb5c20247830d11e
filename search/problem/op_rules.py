"""The factors of a graph's ops, looked up once for all ops that look alike."""

import itertools
from dataclasses import replace
from typing import Any

from autoshard.search.ir.factors import Rule, rule_for
from autoshard.search.ir.graph import Op, Value


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
        rule = replace(rule, operands=tuple(itertools.compress(rule.operands, is_read)))
        if key is not None:
            self._known[key] = rule
        return rule
