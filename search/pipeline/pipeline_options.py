"""The options of a search for pipelines, and of a part of one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.search.pipeline.layers import MAX_LAYERS
from autoshard.search.pipeline.schedules.registry import APART, FAMILIES


@dataclass(frozen=True, slots=True, eq=False)
class PipelineOptions:
    """The options of a search for pipelines.

    Attributes:
      memory_bytes: the cap per device.
      stages: number of stages; None to search it.
      schedule: the family's name; None to search it.
      microbatches: number of microbatches of each replica; None to search it.
      mesh: the mesh of each stage: its number of replicas, then the mesh of a replica's devices; None to search it.
      remat: "never" to recompute nothing; None to search it.
      memory_share: the share of a cap that stages may take, by their layers' costs; infinite for no cap.
      pins: the `PartitionSpec` in which an argument must rest on its stage's mesh, by its pytree path.
      hosted: the arguments that rest in their stage's host memory.
      offload: the names under which the user asks for these; None if the user says nothing.
      among: the families to try, if the caller names none.
    """

    memory_bytes: int
    stages: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    mesh: tuple[int, ...] | None = None
    remat: str | None = None
    memory_share: float = 1.0
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])
    hosted: frozenset[int] = frozenset()
    offload: tuple[str, ...] | str | None = None
    among: tuple[str, ...] = APART

    @property
    def schedules(self) -> tuple[str, ...]:
        """The families to try."""
        return self.among if self.schedule is None else (self.schedule,)

    @property
    def shares_workers(self) -> bool:
        """True if workers hold several stages. Then all stages have equally many devices."""
        family = FAMILIES.get(self.schedule or "")
        return family is not None and family.shares_workers

    def may_stand(self, size: int, group: Cluster) -> bool:
        """True if a stage may have so many devices of a group of nodes; any number if stages share workers."""
        return self.shares_workers or stands(size, group)

    @property
    def most_layers(self) -> int:
        """Largest number of layers of the step: enough for the number of stages."""
        return max(MAX_LAYERS, self.stages or 0)


def stands(size: int, group: Cluster) -> bool:
    """True if so many devices of a group of nodes are 1, 2, 4, ... of a node, or whole nodes."""
    per_node = group.devices_per_node
    is_whole = size % per_node == 0 if size >= per_node else size.bit_count() == 1
    return is_whole and size <= group.num_devices
