"""Pipelines worth having: for each number of microbatches and replicas, stages by dynamic programming.

A stage's devices are replicas times the devices of each. All stages have as many replicas, as they share out microbatches
alike; of how many devices each of these is made, stages may differ. So for each number of replicas there is one problem
for the inter-op search (`search.pipeline.inter_op`), whose options are the numbers of devices of a replica. Layers' costs
come from one solution each for the whole step (`intra_op`, `layer_costs`).

What the inter-op search finds is run by the simulator in its schedule, and what takes least time and fits is the answer.

Where a cap stands in the way, stages may recompute: what they recompute are a few choices of minimum cuts
(`search.memory.trade_offs`). Each stage has the choice, as to recompute is one more option for the inter-op search: a stage
in front, which holds many microbatches at once, may have to where one behind it need not. Layers' costs come from the step
in which all recompute, and the one in which none does. Then the step in which the stages do as the cut says is made ready,
and the cut priced by its own solutions.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod

import numpy as np

from cost_model.cluster import Cluster, Link
from search.ir.graph import Site, Step
from search.memory.microbatches import looped
from search.memory.residuals import Residuals, residuals
from search.memory.trade_offs import HIGHEST_S_PER_BYTE, Choice
from search.mesh_problem import StepProblem
from search.pipeline.inter_op import plan_stages
from search.pipeline.intra_op import IntraOp, solved
from search.pipeline.layer_costs import LayerCosts, Ledger
from search.pipeline.layer_shares import LayerShares
from search.pipeline.layers import Layers
from search.pipeline.pipeline_step import PipelineStep
from search.pipeline.schedules.registry import FAMILIES, build_schedule
from search.pipeline.simulator import Simulation, StageCost, simulate
from search.pipeline.stage_costs import Node, StageOption, Submesh
from search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut
from search.plan.schedule import Schedule
from search.solver.clock import PROCESSOR, SearchClock

GAP = 0.01
"""Proved of a cut: finer than what costs are known to. Source: a choice of ours."""

DISPATCH_S = 2e-4
"""What it takes a host to hand out a task. Source: `benchmarks/pipeline_dispatch.py`, on a core of a server."""

SEARCHED = ("1f1b", "zb-h1")
"""Schedules that are tried where the caller names none: they hold least. Source: Qi et al. 2024, table 1."""


@dataclass(frozen=True, eq=False)
class Parts:
    """The step in so many parts, of which some is recomputed: made ready, with its layers and what is known of them.

    Attributes:
      step_problem: of the step with its loop over parts.
      cluster: on which stages stand.
      borders: positions in the forward phase at which layers begin besides.
      plain: the same with nothing recomputed; None if that is this one, or is not known.
      solutions: by the mesh of a replica, how its devices share the work, as far as that was asked for.
      ledgers: by the mesh of a replica, what layers cost on it, likewise.
      others: by what they recompute, the same with that recomputed, likewise.
      again: by the mesh of a replica, what might be recomputed, likewise.
    """

    step_problem: StepProblem
    cluster: Cluster
    borders: Sequence[int] = ()
    plain: "Parts | None" = None
    solutions: dict[tuple[int, ...], IntraOp] = field(default_factory=dict[tuple[int, ...], IntraOp])
    ledgers: dict[tuple[int, ...], Ledger] = field(default_factory=dict[tuple[int, ...], Ledger])
    others: "dict[frozenset[Site], Parts]" = field(default_factory=dict[frozenset[Site], "Parts"])
    again: "dict[tuple[int, ...], tuple[Again, ...]]" = field(
        default_factory=dict[tuple[int, ...], tuple["Again", ...]]
    )

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
    ) -> "Parts":
        """Makes a step ready.

        Args:
          step: the traced step.
          marks: as for `StepProblem.of`.
          cluster: on which stages stand.
          count: of parts.
          sites: what to recompute.
          borders: positions in the forward phase at which layers begin besides.
          clock: by which searches for it go.
        """
        problem = StepProblem.of(looped(step, count), marks, cluster.device, sites, clock=clock)
        return cls(problem, cluster, borders)

    @cached_property
    def layers(self) -> Layers:
        """Of the step: those of the plain one, where they may be had."""
        step = PipelineStep.of_loop(self.step_problem.step)
        alike = None if self.plain is None else self.plain.layers.of_like(step)
        return alike or Layers.of(step, self.borders)

    def has_layers_of(self, other: "Parts") -> bool:
        """Whether both are made of as many layers, which correspond."""
        return self.layers.num_layers == other.layers.num_layers

    @cached_property
    def shares(self) -> LayerShares:
        """What layers have of it."""
        return LayerShares(self.step_problem, self.layers)

    @property
    def count(self) -> int:
        """Of parts."""
        return self.step_problem.traced.num_microbatches

    def recomputing(self, sites: frozenset[Site]) -> "Parts":
        """The same with some of it recomputed."""
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
            known=problem.plain,
            clock=problem.clock,
        )
        return Parts(problem, self.cluster, plain=self)

    def ledger(self, shape: tuple[int, ...]) -> Ledger:
        """What layers cost when a replica's devices form such a mesh."""
        if shape not in self.ledgers:
            self.ledgers[shape] = Ledger(self.solution(shape), self.shares, self.cluster)
        return self.ledgers[shape]

    def solution(self, shape: tuple[int, ...]) -> IntraOp:
        """How a replica's devices share the work when they form such a mesh."""
        if shape not in self.solutions:
            self.solutions[shape] = solved(self.step_problem, self.cluster, shape)
        return self.solutions[shape]

    def choices(self, shape: tuple[int, ...]) -> "tuple[Again, ...]":
        """What might be recomputed: what is faster so, what saves most for its time, and all that saves anything."""
        if shape not in self.again:
            self.again[shape] = self._choices(shape)
        return self.again[shape]

    def _choices(self, shape: tuple[int, ...]) -> "tuple[Again, ...]":
        intra_op = self.solution(shape)
        fusion = self.step_problem.live_ranges.fusion
        parts = residuals(intra_op.on_mesh.memory.costed, fusion, intra_op.labels)
        none, most = _chosen(parts, 0.0), _chosen(parts, HIGHEST_S_PER_BYTE)
        saved_bytes = max(none.kept_bytes - most.kept_bytes, 1.0)
        some = _chosen(parts, (most.seconds - none.seconds) / saved_bytes)
        loop_s = self.count * self.ledger(shape).microbatch_s
        plain_s = sum(part.seconds(frozenset()) for part in parts)
        again = {c.sites: Again(c.sites, 1 + (c.seconds - plain_s) / loop_s) for c in (none, some, most)}
        return tuple(one for sites, one in again.items() if sites)


