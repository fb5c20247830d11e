"""The exchange of halos: rows that a part of a windowed dimension gets from the parts beside it.

If mesh axes split a factor along which windows slide, each device reads a few rows of its neighbours' parts
(`search.ir.factors.windows`): one collective-permute for the rows before its part, one for those behind. XLA's partitioner
exchanges dimension after dimension, so that the second exchange carries the rows that the first one added. The rows and
the part are then written out as one array, which the op reads. The gradient of a pooling also makes sums for the rows that
it has borrowed, and returns them.

Nothing hides an exchange: an op needs all of its operand.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.cost_model.collectives import MeshModel
from autoshard.search.problem.flat_program import FlatOp

HALO = "collective-permute"
"""The collective that sends a halo."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The exchange of one dimension's halos under one strategy.

    Attributes:
      operand: the operand.
      axes: the mesh axes that split the dimension.
      sent: bytes per device of each collective-permute.
      growth: rows that the op reads over rows of the part.
    """

    operand: int
    axes: tuple[int, ...]
    sent: tuple[float, ...]
    growth: float

    def seconds(self, mesh: MeshModel) -> float:
        """Seconds of its collective-permutes, one after the other."""
        return sum(float(mesh.time_s(HALO, self.axes, num_bytes)) for num_bytes in self.sent)


def exchanges(
    op: FlatOp,
    shapes: list[tuple[int, ...]],
    part_bytes: list[float],
    factor_of: dict[int, int],
    assignment: np.ndarray,
    mesh: MeshModel,
) -> Iterator[Exchange]:
    """The exchanges of an op under a strategy, in their order.

    Args:
      op: the op.
      shapes: by operand, its shape.
      part_bytes: by operand, bytes of a device's part.
      factor_of: by factor of the op's rule, the group's factor that it is.
      assignment: by mesh axis, the group's factor that it splits.
      mesh: the mesh.
    """
    part_bytes = [*part_bytes]
    for window in op.rule.windows:
        axes = tuple(np.flatnonzero(assignment == factor_of[window.factor]).tolist())
        if not axes or not (window.before or window.after):
            continue
        num_parts = prod(mesh.shape[a] for a in axes)
        rows = shapes[window.operand][window.dim] / num_parts
        row_bytes = part_bytes[window.operand] / rows
        sent = tuple(n * row_bytes for n in (window.before, window.after) if n)
        sent *= 2 if window.is_returned else 1
        growth = 1 + (window.before + window.after) / rows
        part_bytes[window.operand] *= growth
        yield Exchange(window.operand, axes, sent, growth)
