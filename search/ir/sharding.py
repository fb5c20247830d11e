"""A plan spelled out for the executor: which specs are imposed where, and along which paths values travel.

A plan speaks of classes of ops; the executor walks the graph op by op. A `StepSharding` says for each value the specs that
it takes where it is made, and for each operand the path of steps that the search priced. Every step is spelled out: left
to go the whole way at once, XLA's partitioner replicates where it knows no better, and aborts on some pairs of specs of a
2x3 mesh.

Readers of one value share the beginnings of their paths, so that the paths from it form a tree. `SharedPaths` walks it: the
executor with arrays, the device's lowering with buffers, the estimates with nothing but a count. So what one of them takes
once, all of them do.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from autoshard.search.ir.spec import PARTIAL, Spec

Place = tuple[str, tuple[Any, ...], int]
"""(what, where, index): `("operand" | "result", site of an op, i)` or `("input" | "output", path of a graph,
i)`; `("enter", path of a branch, i)` is where the branch reads its input before that is placed; `("terms", site of an op,
i)` says how devices' terms of a result lie for which a barrier would wait, and nothing where it shall not.

A site is the path of the op's graph followed by the op's index; a path alternates op index, parameter name
and position, as `graph.walk` yields it. The outermost graph has the empty path.
"""


@dataclass(frozen=True, slots=True)
class ReshardStep:
    """One step of a path.

    Attributes:
      kind: a collective's, or `slice`.
      axes: of the mesh, by number.
      num_bytes: the larger of what a device holds before and after it.
      after: the spec that it leads to.
      is_narrowed: whether what moves has the narrower type from which it was converted, or to which it is.
    """

    kind: str
    axes: tuple[int, ...]
    num_bytes: float
    after: Spec
    is_narrowed: bool = False

    @property
    def is_imposed(self) -> bool:
        """Whether a constraint says it.

        None can say that a value is partial. Where a step scatters a sum over one axis before it reduces it over another,
        that is said with the other axis whole: the compiler then does both in this order (measured on XLA:GPU).
        """
        return PARTIAL not in self.after or self.kind == "reduce-scatter"


ReshardPath = tuple[ReshardStep, ...]
"""How a value gets from one spec to another; empty when it stays as it is."""


@dataclass(frozen=True, slots=True)
class OperandReshard:
    """How an op gets an operand.

    Attributes:
      path: from where the value rests.
      phase: the phase whose readers alone share it, as it is made anew there; empty for all phases.
    """

    path: ReshardPath
    phase: str = ""


class SharedPaths[T]:
    """Values on their ways: each step of a path is taken once, by the first who needs it."""

    def __init__(self) -> None:
        self._reached: dict[tuple[Hashable, str, ReshardPath], T] = {}

    def arrive(
        self,
        value: Hashable,
        reshard: OperandReshard,
        start: Callable[[], T],
        take: Callable[[T, ReshardStep], T],
    ) -> T:
        """What is at the end of a value's path.

        Args:
          value: what tells it apart from others.
          reshard: the path.
          start: what is at its beginning.
          take: what is behind a step, given what is before it.
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
    """A plan spelled out for one graph.

    Attributes:
      mesh_shape: sizes of the mesh axes, outermost first.
      axis_names: their names.
      specs: the specs that a value takes where it is made, one after another; places not listed are left to the
        compiler. Of an op that is applied shard by shard, its operands are listed too, as it reads them.
      reshards: how operands and outputs are brought to where they are read; what is not listed is read as it is.
    """

    mesh_shape: tuple[int, ...]
    axis_names: tuple[str, ...]
    specs: Mapping[Place, tuple[Spec, ...]]
    reshards: Mapping[Place, OperandReshard]