@dataclass(frozen=True, slots=True)
class Again:
    """Something to recompute.

    Attributes:
      sites: what.
      times: how many times as long tasks take with it, about.
    """

    sites: frozenset[Site]
    times: float


def _chosen(parts: Sequence[Residuals], price: float) -> Choice:
    sites = frozenset[Site]().union(*(part.recomputed(price) for part in parts))
    seconds, kept = sum(part.seconds(sites) for part in parts), sum(part.kept_bytes(sites) for part in parts)
    return Choice(price, sites, seconds, kept)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a stage is.

    Attributes:
      first_layer: of it.
      end_layer: behind its last.
      first_device: of it, or of its first worker, in the cluster's order.
      shape: of the mesh of a replica's devices.
    """

    first_layer: int
    end_layer: int
    first_device: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StageProposal:
    """A stage, and what it takes.

    Attributes:
      placed: where it is.
      intra_op: how a replica's devices share the work.
      cost: of a microbatch, for the simulator.
      once_s: in a step.
      state_bytes: always there.
      workspace_bytes: while it runs.
    """

    placed: Placed
    intra_op: IntraOp
    cost: StageCost
    once_s: float
    state_bytes: float
    workspace_bytes: float


@dataclass(frozen=True, eq=False)
class Proposal:
    """A pipeline, and what it takes.

    Attributes:
      parts: the step that it runs.
      num_replicas: of each stage.
      stages: in the order of the forward phase.
      simulation: of its schedule.
    """

    parts: Parts
    num_replicas: int
    stages: tuple[StageProposal, ...]
    simulation: Simulation

    @classmethod
    def of(cls, parts: Parts, num_replicas: int, placed: Sequence[Placed], schedule: Schedule) -> "Proposal":
        """Runs a schedule of stages in time."""
        costs = {one.shape: parts.ledger(one.shape).costs(num_replicas) for one in placed}
        stages = [_priced(parts, costs[one.shape], one, num_replicas) for one in placed]
        return cls(parts, num_replicas, tuple(stages), simulate(schedule, [one.cost for one in stages]))

    @property
    def schedule(self) -> Schedule:
        """Who does what when."""
        return self.simulation.schedule

    @property
    def step_s(self) -> float:
        """Seconds of a step: what devices take, or what the hosts need to hand all that out, where that is more."""
        return max(self._on_devices_s, self._handed_out_s)

    @property
    def rank(self) -> tuple[float, float]:
        """Of two proposals, that of the lower rank is the better one."""
        return self.step_s, self._on_devices_s

    @property
    def _on_devices_s(self) -> float:
        """All tasks, then the update, which may wait for all stages."""
        return self.simulation.makespan_s + max(
            sum(stage.once_s for stage in self._stages_of(w)) for w in range(self.schedule.num_workers)
        )

    @property
    def idle_share(self) -> float:
        """Of all workers' time in their tasks, or in waiting for them."""
        busy_share = 1 - self.simulation.bubble_share
        return 1 - busy_share * min(self.simulation.makespan_s / self._handed_out_s, 1.0)

    @property
    def _handed_out_s(self) -> float:
        """Until the busiest host has handed out a step's tasks: those of all stages that begin on its node."""
        per_node = self.parts.cluster.devices_per_node
        stages = Counter(stage.placed.first_device // per_node for stage in self.stages)
        per_stage = len(self.schedule.kinds) * self.schedule.num_microbatches
        return max(stages.values()) * per_stage * DISPATCH_S

    def _stages_of(self, worker: int) -> list[StageProposal]:
        return [self.stages[stage] for stage in self.schedule.stages_of(worker)]

    @cached_property
    def peak_bytes(self) -> tuple[float, ...]:
        """Of each worker's devices."""
        return tuple(
            held_bytes
            + sum(stage.state_bytes for stage in self._stages_of(worker))
            + max(stage.workspace_bytes for stage in self._stages_of(worker))
            for worker, held_bytes in enumerate(self.simulation.peak_bytes)
        )


def _priced(parts: Parts, costs: LayerCosts, placed: Placed, num_replicas: int) -> StageProposal:
    inside = slice(placed.first_layer, placed.end_layer)
    end_device = placed.first_device + num_replicas * prod(placed.shape)
    behind, before = (link_at(parts.cluster, device) for device in (end_device, placed.first_device))
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
        parts.ledger(placed.shape).intra_op,
        cost,
        float(costs.once_s[inside].sum()),
        float(costs.state_bytes[inside].sum()),
        float(costs.workspace_bytes[inside].max()),
    )


