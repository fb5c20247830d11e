"""Proposals of pipelines: a step in parts, its stages on devices, and the time and memory of a schedule.

A draft (`search.pipeline.drafts`) promises; a proposal is worked out. Its stages are priced by the solutions of the step
that they run, recomputation included, and the simulator runs them in their schedule. The fastest proposal that fits is the
answer.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from autoshard.cost_model.cluster import Cluster, Link
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.search.ir.graph import Site, Step
from autoshard.search.memory.microbatches import looped
from autoshard.search.memory.residuals import Residuals, residuals
from autoshard.search.memory.trade_offs import HIGHEST_S_PER_BYTE, Choice
from autoshard.search.mesh_problem import StepProblem
from autoshard.search.pipeline.bounds import dispatch_s, least_makespan_s
from autoshard.search.pipeline.intra_op import NO_PINS, IntraOp, as_tasks, solved
from autoshard.search.pipeline.layer_costs import LayerCosts, Ledger
from autoshard.search.pipeline.layer_shares import LayerShares
from autoshard.search.pipeline.layers import MAX_LAYERS, Layers
from autoshard.search.pipeline.pipeline_step import PipelineStep
from autoshard.search.pipeline.simulator import Simulation, StageCost, simulate
from autoshard.search.plan.schedule import Schedule
from autoshard.search.solver.clock import PROCESSOR, SearchClock

PARTS_S = 1e-4
"""Nominal seconds (`search.solver.clock`) per op to cut a step into parts and layers, besides those of a step problem.
Source: a transformer of 6 unrolled layers, against `OP_S`."""

LEDGER_S = 5e-5
"""Nominal seconds per op to price layers under a solution. Source: measured with `PARTS_S`."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The step in a number of parts, some of it recomputed: made ready for stages, with its layers. Dictionaries hold the
    results that were asked for so far.

    Attributes:
      step_problem: the step with its loop over parts.
      cluster: nodes of one kind on which stages stand.
      borders: further positions in the forward phase at which layers begin.
      without_remat: these parts without recomputation; None if these have none, or it is unknown.
      solutions: by the mesh of a replica, the strategies of its devices.
      ledgers: by the mesh of a replica, the costs of layers on it.
      layer_costs: by the mesh of a replica and the number of replicas, these costs as numbers.
      others: by recomputed sites, these parts with that recomputation.
      remat_choices: by the mesh of a replica, choices of recomputation.
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
    layer_costs: dict[tuple[tuple[int, ...], int], LayerCosts] = field(
        default_factory=dict[tuple[tuple[int, ...], int], LayerCosts]
    )
    others: "dict[frozenset[Site], Parts]" = field(default_factory=dict[frozenset[Site], "Parts"])
    remat_choices: "dict[tuple[int, ...], tuple[RematChoice, ...]]" = field(
        default_factory=dict[tuple[int, ...], tuple["RematChoice", ...]]
    )
    first: "Parts | None" = None
    on_other_nodes: "dict[Cluster, Parts]" = field(default_factory=dict[Cluster, "Parts"])
    splits_parameters: bool = False
    most_layers: int = MAX_LAYERS
    pins: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def of(
        cls,
        step: Step,
        marks: Sequence[str],
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
          step: the traced step.
          marks: as for `StepProblem.of`.
          cluster: nodes of one kind on which stages stand.
          count: number of parts.
          sites: ops to recompute.
          borders: further positions in the forward phase at which layers begin.
          clock: the clock of all searches for it.
          most_layers: largest number of layers.
          pins: the specs in which arguments must rest.
          decided: per argument, a plan's decisions for it; empty without a plan.
          hosted: the arguments that rest in the host's memory.
        """
        device = cluster.device
        problem = StepProblem.of(
            looped(step, count), marks, device, sites, hosted, decided=decided, clock=clock, as_run=as_tasks
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

    def recomputing(self, sites: frozenset[Site]) -> "Parts":
        """These parts with some ops recomputed."""
        if self.splits_parameters and self.first is not None:
            return self.first.recomputing(sites).with_split_parameters
        if sites not in self.others:
            self.others[sites] = self._recomputing(sites)
        return self.others[sites]

    def _recomputing(self, sites: frozenset[Site]) -> "Parts":
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

    def costs(self, shape: tuple[int, ...], num_replicas: int) -> LayerCosts:
        """The costs of layers on a mesh of a replica's devices, with a number of replicas."""
        key = shape, num_replicas
        if key not in self.layer_costs:
            self.layer_costs[key] = self.ledger(shape).costs(num_replicas)
        return self.layer_costs[key]

    def solution(self, shape: tuple[int, ...]) -> IntraOp:
        """The strategies of a replica's devices on a mesh."""
        if shape not in self.solutions:
            self.solutions[shape] = solved(
                self.step_problem, self.cluster, shape, self.splits_parameters, self.pins
            )
        return self.solutions[shape]

    def least_s(self, cluster: Cluster) -> float:
        """Seconds of a step on nodes of one kind alone that never wait, on the best of the meshes that were priced there."""
        ledgers = self.on(cluster).ledgers.items()
        device_s = min(ledger.microbatch_s * prod(shape) for shape, ledger in ledgers)
        return self.count * device_s / cluster.num_devices

    def choices(self, shape: tuple[int, ...]) -> "tuple[RematChoice, ...]":
        """Choices of recomputation: ops that are faster recomputed, ops that save most bytes for their time, and all ops
        that save any."""
        if shape not in self.remat_choices:
            self.remat_choices[shape] = self._choices(shape)
        return self.remat_choices[shape]

    def _choices(self, shape: tuple[int, ...]) -> "tuple[RematChoice, ...]":
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


@dataclass(frozen=True, slots=True)
class Placed:
    """The place of a stage.

    Attributes:
      first_layer: its first layer.
      end_layer: the layer behind its last.
      first_device: the first device of the stage, or of its first worker, in the cluster's order.
      shape: the mesh of a replica's devices.
    """

    first_layer: int
    end_layer: int
    first_device: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StageProposal:
    """A stage with its costs.

    Attributes:
      placed: its place.
      group: the nodes of one kind on which it stands.
      intra_op: the strategies of a replica's devices.
      cost: the costs of a microbatch, for the simulator.
      once_s: seconds of a step for all that runs once.
      state_bytes: state and sums, which are always there.
      workspace_bytes: other values, while the stage runs.
    """

    placed: Placed
    group: Cluster
    intra_op: IntraOp
    cost: StageCost
    once_s: float
    state_bytes: float
    workspace_bytes: float


@dataclass(frozen=True, eq=False)
class Proposal:
    """A pipeline with its time and memory.

    Attributes:
      parts: the step that it runs.
      cluster: the devices.
      num_replicas: number of replicas of each stage.
      stages: its stages, in the order of the forward phase.
      simulation: the simulated schedule.
    """

    parts: Parts
    cluster: AnyCluster
    num_replicas: int
    stages: tuple[StageProposal, ...]
    simulation: Simulation

    @classmethod
    def of(
        cls,
        run_as: Sequence[Parts],
        cluster: AnyCluster,
        num_replicas: int,
        placed: Sequence[Placed],
        schedule: Schedule,
    ) -> "Proposal":
        """Simulates a schedule of stages. Each is priced by a step; all by the same one, unless they are drafted."""
        copies = len(schedule.workers_of(0))
        return Stages(run_as, cluster, num_replicas, placed, copies).proposal(schedule)

    @property
    def schedule(self) -> Schedule:
        """The order of all tasks."""
        return self.simulation.schedule

    @property
    def step_s(self) -> float:
        """Seconds of a step: of the devices, or of the hosts that dispatch all tasks, whichever is more."""
        return max(self._on_devices_s, self._handed_out_s)

    @property
    def rank(self) -> tuple[float, float]:
        """Of two proposals, the better one has the lower rank."""
        return self.step_s, self._on_devices_s

    @property
    def _on_devices_s(self) -> float:
        """Seconds of all tasks, then of the update, which may wait for all stages."""
        return self.simulation.makespan_s + max(
            sum(stage.once_s for stage in self._stages_of(w)) for w in range(self.schedule.num_workers)
        )

    @property
    def idle_share(self) -> float:
        """The share of all workers' time in which they wait."""
        busy_share = 1 - self.simulation.bubble_share
        return 1 - busy_share * min(self.simulation.makespan_s / self._handed_out_s, 1.0)

    @property
    def _handed_out_s(self) -> float:
        """Seconds until the busiest host has dispatched its tasks: those of all stages that begin on its node."""
        schedule = self.schedule
        return dispatch_s(
            schedule.name, schedule.num_microbatches, _stages_of_a_node(self.cluster, self.stages)
        )

    def _stages_of(self, worker: int) -> list[StageProposal]:
        return [self.stages[stage] for stage in self.schedule.stages_of(worker)]

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Peak of each worker's devices."""
        return tuple(
            held_bytes
            + sum(stage.state_bytes for stage in self._stages_of(worker))
            + max(stage.workspace_bytes for stage in self._stages_of(worker))
            for worker, held_bytes in enumerate(self.simulation.peak_bytes)
        )

    def caps(self, memory_bytes: int) -> tuple[int, ...]:
        """Cap of each stage's devices, under a cap for all."""
        of_group = dict(zip(self.cluster.groups, self.cluster.caps(memory_bytes), strict=True))
        return tuple(of_group[stage.group] for stage in self.stages)

    def fullness(self, memory_bytes: int) -> float:
        """Largest share of its cap that a device holds."""
        caps, schedule = self.caps(memory_bytes), self.schedule
        return max(peak / caps[schedule.stages_of(w)[0]] for w, peak in enumerate(self.peak_bytes))


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages on their devices, before a schedule runs them.

    Attributes:
      run_as: by stage, the step that it runs a part of.
      cluster: where they stand.
      num_replicas: of each stage.
      placed: by stage, its place.
      copies: workers that hold a stage, which add up its gradients.
    """

    run_as: Sequence[Parts]
    cluster: AnyCluster
    num_replicas: int
    placed: Sequence[Placed]
    copies: int = 1

    @cached_property
    def priced(self) -> tuple[StageProposal, ...]:
        """Times and bytes of each stage."""
        links = _links(self.cluster, self.num_replicas, self.placed)
        return tuple(
            _priced(
                parts.on(self.cluster.locate(one.first_device)[0]), one, self.num_replicas, self.copies, *at
            )
            for parts, one, at in zip(self.run_as, self.placed, links, strict=True)
        )

    def least_s(self, name: str, num_microbatches: int, num_workers: int) -> float:
        """Seconds of a step under any schedule of a family, at least."""
        costs = [one.cost for one in self.priced]
        busy_s = least_makespan_s(name, costs, num_microbatches, num_workers)
        told_s = dispatch_s(name, num_microbatches, _stages_of_a_node(self.cluster, self.priced))
        return max(busy_s + max(one.once_s for one in self.priced), told_s)

    def proposal(self, schedule: Schedule) -> Proposal:
        """The stages under a schedule."""
        simulation = simulate(schedule, [one.cost for one in self.priced])
        return Proposal(self.run_as[0], self.cluster, self.num_replicas, self.priced, simulation)


def _stages_of_a_node(cluster: AnyCluster, stages: Sequence[StageProposal]) -> int:
    """Stages that begin on the node where most do."""
    return max(Counter(cluster.node_of(stage.placed.first_device) for stage in stages).values())


def _links(cluster: AnyCluster, num_replicas: int, placed: Sequence[Placed]) -> Iterator[tuple[Link, Link]]:
    """By stage: the link to the next one, and that from the one before; at the ends of a row nothing goes over them."""
    ends = [one.first_device + num_replicas * prod(one.shape) - 1 for one in placed]
    between = [cluster.link(end, one.first_device) for end, one in zip(ends, placed[1:], strict=False)]
    return zip([*between, cluster.groups[-1].intra], [cluster.groups[0].intra, *between], strict=True)


def _priced(
    parts: Parts, placed: Placed, num_replicas: int, copies: int, behind: Link, before: Link
) -> StageProposal:
    costs, inside = parts.costs(placed.shape, num_replicas), slice(placed.first_layer, placed.end_layer)
    residual_bytes = float(costs.residual_bytes[inside].sum())
    cost = StageCost(
        float(costs.forward_s[inside].sum()),
        float(costs.backward_s[inside].sum()),
        float(costs.weight_gradient_s[inside].sum()),
        float(costs.transfer_s(behind)[placed.end_layer]),
        float(costs.transfer_s(before)[placed.first_layer]),
        residual_bytes,
        float(costs.weight_gradient_bytes[inside].sum()),
    )
    return StageProposal(
        placed,
        parts.cluster,
        parts.solution(placed.shape),
        cost,
        float(costs.once_s[inside].sum()) + _copied_s(parts, placed, num_replicas, copies),
        float(costs.state_bytes[inside].sum()),
        float(costs.workspace_bytes[inside].max()),
    )


def _copied_s(parts: Parts, placed: Placed, num_replicas: int, copies: int) -> float:
    """Seconds per step that the sum of gradients takes longer over all copies of a stage than over the replicas of one."""
    if copies == 1:
        return 0.0
    ledger, inside = parts.ledger(placed.shape), slice(placed.first_layer, placed.end_layer)
    of_all, of_one = ledger.reduction_s(copies * num_replicas), ledger.reduction_s(num_replicas)
    return float((of_all - of_one)[inside].sum())
