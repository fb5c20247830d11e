"""The values that a plan is made of, as its file holds them.

A plan has stages, 1 to n, a schedule and an executor. One program is the plan with one stage and no schedule. These
dataclasses are also the schema of a plan's file: a field is a key, a field with its default is left out, and Pydantic reads
and describes files by them (`search.plan.plan_file`). `search.plan.plan` adds the file itself, the printed text and the
comparison, which these values do not know.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any

from autoshard.cost_model.errors import PlanError
from autoshard.search.plan.bounds import NOT_EMPTY, Count, Mesh, Number, Share, Size
from autoshard.search.plan.outline import Outline
from autoshard.search.plan.profile import Profile
from autoshard.search.plan.work_shares import WorkShares

STAGE, REPLICA = "stage", "replica"
"""Mesh axes of a pipeline: of its stages, where one program runs all, and of the replicas of a stage, which take different
examples."""


@dataclass(frozen=True, slots=True)
class Collective:
    """All collectives of one kind over the same mesh axes, in one step.

    Attributes:
      kind: XLA's name: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `collective-permute`.
      axes: names of mesh axes.
      count: number in one step.
      bytes: per device and step: of each, the larger of input and output.
      seconds: predicted, per step.
    """

    kind: str
    axes: tuple[str, ...]
    count: Count
    bytes: Count
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimates:
    """The predictions for a pipeline's stage; bytes are those of a device.

    Attributes:
      forward_s: seconds of the forward pass of a microbatch; in one program for all stages, with the transfer.
      backward_s: seconds of the backward pass of a microbatch, without weight gradients that have tasks of their own.
      weight_gradient_s: seconds of the weight gradients of a microbatch.
      send_s: seconds of the transfer of activations to the next stage.
      return_s: seconds of the transfer of gradients to the previous stage.
      update_s: seconds per step of the update, with the gradients' reduction over replicas.
      residual_bytes: residuals of a microbatch in flight.
      state_bytes: state, which is always there.
      workspace_bytes: temporaries while the stage runs.
      peak_bytes: the peak, with all stages of the device's worker.
      host_bytes: state in pinned host memory.
      collectives: per kind and axes of its submesh, in a step, if the stage has programs of its own.
    """

    forward_s: Number
    backward_s: Number
    weight_gradient_s: Number = 0.0
    send_s: Number = 0.0
    return_s: Number = 0.0
    update_s: Number
    residual_bytes: Count
    state_bytes: Count
    workspace_bytes: Count = 0
    peak_bytes: Count
    host_bytes: Count = 0
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """The cost model's predictions for a plan.

    Attributes:
      step_s: seconds per step; of one program `compute_s`, the collectives' seconds and `transfer_s`, less `hidden_s`.
      peak_bytes: device memory at its highest, per device.
      compute_s: of one program: seconds of computation.
      recompute_s: of one program: seconds of computation and communication of recomputed ops.
      transfer_s: of one program: seconds of copies between the device and its host.
      hidden_s: of one program: seconds of collectives and copies that run behind computation.
      host_bytes: pinned host memory, per device.
      residents: bytes per device at the peak, by kind.
      peak_at: the op at which the peak occurs, with its source line.
      collectives: per kind and axes, in one program.
      bubble: of a pipeline: the share of the step in which workers wait, or compute results that nobody reads.
      between_s: of one program for all stages: seconds per step of the ops between loops over layers.
      stages: of a pipeline: the predictions for each stage.
      shares: for each of the plan's `shardings`, how its mesh axes share the work; empty if unknown.
      compiled_peak_bytes: device memory at its highest in the compiled program; of stages with programs of their own, that
        of the stage that needs the largest share of its cap. None if the plan was not compiled.
      profile: of one program: a device over the time of a step; None if unknown.
    """

    step_s: Number
    peak_bytes: Count
    compute_s: Number = 0.0
    recompute_s: Number = 0.0
    transfer_s: Number = 0.0
    hidden_s: Number = 0.0
    host_bytes: Count = 0
    residents: Mapping[str, Count] = field(default_factory=dict[str, int])
    peak_at: str = ""
    collectives: tuple[Collective, ...] = ()
    bubble: Number = 0.0
    between_s: Number = 0.0
    stages: tuple[StageEstimates, ...] = ()
    shares: tuple[WorkShares, ...] = ()
    compiled_peak_bytes: Count | None = None
    profile: Profile | None = None

    @property
    def unhidden_s(self) -> float:
        """Seconds per step if nothing of the communication were hidden."""
        return self.step_s + self.hidden_s


@dataclass(frozen=True, slots=True)
class Sharding:
    """How the devices of a mesh share a step, or a replica's devices a stage.

    Attributes:
      mesh: size of each mesh axis by name, outermost first.
      arguments: per argument of the step, by pytree path: the spec it rests in, such as `P('data', None)` or
        `P('model') on host`, with `, updated there` if the host updates it.
      ops: per class of ops, by name: the specs that it reads and makes, such as `P('data'), P() -> P('data')`.
      copies: per value that is resharded for a phase, by its op's name: its spec there and how it comes by it.
      group: the group of nodes that it is for, on a cluster with several kinds of node.
    """

    mesh: Mesh
    arguments: Mapping[str, str]
    ops: Mapping[str, str]
    copies: Mapping[str, str]
    group: str = ""

    @property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())


@dataclass(frozen=True, slots=True)
class Decisions(Sharding):
    """Every choice of a plan of one program: the sharding, and what is done to the step before.

    Attributes:
      mesh: as in `Sharding`.
      arguments: as in `Sharding`.
      ops: as in `Sharding`. The names of `ops` and `copies` are those of the step with recomputation.
      copies: as in `Sharding`.
      group: as in `Sharding`.
      retention: as in `Plan`.
      microbatches: as in `Plan`. All names are those of the step in so many microbatches.
    """

    retention: Mapping[str, str] = field(default_factory=dict[str, str])
    microbatches: int = 1

    @property
    def sharding(self) -> Sharding:
        """The sharding alone."""
        return Sharding(self.mesh, self.arguments, self.ops, self.copies, self.group)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage of a plan.

    Attributes:
      first_op: the position of its first op, of those that run for each microbatch in the forward phase: an op counts as
        one, a loop over layers as many as it has. In one program for all stages, these have equally many layers, and it is
        left out.
      replicas: groups of its devices that do the same for other examples.
      sharding: the number, in the plan's `shardings`, of how the devices of a replica share the work.
    """

    first_op: Count = 0
    replicas: Size = 1
    sharding: Count = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """Plans that were searched together: on one mesh, for the step with the same done to it before.

    Attributes:
      mesh: sizes of the mesh's axes.
      microbatches: number of parts in which the step goes through its batch.
      recomputed: number of ops that are recomputed, of the step that was searched.
      waiting: number of ops whose results wait on the host for the backward phase.
      hosted: number of arguments that rest on the host.
      bound_s: lower bound on the seconds per step of all of its plans.
      step_s: seconds per step of the best plan found; None if none was found that fits and is faster than those before.
      is_ruled_out: whether none of its plans fits, or is faster than the best one then.
    """

    mesh: tuple[Size, ...]
    microbatches: Size = 1
    recomputed: Count = 0
    waiting: Count = 0
    hosted: Count = 0
    bound_s: Number = 0.0
    step_s: Number | None = None
    is_ruled_out: bool = False


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PlanValues:
    """The contents of a plan: `search.plan.plan.Plan` describes them."""

    step: str
    fingerprint: str
    jax: str
    cluster: Mapping[str, Any]
    groups: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    meshes: tuple[Annotated[tuple[Size, ...], NOT_EMPTY], ...] = ()
    memory_bytes: Count
    executor: str
    schedule: str = ""
    workers: Size = 1
    microbatches: Size
    stages: Annotated[tuple[Stage, ...], NOT_EMPTY] = (Stage(),)
    retention: Mapping[str, str]
    shardings: Annotated[tuple[Sharding, ...], NOT_EMPTY]
    estimates: Estimates
    gap: Number | None = None
    candidates: tuple[Candidate, ...] = ()
    attention: str = ""
    overlap: Share = 1.0
    marks: str = ""
    outline: Outline | None = None
    search_s: Mapping[str, float] = field(default_factory=dict[str, float])
    is_sealed: bool = field(default=True, compare=False, repr=False)

    @property
    def is_pipeline(self) -> bool:
        """Whether the step is cut into stages, under a schedule."""
        return bool(self.schedule)

    @property
    def num_devices(self) -> int:
        """Devices of all workers; each runs as many stages as the others."""
        return sum(map(self.devices_of, self.stages)) * self.workers // len(self.stages)

    @property
    def num_replicas(self) -> int:
        """Replicas of each stage."""
        return self.stages[0].replicas

    @property
    def decisions(self) -> Decisions:
        """The decisions of a plan of one program.

        Raises:
          PlanError: the plan is a pipeline's.
        """
        if self.is_pipeline:
            raise PlanError(
                f"the plan is a pipeline's, and only one program has decisions for the whole step. A pipeline's are in "
                f"plan.shardings, of which it has {len(self.shardings)}"
            )
        one = self.shardings[0]
        return Decisions(
            one.mesh, one.arguments, one.ops, one.copies, one.group, self.retention, self.microbatches
        )

    def sharding_of(self, stage: Stage) -> Sharding:
        """How the devices of a stage's replicas share its work."""
        return self.shardings[stage.sharding]

    def devices_of(self, stage: Stage) -> int:
        """Number of devices of a stage."""
        return stage.replicas * self.sharding_of(stage).num_devices

    def mesh_of(self, stage: Stage) -> dict[str, int]:
        """The mesh of a pipeline's stage: its replicas, then the devices of each."""
        return {REPLICA: stage.replicas, **self.sharding_of(stage).mesh}

    @property
    def stands_on(self) -> tuple[str, ...]:
        """The group of nodes on which each stage stands, of several kinds; they stand one after another.

        Raises:
          PlanError: the groups are not those of the cluster, or have other devices than the stages.
        """
        sizes = {group["name"]: group["num_devices"] for group in self.cluster.get("groups", ())}
        counts = [self.devices_of(stage) for stage in self.stages]
        if sorted(self.groups) != sorted(sizes) or (sizes and sum(counts) != sum(sizes.values())):
            raise PlanError(
                f"plan: stages have {sum(counts)} devices of the groups {list(self.groups)}, its cluster has {sizes}. Name "
                "each of its groups once, and give stages all of its devices"
            )
        group_of = [name for name in self.groups for _ in range(sizes[name])]
        return tuple(group_of[first] for first in accumulate(counts[:-1], initial=0)) if group_of else ()
