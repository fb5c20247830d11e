"""Drafts of pipelines: for each number of replicas, a cut into stages by dynamic programming, with an estimated time.

A stage's devices are replicas times the devices of each. All stages have equally many replicas, as they share
microbatches alike; the devices of a replica may differ from stage to stage. So for each number of replicas there is one
problem of the inter-op search (`search.pipeline.inter_op`), whose options are the meshes of a replica. The costs of
layers come from one solution for the whole step on each mesh (`intra_op`, `layer_costs`).

Under a cap, stages may recompute, by a few choices of minimum cuts (`search.memory.trade_offs`). Recomputation is an
option of the inter-op search like any other, so each stage has the choice: a stage in front, which holds many
microbatches, may recompute while one behind it does not. The costs come from two steps: in one all layers recompute, in
the other none does.

A draft is cheap, a proposal is not: for a proposal, the step is rewritten with the recomputation of each stage, and its
own solutions price the cut. A draft has a lower bound for any schedule, and an estimate: the simulator runs its
schedules, with each stage priced as it was drafted. Only a draft that promises to beat the best pipeline becomes a
proposal.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, product, starmap
from math import inf, prod
from typing import NamedTuple

import numpy as np

from autoshard.cost_model.cluster import Cluster, Link
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.search.ir.graph import Site
from autoshard.search.pipeline.inter_op import fastest_cut
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.proposals import Placed, Proposal, Stages
from autoshard.search.pipeline.schedules.registry import FAMILIES, build_schedule, check_numbers, num_workers
from autoshard.search.pipeline.stage_costs import ClusterNode, StageOption, Submesh
from autoshard.search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut, StagePlan

GAP = 0.01
"""Certified gap of a cut: costs are known less precisely. Source: a choice of ours."""

Shapes = tuple[tuple[int, ...], ...]
"""Meshes of a replica's devices."""


class LayerVariant(NamedTuple):
    """A way to run layers.

    Attributes:
      group: the nodes of one kind.
      parts: the step that is run.
      shape: the mesh of a replica.
    """

    group: Cluster
    parts: Parts
    shape: tuple[int, ...]


class PipelineKind(NamedTuple):
    """Pipelines of a step in parts that are cut into stages together.

    Attributes:
      bound_s: lower bound on the seconds of a step.
      num_replicas: number of replicas of each stage.
      shapes: the possible meshes of a replica's devices.
      options: the options of a proposal.
    """

    bound_s: float
    num_replicas: int
    shapes: Shapes
    options: PipelineOptions

    @staticmethod
    def rank(one: "PipelineKind") -> tuple[float, int, Shapes, bool]:
        """Sorts kinds by their bound; of equal ones, a stage on each worker comes first."""
        return one.bound_s, one.num_replicas, one.shapes, one.options.shares_workers


