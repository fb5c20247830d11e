"""A plan's shardings for one graph: the specs imposed on values, and the paths along which values are resharded.

A plan decides for classes of ops; the executor walks the graph op by op. A `StepSharding` holds the specs that each value
takes where it is made, and for each operand the path of reshard steps that the search priced. The path lists every step: if
XLA's partitioner had to reshard in one step, it would replicate some values, and abort for some specs on a 2x3 mesh.

Readers of one value share the beginnings of their paths, so the paths from a value form a tree. `SharedPaths` walks it: the
executor with arrays, the device's lowering with buffers, the estimates with a count. All three therefore take a shared step
exactly once.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from autoshard.search.ir.spec import PARTIAL, Spec

Place = tuple[str, tuple[Any, ...], int]
"""(kind, where, index): `("operand" | "result", site of an op, i)` or `("input" | "output", path of a graph,
i)`; `("enter", path of a branch, i)` is the branch's input before its specs are imposed; `("terms", site of an op, i)` holds
the spec of a partial result's terms on the devices, for which a barrier waits instead of their sum; empty if it does not
wait.

A site is the path of the op's graph followed by the op's index; a path alternates op index, parameter name
and position, as `graph.walk` yields it. The outermost graph has the empty path.
"""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One step of a path.

    Attributes:
      kind: the kind of a collective, or `slice`.
      axes: the numbers of its mesh axes.
      num_bytes: bytes per device before or after the step, whichever is larger.
      after: the spec that it results in.
      narrow_dtype: the narrower type in which the value moves, as it was converted from it or will be converted to it;
        None if it moves in its own.
    """

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    after: Spec
    narrow_dtype: Any = None

    @property
    def is_narrowed(self) -> bool:
        """True if the value moves in a narrower type than its own."""
        return self.narrow_dtype is not None

    @property
    def is_constrained(self) -> bool:
        """True if a sharding constraint imposes this step.

        No constraint can express a partial value. If a reduce-scatter over one axis precedes a reduction over another, the
        constraint has the other axis whole: the compiler then does both in this order (measured on XLA:GPU).
        """
        return PARTIAL not in self.after or self.kind == "reduce-scatter"


ReshardPath = tuple[ReshardStep, ...]
"""The steps from one spec of a value to another; empty if the spec does not change."""


@dataclass(frozen=True, slots=True)
class OperandReshard:
    """The resharding of an op's operand.

    Attributes:
      path: the steps from the value's spec at rest.
      phase: the phase whose readers share the resharded value, which is recomputed there; empty if all phases share it.
    """

    path: ReshardPath
    phase: str = ""


class SharedPaths[T]:
    """Resharded values: each step of a path is taken once, by the first reader that needs it."""

    def __init__(self) -> None:
        self._reached: dict[tuple[Hashable, str, ReshardPath], T] = {}

    def arrive(
        self,
        value: Hashable,
        reshard: OperandReshard,
        start: Callable[[], T],
        take: Callable[[T, ReshardStep], T],
    ) -> T:
        """The value at the end of its path.

        Args:
          value: the value's key.
          reshard: the path.
          start: makes the value at the beginning of the path.
          take: makes the value after a step from the value before it.
        """
        here = self._once((value, reshard.phase, ()), start)
        for n, step in enumerate(reshard.path, 1):
            here = self._once((value, reshard.phase, reshard.path[:n]), partial(take, here, step))
        return here

    def _once(self, key: tuple[Hashable, str, ReshardPath], make: Callable[[], T]) -> T:
        if key not in self._reached:
            self._reached[key] = make()
        return self._reached[key]


@dataclass(frozen=True, eq=False)
class StepSharding:
    """A plan's shardings for one graph.

    Attributes:
      mesh_shape: sizes of the mesh axes, outermost first.
      axis_names: names of the mesh axes.
      specs: the specs that a value takes where it is made, one after another; the compiler decides for places that are not
        listed. For an op that is applied shard by shard, the specs in which it reads its operands are listed, too.
      reshards: the resharding of operands and outputs; places that are not listed are read without one.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[Place, tuple[Spec, ...]]
    reshards: Mapping[Place, OperandReshard]
