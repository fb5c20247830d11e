"""Proposals of pipelines: a step in parts, its stages on devices, and the time and memory of a schedule.

A draft (`search.pipeline.drafts`) promises; a proposal is worked out. Its stages are priced by the solutions of the step
that they run, recomputation included, and the simulator runs them in their schedule. The fastest proposal that fits is the
answer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autoshard.cost_model.cluster import Cluster, Link
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.search.pipeline.bounds import dispatch_s, least_makespan_s
from autoshard.search.pipeline.intra_op import IntraOp
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.simulator import Simulation, StageCost, simulate
from autoshard.search.plan.schedule import Schedule


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
      cluster: the devices.
      num_replicas: replicas of each stage.
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