@dataclass(frozen=True, eq=False)
class Drafting:
    """A problem for drafts: a step to cut into stages.

    Attributes:
      among: the step as each stage may run it. These differ only in recomputation, and the first one recomputes least.
      num_replicas: replicas of each stage.
      shapes: the possible meshes of a replica's devices.
      options: the options of drafts.
      cluster: the devices, in the order of its groups of nodes.
    """

    among: tuple[Parts, ...]
    num_replicas: int
    shapes: Shapes
    options: PipelineOptions
    cluster: AnyCluster

    def __str__(self) -> str:
        sites = self.among[-1].step_problem.sites
        up_to = "up to " if len(self.among) > 1 else ""
        recomputing = f", recomputing {up_to}{len(sites)} ops" if sites else ""
        groups = [group.name for group in self.cluster.groups]
        first = f", {groups[0]} first" if len(groups) > 1 else ""
        name = f", {self.options.schedule}" if self.options.shares_workers else ""
        return f"{self.num_microbatches} microbatches, {self.num_replicas} replicas of each stage{name}{recomputing}{first}"

    def draft(self) -> "Draft | None":
        """The fastest cut; None if none fits.

        Raises:
          InputError: the schedule cannot run so many stages or microbatches.
        """
        cut = fastest_cut(self.problem, GAP)
        if cut is None:
            return None
        count, names = len(cut.stages), self.options.schedules
        if self.options.schedule is None:
            names = tuple(name for name in names if FAMILIES[name].suits(count, self.num_microbatches))
        for name in names:
            check_numbers(name, count, self.num_microbatches, num_workers(name, count))
        return Draft(self, cut, names) if names else None

    @property
    def base(self) -> Parts:
        """The step that recomputes least."""
        return self.among[0]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of each replica."""
        return self.base.count // self.num_replicas

    @property
    def recomputes(self) -> bool:
        """True if stages may recompute."""
        return bool(self.among[-1].step_problem.sites)

    @property
    def without_cap(self) -> "Drafting":
        """The problem without a cap."""
        return replace(self, options=replace(self.options, memory_share=inf))

    @cached_property
    def variants(self) -> tuple[LayerVariant, ...]:
        """The ways to run layers."""
        variants = starmap(LayerVariant, product(self.cluster.groups, self.among, self.shapes))
        return tuple(one for one in variants if self.options.may_stand(self._size(one), one.group))

    def variant_of(self, stage: StagePlan) -> LayerVariant:
        """The way in which a stage's layers are run."""
        return self.variants[int(stage.variant)]

    @cached_property
    def problem(self) -> InterOpProblem:
        """The problem of the inter-op search. Stages that share workers have equally many devices each; the simulator
        tells if they fit."""
        if self.options.shares_workers:
            assert self.options.stages, "stages that share workers are asked for by their number"
            nodes, in_flight, links = (ClusterNode(self.options.stages, np.inf),), (1,), []
            options = [self._option(0, Submesh(1, 1))]
        else:
            held = self.num_microbatches if self.options.schedule == "gpipe" else 1
            nodes, in_flight, links = self._nodes, tuple(range(held, self.num_microbatches + 1)), self._links
            options = [self._option(n, self._submesh(variant)) for n, variant in enumerate(self.variants)]
        kinds, costs = tuple(dict.fromkeys(links)), self.base.costs(self.shapes[0], self.num_replicas)
        return InterOpProblem(
            nodes,
            tuple(options),
            self.num_microbatches,
            in_flight,
            np.array([2 * costs.transfer_s(link) for link in kinds or (self.cluster.groups[0].intra,) * 2]),
            num_stages=self.options.stages,
            links=tuple(map(kinds.index, links)),
        )

    @property
    def _nodes(self) -> tuple[ClusterNode, ...]:
        caps = self.cluster.caps(self.options.memory_bytes)
        of_groups = (
            (ClusterNode(group.devices_per_node, self.options.memory_share * cap, self._kind(group)),)
            * group.num_nodes
            for group, cap in zip(self.cluster.groups, caps, strict=True)
        )
        return tuple(chain.from_iterable(of_groups))

    @property
    def _links(self) -> list[Link]:
        """The link to each device from the one before it; that to the first one is not used."""
        links = list[Link]()
        for group in self.cluster.groups:
            for _ in range(group.num_nodes):
                links += [self.cluster.link(max(len(links) - 1, 0), len(links))]
                links += [group.intra] * (group.devices_per_node - 1)
        return links

    def _option(self, n: int, submesh: Submesh) -> StageOption:
        """The n-th way to run layers, on a stage's devices."""
        variant = self.variants[n]
        costs = variant.parts.on(variant.group).costs(variant.shape, self.num_replicas)
        return StageOption(
            submesh,
            str(n),
            costs.forward_s + costs.backward_s + costs.weight_gradient_s,
            costs.residual_bytes,
            costs.state_bytes,
            costs.workspace_bytes,
            costs.once_s,
            self._kind(variant.group),
        )

    def _kind(self, group: Cluster) -> str:
        return group.name if len(self.cluster.groups) > 1 else ""

    def _size(self, variant: LayerVariant) -> int:
        """Devices of a stage."""
        return self.num_replicas * prod(variant.shape)

    def _submesh(self, variant: LayerVariant) -> Submesh:
        size, per_node = self._size(variant), variant.group.devices_per_node
        return Submesh(1, size) if size <= per_node else Submesh(size // per_node, per_node)


@dataclass(frozen=True, eq=False)
class Draft:
    """A cut into stages, before the step is rewritten with its recomputation.

    Attributes:
      drafting: the problem.
      cut: the stages, and the way in which each is run.
      schedules: the families that suit the cut.
    """

    drafting: Drafting
    cut: InterOpPlan
    schedules: tuple[str, ...]

    @property
    def least_s(self) -> float:
        """Lower bound on the seconds of a step in any schedule: all microbatches on the slowest stage, and its update."""
        count = self.drafting.num_microbatches
        return max(count * stage.time_s + stage.update_s for stage in self.cut.stages)

    @property
    def fullness(self) -> float:
        """Largest share of its cap that a device holds."""
        return max(stage.memory_bytes / stage.cap_bytes for stage in self.cut.stages)

    @cached_property
    def promised_rank(self) -> tuple[float, float]:
        """Estimated rank, as of proposals, of the best schedule that seems to fit; if none does, of the best one."""
        return min(one.rank for one in self._fitting(self._as_drafted) or self._as_drafted)

    @property
    def promised_s(self) -> float:
        """Estimated seconds of a step."""
        return self.promised_rank[0]

    def proposal(self) -> Proposal | NoCut:
        """The fastest schedule that fits, or the reason why none does."""
        parts = self._parts
        is_drafted = parts is self.drafting.base
        found = self._as_drafted if is_drafted else self._proposals([parts] * len(self.cut.stages))
        fitting = self._fitting(found)
        return min(fitting, key=lambda one: one.rank) if fitting else NoCut(self.cut.stages)

    def _fitting(self, found: Sequence[Proposal]) -> list[Proposal]:
        options = self.drafting.options
        return [one for one in found if one.fullness(options.memory_bytes) <= options.memory_share]

    @cached_property
    def _as_drafted(self) -> list[Proposal]:
        """Its schedules, each stage priced by the step in which all layers run as the stage's do."""
        return self._proposals([self.drafting.variant_of(stage).parts for stage in self.cut.stages])

    @cached_property
    def _parts(self) -> Parts:
        """The step with the recomputation that the cut decides for each stage."""
        base, sites = self.drafting.base, set[Site]()
        for stage in self.cut.stages:
            layers = range(stage.first_layer, stage.end_layer)
            recomputing = self.drafting.variant_of(stage).parts
            if recomputing is not base:
                of_step = recomputing.step_problem.sites
                sites |= {s for s in of_step if not base.shares.layers_of(s).isdisjoint(layers)}
        return base.recomputing(frozenset(sites)) if sites else base

    def _proposals(self, run_as: Sequence[Parts]) -> list[Proposal]:
        """Its schedules, with stages priced by `run_as`: the lowest bound first, until one fits that no other bound
        undercuts."""
        stages, count, options = self._placed(run_as), len(self.cut.stages), self.drafting.options
        numbers = {
            name: (self.drafting.num_microbatches, num_workers(name, count)) for name in self.schedules
        }
        found, best_s = list[Proposal](), inf
        for least_s, name in sorted((stages.least_s(name, *numbers[name]), name) for name in self.schedules):
            if least_s > best_s:
                break
            found.append(stages.proposal(build_schedule(name, count, *numbers[name])))
            if found[-1].fullness(options.memory_bytes) <= options.memory_share:
                best_s = min(best_s, found[-1].step_s)
        return found

    def _placed(self, run_as: Sequence[Parts]) -> Stages:
        """The stages on their devices, which are the same for all families that suit the cut."""
        drafting, count, name = self.drafting, len(self.cut.stages), self.schedules[0]
        workers = [*enumerate(FAMILIES[name].stages_of_workers(count, num_workers(name, count)))]
        worker_of = {stage: w for w, stages in reversed(workers) for stage in stages}
        placed: list[Placed] = []
        for n, stage in enumerate(self.cut.stages):
            shape = drafting.variant_of(stage).shape
            device = worker_of[n] * drafting.num_replicas * prod(shape)
            device = device if drafting.options.shares_workers else stage.first_device
            placed.append(Placed(stage.first_layer, stage.end_layer, device, shape))
        return Stages(run_as, drafting.cluster, drafting.num_replicas, placed, FAMILIES[name].copies)
