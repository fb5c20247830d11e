"""The registry of factor rules: for each primitive, what its dimensions mean.

One rule per primitive, used by everything: strategies and their collectives, local shapes, FLOPs and bytes,
microbatches. A rule is a function of avals (`shape` and `dtype` are all that is read) and parameters; most
are one line in the table of their family's module. A primitive without one is never an error: nothing of it
can be split.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from autoshard.search.ir.factors import (
    attention,
    contraction,
    elementwise,
    indexing,
    kernels,
    linalg,
    reduction,
    rng,
    shape,
)
from autoshard.search.ir.factors.loops import opaque
from autoshard.search.ir.factors.rule import Factor, Kind, Rule, RuleFn

__all__ = ["Factor", "Kind", "Rule", "has_rule", "rule_for"]

_RULES: Mapping[str, RuleFn] = MappingProxyType(
    {
        **elementwise.RULES,
        **contraction.RULES,
        **shape.RULES,
        **reduction.RULES,
        **indexing.RULES,
        **rng.RULES,
        **linalg.RULES,
        **kernels.RULES,
        **attention.RULES,
    }
)


def has_rule(name: str) -> bool:
    """Whether the primitive of that name has a rule; one that says "nothing can be split" counts."""
    return name in _RULES


def rule_for(name: str, in_avals: Sequence[Any], out_avals: Sequence[Any], params: dict[str, Any]) -> Rule:
    """The factors of one equation.

    A primitive without a rule gets one that splits nothing: each dimension is an unsplittable factor of its
    own.

    Example:
      >>> import jax
      >>> from autoshard.search.ir.factors import rule_for
      >>> a, b, c = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((8, 4), (4, 2), (8, 2)))
      >>> rule = rule_for("dot_general", (a, b), (c,), {"dimension_numbers": (((1,), (0,)), ((), ()))})
      >>> [(factor.size, str(factor.kind)) for factor in rule.factors]
      [(8, 'parallel'), (4, 'sum'), (2, 'parallel')]
      >>> rule.operands, rule.results
      ((((0,), (1,)), ((1,), (2,))), (((0,), (2,)),))
    """
    if name in _RULES:
        return _RULES[name](in_avals, out_avals, params)
    return replace(opaque(in_avals, out_avals, params), is_unknown=True)
