"""A solution of a search: strategies on a mesh, and the device's step under them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from autoshard.search.device.prediction import Prediction
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.solver.pbqp import Labels
from autoshard.search.step_problem import StepProblem

Bounds = Mapping[tuple[int, ...], float]
"""Lower bounds in seconds, by mesh."""


@dataclass(frozen=True, eq=False)
class Found:
    """Strategies, and the device's step under them.

    Attributes:
      step_problem: the prepared step, with its recomputation and offloading.
      on_mesh: its problem on a mesh.
      labels: a strategy for each node.
      limit_bytes: the memory cap.
      asked: the device's predicted step, if it was simulated to find out whether the strategies fit.
    """

    step_problem: StepProblem
    on_mesh: MeshProblem
    labels: Labels
    limit_bytes: int
    asked: Prediction | None = None

    @cached_property
    def device(self) -> Prediction:
        """The device's predicted step."""
        return self.asked or self.on_mesh.predicted(self.labels, self.limit_bytes)

    @property
    def fits(self) -> bool:
        """True if the kernels of a device keep to the cap."""
        return self.device.needed_bytes <= self.limit_bytes

    @cached_property
    def peak(self) -> Peak:
        """The larger of two peaks: in program order and in the kernels' order."""
        return self.on_mesh.larger_peak(self.labels, self.device)

    @cached_property
    def solved_s(self) -> float:
        """Seconds of computation and visible communication, and of all copies to and from the host. The solver's bounds
        are bounds on these."""
        return self.on_mesh.cost_s(self.labels, self.device)

    @property
    def cost_s(self) -> float:
        """Seconds of computation and visible communication, and of waiting for copies to and from the host."""
        return self.solved_s - self._hidden_copies_s

    @cached_property
    def communication_s(self) -> float:
        """Seconds of the cost that are communication."""
        return self.cost_s - self.on_mesh.memory.costed.compute_s(self.labels)

    @property
    def hidden_s(self) -> float:
        """Seconds of communication and copies that computation hides."""
        hidden_s = self._hidden_copies_s
        if self.device.overlap:
            hidden_s += self.on_mesh.hiding.hidden_once_s(self.labels) - self.device.lost_overlap_s
        return hidden_s

    @property
    def _hidden_copies_s(self) -> float:
        return self.device.transfer_s - self.device.waited_s if self.step_problem.has_transfers else 0.0

    @property
    def host_bytes(self) -> float:
        """Bytes of host memory that a device needs."""
        return self.on_mesh.host.peak(self.labels).num_bytes if self.on_mesh.host.items else 0.0
