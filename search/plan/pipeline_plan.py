"""The plan of a pipeline: where a step is cut into stages, on which submeshes they run, how, and in which schedule.

A stage's submesh has replicas, over which examples are split, and the devices of each, which share the work as `decisions`
say: in the words of a plan of one program, for each mesh that a stage's replicas form. All of it can be edited by hand and
is honoured. `estimates` are the cost model's predictions, stage by stage: from them alone the schedule can be drawn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from typing import Any

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.executors import MPMD
from autoshard.search.plan.json_file import schema_of
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.peak_band import compiled_json
from autoshard.search.plan.plan import Collective, Decisions
from autoshard.search.plan.saved import SavedPlan
from autoshard.search.plan.work_shares import WorkShares

SCHEMA = "autoshard.pipeline/2"

REPLICA = "replica"
"""The first axis of each stage's submesh."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage.

    Attributes:
      first_op: the position of its first op, of those that run for each microbatch in the forward phase: an op counts as
        one, a loop over layers as many as it has.
      mesh: size of each axis of its submesh by name: of replicas, then of each one's devices.
    """

    first_op: int
    mesh: Mapping[str, int]

    @property
    def num_devices(self) -> int:
        """Devices of its submesh."""
        return math.prod(self.mesh.values())

    @property
    def num_replicas(self) -> int:
        """Groups of its devices that do the same for other examples."""
        return self.mesh[REPLICA]

    @property
    def replica_mesh(self) -> dict[str, int]:
        """The mesh of a replica's devices."""
        return {name: size for name, size in self.mesh.items() if name != REPLICA}


