"""The search for a pipeline, over microbatches, replicas, meshes, schedules and recomputation.

The number of examples that a replica takes at a time decides on the bubble, and on the rate that its kernels reach. The
number of replicas decides how much is communicated for each microbatch, and how much once in a step. A family of pipelines
has a number of parts of the batch, of replicas, of devices of a replica, and a schedule. Its bound is known before the step
is made ready in so many parts (`search.pipeline.bounds`). Families with the least bound come first, and a bound above the
best plan ends the search. So does a number of parts without a better pipeline than the numbers before: the bubble takes
back the gain of larger microbatches. Once the step is made ready, each number of replicas has a tighter bound: all devices
work all the time, each at the rate of a replica's best mesh.

The work of a step is known from one program for it. Without one, the search begins with one example at a time, and takes
the work from there.

If nothing fits, or if the cap makes pipelines slower, the step is also searched with stages whose devices hold a part of
each parameter that tasks read, and with stages that may recompute.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import gcd, inf, prod

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.mixed_cluster import AnyCluster
from autoshard.cost_model.units import format_bytes, format_seconds
from autoshard.search.ir.graph import Step
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.memory.residuals import has_loops
from autoshard.search.pipeline.bounds import PipelineBounds, Pipelines
from autoshard.search.pipeline.drafts import GAP, Draft, Drafting, PipelineKind, Shapes
from autoshard.search.pipeline.inter_op import nearest_cut
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.proposals import Proposal
from autoshard.search.pipeline.schedules.registry import (
    APART,
    FAMILIES,
    check_name,
    check_numbers,
    num_workers,
)
from autoshard.search.pipeline.stage_meshes import StageMeshes
from autoshard.search.pipeline.stage_pins import check_axes
from autoshard.search.pipeline.stage_plan import InterOpProblem, NoCut
from autoshard.search.pipeline.step_work import StepWork

MEMORY_BOUND_SLOWDOWN = 2 * GAP
"""Least relative slowdown by the cap at which stages that recompute are tried. Derived: they take back about half of it, and
cuts are certified to `GAP`."""

UNCONSTRAINED_SHARE = 0.5
"""Largest share of the cap that a pipeline may hold to count as not slowed down by it. Derived for equal stages: of the
families that are faster for more memory, ZB-H2 holds most, less than twice the microbatches of 1F1B's first stage."""


