"""Why a pipeline is as it is: what other searches find where one of its choices is another.

Stages, schedule and microbatches are chosen together by enumeration, so the search knows no runner-up of one of them. It is
searched for: for each neighbour of the choice, with the plan's cap, pins and executor. A neighbour of a number is its half
or its double; of the stages also one program; of a schedule, each other family. The other choices stay, except that another
number of stages may have any schedule and microbatches. Once a neighbour is found, only a faster one counts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from autoshard import lowerings, planning
from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError, closest
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.units import format_seconds
from autoshard.lowerings import Found
from autoshard.options import Options
from autoshard.pipelines import PipelineSearches
from autoshard.search.explained_memory import pinned
from autoshard.search.ir.graph import Step
from autoshard.search.ir.spec import format_spec
from autoshard.search.mesh_problem import RELATIVE_GAP
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.schedules.registry import FAMILIES
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.plan.executors import MPMD
from autoshard.search.plan.explained import CHEAPER_ELSEWHERE, IMPROVABLE, NOT_POSSIBLE, TIE, MoreMemory
from autoshard.search.plan.explained_pipeline import NOT_NEEDED, Neighbour, PipelineExplanation, Place
from autoshard.search.plan.headline import headline
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.spmd_resting import SpmdResting
from autoshard.search.plan.text_table import plural
from autoshard.search.plan.values import REPLICA, STAGE

CHOICES = ("stages", "schedule", "microbatches")
"""The choices of a pipeline that are explained."""

NEVER, NEXT_SHARE = "never", 1.1
"""No compiler is asked; the cap with the next 10% of memory, as a share of the cap."""


def explain(step: Step, plan: Plan, cluster: AnyCluster, name: str, place: str) -> PipelineExplanation:
    """Explains a pipeline's stages, schedule or microbatches, or the place of an argument.

    Args:
      name: `stages`, `schedule` or `microbatches`, or the path of an argument.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
    """
    found = lowerings.applied(step, plan, place)
    neighbourhood = _Neighbourhood(step, found.plan, cluster)
    if name in CHOICES:
        return neighbourhood.explained(name)
    resting = _place(found, step, name, place)
    return PipelineExplanation(name, resting.spec, place=resting)


@dataclass(frozen=True, eq=False)
class _Neighbourhood:
    """The plans around a pipeline."""

    step: Step
    plan: Plan
    cluster: AnyCluster

    def _choice(self, name: str) -> str:
        """A choice in words."""
        if name == "stages":
            return f"{self._count} on {plural(self.plan.workers, 'worker')}{self._balance}"
        return self.plan.schedule if name == "schedule" else str(self.plan.microbatches)

    @property
    def _count(self) -> str:
        return plural(len(self.plan.stages), "stage")

    @property
    def _balance(self) -> str:
        """How evenly the cut shares the work out."""
        taken = [one.forward_s + one.backward_s + one.weight_gradient_s for one in self.plan.estimates.stages]
        if not taken:
            return ""
        least, most = format_seconds(min(taken)), format_seconds(max(taken))
        return (
            f", which take {least} to {most} for a microbatch"
            if least != most
            else f", of {most} for a microbatch"
        )

    def explained(self, name: str) -> PipelineExplanation:
        """Why a choice is as it is."""
        tried = self._tried(name)
        with_plan = [one for one in tried if one.more_s is not None]
        best = min(with_plan, key=lambda one: one.more_s or 0.0, default=None)
        return PipelineExplanation(
            name,
            self._choice(name),
            self._reason(best),
            best,
            tuple(one for one in tried if one is not best),
            more_memory=self._more_memory(),
            step_s=self.plan.estimates.step_s,
        )

    def _reason(self, best: Neighbour | None) -> str:
        if best is None or best.more_s is None:
            return NOT_POSSIBLE
        if abs(best.more_s) <= RELATIVE_GAP * self.plan.estimates.step_s:
            return TIE
        return CHEAPER_ELSEWHERE if best.more_s > 0 else IMPROVABLE

    # --- neighbours

    def _tried(self, name: str) -> list[Neighbour]:
        """All neighbours; those after the fastest one so far have a plan only if they are faster."""
        found, cutoff_s = list[Neighbour](), inf
        for choice, options in self._neighbours(name):
            one = self._neighbour(choice, options, cutoff_s)
            if one.more_s is not None:
                cutoff_s = self.plan.estimates.step_s + one.more_s
            found.append(one)
        return found

    def _neighbours(self, name: str) -> Iterator[tuple[str, Options]]:
        own = self._own
        if name == "schedule":
            for family in FAMILIES:
                if family != self.plan.schedule and self.plan.executor == MPMD:
                    yield family, replace(own, schedule=family)
        elif name == "microbatches":
            for count in _around(self.plan.microbatches):
                yield plural(count, "microbatch", "es"), replace(own, microbatches=count)
        else:
            for count in _around(len(self.plan.stages)):
                yield plural(count, "stage"), replace(own, stages=count, schedule=None, microbatches=None)
            if not isinstance(self.cluster, MixedCluster):
                yield "one program", Options(memory=self.plan.memory_bytes, pin=own.pin, verify=NEVER)

    @property
    def _own(self) -> Options:
        """Options by which the plan would be found."""
        return Options(
            memory=self.plan.memory_bytes,
            stages=len(self.plan.stages),
            schedule=self.plan.schedule if self.plan.executor == MPMD else None,
            microbatches=self.plan.microbatches,
            executor=self.plan.executor,
            pin=pinned(self.plan) or None,
            verify=NEVER,
        )

    def _neighbour(self, choice: str, options: Options, cutoff_s: float) -> Neighbour:
        try:
            other = self._searched(options, cutoff_s)
        except (InfeasibleError, InputError) as e:
            is_cut_off = isinstance(e, InfeasibleError) and cutoff_s < inf
            return Neighbour(choice, why_not=NOT_NEEDED if is_cut_off else str(e))
        more_s = other.estimates.step_s - self.plan.estimates.step_s
        if self.plan.estimates.step_s + more_s >= cutoff_s:
            return Neighbour(choice, why_not=NOT_NEEDED)
        more_bytes = other.estimates.peak_bytes - self.plan.estimates.peak_bytes
        return Neighbour(choice, headline(other), more_s, more_bytes)

    def _searched(self, options: Options, cutoff_s: float) -> Plan:
        if options.stages is None:
            cluster = self.cluster
            assert not isinstance(cluster, MixedCluster)
            return planning.find(self.step, cluster, planning.options(self.step, cluster, options)).plan
        prepared = self._prepared if options.stages == len(self.plan.stages) else None
        return PipelineSearches(self.step, self.cluster, options).fastest(cutoff_s, prepared).plan

    @cached_property
    def _prepared(self) -> Prepared:
        """The step in parts, for all searches with as many stages."""
        return Prepared.within()

    # --- memory

    def _more_memory(self) -> MoreMemory:
        """The fastest pipeline with as many stages under a cap that is 10% higher."""
        cap_bytes, step_s = self.plan.memory_bytes, self.plan.estimates.step_s
        most_bytes = min(group.device.memory_bytes for group in self.cluster.groups)
        higher = min(int(NEXT_SHARE * cap_bytes), max(most_bytes, cap_bytes))
        options = replace(self._own, memory=higher, schedule=None, microbatches=None)
        try:
            other = self._searched(options, (1 - RELATIVE_GAP) * step_s)
        except (InfeasibleError, InputError):
            return MoreMemory(higher - cap_bytes, 0.0, "", False)
        less_s = step_s - other.estimates.step_s
        is_faster = less_s > RELATIVE_GAP * step_s
        return MoreMemory(
            higher - cap_bytes, less_s if is_faster else 0.0, headline(other) if is_faster else "", False
        )


def _around(count: int) -> list[int]:
    return [other for other in (count // 2, 2 * count) if other >= 1 and other != count]


# --- arguments


def _place(found: Found, step: Step, name: str, place: str) -> Place:
    """Where an argument rests."""
    number = next((i for i, one in enumerate(step.arguments) if name in one.names), None)
    if number is None:
        known = [*CHOICES, *(path for one in step.arguments for path in one.names)]
        raise PlanError(
            f"{place}: wanted {', '.join(CHOICES)} or the path of an argument, got {name!r}{closest(name, known)}. Ops of "
            "pipelines are not explained"
        )
    if isinstance(found, Pipeline):
        return _on_a_stage(found, found.programs.step.graph.inputs[number])
    assert isinstance(found, SpmdPipeline)
    return _on_all_stages(found, found.program.step.graph.inputs[number])


def _on_a_stage(found: Pipeline, value: int) -> Place:
    stage = found.programs.stage_of[value]
    sharding = found.shardings[stage]
    mesh = dict(zip(sharding.axis_names, sharding.mesh_shape, strict=True))
    return Place(stage, mesh, format_spec(sharding.spec(value), sharding.axis_names))


def _on_all_stages(found: SpmdPipeline, value: int) -> Place:
    names = (STAGE, REPLICA, *found.sharding.axis_names)
    resting = SpmdResting(found.program, found.sharding)
    mesh = dict(zip(names, resting.mesh_shape, strict=True))
    return Place(None, mesh, format_spec(resting.resting_spec(value), names))