@dataclass(frozen=True, slots=True)
class StageEstimates:
    """The predictions for a stage; bytes are those of a device.

    Attributes:
      forward_s: seconds of the forward pass of a microbatch.
      backward_s: seconds of the backward pass of a microbatch, without weight gradients.
      weight_gradient_s: seconds of the weight gradients of a microbatch.
      send_s: seconds of the transfer of activations to the next stage.
      return_s: seconds of the transfer of gradients to the previous stage.
      update_s: seconds per step of the update, with the gradients' reduction over replicas.
      residual_bytes: residuals of a microbatch in flight.
      state_bytes: state, which is always there.
      workspace_bytes: temporaries while the stage runs.
      peak_bytes: the peak, with all stages of the device's worker.
      collectives: per kind and axes of its submesh, in a step.
    """

    forward_s: float
    backward_s: float
    weight_gradient_s: float
    send_s: float
    return_s: float
    update_s: float
    residual_bytes: int
    state_bytes: int
    workspace_bytes: int
    peak_bytes: int
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True)
class PipelineEstimates:
    """The cost model's predictions for a pipeline.

    Attributes:
      step_s: seconds per step.
      bubble: of the workers' time in it, the share in which they wait.
      peak_bytes: device memory at its highest.
      stages: the predictions for each stage.
      shares: for each of the plan's `decisions`, how its mesh axes share the work; none in files of earlier versions.
      compiled_peak_bytes: the compiled peak of the stage that needs the largest share of its cap; None if the stages'
        programs were not compiled.
    """

    step_s: float
    bubble: float
    peak_bytes: int
    stages: tuple[StageEstimates, ...]
    shares: tuple[WorkShares, ...] = ()
    compiled_peak_bytes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PipelinePlan(SavedPlan):
    """How to run a training step as a pipeline.

    Attributes:
      step: the step function's name.
      fingerprint: of the traced step.
      jax: the JAX version that traced it.
      cluster: the cluster, as its JSON file would say it.
      memory_bytes: the cap per device.
      schedule: the family's name, such as `1f1b`.
      workers: groups of devices; each may run several stages.
      microbatches: the number of parts in which the step goes through its batch.
      stages: in the order of the forward phase.
      retention: per class of forward ops, by name, the results that are not kept, as in a plan of one program.
      decisions: for each mesh that the replicas of a stage form, on nodes of each kind, how their devices share the work.
      estimates: the predictions for these choices.
      groups: names of the cluster's groups of nodes, in the order in which stages stand on them; of several kinds alone.
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
    workers: int
    microbatches: int
    stages: tuple[Stage, ...]
    retention: Mapping[str, str]
    decisions: tuple[Decisions, ...]
    estimates: PipelineEstimates
    groups: tuple[str, ...] = ()
    search_s: Mapping[str, float] = field(default_factory=dict[str, float])
    outline: Outline | None = None
    is_sealed: bool = field(default=True, compare=False, repr=False)

    @property
    def num_replicas(self) -> int:
        """Of each stage."""
        return self.stages[0].num_replicas

    @property
    def stands_on(self) -> tuple[str, ...]:
        """The group of nodes on which each stage stands, of several kinds; they stand one after another.

        Raises:
          PlanError: the groups are not those of the cluster, or have other devices than the stages.
        """
        sizes = {group["name"]: group["num_devices"] for group in self.cluster.get("groups", ())}
        total = sum(stage.num_devices for stage in self.stages)
        if sorted(self.groups) != sorted(sizes) or (sizes and total != sum(sizes.values())):
            raise PlanError(
                f"plan: stages have {total} devices of the groups {list(self.groups)}, its cluster has {sizes}. Name each "
                "of its groups once, and give stages all of its devices"
            )
        group_of = [name for name in self.groups for _ in range(sizes[name])]
        firsts = accumulate((stage.num_devices for stage in self.stages[:-1]), initial=0)
        return tuple(group_of[first] for first in firsts) if group_of else ()

    @property
    def executor(self) -> str:
        """The name of its executor: a program per stage."""
        return MPMD

    @property
    def gap(self) -> None:
        """None: of a pipeline as a whole nothing is proven."""

    def _values(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "step": self.step,
            "fingerprint": self.fingerprint,
            "jax": self.jax,
            "cluster": dict(self.cluster),
            **({"groups": list(self.groups)} if self.groups else {}),
            "memory_bytes": self.memory_bytes,
            "schedule": self.schedule,
            "workers": self.workers,
            "microbatches": self.microbatches,
            "stages": [{"first_op": s.first_op, "mesh": dict(s.mesh)} for s in self.stages],
            "retention": dict(self.retention),
            "decisions": [
                {
                    "mesh": dict(d.mesh),
                    **({"group": d.group} if d.group else {}),
                    "arguments": dict(d.arguments),
                    "ops": dict(d.ops),
                    "copies": dict(d.copies),
                }
                for d in self.decisions
            ],
            "estimates": _estimates_json(self.estimates),
            **({} if self.outline is None else {"outline": self.outline.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Any, place: str = "plan") -> "PipelinePlan":
        """A plan from JSON-ready values.

        Raises:
          PlanError: a key is missing or of the wrong type; names it.
        """
        from autoshard.search.plan.plan_file import PipelineFile, read  # it takes a while to import

        if (schema := schema_of(data)) not in (None, SCHEMA):
            raise PlanError(f"{place} has schema {schema!r}; wanted {SCHEMA!r}, as of a pipeline's plan")
        file = read(PipelineFile, data, place)
        of_stages = tuple(_stage_estimates(**stage) for stage in file["estimates"].pop("stages"))
        shares = tuple(WorkShares.from_json(one) for one in file["estimates"].pop("shares", ()))
        read_as: dict[str, Any] = {
            "stages": tuple(Stage(**stage) for stage in file["stages"]),
            "decisions": tuple(Decisions(**decisions) for decisions in file["decisions"]),
            "estimates": PipelineEstimates(**file["estimates"], stages=of_stages, shares=shares),
            "outline": Outline(**file["outline"]) if "outline" in file else None,
        }
        plan = cls(**{f.name: file[f.name] for f in fields(cls) if f.name in file} | read_as)
        return plan._read_from(file)

    def __str__(self) -> str:
        from autoshard.search.plan.pipeline_summary import summary  # it needs plans itself

        return summary(self)


def _estimates_json(estimates: PipelineEstimates) -> dict[str, Any]:
    shares = {"shares": [one.to_json() for one in estimates.shares]} if estimates.shares else {}
    return {
        "step_s": estimates.step_s,
        "bubble": estimates.bubble,
        "peak_bytes": estimates.peak_bytes,
        "stages": [_stage_json(stage) for stage in estimates.stages],
        **shares,
        **compiled_json(estimates),
    }


def _stage_json(stage: StageEstimates) -> dict[str, Any]:
    values = asdict(stage)
    return values | {"collectives": [{**one, "axes": list(one["axes"])} for one in values["collectives"]]}


def _stage_estimates(collectives: Sequence[Mapping[str, Any]] = (), **estimates: Any) -> StageEstimates:
    return StageEstimates(**estimates, collectives=tuple(Collective(**one) for one in collectives))


def is_of_pipeline(data: Any) -> bool:
    """Whether JSON-ready values say that they are a pipeline's plan."""
    return str(schema_of(data)).startswith("autoshard.pipeline/")
