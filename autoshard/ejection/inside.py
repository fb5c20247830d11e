"""The plan's shardings inside a step, by the line of the user's code that makes a value.

A wrapper cannot impose them. A person can, by `with_sharding_constraint` on these lines. The list is in the file's
docstring.
"""

from collections.abc import Iterator

from autoshard.ejection import source
from autoshard.search.ir.graph import Op, Phase, Step, walk
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import partition_spec

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Primitives whose results are listed: partitioners take the shardings of other values from these."""

MAX_LINES = 24
"""Most lines of the list. Source: the lines of a VT100."""


def constraints(step: Step, sharding: StepSharding) -> list[str]:
    """A line for each product of the forward phase: its place, its type, and its sharding. Equal lines are one."""
    found = list(dict.fromkeys(_constraints(step, sharding)))
    more = [f"and {len(found) - MAX_LINES} more"] if len(found) > MAX_LINES else []
    return [*found[:MAX_LINES], *more]


def _constraints(step: Step, sharding: StepSharding) -> Iterator[str]:
    for path, graph in walk(step.graph):
        for i, op in enumerate(graph.ops):
            specs = sharding.specs.get(("result", (*path, i), 0))
            if op.name in PRODUCTS and op.phase is Phase.FORWARD and specs:
                spec = source.text(partition_spec(specs[-1], sharding.axis_names))
                yield f"{op.short_source or op.scope}: {_typed(op)} is {spec}"


def _typed(op: Op) -> str:
    (value,) = op.result_values
    return f"{op.name} {value.dtype}[{', '.join(map(str, value.shape))}]"
