"""Drafts of pipelines: for each number of replicas, stages by dynamic programming, and what they take about.

A stage's devices are replicas times the devices of each. All stages have as many replicas, as they share out microbatches
alike; of how many devices each of these is made, stages may differ. So for each number of replicas there is one problem
for the inter-op search (`search.pipeline.inter_op`), whose options are the numbers of devices of a replica. Layers' costs
come from one solution each for the whole step (`intra_op`, `layer_costs`).

Where a cap stands in the way, stages may recompute: what they recompute are a few choices of minimum cuts
(`search.memory.trade_offs`). Each stage has the choice, as to recompute is one more option for the inter-op search: a stage
in front, which holds many microbatches at once, may have to where one behind it need not. Layers' costs come from the step
in which all recompute, and the one in which none does.

A draft is cheap, a proposal is not: for that the step in which the stages do as the cut says is made ready, and the cut
priced by its own solutions. So a draft says what it takes at least, in any schedule, and what it takes about: its schedules
run by the simulator, each stage priced as it was drafted. Only what is promised to be better than the best so far is worked
out.
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
from autoshard.search.pipeline.proposals import Parts, Placed, Proposal, Stages
from autoshard.search.pipeline.schedules.registry import FAMILIES, build_schedule, check_numbers
from autoshard.search.pipeline.stage_costs import Node, StageOption, Submesh
from autoshard.search.pipeline.stage_plan import InterOpPlan, InterOpProblem, NoCut, StagePlan

GAP = 0.01
"""Proved of a cut: finer than what costs are known to. Source: a choice of ours."""

APART = tuple(name for name, family in FAMILIES.items() if not family.shares_workers)
"""The families with a stage on each worker. Stages that are cut once suit all of them."""

SHARED = tuple(name for name, family in FAMILIES.items() if family.shares_workers)
"""The families with several stages on each worker."""

VIRTUAL_STAGES = 2
"""Stages per worker where a family leaves that open. Source: a choice of ours, the fewest there can be."""


def num_workers(schedule: str, num_stages: int) -> int:
    """Groups of devices; errors are the schedule's to say."""
    family = FAMILIES.get(schedule)
    per_worker = 1 if family is None else family.stages_per_worker or VIRTUAL_STAGES
    return max(num_stages // per_worker, 1)


def stands(size: int, group: Cluster) -> bool:
    """Whether so many devices of a group of nodes are 1, 2, 4, ... of a node, or whole nodes."""
    per_node = group.devices_per_node
    is_whole = size % per_node == 0 if size >= per_node else size.bit_count() == 1
    return is_whole and size <= group.num_devices


class Way(NamedTuple):
    """A way to run layers.

    Attributes:
      group: on nodes of which kind.
      parts: as which step.
      shape: on which mesh of a replica.
    """

    group: Cluster
    parts: Parts
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for.

    Attributes:
      memory_bytes: the cap per device.
      stages: how many, if the caller says so.
      schedule: the family's name, if the caller says so.
      memory_share: the share of a cap that stages may take; infinite for no cap.
      among: the families to try, if the caller names none.
    """

    memory_bytes: int
    stages: int | None = None
    schedule: str | None = None
    memory_share: float = 1.0
    among: tuple[str, ...] = APART

    @property
    def shares_workers(self) -> bool:
        """Whether workers hold several stages, so that all have as many devices."""
        family = FAMILIES.get(self.schedule or "")
        return family is not None and family.shares_workers

    def may_stand(self, size: int, group: Cluster) -> bool:
        """Whether a stage may have so many devices of a group of nodes; of stages that share workers, each has its share."""
        return self.shares_workers or stands(size, group)

    @property
    def schedules(self) -> tuple[str, ...]:
        """The families to try."""
        return self.among if self.schedule is None else (self.schedule,)


@dataclass(frozen=True, eq=False)
class Drafting:
    """What there is to be cut into stages.

    Attributes:
      among: the step as each stage may run it: alike but for what is recomputed; first the one that recomputes least.
      num_replicas: of each stage.
      shapes: the meshes that a replica's devices may form.
      wanted: what is asked for.
      cluster: where stages stand, in the order of its groups of nodes.
    """

    among: tuple[Parts, ...]
    num_replicas: int
    shapes: tuple[tuple[int, ...], ...]
    wanted: Wanted
    cluster: AnyCluster

    def __str__(self) -> str:
        sites = self.among[-1].step_problem.sites
        up_to = "up to " if len(self.among) > 1 else ""
        again = f", recomputing {up_to}{len(sites)} ops" if sites else ""
        groups = [group.name for group in self.cluster.groups]
        first = f", {groups[0]} first" if len(groups) > 1 else ""
        name = f", {self.wanted.schedule}" if self.wanted.shares_workers else ""
        return f"{self.num_microbatches} microbatches, {self.num_replicas} replicas of each stage{name}{again}{first}"

    def draft(self) -> "Draft | None":
        """The fastest cut; None where none fits.

        Raises:
          InputError: there is no such schedule for what it is cut into.
        """
        cut = fastest_cut(self.problem, GAP)
        if cut is None:
            return None
        count, names = len(cut.stages), self.wanted.schedules
        if self.wanted.schedule is None:
            names = tuple(name for name in names if FAMILIES[name].suits(count, self.num_microbatches))
        for name in names:
            check_numbers(name, count, self.num_microbatches, num_workers(name, count))
        return Draft(self, cut, names) if names else None

    @property
    def plain(self) -> Parts:
        """The step that recomputes least."""
        return self.among[0]

    @property
    def num_microbatches(self) -> int:
        """Of each replica."""
        return self.plain.count // self.num_replicas

    @property
    def recomputes(self) -> bool:
        """Whether stages may recompute anything."""
        return bool(self.among[-1].step_problem.sites)

    @property
    def without_cap(self) -> "Drafting":
        """The same on devices of any memory."""
        return replace(self, wanted=replace(self.wanted, memory_share=inf))

    @cached_property
    def ways(self) -> tuple[Way, ...]:
        """To run layers."""
        ways = starmap(Way, product(self.cluster.groups, self.among, self.shapes))
        return tuple(one for one in ways if self.wanted.may_stand(self._size(one), one.group))

    def way(self, stage: StagePlan) -> Way:
        """How a stage's layers are run."""
        return self.ways[int(stage.variant)]

    @cached_property
    def problem(self) -> InterOpProblem:
        """For the inter-op search. Stages that share workers have as many devices each; whether they fit, the simulator
        says."""
        if self.wanted.shares_workers:
            assert self.wanted.stages, "stages that share workers are asked for by their number"
            nodes, in_flight, links = (Node(self.wanted.stages, np.inf),), (1,), []
            options = [self._option(0, Submesh(1, 1))]
        else:
            held = self.num_microbatches if self.wanted.schedule == "gpipe" else 1
            nodes, in_flight, links = self._nodes, tuple(range(held, self.num_microbatches + 1)), self._links
            options = [self._option(n, self._submesh(way)) for n, way in enumerate(self.ways)]
        kinds, costs = tuple(dict.fromkeys(links)), self.plain.costs(self.shapes[0], self.num_replicas)
        return InterOpProblem(
            nodes,
            tuple(options),
            self.num_microbatches,
            in_flight,
            np.array([2 * costs.transfer_s(link) for link in kinds or (self.cluster.groups[0].intra,) * 2]),
            num_stages=self.wanted.stages,
            links=tuple(map(kinds.index, links)),
        )

    @property
    def _nodes(self) -> tuple[Node, ...]:
        caps = self.cluster.caps(self.wanted.memory_bytes)
        of_groups = (
            (Node(group.devices_per_node, self.wanted.memory_share * cap, self._kind(group)),)
            * group.num_nodes
            for group, cap in zip(self.cluster.groups, caps, strict=True)
        )
        return tuple(chain.from_iterable(of_groups))

    @property
    def _links(self) -> list[Link]:
        """To each device from the one before it; nothing goes to the first one."""
        links = list[Link]()
        for group in self.cluster.groups:
            for _ in range(group.num_nodes):
                links += [self.cluster.link(max(len(links) - 1, 0), len(links))]
                links += [group.intra] * (group.devices_per_node - 1)
        return links

    def _option(self, n: int, submesh: Submesh) -> StageOption:
        """The n-th way to run layers, on a stage's devices."""
        way = self.ways[n]
        costs = way.parts.on(way.group).costs(way.shape, self.num_replicas)
        return StageOption(
            submesh,
            str(n),
            costs.forward_s + costs.backward_s + costs.weight_gradient_s,
            costs.residual_bytes,
            costs.state_bytes,
            costs.workspace_bytes,
            costs.once_s,
            self._kind(way.group),
        )

    def _kind(self, group: Cluster) -> str:
        return group.name if len(self.cluster.groups) > 1 else ""

    def _size(self, way: Way) -> int:
        """Devices of a stage."""
        return self.num_replicas * prod(way.shape)

    def _submesh(self, way: Way) -> Submesh:
        size, per_node = self._size(way), way.group.devices_per_node
        return Submesh(1, size) if size <= per_node else Submesh(size // per_node, per_node)


@dataclass(frozen=True, eq=False)
class Draft:
    """A cut into stages, before what they recompute is made ready.

    Attributes:
      drafting: of what.
      cut: where stages begin, and how each is run.
      schedules: the families that suit it.
    """

    drafting: Drafting
    cut: InterOpPlan
    schedules: tuple[str, ...]

    @property
    def least_s(self) -> float:
        """Least seconds of a step in any schedule: all microbatches on the slowest stage, and its update."""
        count = self.drafting.num_microbatches
        return max(count * stage.time_s + stage.update_s for stage in self.cut.stages)

    @property
    def fullness(self) -> float:
        """Largest share of its cap that a device holds."""
        return max(stage.memory_bytes / stage.cap_bytes for stage in self.cut.stages)

    @cached_property
    def promised_rank(self) -> tuple[float, float]:
        """Estimated rank, as of proposals, of its best schedule that seems to fit; of the best one if none does."""
        return min(one.rank for one in self._fitting(self._as_drafted) or self._as_drafted)

    @property
    def promised_s(self) -> float:
        """Estimated seconds of a step."""
        return self.promised_rank[0]

    def proposal(self) -> Proposal | NoCut:
        """The fastest schedule that fits, or that none does."""
        parts = self._parts
        is_drafted = parts is self.drafting.plain
        found = self._as_drafted if is_drafted else self._proposals([parts] * len(self.cut.stages))
        fitting = self._fitting(found)
        return min(fitting, key=lambda one: one.rank) if fitting else NoCut(self.cut.stages)

    def _fitting(self, found: Sequence[Proposal]) -> list[Proposal]:
        wanted = self.drafting.wanted
        return [one for one in found if one.fullness(wanted.memory_bytes) <= wanted.memory_share]

    @cached_property
    def _as_drafted(self) -> list[Proposal]:
        """Its schedules, each stage priced by the step in which all layers are run as its are."""
        return self._proposals([self.drafting.way(stage).parts for stage in self.cut.stages])

    @cached_property
    def _parts(self) -> Parts:
        """The step in which each stage recomputes what the cut says."""
        plain, sites = self.drafting.plain, set[Site]()
        for stage in self.cut.stages:
            layers = range(stage.first_layer, stage.end_layer)
            again = self.drafting.way(stage).parts
            if again is not plain:
                of_step = again.step_problem.sites
                sites |= {s for s in of_step if not plain.shares.layers_of(s).isdisjoint(layers)}
        return plain.recomputing(frozenset(sites)) if sites else plain

    def _proposals(self, run_as: Sequence[Parts]) -> list[Proposal]:
        """Its schedules, if stages are priced by these: those with the lowest bound first, until one fits that takes no
        longer than any other can."""
        stages, count, wanted = self._placed(run_as), len(self.cut.stages), self.drafting.wanted
        numbers = {
            name: (self.drafting.num_microbatches, num_workers(name, count)) for name in self.schedules
        }
        found, best_s = list[Proposal](), inf
        for least_s, name in sorted((stages.least_s(name, *numbers[name]), name) for name in self.schedules):
            if least_s > best_s:
                break
            found.append(stages.proposal(build_schedule(name, count, *numbers[name])))
            if found[-1].fullness(wanted.memory_bytes) <= wanted.memory_share:
                best_s = min(best_s, found[-1].step_s)
        return found

    def _placed(self, run_as: Sequence[Parts]) -> Stages:
        """The stages where they stand: all families that suit a cut have them on the same devices."""
        drafting, count, name = self.drafting, len(self.cut.stages), self.schedules[0]
        workers = [*enumerate(FAMILIES[name].stages_of_workers(count, num_workers(name, count)))]
        worker_of = {stage: w for w, stages in reversed(workers) for stage in stages}
        placed: list[Placed] = []
        for n, stage in enumerate(self.cut.stages):
            shape = drafting.way(stage).shape
            device = worker_of[n] * drafting.num_replicas * prod(shape)
            device = device if drafting.wanted.shares_workers else stage.first_device
            placed.append(Placed(stage.first_layer, stage.end_layer, device, shape))
        copies = 2 if name == "chimera" else 1
        return Stages(run_as, drafting.cluster, drafting.num_replicas, placed, copies)
