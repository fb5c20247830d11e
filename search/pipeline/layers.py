"""The forward phase as a chain of layers: the places where it may be cut into stages, and the layer of each op.

Between any two ops with much of the work there is one position where the fewest bytes cross; only such positions can be
borders. While there are too many, the border where most bytes cross is dropped; of equal ones, as between equal blocks,
the one whose layers have the least work together. So repeated blocks become equal layers, without being looked for.
Layers under `scan` may be cut between any two iterations, which count as ops of their own.

All other ops follow their layer as they follow a stage (`search.pipeline.stages`): layers are the finest stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from autoshard.search.ir.graph import Op
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.split_loops import between_ops, num_positions
from autoshard.search.pipeline.stage_barriers import barriers_per_value, barriers_within_stages
from autoshard.search.pipeline.stage_cut import StageCut, crossing_bytes, num_flops
from autoshard.search.pipeline.stages import StageAssignment, assign

MAX_LAYERS = 96
"""Largest number of layers. Source: a choice of ours; the inter-op search takes seconds for as many on a thousand
devices."""

HEAVY_SHARE = 0.1
"""Ops with less than this share of an even share of the work make no layer. Source: a choice of ours."""


@dataclass(frozen=True, eq=False)
class Layers:
    """The layers of a step.

    Attributes:
      starts: by layer, the position of its first op, as in a cut of the step.
      whole: the step in parts.
      step: the step with its loops cut between layers, and barriers inside layers.
      cut: the starts of the layers in that step.
    """

    starts: tuple[int, ...]
    whole: PipelineStep
    step: PipelineStep
    cut: StageCut

    @classmethod
    def of(cls, step: PipelineStep, borders: Sequence[int] = (), most: int = MAX_LAYERS) -> "Layers":
        """The layers of a step: at most `most`, and more if some must begin at `borders`."""
        ops = step.forward_ops
        counts = [num_positions(step, op) for op in ops]
        found = layer_starts(work(step, ops), crossing_bytes(ops, step.values, counts), most)
        starts = tuple(sorted({*found, *borders}))
        return cls._cut(step, starts)

    @classmethod
    def _cut(cls, whole: PipelineStep, starts: tuple[int, ...]) -> "Layers":
        step, cut = between_ops(whole, StageCut(starts[1:]))
        step = barriers_per_value(step)
        return cls(starts, whole, barriers_within_stages(step, assign(step, cut)), cut)

    def of_like(self, step: PipelineStep) -> "Layers | None":
        """These layers in a step that also recomputes. Forward ops that serve only the backward phase may be missing
        there; None if a layer would be empty."""
        there = {name: position for position, name in enumerate(_names(step))}
        names = _names(self.whole)
        found = [next((there[n] for n in names[at:] if n in there), None) for at in self.starts]
        starts = [at for at in found if at is not None]
        if len({*starts}) < self.num_layers:
            return None
        return Layers._cut(step, (0, *starts[1:]))

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.starts)

    @cached_property
    def assigned(self) -> StageAssignment:
        """The layer of each op, and of each value, where it is made or rests."""
        return assign(self.step, self.cut)

    def stage_cut(self, first_layers: Sequence[int]) -> StageCut:
        """The cut of the step in parts into stages that begin with these layers."""
        return StageCut(tuple(self.starts[layer] for layer in first_layers[1:]))


def _names(step: PipelineStep) -> list[tuple[int, int]]:
    """By position, the number in the loop's body of the value that is made there, and the iteration."""
    return [
        (step.origins[op.outputs[0]], n) for op in step.forward_ops for n in range(num_positions(step, op))
    ]


def work(step: PipelineStep, ops: Sequence[Op]) -> np.ndarray:
    """Floating-point operations by position."""
    counts = [num_positions(step, op) for op in ops]
    flops = np.array([num_flops(op, step.values) for op in ops])
    return np.repeat(flops / counts, counts)


def layer_starts(flops: np.ndarray, crossing: np.ndarray, most: int) -> tuple[int, ...]:
    """The positions at which layers begin.

    Args:
      flops: [positions] of each op.
      crossing: [positions + 1] bytes that cross in front of it.
      most: largest number of layers.
    """
    heavy = np.flatnonzero(flops > HEAVY_SHARE * flops.sum() / most)
    if not len(heavy):
        return (0,)
    starts = [0]
    for before, after in pairwise(heavy):
        starts.append(int(before + 1 + np.argmin(crossing[before + 1 : after + 1])))
    total = np.concatenate([[0.0], np.cumsum(flops)])
    while len(starts) > most:
        ends = [*starts[1:], len(flops)]
        joined = [total[ends[i]] - total[starts[i - 1]] for i in range(1, len(starts))]
        worst = max(range(1, len(starts)), key=lambda i: (crossing[starts[i]], -joined[i - 1], -i))
        del starts[worst]
    return tuple(starts)
