"""The costs of stages: of any run of layers, on any submesh, in any of some ways to run layers.

The inter-op search asks for L^2 runs of layers on each submesh. None of them is searched by itself. The cost of a run
is made of those of its layers: time, residuals and state are sums, and the workspace is that of the layer that needs
most. An *option* is a submesh with a way to run any layer on it, for example with a mesh, with or without
recomputation. Prefix sums give the sums of all runs at once.

Costs never fall when a run gets longer. So the runs from a first layer that fit a cap, of bytes or of seconds, are all
those up to some last layer. Bisection finds it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray

TOLERANCE = 1e-9
"""Relative difference within which sums count as equal. Source: rounding of sums of some hundred terms, with room."""


@dataclass(frozen=True, slots=True, order=True)
class Submesh:
    """A grid of devices for a stage: a part of a node, or whole nodes.

    Attributes:
      num_nodes: number of nodes.
      devices_per_node: number of devices on each; all of them if there are several nodes.
    """

    num_nodes: int
    devices_per_node: int

    @property
    def size(self) -> int:
        """Number of devices."""
        return self.num_nodes * self.devices_per_node

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster.

    Attributes:
      num_devices: number of its devices.
      memory_bytes: the cap per device.
      kind: its kind. An option is for nodes of one kind.
    """

    num_devices: int
    memory_bytes: float
    kind: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class StageOption:
    """A way to run layers on a submesh. Arrays are [layers]; bytes are per device.

    Attributes:
      submesh: the devices.
      variant: the name of the way.
      time_s: seconds of the forward and backward pass of a microbatch.
      residual_bytes: bytes per microbatch in flight.
      state_bytes: bytes that stay in memory throughout.
      workspace_bytes: bytes that the layer needs while it runs.
      update_s: seconds once per step.
      kind: the kind of nodes that it is for.
    """

    submesh: Submesh
    variant: str
    time_s: Array
    residual_bytes: Array
    state_bytes: Array
    workspace_bytes: Array
    update_s: Array
    kind: str = ""

    def __post_init__(self) -> None:
        arrays = (self.time_s, self.residual_bytes, self.state_bytes, self.workspace_bytes, self.update_s)
        assert len({len(a) for a in arrays}) == 1, f"option {self.submesh} {self.variant}: layers differ"
        assert all(np.all(a >= 0) for a in arrays), f"option {self.submesh} {self.variant}: costs below zero"

    def memory_bytes(self, first: int, end: int, in_flight: int) -> float:
        """Bytes per device for layers `first` to `end - 1`."""
        residual_bytes = in_flight * self.residual_bytes[first:end].sum()
        return float(
            self.state_bytes[first:end].sum() + residual_bytes + self.workspace_bytes[first:end].max()
        )


@dataclass(frozen=True, eq=False)
class StageTable:
    """The costs of all runs of layers under all options, by prefix sums: arrays are [options, layers + 1].

    Attributes:
      options: the ways to run layers.
      cap_bytes: [options] cap per device.
      latency_s: seconds that a run adds to the time in which the pipeline fills and drains.
      bottleneck_s: seconds that a run takes of a step if it is the slowest stage.
    """

    options: tuple[StageOption, ...]
    cap_bytes: Array
    latency_s: Array
    bottleneck_s: Array

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.options[0].time_s)

    @cached_property
    def state_bytes(self) -> Array:
        """State of all layers before each."""
        return prefix_sums([option.state_bytes for option in self.options])

    @cached_property
    def residual_bytes(self) -> Array:
        """Residuals of all layers before each, per microbatch in flight."""
        return prefix_sums([option.residual_bytes for option in self.options])

    @cached_property
    def workspace_bytes(self) -> Array:
        """[options, first layer, end]: the largest workspace of a run's layers."""
        size = self.num_layers + 1
        most = np.zeros((len(self.options), size, size))
        needed = np.array([option.workspace_bytes for option in self.options])
        for first in range(self.num_layers):
            most[:, first, first + 1 :] = np.maximum.accumulate(needed[:, first:], axis=1)
        return most

    def reach_in_memory(self, in_flight: int) -> Array:
        """[options, first layer]: the end of the longest run that fits the cap; `first` if none does."""
        held = self.state_bytes + in_flight * self.residual_bytes
        rows, firsts = np.indices(held.shape)
        cap = (self.cap_bytes * (1 + TOLERANCE))[:, None]
        return self._reach(
            lambda ends: held[rows, ends] - held + self.workspace_bytes[rows, firsts, ends] <= cap
        )

    def reach_in_time(self, limit_s: float) -> Array:
        """[options, first layer]: the end of the longest run that takes at most `limit_s` of a step as its slowest
        stage."""
        rows = np.indices(self.bottleneck_s.shape)[0]
        limits_s = limit_s * (1 + TOLERANCE)
        return self._reach(lambda ends: self.bottleneck_s[rows, ends] - self.bottleneck_s <= limits_s)

    def _reach(self, fits: Callable[[Array], Array]) -> Array:
        """The last end that fits, for each first layer. All ends before it fit, too."""
        fitting = np.indices(self.latency_s.shape)[1]
        step = 1 << self.num_layers.bit_length()
        while step := step // 2:
            ends = fitting + step
            inside = ends <= self.num_layers
            fitting = np.where(inside & fits(np.minimum(ends, self.num_layers)), ends, fitting)
        return fitting

    def reversed(self) -> "StageTable":
        """The table with the layers in reverse order."""

        def backwards(option: StageOption) -> StageOption:
            return StageOption(
                option.submesh,
                option.variant,
                option.time_s[::-1],
                option.residual_bytes[::-1],
                option.state_bytes[::-1],
                option.workspace_bytes[::-1],
                option.update_s[::-1],
                option.kind,
            )

        return StageTable(
            tuple(map(backwards, self.options)),
            self.cap_bytes,
            self.latency_s[:, -1:] - self.latency_s[:, ::-1],
            self.bottleneck_s[:, -1:] - self.bottleneck_s[:, ::-1],
        )


def prefix_sums(rows: list[Array]) -> Array:
    """[rows, columns + 1]: the sum of all columns before each."""
    values = np.array(rows, float)
    return np.concatenate([np.zeros((len(rows), 1)), np.cumsum(values, axis=1)], axis=1)