class PipelineSearch:
    """One search.

    Attributes:
      best: the best pipeline so far.
      nearest: the cut that exceeds the cap by least, among those that seemed to fit and do not.
      uncut: problems of which no cut fits.
      cutoff_s: seconds of another plan that a pipeline has to beat.
      skipped_s: least bound of the pipelines that were not drafted.
      refused: the reasons against some numbers of microbatches.
      prepared: the step as far as it is made ready, which all searches for it share.
    """

    def __init__(
        self,
        step: Step,
        cluster: AnyCluster,
        options: PipelineOptions,
        progress: Callable[[str], None] = lambda line: None,
        prepared: Prepared | None = None,
    ) -> None:
        self.step, self.cluster, self.options, self.progress = step, cluster, options, progress
        self.meshes = StageMeshes(step, cluster, options)
        check_axes(options.pins)
        self.prepared = prepared or Prepared.within()
        self.best: Proposal | None = None
        self.cutoff_s = inf
        self.nearest = NoCut(())
        self.uncut: list[InterOpProblem] = []
        self.skipped_s = inf
        self.refused: list[InputError] = []

    def run(self, cutoff_s: float = inf) -> Proposal:
        """The fastest pipeline.

        Raises:
          InputError: no pipeline has these options.
          NotSplittableError: the step has no microbatches; the message says why.
          InfeasibleError: nothing fits, or takes less than the cutoff; the message names the nearest.
        """
        if self.options.schedule is not None:
            check_name(self.options.schedule)
        self.meshes.check()
        counts = self.meshes.counts()
        if not counts:
            raise self.meshes.indivisible()
        self.cutoff_s, left = cutoff_s, [*counts]
        while left and not self._is_late:
            worth = [count for count in left if self._is_worth(self._least_s(count))]
            if not worth:
                self.skipped_s = min(self.skipped_s, *map(self._least_s, left))
                break
            count = min(worth, key=self._promise_s)
            left.remove(count)
            before_s = self._best_s
            try:
                self._in_parts(count)
            except NotSplittableError as e:
                self.refused.append(e)
            if self.best and self._best_s == before_s and self.options.microbatches is None:
                break
        if self.best and self.best.step_s < cutoff_s:
            return self.best
        raise self._infeasible()

    def least_s(self) -> float:
        """Seconds of a step of any pipeline, at least.

        Raises:
          InputError: no pipeline has these options.
        """
        families = (family for count in self.meshes.counts() for family in self._families_of(count))
        return self.prepared.least_of(families, self.options.stages)

    def work_s(self) -> float:
        """Seconds of a step of any pipeline, at least, wherever its stages begin.

        Raises:
          InputError: no pipeline has these options.
        """
        bounds, counts = self.prepared.bounds, self.meshes.counts()
        if bounds is None:
            return 0.0
        sizes = {
            count: [prod(shape) for _, shapes in self.meshes.of(count) for shape in shapes]
            for count in counts
        }
        return min((bounds.work_s(count, gcd(*some)) for count, some in sizes.items() if some), default=inf)

    def _is_worth(self, least_s: float) -> bool:
        """True if pipelines with this bound may be better. Of two that wait for their hosts, the one whose devices finish
        sooner is the better one."""
        return least_s < self.cutoff_s and least_s <= self._best_s

    def _least_s(self, count: int) -> float:
        """Least bound of the families of a number of parts."""
        return min((least_s for least_s, *_ in self._families(count)), default=inf)

    def _promise_s(self, count: int) -> tuple[float, float]:
        """Rank of a number of parts: its bound for the smallest replicas, then for all. The bound leaves out communication
        inside a replica, and the smallest replicas have least of it."""
        families = [*self._families(count)]
        smallest = min(prod(shape) for _, _, shape, _ in families)
        of_smallest = min(least_s for least_s, _, shape, _ in families if prod(shape) == smallest)
        return of_smallest, min(least_s for least_s, *_ in families)

    def _families(self, count: int) -> Iterator[tuple[float, int, tuple[int, ...], str]]:
        """The families of a number of parts: bound, number of replicas, mesh of each, and schedule."""
        for one in self._families_of(count):
            least_s = self.prepared.least_s(one, self.options.stages)
            yield least_s, one.num_replicas, one.shape, one.schedule

    def _families_of(self, count: int) -> Iterator[Pipelines]:
        """The families of a number of parts."""
        for num_replicas, shapes in self.meshes.of(count):
            for shape, name in product(shapes, self._names):
                yield Pipelines(name, count // num_replicas, num_replicas, shape)

    @property
    def _names(self) -> Sequence[str]:
        return tuple(FAMILIES) if self.options.schedule is None else (self.options.schedule,)

    def _in_parts(self, count: int) -> None:
        """Looks for better pipelines of the step in so many parts."""
        self.progress(f"the step in {count} parts")
        parts = self.prepared.in_parts(count, self.step, self.cluster.groups[0], self.options)
        self._check_layers(parts)
        self._take_work_from(parts)
        left = self._improvable([parts], sorted(self._worth_a_look(parts), key=PipelineKind.rank))
        if left and not self._is_late and max(prod(shape) for one in left for shape in one.shapes) > 1:
            split = parts.with_split_parameters
            self._improvable([split], left)
            parts = split if self.best is None or self.best.parts.splits_parameters else parts
        self._recomputing(parts, left)

    def _take_work_from(self, parts: Parts) -> None:
        """Takes the work of the step from these parts, unless it is known from one program."""
        if self.prepared.bounds is None and isinstance(self.cluster, Cluster):
            shape = min(min(shapes) for _, shapes in self.meshes.of(parts.count))
            work = StepWork.of(parts.solution(shape).on_mesh)
            self.prepared.bounds = PipelineBounds(self.step, self.cluster, work)

    def _worth_a_look(self, parts: Parts) -> Iterator[PipelineKind]:
        """The pipelines of a step in parts that may be faster than the best plan: those with a stage on each worker by their
        number of replicas, all others one by one. Meshes of the most promising families are solved first; when the time is
        over, no other mesh is."""
        apart = dict[int, dict[tuple[int, ...], set[str]]]()
        for least_s, num_replicas, shape, name in sorted(self._families(parts.count)):
            if not self._is_worth(least_s):
                self._refuse(name, parts.count // num_replicas)
                continue
            if self._is_late and parts.is_priced and not self._is_priced(parts, num_replicas, shape):
                self.skipped_s = min(self.skipped_s, least_s)
                continue
            self._price(parts, num_replicas, shape)
            if FAMILIES[name].shares_workers:
                options = self._sharing(name, num_replicas * prod(shape))
                if options is not None:
                    yield self._kind(parts, num_replicas, (shape,), options)
            else:
                apart.setdefault(num_replicas, {}).setdefault(shape, set()).add(name)
        for num_replicas, names in apart.items():
            among = tuple(name for name in APART if any(name in some for some in names.values()))
            shapes = tuple(sorted(names))
            yield self._kind(parts, num_replicas, shapes, replace(self.options, among=among))

    def _price(self, parts: Parts, num_replicas: int, shape: tuple[int, ...]) -> None:
        """Prices layers on a mesh of a replica's devices, on each kind of node where such stages may stand."""
        for there in self._where(parts, num_replicas, shape):
            there.ledger(shape)

    def _is_priced(self, parts: Parts, num_replicas: int, shape: tuple[int, ...]) -> bool:
        """True if layers are priced on a mesh of a replica's devices already."""
        return all(shape in there.ledgers for there in self._where(parts, num_replicas, shape))

    def _where(self, parts: Parts, num_replicas: int, shape: tuple[int, ...]) -> Iterator[Parts]:
        """The parts on each kind of node where stages of a mesh may stand."""
        size, may_stand = num_replicas * prod(shape), self.options.may_stand
        return (parts.on(group) for group in self.cluster.groups if may_stand(size, group))

    def _refuse(self, name: str, num_microbatches: int) -> None:
        """Notes the reason if the asked schedule does not suit these numbers."""
        if self.options.schedule is None or (stages := self.options.stages) is None:
            return
        try:
            check_numbers(name, stages, num_microbatches, num_workers(name, stages))
        except InputError as e:
            self.refused.append(e)

    def _sharing(self, name: str, size: int) -> PipelineOptions | None:
        """The options of a pipeline whose stages share workers of a size; None if no number of stages does."""
        options, total = self.options, self.cluster.num_devices
        stages = options.stages or total // size * FAMILIES[name].stages_each
        divides = num_workers(name, stages) * size == total and len(self.cluster.groups) == 1
        return replace(options, schedule=name, stages=stages) if divides else None

    def _kind(
        self, parts: Parts, num_replicas: int, shapes: Shapes, options: PipelineOptions
    ) -> PipelineKind:
        return PipelineKind(self._bound_s(parts, num_replicas, shapes), num_replicas, shapes, options)

    def _recomputing(self, parts: Parts, left: Sequence[PipelineKind]) -> None:
        """Looks for better pipelines that recompute."""
        if not left or self.options.remat == "never":
            return
        for choice in parts.choices(max(shapes[-1] for _, shapes in self.meshes.all_meshes)):
            times = min(choice.times, 1.0)
            if left and not self._is_late and left[0].bound_s * times < self._target_s:
                recomputing = parts.recomputing(choice.sites)
                if self.options.shares_workers or not recomputing.has_layers_of(parts):
                    left = self._improvable([recomputing], left, choice.times)
                else:
                    left = self._improvable([parts, recomputing], left, times)

    def _improvable(
        self, among: Sequence[Parts], left: Sequence[PipelineKind], times: float = 1.0
    ) -> list[PipelineKind]:
        """Drafts pipelines of each kind, and takes better ones.

        Args:
          among: the parts that stages may run: they recompute more or less.
          left: the kinds to draft.
          times: estimated time of tasks, as a multiple of those without recomputation.

        Returns:
          The kinds that may be faster with less in memory, with their bounds.
        """
        looked_at = list[tuple[PipelineKind, Drafting, Draft | None]]()
        for kind, cluster in product(left, self.cluster.orders):
            if kind.bound_s * times >= self._target_s:
                self.skipped_s = min(self.skipped_s, kind.bound_s * times)
                break
            drafting = Drafting(tuple(among), kind.num_replicas, kind.shapes, kind.options, cluster)
            self.progress(str(drafting))
            try:
                looked_at.append((kind, drafting, drafting.draft()))
            except InputError as e:  # the schedule suits no such number of microbatches
                self.refused.append(e)
        drafts = [draft for _, _, draft in looked_at if draft is not None]
        misfits = [
            draft.drafting
            for draft in sorted(drafts, key=lambda one: one.cut.step_s)
            if not self._takes(draft)
        ]
        self.uncut += [drafting.problem for _, drafting, draft in looked_at if draft is None]
        improvable = dict[PipelineKind, float]()
        for kind, drafting, draft in looked_at:
            least_s = self._saving_s(drafting, None if drafting in misfits else draft)
            improvable[kind] = min(max(kind.bound_s, least_s), improvable.get(kind, inf))
        found = [kind._replace(bound_s=least_s) for kind, least_s in improvable.items() if least_s < inf]
        return sorted(found, key=PipelineKind.rank)

    def _takes(self, draft: Draft) -> bool:
        """Works out a draft that promises to be better than the best pipeline, and takes it if it is; false if it does not
        fit after all."""
        if self.best and (draft.least_s > self.best.step_s or draft.promised_rank >= self.best.rank):
            return True
        found = draft.proposal()
        if isinstance(found, NoCut):
            self.nearest = min(self.nearest, found, key=lambda one: one.over_bytes)
            return False
        self.best = min(self.best or found, found, key=lambda one: one.rank)
        return True

    def _saving_s(self, drafting: Drafting, fitting: Draft | None) -> float:
        """Lower bound on the seconds of a pipeline that splits parameters or recomputes more; infinite if nothing is slowed
        down by the cap. The bound is the time without a cap; 0 with loops, as these may be faster with smaller stacks."""
        if drafting.recomputes and fitting:
            return inf
        may_recompute = self.options.remat != "never"
        if may_recompute and (drafting.recomputes or has_loops(drafting.base.step_problem.step)):
            return 0.0
        if fitting and fitting.fullness < UNCONSTRAINED_SHARE:
            return inf
        uncapped = drafting.without_cap.draft()
        if uncapped is None or uncapped.least_s >= self._best_s:
            return inf
        if fitting and uncapped.promised_s >= (1 - MEMORY_BOUND_SLOWDOWN) * fitting.promised_s:
            return inf
        return (1 - GAP) * uncapped.promised_s

    def _bound_s(self, parts: Parts, num_replicas: int, shapes: Shapes) -> float:
        """Lower bound on the seconds of a step with a number of replicas."""
        microbatches_per_s = 0.0
        for group in self.cluster.groups:
            sizes = {s: num_replicas * prod(s) for s in shapes}
            here = [s for s, size in sizes.items() if self.options.may_stand(size, group)]
            device_s = min(parts.on(group).ledger(s).microbatch_s * sizes[s] for s in here)
            microbatches_per_s += group.num_devices / device_s
        return parts.count // num_replicas / microbatches_per_s

    @property
    def _is_late(self) -> bool:
        """True if the time is over."""
        return self.prepared.deadline.is_over

    @property
    def _best_s(self) -> float:
        return self.best.step_s if self.best else inf

    @property
    def _target_s(self) -> float:
        """Seconds of the plan to beat."""
        return min(self._best_s, self.cutoff_s)

    def _check_layers(self, parts: Parts) -> None:
        """Refuses more stages than the step has layers."""
        if (stages := self.options.stages or 0) > (num_layers := parts.layers.num_layers):
            raise InputError(
                f"wanted {stages} stages, but the step's forward phase can be cut into {num_layers} at most: as many ops, "
                "or layers of a loop, compute much for a microbatch. Ask for fewer stages; if the step goes through its "
                "batch in a loop of its own, leave that to microbatches="
            )

    # --- messages

    def _infeasible(self) -> Exception:
        """The error that says why there is no pipeline."""
        if (least_s := min(self._best_s, self.skipped_s)) < inf:
            return InfeasibleError(
                f"pipelines of {self.step.name} take {format_seconds(least_s)} or more, and there is a plan of "
                f"{format_seconds(self.cutoff_s)}"
            )
        if self._is_late:
            return InfeasibleError(
                f"no pipeline of {self.step.name} was found in the time limit. Allow more with time_limit_s="
            )
        nearest = min((self.nearest, *map(nearest_cut, self.uncut)), key=lambda one: one.over_bytes)
        if self.refused and not nearest.nearest:
            return self.refused[0]
        return InfeasibleError(
            f"no pipeline of {self.step.name} on {self.cluster.name} fits {format_bytes(self.options.memory_bytes)} a device"
            f": {nearest}. Allow more memory, more microbatches or more stages, or use more devices"
        )
