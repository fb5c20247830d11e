"""The plan of a pipeline that is one program: how many stages of equal layers, on which mesh, in which order.

It says less than the plan of a pipeline whose stages have programs of their own: all stages are alike. All of it may be
edited by hand; `estimates` are the cost model's predictions.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.executors import SPMD
from autoshard.search.plan.json_file import schema_of
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.peak_band import compiled_json
from autoshard.search.plan.plan import Collective, Decisions
from autoshard.search.plan.saved import SavedPlan
from autoshard.search.plan.work_shares import WorkShares

SCHEMA = "autoshard.one-program/2"


@dataclass(frozen=True, slots=True)
class SpmdEstimates:
    """The cost model's predictions for a pipeline that is one program; bytes are those of a device.

    Attributes:
      step_s: seconds per step.
      bubble: the share of the step in which a stage has no microbatch, and its results are thrown away.
      peak_bytes: device memory at its highest.
      forward_s: seconds of the forward pass of a stage's layers on one microbatch, and of the transfer to the next stage.
      backward_s: seconds of the backward pass of a stage's layers on one microbatch, and of the transfer back.
      between_s: seconds per step of the ops between loops over layers, transfers included.
      update_s: seconds per step of the update, with the gradients' reduction.
      residual_bytes: residuals of one microbatch on a stage.
      state_bytes: state, which is always there.
      collectives: per kind and axes, in a step.
      shares: how the axes of a replica's mesh share the work; None in files of earlier versions.
      compiled_peak_bytes: device memory at its highest in the compiled program; None if it was not compiled.
    """

    step_s: float
    bubble: float
    peak_bytes: int
    forward_s: float
    backward_s: float
    between_s: float
    update_s: float
    residual_bytes: int
    state_bytes: int
    collectives: tuple[Collective, ...] = ()
    shares: WorkShares | None = None
    compiled_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SpmdPlan(SavedPlan):
    """How to run a training step as a pipeline that is one program.

    Attributes:
      step: the step function's name.
      fingerprint: of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      memory_bytes: the cap per device.
      schedule: `gpipe` or `circular`.
      microbatches: the number of parts in which each replica goes through its share of the batch.
      stages: runs of equally many layers.
      mesh: size of each axis by name: of groups of devices, each with as many stages, and of the replicas of each.
      retention: per class of forward ops, by name, the results that are not kept, as in a plan of one program.
      estimates: the predictions for these choices.
      decisions: how the devices of a replica share its work, on a mesh of theirs; None where a replica is one device.
      search_s: seconds of the search; not saved.
      outline: the traced step's types and ops, to say how another step differs; None in a file without it.
      is_sealed: whether the estimates are those of the decisions; False after an edit by hand.
    """

    step: str
    fingerprint: str
    jax: str
    cluster: Mapping[str, Any]
    memory_bytes: int
    schedule: str
    microbatches: int
    stages: int
    mesh: Mapping[str, int]
    retention: Mapping[str, str]
    estimates: SpmdEstimates
    decisions: Decisions | None = None
    search_s: Mapping[str, float] = field(default_factory=dict[str, float])
    outline: Outline | None = None
    is_sealed: bool = field(default=True, compare=False, repr=False)

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
        """The name of its executor: one program for all stages."""
        return SPMD

    @property
    def gap(self) -> None:
        """None: of a pipeline as a whole nothing is proven."""

    def _values(self) -> dict[str, Any]:
        said: dict[str, Any] = {
            "schema": SCHEMA,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "jax": self.jax,
            "cluster": dict(self.cluster),
            "memory_bytes": self.memory_bytes,
            "executor": self.executor,
            "schedule": self.schedule,
            "microbatches": self.microbatches,
            "stages": self.stages,
            "mesh": dict(self.mesh),
            "retention": dict(self.retention),
        }
        if (d := self.decisions) is not None:
            said["decisions"] = {
                "mesh": dict(d.mesh),
                "arguments": dict(d.arguments),
                "ops": dict(d.ops),
                "copies": dict(d.copies),
            }
        collectives = [{**asdict(one), "axes": list(one.axes)} for one in self.estimates.collectives]
        estimates = {**asdict(self.estimates), "collectives": collectives}
        del estimates["shares"], estimates["compiled_peak_bytes"]
        shares = {"shares": self.estimates.shares.to_json()} if self.estimates.shares else {}
        outline = {} if self.outline is None else {"outline": self.outline.to_json()}
        return said | {"estimates": estimates | shares | compiled_json(self.estimates)} | outline

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "SpmdPlan":
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        from autoshard.search.plan.plan_file import SpmdFile, read  # it takes a while to import

        if (schema := schema_of(data)) not in (None, SCHEMA):
            raise PlanError(
                f"{place} has schema {schema!r}; wanted {SCHEMA!r}, as of a pipeline that is one program"
            )
        file = read(SpmdFile, data, place)
        del file["schema"], file["executor"]
        seal = file.pop("seal", None)
        if "decisions" in file:
            file["decisions"] = Decisions(**file["decisions"])
        if "outline" in file:
            file["outline"] = Outline(**file["outline"])
        collectives = tuple(Collective(**one) for one in file["estimates"].pop("collectives", ()))
        shares = file["estimates"].pop("shares", None)
        file["estimates"] = SpmdEstimates(
            **file["estimates"],
            collectives=collectives,
            shares=WorkShares.from_json(shares) if shares else None,
        )
        return cls(**file)._read_from({"seal": seal})

    def __str__(self) -> str:
        from autoshard.search.plan.spmd_summary import summary  # it needs plans itself

        return summary(self)


def is_of_one_program(data: Any) -> bool:
    """Whether JSON-ready values say that they are the plan of a pipeline that is one program."""
    return schema_of(data) == SCHEMA
