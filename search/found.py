"""What a search found: strategies on a mesh, and what a device does under them."""

from dataclasses import dataclass
from functools import cached_property

from autoshard.search.device.prediction import Prediction
from autoshard.search.mesh_problem import MeshProblem, StepProblem
from autoshard.search.problem.memory_rows import Peak
from autoshard.search.solver.pbqp import Labels


@dataclass(frozen=True, eq=False)
class Found:
    """Strategies that fit, and what a device does under them.

    Attributes:
      step_problem: of the step with what is recomputed.
      on_mesh: the problem that they solve.
      labels: a strategy for each node.
      limit_bytes: the cap.
      asked: what a device does, where that was asked to find out whether they fit.
    """

    step_problem: StepProblem
    on_mesh: MeshProblem
    labels: Labels
    limit_bytes: int
    asked: Prediction | None = None

    @cached_property
    def device(self) -> Prediction:
        """What a device does."""
        return self.asked or self.on_mesh.predicted(self.labels, self.limit_bytes)

    @property
    def fits(self) -> bool:
        """Whether the kernels of a device keep to the cap."""
        return self.device.needed_bytes <= self.limit_bytes

    @cached_property
    def peak(self) -> Peak:
        """In program order or the kernels', what is more."""
        return self.on_mesh.larger_peak(self.labels, self.device)

    @property
    def cost_s(self) -> float:
        """Computation, and communication that it does not hide, which the solver minimises, and what the device waits for
        copies to and from its host."""
        return self.on_mesh.problem.cost_s(self.labels) - self._hidden_copies_s

    @property
    def communication_s(self) -> float:
        """Of that, what is no computation."""
        return self.cost_s - self.on_mesh.memory.costed.compute_s(self.labels)

    @property
    def communication_share(self) -> float:
        """The same, of the cost."""
        return self.communication_s / self.cost_s if self.cost_s else 0.0

    @property
    def hidden_s(self) -> float:
        """Communication and copies that run behind computation."""
        return self.on_mesh.hiding.hidden_once_s(self.labels) + self._hidden_copies_s

    @property
    def _hidden_copies_s(self) -> float:
        return self.device.transfer_s - self.device.waited_s if self.step_problem.has_transfers else 0.0

    @property
    def host_bytes(self) -> float:
        """What a device holds of its host's memory."""
        return self.on_mesh.host.peak(self.labels).num_bytes if self.on_mesh.host.items else 0.0