def link_at(cluster: Cluster, device: int) -> Link:
    """Between a device and the one before it."""
    return cluster.inter if device % cluster.devices_per_node == 0 else cluster.intra


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for.

    Attributes:
      memory_bytes: the cap per device.
      stages: how many, if the caller says so.
      schedule: the family's name, if the caller says so.
    """

    memory_bytes: float
    stages: int | None = None
    schedule: str | None = None

    @property
    def shares_workers(self) -> bool:
        """Whether workers hold several stages, so that all have as many devices."""
        family = FAMILIES.get(self.schedule or "")
        return self.schedule == "chimera" or (family is not None and family.stages_per_worker != 1)


def propose(
    among: Sequence[Parts], num_replicas: int, shapes: Sequence[tuple[int, ...]], wanted: Wanted
) -> Proposal | NoCut:
    """The fastest pipeline of a step in parts, or why there is none that fits.

    Args:
      among: the step as each stage may run it: alike but for what is recomputed; first the one that recomputes least.
      num_replicas: of each stage.
      shapes: the meshes that a replica's devices may form.
      wanted: what is asked for.
    """
    return _Proposing(tuple(among), num_replicas, tuple(shapes), wanted).run()


@dataclass(frozen=True, eq=False)
class _Proposing:
    among: tuple[Parts, ...]
    num_replicas: int
    shapes: tuple[tuple[int, ...], ...]
    wanted: Wanted

    def run(self) -> Proposal | NoCut:
        cut = self._even_cut() if self.wanted.shares_workers else self._cut()
        if isinstance(cut, NoCut):
            return cut
        names = SEARCHED if self.wanted.schedule is None else (self.wanted.schedule,)
        parts = self._as_cut(cut)
        found = [self._proposal(parts, cut, name) for name in names]
        fitting = [one for one in found if max(one.peak_bytes) <= self.wanted.memory_bytes]
        return min(fitting, key=lambda one: one.rank) if fitting else NoCut(cut.stages)

    @property
    def _plain(self) -> Parts:
        return self.among[0]

    @property
    def _num_microbatches(self) -> int:
        return self._plain.count // self.num_replicas

    @cached_property
    def _ways(self) -> tuple[tuple[Parts, tuple[int, ...]], ...]:
        """To run layers: as which step, on which mesh of a replica."""
        return tuple(product(self.among, self.shapes))

    @cached_property
    def _costs(self) -> tuple[LayerCosts, ...]:
        """Of layers, by the way to run them."""
        return tuple(parts.ledger(shape).costs(self.num_replicas) for parts, shape in self._ways)

    def _cut(self) -> InterOpPlan | NoCut:
        cluster, cap_bytes = self._plain.cluster, self.wanted.memory_bytes
        nodes = (Node(cluster.devices_per_node, cap_bytes),) * cluster.num_nodes
        held = self._num_microbatches if self.wanted.schedule == "gpipe" else 1
        in_flight = tuple(range(held, self._num_microbatches + 1))
        options = [self._option(n, self._submesh(shape)) for n, (_, shape) in enumerate(self._ways)]
        return plan_stages(self._problem(nodes, options, in_flight), GAP)

    def _even_cut(self) -> InterOpPlan | NoCut:
        """As many devices for each stage; whether they fit, the simulator says."""
        assert self.wanted.stages is not None, "stages that share workers are asked for by their number"
        nodes = (Node(self.wanted.stages, np.inf),)
        return plan_stages(self._problem(nodes, [self._option(0, Submesh(1, 1))], (1,)), GAP)

    def _problem(
        self, nodes: tuple[Node, ...], options: Sequence[StageOption], in_flight: tuple[int, ...]
    ) -> InterOpProblem:
        costs, cluster = self._costs[0], self._plain.cluster
        there_and_back_s = np.array([2 * costs.transfer_s(link) for link in (cluster.intra, cluster.inter)])
        return InterOpProblem(
            nodes,
            tuple(options),
            self._num_microbatches,
            in_flight,
            there_and_back_s,
            num_stages=self.wanted.stages,
        )

    def _option(self, n: int, submesh: Submesh) -> StageOption:
        """The n-th way to run layers, on a stage's devices."""
        costs = self._costs[n]
        return StageOption(
            submesh,
            str(n),
            costs.forward_s + costs.backward_s + costs.weight_gradient_s,
            costs.residual_bytes,
            costs.state_bytes,
            costs.workspace_bytes,
            costs.once_s,
        )

    def _submesh(self, shape: tuple[int, ...]) -> Submesh:
        size, per_node = self.num_replicas * prod(shape), self._plain.cluster.devices_per_node
        return Submesh(1, size) if size <= per_node else Submesh(size // per_node, per_node)

    def _as_cut(self, cut: InterOpPlan) -> Parts:
        """The step in which each stage recomputes what the cut says."""
        if len(self.among) == 1:
            return self._plain
        sites, layers_of = set[Site](), self._plain.shares.layers_of
        for stage in cut.stages:
            layers = range(stage.first_layer, stage.end_layer)
            again = self._ways[int(stage.variant)][0].step_problem.sites
            sites |= {site for site in again if not layers_of(site).isdisjoint(layers)}
        return self._plain.recomputing(frozenset(sites)) if sites else self._plain

    def _proposal(self, parts: Parts, cut: InterOpPlan, name: str) -> Proposal:
        num_stages = len(cut.stages)
        schedule = build_schedule(name, num_stages, self._num_microbatches, num_workers(name, num_stages))
        placed: list[Placed] = []
        for n, stage in enumerate(cut.stages):
            _, shape = self._ways[int(stage.variant)]
            worker_devices = schedule.workers_of(n)[0] * self.num_replicas * prod(shape)
            device = worker_devices if self.wanted.shares_workers else stage.first_device
            placed.append(Placed(stage.first_layer, stage.end_layer, device, shape))
        return Proposal.of(parts, self.num_replicas, placed, schedule)


VIRTUAL_STAGES = 2
"""Stages per worker where a family leaves that open. Source: a choice of ours, the fewest there can be."""


def num_workers(schedule: str, num_stages: int) -> int:
    """Groups of devices; errors are the schedule's to say."""
    family = FAMILIES.get(schedule)
    per_worker = 1 if family is None else family.stages_per_worker or VIRTUAL_STAGES
    return max(num_stages // per_worker, 1)
