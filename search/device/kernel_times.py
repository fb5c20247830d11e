"""Kernel times: by our cost model, and in XLA's scheduler, which hides collectives behind kernels.

On Hopper and later, the scheduler has tables of products and of collectives inside a node. They were measured on H100s,
and our model follows them. For all other kernels the scheduler uses constants; launches take no time there. It logs its
time for each kernel (`xla/service/gpu/model/sol_latency_estimator.cc`; read with JAX 0.12). Before Hopper see
`search.device.kernel_sizes`.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.cost_model.collectives import SCHEDULED_RATIO, MeshModel
from autoshard.cost_model.compute import kernel_s
from autoshard.cost_model.memo import memo
from autoshard.search.problem.convolution_copies import CONVOLUTION
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.kernels import FusedKernel, runs_alone

UNKNOWN_S = 5e-3
"""The scheduler's time for a collective between nodes, and for a transfer between a device and its host. Source: its log;
XLA, `kHighLatency`."""

CONVOLUTION_S = 10e-6
"""The scheduler's time for any convolution. Source: its log."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Time of one run.

    Attributes:
      seconds: by our model; for an op in a kernel that makes several arrays, its share of the kernel.
      scheduled_s: the time that XLA's scheduler assumes.
    """

    seconds: float
    scheduled_s: float

    def __add__(self, other: "KernelTime") -> "KernelTime":
        return KernelTime(self.seconds + other.seconds, self.scheduled_s + other.scheduled_s)

    def __mul__(self, runs: float) -> "KernelTime":
        return KernelTime(runs * self.seconds, runs * self.scheduled_s)


def of_collective(mesh: MeshModel, kind: str, axes: Collection[int], num_bytes: float) -> KernelTime:
    """The time of a collective with this many bytes per device."""
    seconds = float(mesh.time_s(kind, axes, num_bytes))
    scheduled_s = UNKNOWN_S if mesh.group(axes).crosses_nodes else SCHEDULED_RATIO * seconds
    return KernelTime(seconds, scheduled_s)


class Times:
    """Kernel times of a program's ops under some strategies; ops of one class are computed once."""

    def __init__(self, costed: CostedGraph, chosen: Sequence[int]) -> None:
        self.costed, self.chosen, self.folded = costed, chosen, costed.graph.folded
        self.device = costed.resharder.mesh.cluster.device

    def of_op(self, i: int, moved_bytes: float) -> KernelTime:
        """One run of the kernel that makes an op's results, which reads and writes this many bytes for them."""
        op_class = self.folded.class_of[i]
        if runs_alone(self.folded, op_class):
            return self._of_alone(op_class)
        apart = self.of_moving(moved_bytes)
        if i not in self.costed.kernels.of_op:  # it only passes arrays on
            return apart
        kernel, share = self.costed.kernels.of_op[i]
        return KernelTime(share * self._fused_s(kernel), apart.scheduled_s)

    @memo
    def _fused_s(self, kernel: FusedKernel) -> float:
        moved_bytes = self._chosen(kernel.op_classes[0], self.costed.kernel_bytes(kernel))
        return float(kernel_s(self.device, moved_bytes))

    @memo
    def _of_alone(self, op_class: int) -> KernelTime:
        seconds = self._chosen(op_class, self.costed.op_seconds(op_class))
        op = self.folded.op(op_class)
        guessed_s = UNKNOWN_S if op.is_transfer else CONVOLUTION_S if op.name == CONVOLUTION else seconds
        return KernelTime(seconds, guessed_s)

    def _chosen(self, op_class: int, of_strategies: np.ndarray) -> float:
        """The entry of an array over strategies at the chosen strategy of an op's group."""
        strategy = self.chosen[self.costed.graph.node_of[op_class]]
        return float(of_strategies[strategy])

    @memo
    def of_moving(self, num_bytes: float) -> KernelTime:
        """A kernel that reads and writes this many bytes."""
        seconds = float(kernel_s(self.device, num_bytes))
        return KernelTime(seconds, num_bytes / self.device.memory_bytes_per_s)
