"""The plan of a pipeline: where a step is cut into stages, on which submeshes they run, and in which schedule.

It stands apart from `Plan`, which says what every op of one program does: here, each stage splits its examples over its
devices, and nothing else is decided. So there is little to say, all of it can be edited by hand, and nothing of it is an
estimate.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cost_model.errors import PlanError
from cost_model.whole_file import write_whole
from search.plan.json_file import read_file, schema_of
from search.plan.spmd_plan import PROGRAM_PER_STAGE

SCHEMA = "autoshard.pipeline/1"


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
      first_op: the position of its first op, of those that run for each microbatch in the forward phase: an op counts as
        one, a loop over layers as many as it has.
      mesh: size of each axis of its submesh by name.
    """

    first_op: int
    mesh: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        """Devices of its submesh."""
        return math.prod(self.mesh.values())


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """How to run a training step as a pipeline.

    Attributes:
      step: the step function's name.
      fingerprint: of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      schedule: the family's name, such as `1f1b`.
      workers: groups of devices; each may run several stages.
      microbatches: in how many the step goes through its batch.
      stages: in the order of the forward phase.
    """

    step: str
    fingerprint: str
    jax: str
    cluster: Mapping[str, Any]
    schedule: str
    workers: int
    microbatches: int
    stages: tuple[Stage, ...]

    @property
    def executor(self) -> str:
        """What runs it."""
        return PROGRAM_PER_STAGE

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the same plan gives the same values in the same order."""
        return {
            "schema": SCHEMA,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "jax": self.jax,
            "cluster": dict(self.cluster),
            "schedule": self.schedule,
            "workers": self.workers,
            "microbatches": self.microbatches,
            "stages": [{"first_op": s.first_op, "mesh": dict(s.mesh)} for s in self.stages],
        }

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan as JSON: the file is whole or not there.

        Raises:
          InputError: the path cannot be written.
        """
        write_whole(Path(path), json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n", "the plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "PipelinePlan":
        """Reads what `save` wrote.

        Raises:
          InputError: no such file, or it cannot be read.
          PlanError: not JSON, or not a plan of this schema; says where.
        """
        return cls.from_json(read_file(path), str(path))

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "PipelinePlan":
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        from search.plan.plan_file import PipelineFile, read  # it takes a while to import

        if (schema := schema_of(data)) not in (None, SCHEMA):
            raise PlanError(f"{place} has schema {schema!r}; wanted {SCHEMA!r}, as of a pipeline's plan")
        file = read(PipelineFile, data, place)
        return cls(
            file["step"],
            file["fingerprint"],
            file["jax"],
            file["cluster"],
            file["schedule"],
            file["workers"],
            file["microbatches"],
            tuple(Stage(**stage) for stage in file["stages"]),
        )


def is_of_pipeline(data: Any) -> bool:
    """Whether JSON-ready values say that they are a pipeline's plan."""
    return schema_of(data) == SCHEMA
