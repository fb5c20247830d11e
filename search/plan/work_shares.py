"""The shares of a plan: how each mesh axis shares the work and the state, in shares between 0 and 1.

An expert calls a plan by what its mesh axes split: examples (data parallelism), weights in computation (tensor parallelism),
stacks of weights (experts), positions of a sequence, rows of images (spatial parallelism), and parameters and optimizer
state at rest (ZeRO, FSDP). `WorkShares` holds these shares. `search.plan.measured_shares` measures them, and
`search.plan.headline` puts them into words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.search.plan.bounds import Count, Number, Size


@dataclass(frozen=True, slots=True)
class AxisUse:
    """The use of one mesh axis.

    The first six are shares of the FLOPs of the forward phase's products with weights: of those products in which the axis
    splits such a loop. The rest of 1 is repeated on all devices of the axis. The others are shares of bytes.

    Attributes:
      axis: the axis.
      size: number of devices along it.
      examples: loops over the examples of the batch.
      positions: loops over positions of an example: of a sequence, of an image.
      rows: loops over rows along which windows slide, with halos.
      features: other loops that the weights do not have.
      weights: loops of the weights, over their outputs or over what is summed.
      experts: loops over a stack of weights, each of which meets its own part of the activations.
      sums_scattered: of sums over `weights` in the forward phase, those that are scattered along examples or positions.
      parameters: parameters that are split at rest.
      gathered: parameters that are split at rest, and gathered for products and lookups.
      regathered: of these, those that the backward phase gathers once more.
      tables: parameters that are split at rest and looked up where they are.
      optimizer_state: optimizer state that is split at rest.
      reductions_scattered: of the bytes of reductions over the axis, those of reduce-scatters.
    """

    axis: str
    size: Size
    examples: Number = 0.0
    positions: Number = 0.0
    rows: Number = 0.0
    features: Number = 0.0
    weights: Number = 0.0
    experts: Number = 0.0
    sums_scattered: Number = 0.0
    parameters: Number = 0.0
    gathered: Number = 0.0
    regathered: Number = 0.0
    tables: Number = 0.0
    optimizer_state: Number = 0.0
    reductions_scattered: Number = 0.0


@dataclass(frozen=True, slots=True)
class WorkShares:
    """How a step is shared out on one mesh, and the work of all of it.

    Attributes:
      axes: the mesh axes with more than one device.
      model_flops: by dtype of the operands, FLOPs of the step's matrix products, convolutions and fused attention, in all
        phases and on all devices together. Recomputed FLOPs are left out.
      recomputed: of the FLOPs of the forward phase, the share that the plan computes once more.
      runs: by name of an op in the plan's decisions: its runs in a step, of matrix products, convolutions, lookups and
        scatters.
    """

    axes: tuple[AxisUse, ...] = ()
    model_flops: Mapping[str, Number] = field(default_factory=dict[str, float])
    recomputed: Number = 0.0
    runs: Mapping[str, Count] = field(default_factory=dict[str, int])
