"""The step in a number of parts, made ready for stages.

The work for a step in so many parts is done once, when it is asked for: its layers, the strategies of a replica's devices on
each mesh, the costs of layers under them, and choices of recomputation. Variants share it: on nodes of another kind, with
recomputation, or with strategies that split parameters.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Site, Step
from autoshard.search.memory.microbatches import looped
from autoshard.search.memory.residuals import Residuals, residuals
from autoshard.search.memory.trade_offs import HIGHEST_S_PER_BYTE, Choice
from autoshard.search.mesh_problem import MeshProblem
from autoshard.search.options import pin_marks
from autoshard.search.pipeline.intra_op import NO_PINS, IntraOp, as_tasks, of_replica, solved
from autoshard.search.pipeline.layer_costs import LayerCosts, Ledger
from autoshard.search.pipeline.layer_shares import LayerShares
from autoshard.search.pipeline.layers import MAX_LAYERS, Layers
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.step_problem import StepProblem

PARTS_S = 1e-4
"""Nominal seconds (`search.solver.clock`) per op to cut a step into parts and layers, besides those of a step problem.
Source: a transformer of 6 unrolled layers, against `OP_S` of `search.step_problem`."""

LEDGER_S = 5e-5
"""Nominal seconds per op to price layers under a solution. Source: measured with `PARTS_S`."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The step in a number of parts, some of it recomputed: made ready for stages, with its layers.

    Attributes:
      step_problem: the step with its loop over parts.
      cluster: nodes of one kind on which stages stand.
      borders: further positions in the forward phase at which layers begin.
      without_remat: these parts without recomputation; None if these have none, or it is unknown.
      solutions: by the mesh of a replica, the strategies of its devices, as far as they were asked for.
      ledgers: by the mesh of a replica, the costs of layers on it, as far as they were asked for.
      first: the parts whose layers these have: on nodes of another kind, or without split parameters; None if these are
        the first.
      on_other_nodes: by nodes of another kind, these parts there.
      splits_parameters: whether each device holds only a part of each parameter that tasks read.
      most_layers: largest number of layers.
      pins: the `PartitionSpec` in which an argument must rest on the mesh of a replica, by its pytree path.
    """

    step_problem: StepProblem
    cluster: Cluster
    borders: Sequence[int] = ()
    without_remat: "Parts | None" = None
    solutions: dict[tuple[int, ...], IntraOp] = field(default_factory=dict[tuple[int, ...], IntraOp])
    ledgers: dict[tuple[int, ...], Ledger] = field(default_factory=dict[tuple[int, ...], Ledger])
    first: "Parts | None" = None
    on_other_nodes: "dict[Cluster, Parts]" = field(default_factory=dict[Cluster, "Parts"])
    splits_parameters: bool = False
    most_layers: int = MAX_LAYERS
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(
        cls,
        step: Step,
        cluster: Cluster,
        count: int,
        sites: frozenset[Site] = frozenset(),
        borders: Sequence[int] = (),
        clock: SearchClock = PROCESSOR,
        most_layers: int = MAX_LAYERS,
        pins: Mapping[str, Any] = NO_PINS,
        decided: Sequence[Any] = (),
        hosted: frozenset[int] = frozenset(),
    ) -> "Parts":
        """Makes a step ready.

        Args:
          cluster: nodes of one kind on which stages stand.
          borders: further positions in the forward phase at which layers begin.
          most_layers: largest number of layers.
          pins: the specs in which arguments must rest.
          decided: per argument, a plan's decisions for it; empty without a plan.
          hosted: the arguments that rest in the host's memory.
        """
        split, marks, device = looped(step, count), pin_marks(step, pins), cluster.device
        problem = StepProblem.of(
            split, marks, device, sites, hosted, decided=decided, clock=clock, as_run=as_tasks
        )
        clock.spend(PARTS_S * len(problem.graph.folded.program.ops))
        return cls(problem, cluster, borders, most_layers=most_layers, pins=pins)

    @cached_property
    def layers(self) -> Layers:
        """The layers of the step: those of the plain one, if they correspond."""
        if self.first is not None:
            return self.first.layers
        step = PipelineStep.of_loop(self.step_problem.step)
        alike = None if self.without_remat is None else self.without_remat.layers.of_like(step)
        return alike or Layers.of(step, self.borders, self.most_layers)

    def has_layers_of(self, other: "Parts") -> bool:
        """True if both have as many layers, which then correspond."""
        return self.layers.num_layers == other.layers.num_layers

    @cached_property
    def shares(self) -> LayerShares:
        """The shares of layers in the step."""
        if self.first is not None and self.first.step_problem is self.step_problem:
            return self.first.shares
        return LayerShares(self.step_problem, self.layers)

    @property
    def count(self) -> int:
        """Number of parts."""
        return self.step_problem.traced.num_microbatches

    def on(self, cluster: Cluster) -> "Parts":
        """These parts on nodes of another kind."""
        if cluster == self.cluster:
            return self
        if cluster not in self.on_other_nodes:
            problem = self.step_problem.on_devices(cluster.device)
            self.on_other_nodes[cluster] = Parts(
                problem, cluster, first=self, splits_parameters=self.splits_parameters, pins=self.pins
            )
        return self.on_other_nodes[cluster]

    @cached_property
    def with_split_parameters(self) -> "Parts":
        """These parts with strategies under which each device holds only a part of each parameter that tasks read."""
        return Parts(self.step_problem, self.cluster, first=self, splits_parameters=True, pins=self.pins)

    @memo
    def recomputing(self, sites: frozenset[Site]) -> "Parts":
        """These parts with some ops recomputed."""
        if self.splits_parameters and self.first is not None:
            return self.first.recomputing(sites).with_split_parameters
        problem = self.step_problem
        problem = StepProblem.of(
            problem.traced,
            problem.marks,
            self.cluster.device,
            sites,
            problem.hosted,
            known=problem.traced_program,
            clock=problem.clock,
            as_run=as_tasks,
        )
        return Parts(problem, self.cluster, without_remat=self, most_layers=self.most_layers, pins=self.pins)

    def ledger(self, shape: tuple[int, ...]) -> Ledger:
        """The costs of layers on a mesh of a replica's devices."""
        if shape not in self.ledgers:
            self.ledgers[shape] = Ledger(self.solution(shape), self.shares, self.cluster)
            self.step_problem.clock.spend(LEDGER_S * len(self.step_problem.graph.folded.program.ops))
        return self.ledgers[shape]

    @property
    def is_priced(self) -> bool:
        """True if layers are priced on some mesh, here or on nodes of another kind."""
        return bool(self.ledgers) or any(there.ledgers for there in self.on_other_nodes.values())

    @memo
    def costs(self, shape: tuple[int, ...], num_replicas: int) -> LayerCosts:
        """The costs of layers on a mesh of a replica's devices, with a number of replicas."""
        return self.ledger(shape).costs(num_replicas)

    def solution(self, shape: tuple[int, ...]) -> IntraOp:
        """The strategies of a replica's devices on a mesh."""
        if shape not in self.solutions:
            on_mesh = self._on_mesh(shape)
            self.solutions[shape] = solved(self.step_problem, on_mesh, self.splits_parameters, self.pins)
        return self.solutions[shape]

    def _on_mesh(self, shape: tuple[int, ...]) -> MeshProblem:
        """The problem on a mesh of a replica's devices. Variants on the same nodes share its costs: those that split
        parameters all of them, those that recompute the costs of resharding."""
        given = (self.first, self.without_remat)
        there = [one for one in given if one and one.cluster == self.cluster and shape in one.solutions]
        if not there:
            return of_replica(self.step_problem, self.cluster, shape)
        on_mesh = there[0].solutions[shape].on_mesh
        if there[0].step_problem is self.step_problem:
            return on_mesh
        return of_replica(self.step_problem, self.cluster, shape, on_mesh.memory.costed.resharder)

    def least_s(self, cluster: Cluster) -> float:
        """Seconds of a step on nodes of one kind alone that never wait, on the best of the meshes that were priced there."""
        ledgers = self.on(cluster).ledgers.items()
        device_s = min(ledger.microbatch_s * prod(shape) for shape, ledger in ledgers)
        return self.count * device_s / cluster.num_devices

    @memo
    def choices(self, shape: tuple[int, ...]) -> "tuple[RematChoice, ...]":
        """Choices of recomputation: ops that are faster recomputed, ops that save most bytes for their time, and all ops
        that save any."""
        intra_op = self.solution(shape)
        fusion = self.step_problem.live_ranges.fusion
        parts = residuals(intra_op.on_mesh.memory.costed, fusion, intra_op.labels)
        none, most = _chosen(parts, 0.0), _chosen(parts, HIGHEST_S_PER_BYTE)
        saved_bytes = max(none.kept_bytes - most.kept_bytes, 1.0)
        some = _chosen(parts, (most.seconds - none.seconds) / saved_bytes)
        loop_s = self.count * self.ledger(shape).microbatch_s
        plain_s = sum(part.seconds(frozenset()) for part in parts)
        before = self.step_problem.rewritten.before
        remat_choices = {
            sites: RematChoice(sites, 1 + (c.seconds - plain_s) / loop_s)
            for c in (none, some, most)
            for sites in (before(c.sites),)
        }
        return tuple(one for sites, one in remat_choices.items() if sites)


@dataclass(frozen=True, slots=True)
class RematChoice:
    """A choice of recomputation.

    Attributes:
      sites: the recomputed ops.
      times: estimated time of tasks with it, as a multiple of the time without.
    """

    sites: frozenset[Site]
    times: float


def _chosen(parts: Sequence[Residuals], price: float) -> Choice:
    sites = frozenset[Site]().union(*(part.recomputed(price) for part in parts))
    seconds, kept = sum(part.seconds(sites) for part in parts), sum(part.kept_bytes(sites) for part in parts)
    return Choice(price, sites, seconds, kept)
