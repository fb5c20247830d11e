"""The plan of a pipeline that is one program: how many stages of equal layers, on which mesh, in which order.

It says less than the plan of a pipeline whose stages have programs of their own: all stages are alike. All of it may be
edited by hand, and nothing of it is an estimate.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cost_model.errors import PlanError
from cost_model.units import format_mesh
from search.plan.json_file import schema_of
from search.plan.plan import Decisions
from search.plan.saved import SavedPlan

SCHEMA = "autoshard.one-program/1"

ONE_PROGRAM = "one program"
PROGRAM_PER_STAGE = "a program per stage"
EXECUTORS = (PROGRAM_PER_STAGE, ONE_PROGRAM)
"""What runs a pipeline."""


@dataclass(frozen=True, slots=True)
class SpmdPlan(SavedPlan):
    """How to run a training step as a pipeline that is one program.

    Attributes:
      step: the step function's name.
      fingerprint: of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      schedule: `gpipe` or `circular`.
      microbatches: in how many each replica goes through its part of the batch.
      stages: runs of equally many layers.
      mesh: size of each axis by name: of groups of devices, each with as many stages, and of the replicas of each.
      decisions: how the devices of a replica share its work, on a mesh of theirs; None where a replica is one device.
    """

    step: str
    fingerprint: str
    jax: str
    cluster: Mapping[str, Any]
    schedule: str
    microbatches: int
    stages: int
    mesh: Mapping[str, int]
    decisions: Decisions | None = None

    @property
    def num_workers(self) -> int:
        """Groups of devices."""
        return self.mesh["stage"]

    @property
    def num_replicas(self) -> int:
        """Of each stage."""
        return self.mesh["replica"]

    @property
    def num_parts(self) -> int:
        """In how many all replicas of a stage go through the batch."""
        return self.microbatches * self.num_replicas

    @property
    def executor(self) -> str:
        """What runs it."""
        return ONE_PROGRAM

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON-ready values; the same plan gives the same values in the same order."""
        said: dict[str, Any] = {
            "schema": SCHEMA,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "jax": self.jax,
            "cluster": dict(self.cluster),
            "executor": self.executor,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "stages": self.stages,
            "mesh": dict(self.mesh),
        }
        if (d := self.decisions) is not None:
            said["decisions"] = {
                "mesh": dict(d.mesh),
                "arguments": dict(d.arguments),
                "ops": dict(d.ops),
                "copies": dict(d.copies),
            }
        return said

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "SpmdPlan":
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        from search.plan.plan_file import SpmdFile, read  # it takes a while to import

        if (schema := schema_of(data)) not in (None, SCHEMA):
            raise PlanError(
                f"{place} has schema {schema!r}; wanted {SCHEMA!r}, as of a pipeline that is one program"
            )
        file = read(SpmdFile, data, place)
        del file["schema"], file["executor"]
        if "decisions" in file:
            file["decisions"] = Decisions(**file["decisions"])
        return cls(**file)

    def __str__(self) -> str:
        whole = {**self.mesh, **(self.decisions.mesh if self.decisions else {})}
        shape = format_mesh(tuple(whole.values()))
        return (
            f"step     {self.step} (fingerprint {self.fingerprint}, JAX {self.jax})\n"
            f"pipeline {self.stages} stages of equal layers, {self.schedule}, {self.microbatches} microbatches: "
            f"{self.executor}\n"
            f"mesh     {shape} ({' x '.join(whole)})\n"
        )


def is_of_one_program(data: Any) -> bool:
    """Whether JSON-ready values say that they are the plan of a pipeline that is one program."""
    return schema_of(data) == SCHEMA
