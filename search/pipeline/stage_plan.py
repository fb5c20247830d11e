"""The values of the inter-op search: its problem, a cut into stages, and the reason why there is none."""

from dataclasses import dataclass

import numpy as np

from autoshard.cost_model.units import format_bytes
from autoshard.search.pipeline.stage_costs import Array, ClusterNode, StageOption, Submesh


@dataclass(frozen=True, slots=True, eq=False)
class InterOpProblem:
    """Layers to cut into stages, and the devices for these.

    Attributes:
      nodes: the cluster's nodes, in the order in which stages stand on them.
      options: the ways to run layers on submeshes.
      num_microbatches: microbatches of a step.
      in_flight: by the number of stages behind a stage, the microbatches whose residuals it holds. The last entry holds
        for more stages, too. Entries never fall.
      transfer_s: [links, layers + 1]: seconds to send, at each cut, the operands of the next layer, and their gradients
        back.
      num_stages: the number of stages that the caller asked for; None for any.
      links: the link to each device from the one before it; if empty, there are two: inside a node, and between nodes.
    """

    nodes: tuple[ClusterNode, ...]
    options: tuple[StageOption, ...]
    num_microbatches: int
    in_flight: tuple[int, ...]
    transfer_s: Array
    num_stages: int | None = None
    links: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert all(a <= b for a, b in zip(self.in_flight, self.in_flight[1:], strict=False)), (
            f"in flight with more stages behind must not be less, got {self.in_flight}"
        )
        assert len({node.kind for node in self.nodes}) == len(set(self.nodes)), "nodes of a kind differ"
        assert len(self.links) in (0, self.num_devices), (
            f"{len(self.links)} links to {self.num_devices} devices"
        )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.options[0].time_s)

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return sum(node.num_devices for node in self.nodes)

    @property
    def links_to(self) -> Array:
        """[devices + 1]: the link to each device. The last entry, behind all devices, leads nowhere."""
        inside = (np.arange(node.num_devices) == 0 for node in self.nodes)
        return np.append(self.links or np.concatenate([*inside]).astype(int), 0)

    def held_with(self, num_behind: int) -> int:
        """Microbatches in flight on a stage."""
        return self.in_flight[min(num_behind, len(self.in_flight) - 1)]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage.

    Attributes:
      first_layer: its first layer.
      end_layer: the layer behind its last.
      first_device: its first device, in the cluster's order.
      submesh: its devices.
      variant: the way in which its layers are run.
      in_flight: microbatches whose residuals it holds.
      time_s: seconds of the forward and backward pass of a microbatch.
      update_s: seconds once per step.
      memory_bytes: bytes per device.
      cap_bytes: the cap per device.
      kind: the kind of its nodes, if there are several.
    """

    first_layer: int
    end_layer: int
    first_device: int
    submesh: Submesh
    variant: str
    in_flight: int
    time_s: float
    update_s: float
    memory_bytes: float
    cap_bytes: float
    kind: str = ""

    def __str__(self) -> str:
        layers = f"layers {self.first_layer} to {self.end_layer - 1}"
        devices = f"devices {self.first_device} to {self.first_device + self.submesh.size - 1}"
        if self.kind:  # whose order may be another one than their owner's
            devices = f"{self.submesh.size} devices of {self.kind}"
        return f"{layers} on {devices} ({self.submesh}, {self.variant}), {self.in_flight} in flight"


@dataclass(frozen=True, slots=True)
class InterOpPlan:
    """A cut into stages.

    Attributes:
      stages: the stages, in order.
      step_s: predicted seconds of a step.
      bound_s: lower bound on the step time of all cuts onto these nodes, in this order, under these options.
    """

    stages: tuple[StagePlan, ...]
    step_s: float
    bound_s: float

    @property
    def gap(self) -> float:
        """Upper bound on the share of its step time that the best cut saves."""
        return 1 - self.bound_s / self.step_s if self.step_s else 0.0


@dataclass(frozen=True, slots=True)
class NoCut:
    """The reason why there is no plan.

    Attributes:
      nearest: stages of a cut that needs about the least additional memory; empty if no memory would help.
    """

    nearest: tuple[StagePlan, ...]

    @property
    def over_bytes(self) -> float:
        """Bytes by which its fullest stage exceeds its cap; infinite if no memory would help."""
        return max((stage.memory_bytes - stage.cap_bytes for stage in self.nearest), default=np.inf)

    def __str__(self) -> str:
        if not self.nearest:
            return (
                "no cut into stages uses all devices, whatever their memory: there are fewer layers than nodes or than the "
                "stages asked for, or no option for some node. Ask for fewer stages, or use fewer nodes"
            )
        worst = max(self.nearest, key=lambda stage: stage.memory_bytes - stage.cap_bytes)
        return (
            f"no cut into stages fits: in the nearest, of {len(self.nearest)} stages, stage {self.nearest.index(worst)} "
            f"({worst}) needs {format_bytes(worst.memory_bytes)} per device, "
            f"{format_bytes(self.over_bytes)} more than there is"
        )
