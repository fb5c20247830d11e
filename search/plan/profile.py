"""The profile of a step: one device over the time of a step, small enough for a plan's file.

The cost model's device runs thousands of kernels and holds as many buffers. Readers look for three things: the activity
of each stream, the values that fill the memory, and the longest ops. So the step is divided into slices of equal time.
The profile has the share of each slice in which a stream is busy, and the bytes of each kind at the fullest point of
the slice. `search.plan.measured_profile` makes it. A plan runs without a profile, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.search.plan.bounds import Count, Number


@dataclass(frozen=True, slots=True)
class OpTime:
    """The ops under one name of a plan's `ops` that are kernels of their own, on one device.

    Attributes:
      name: the name in `ops`.
      runs: their runs in a step.
      seconds: per step.
      flops: per step.
      moved_bytes: read and written per step.
      peak_flops_per_s: peak of the device for the dtype of the operands.
    """

    name: str
    runs: Count
    seconds: Number
    flops: Number
    moved_bytes: Number
    peak_flops_per_s: Number


@dataclass(frozen=True, slots=True)
class ClassTime:
    """The kernels of one class, on one device.

    Attributes:
      seconds: per step.
      runs: kernels that run in a step.
    """

    seconds: Number
    runs: Count


@dataclass(frozen=True, slots=True)
class Profile:
    """One device over a step, in slices of equal time.

    Attributes:
      seconds: length of the step in this schedule of kernels. The solver's `step_s` is the sum of the kernels' times,
        without the time that it takes to be hidden.
      busy: by stream, the share of each slice in which it runs: `forward`, `recomputation`, `backward` and `update`,
        which compute, one at a time; `collectives over data`; `to host` and `from host`.
      held_bytes: by kind of resident, bytes at the fullest point of each slice.
      ops: the ops that take longest, the longest first.
      kernels: the kernels that compute, by class (`search.plan.kernel_class`).
    """

    seconds: Number
    busy: Mapping[str, tuple[Number, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    held_bytes: Mapping[str, tuple[Count, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    ops: tuple[OpTime, ...] = ()
    kernels: Mapping[str, ClassTime] = field(default_factory=dict[str, ClassTime])
