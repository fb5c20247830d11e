"""What the executor needs to know: where in the nested graph a spec is imposed.

A plan speaks of kinds of ops; the executor walks the graph op by op. A `Layout` is the plan spelled out for one graph:
the spec that a value gets where it is made, and what an op wants done to an operand before it reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.spec import Spec

Place = tuple[str, tuple[Any, ...], int]
"""(what, where, index): `("operand" | "result", site of an op, i)` or `("input" | "output", path of a graph, i)`.

A site is the path of the op's graph followed by the op's index; a path alternates op index, parameter name and position,
as `graph.walk` yields it. The outermost graph has the empty path.
"""


@dataclass(frozen=True, slots=True)
class Want:
    """How an op wants an operand.

    Attributes:
      copy: the spec of the copy that it shares with the other readers of its phase; None when it reads the value itself.
      is_fresh: whether that copy is made anew in the backward phase, not shared with the forward phase.
      group: the phase's name, so that copies are told apart.
      spec: what it finally reads.
    """

    copy: Spec | None
    is_fresh: bool
    group: str
    spec: Spec | None


@dataclass(frozen=True, eq=False)
class Layout:
    """A plan spelled out for one graph.

    Attributes:
      mesh_shape: sizes of the mesh axes, outermost first.
      axis_names: their names.
      specs: the spec imposed on a value where it is made; places not listed are left to the compiler.
      wants: what is done to an operand or output before it is read.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[Place, Spec]
    wants: Mapping[Place, Want]
