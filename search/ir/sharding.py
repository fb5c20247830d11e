"""What the executor needs to know: where in the nested graph a spec is imposed.

A plan speaks of classes of ops; the executor walks the graph op by op. A `StepSharding` is the plan spelled out for
one graph: the spec that a value gets where it is made, and what an op wants done to an operand before it
reads it. A value is taken from one spec to another by the chain of steps that the search priced, and every
step is spelled out: left to go the whole way at once, XLA's partitioner replicates where it knows no better,
and aborts on some pairs of specs of a 2x3 mesh.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from search.ir.spec import Spec

Place = tuple[str, tuple[Any, ...], int]
"""(what, where, index): `("operand" | "result", site of an op, i)` or `("input" | "output", path of a graph,
i)`.

A site is the path of the op's graph followed by the op's index; a path alternates op index, parameter name
and position, as `graph.walk` yields it. The outermost graph has the empty path.
"""


Route = tuple[Spec, ...]
"""The specs that a value passes through, the last one being where it arrives; empty when it stays as it is."""


@dataclass(frozen=True, slots=True)
class Want:
    """How an op wants an operand.

    Attributes:
      copy: the route to the copy that it shares with the other readers of its phase; empty when it reads the
        value itself.
      is_fresh: whether that copy is made anew in the backward phase, not shared with the forward phase.
      group: the phase's name, so that copies are told apart.
      last: the route from there to what it reads.
    """

    copy: Route
    is_fresh: bool
    group: str
    last: Route


@dataclass(frozen=True, eq=False)
class StepSharding:
    """A plan spelled out for one graph.

    Attributes:
      mesh_shape: sizes of the mesh axes, outermost first.
      axis_names: their names.
      specs: the route that a value takes where it is made; places not listed are left to the compiler.
      wants: what is done to an operand or output before it is read.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[Place, Route]
    wants: Mapping[Place, Want]
