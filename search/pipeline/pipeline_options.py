"""The options of a search for pipelines."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.search.pipeline.drafts import DraftOptions
from autoshard.search.pipeline.layers import MAX_LAYERS


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """The options of a search for pipelines.

    Attributes:
      memory_bytes: the cap per device.
      stages: number of stages; None to search it.
      schedule: the family's name; None to search it.
      microbatches: number of microbatches of each replica; None to search it.
      mesh: the mesh of each stage: its number of replicas, then the mesh of a replica's devices; None to search it.
      remat: "never" to recompute nothing; None to search it.
      memory_share: the share of a cap that stages may take, by their layers' costs.
      pins: the `PartitionSpec` in which an argument must rest on its stage's mesh, by its pytree path.
      hosted: the arguments that rest in their stage's host memory.
      offload: the names under which the user asks for these; None if the user says nothing.
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

    @property
    def draft_options(self) -> DraftOptions:
        """The options of a proposal."""
        return DraftOptions(self.memory_bytes, self.stages, self.schedule, self.memory_share)

    @property
    def most_layers(self) -> int:
        """Largest number of layers of the step: enough for the number of stages."""
        return max(MAX_LAYERS, self.stages or 0)
