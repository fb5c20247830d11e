"""Pipelines as users ask for them: from `stages=` and its neighbours to a pipeline on its step.

Without `stages=`, the user gets a pipeline if it is faster than one program or the only plan that fits. To make a step ready
for pipelines takes longer than to search one program. So bounds come first: the work of the step is known from one program,
and a family of pipelines that can be no faster is not looked at (`search.pipeline.bounds`). Both searches share one clock
and one time limit.
"""

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from time import perf_counter
from typing import Any, cast

from autoshard import compiled_peaks, lowerings, planning
from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.cost_model.mixed_cluster import AnyCluster, MixedCluster
from autoshard.cost_model.units import format_seconds
from autoshard.options import ALWAYS, Options
from autoshard.pipeline_request import across_kinds, allowed_executor, are_allowed, requested
from autoshard.processes import ALONE, Processes
from autoshard.programs import Built
from autoshard.progress import Progress
from autoshard.search.ir.graph import Step
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, LATEST
from autoshard.search.pipeline import planning as pipelines
from autoshard.search.pipeline import spmd_planning
from autoshard.search.pipeline.bounds import PipelineBounds
from autoshard.search.pipeline.parts import Parts
from autoshard.search.pipeline.pipeline_options import PipelineOptions
from autoshard.search.pipeline.pipeline_plan import Pipeline
from autoshard.search.pipeline.prepared import Prepared
from autoshard.search.pipeline.search import PipelineSearch
from autoshard.search.pipeline.spmd_planning import SpmdPipeline
from autoshard.search.pipeline.spmd_search import SpmdSearch
from autoshard.search.pipeline.step_work import StepWork
from autoshard.search.plan.executors import JIT, MPMD, SPMD
from autoshard.search.plan.plan import Plan
from autoshard.search.result import SearchResult
from autoshard.search.solver.clock import PROCESSOR, Deadline, SearchClock, WorkClock
from autoshard.user_warning import warn

AnyPipeline = Pipeline | SpmdPipeline

MUCH_FASTER = 1.3
"""Largest speed-up of one program over a pipeline's microbatches on busy devices: its kernels take more examples at a time.
Source: a choice of ours."""


def one_program_or_pipeline[One: (SearchResult, Built)](
    step: Step,
    hardware: AnyCluster,
    options: Options,
    alone: Callable[[Options], One],
    progress: Progress,
    processes: Processes = ALONE,
    is_later: bool = False,
) -> One | AnyPipeline:
    """The plan that the options ask for; the faster one if they allow one program and pipelines.

    Args:
      alone: searches for one program, by the user's options with its time limit.
      processes: the processes that run the step; the first one searches.
      is_later: whether this is a later call of a step whose first plan is a pipeline. It is planned as one program if it
        cannot be a pipeline: a last batch may have fewer examples than the pipeline has microbatches.

    Raises:
      InfeasibleError: nothing fits.

    Warns:
      AutoshardWarning: a later call is planned as one program.
    """
    if isinstance(hardware, MixedCluster):
        across = across_kinds(hardware, options)
        return PipelineSearches(step, hardware, across, progress, processes).fastest()
    if not are_allowed(options):
        return alone(options)
    limit_s = options.time_limit_s  # of which one program before pipelines gets most
    before = options if limit_s is None else replace(options, time_limit_s=limit_s / LATEST)
    searches = PipelineSearches(step, hardware, options, progress, processes)
    if options.num_stages is None:
        return searches.faster_than(hardware, lambda: alone(before))
    try:
        return searches.fastest()
    except InputError as e:
        if not is_later:
            raise
        warn(f"this call of {step.name} is planned as one program, since it cannot be a pipeline: {e}")
        return alone(before)


@dataclass(frozen=True, eq=False)
class PipelineSearches:
    """The searches for pipelines of a step, for each executor that the user's options allow.

    Attributes:
      step: the traced step.
      cluster: the cluster that it will run on.
      options: the user's options, which ask for a pipeline or allow one.
      progress: called with one line per stage of the work.
      processes: the processes that run the step; the first one searches.
    """

    step: Step
    cluster: AnyCluster
    options: Options
    progress: Progress = lambda line: None
    processes: Processes = ALONE

    def faster_than[One: (SearchResult, Built)](
        self, cluster: Cluster, alone: Callable[[], One]
    ) -> One | AnyPipeline:
        """The faster of one program on the cluster and a pipeline of any number of stages.

        Raises:
          InfeasibleError: neither fits; the message tells how one program could fit.
        """
        found, refused, start_s, clock_s = None, InfeasibleError(), perf_counter(), PROCESSOR.now_s
        try:
            found = alone()
        except InfeasibleError as e:
            refused = e
        alone_s = perf_counter() - start_s
        prepared = self._after(found, cluster, clock_s)
        cutoff_s = math.inf if found is None else found.plan.estimates.step_s
        try:
            least_s = self._least(lambda search: search.least_s(), prepared)
            if found is not None and least_s >= cutoff_s:
                if self.options.stages is not None:
                    seconds = format_seconds(cutoff_s)
                    self.progress(f"no pipeline: none can take less than the {seconds} of one program")
                return found.waited("pipelines", perf_counter() - start_s - alone_s)
            why = "as nothing else fits" if found is None else "which may be faster"
            self.progress(f"looking for a pipeline, {why}")
            return self.fastest(cutoff_s, prepared).waited(JIT, alone_s)
        except (InfeasibleError, InputError) as e:
            self.progress(f"no pipeline: {e}")
            if found is None:
                raise refused from e
        return found.waited("pipelines", perf_counter() - start_s - alone_s)

    def _after(self, found: SearchResult | Built | None, cluster: Cluster, began_s: float) -> Prepared:
        """The step for searches behind that for one program, which began at this time of the processor: the clock goes on,
        and the work of the step is that of one program, if one was found."""
        if found is None:
            return Prepared(self._deadline(WorkClock(), began_s, 0.0))
        waited_s = found.plan.search_s.get("compiler", 0.0)
        recompute_s = cluster.num_devices * found.plan.estimates.recompute_s
        bounds = PipelineBounds(self.step, cluster, StepWork.of(found.on_mesh, recompute_s))
        return Prepared(self._deadline(found.on_mesh.clock, began_s, waited_s), bounds=bounds)

    def _deadline(self, clock: SearchClock, began_s: float, waited_s: float) -> Deadline:
        """The deadline behind one program, whose search waited so long for the compiler."""
        if self.options.time_limit_s is not None:
            return Deadline(PROCESSOR, began_s + self.options.time_limit_s - waited_s)
        return Deadline(clock, LATEST * DEFAULT_TIME_LIMIT_S if self.options.stages is None else math.inf)

    def fastest(self, cutoff_s: float = math.inf, prepared: Prepared | None = None) -> AnyPipeline:
        """The fastest pipeline whose step takes less than `cutoff_s`.

        Args:
          prepared: the time and the bounds of the search; by default those of a new one.

        Raises:
          InputError: the options are impossible.
          InfeasibleError: no pipeline fits.
        """
        limit_s = self.options.time_limit_s
        within = Deadline.after(*((math.inf, WorkClock()) if limit_s is None else (limit_s, PROCESSOR)))
        ready, cap_bytes = prepared or Prepared(within), self._asked.memory_bytes

        def search(limit_bytes: int, _: float | None, report: Progress) -> AnyPipeline:
            return self._under(limit_bytes / cap_bytes, report, cutoff_s, ready)

        def kept() -> AnyPipeline:
            judge = compiled_peaks.judge_of_pipelines(
                self.step, self.cluster, self.options, self.progress, lowerings.verified
            )
            left_s = None if limit_s is None else ready.deadline.left_s
            is_asked = self.options.verify == ALWAYS
            found = compiled_peaks.kept(search, judge, cap_bytes, self.progress, is_asked, left_s)
            return self._certified(found, ready)

        def apply(data: Any, place: str) -> AnyPipeline:
            return cast(AnyPipeline, lowerings.applied(self.step, Plan.from_json(data, place), place))

        return self.processes.found_by_the_first(kept, apply)

    @cached_property
    def _asked(self) -> PipelineOptions:
        return requested(self.step, self.cluster, self.options)

    @property
    def _executor(self) -> str | None:
        """The executor that the options allow; None for the faster one."""
        return allowed_executor(self.options)

    def _least(self, bound_s: Callable[[PipelineSearch | SpmdSearch], float], prepared: Prepared) -> float:
        """The least bound of the searches.

        Raises:
          InputError: there are no such pipelines.
        """
        step, cluster, asked, searches = self.step, self.cluster, self._asked, list[Any]()
        if self._executor != SPMD:
            searches.append(PipelineSearch(step, cluster, asked, prepared=prepared))
        if self._executor != MPMD and isinstance(cluster, Cluster):
            searches.append(SpmdSearch(step, cluster, asked, prepared=prepared))
        found, refused = list[float](), list[InputError]()
        for search in searches:
            try:
                found.append(bound_s(search))
            except InputError as e:
                refused.append(e)
        if not found:
            raise refused[0]
        return min(found)

    def _certified(self, found: AnyPipeline, prepared: Prepared) -> AnyPipeline:
        """A copy of a pipeline with its gap to a bound on all pipelines that the options allow; without one if the work of
        the step is not known."""
        if prepared.bounds is None:
            return found
        bound_s = self._least(lambda search: search.work_s(), prepared)
        return found.with_plan(gap=max(0.0, 1 - bound_s / found.plan.estimates.step_s))

    def _under(
        self, memory_share: float, progress: Progress, cutoff_s: float, prepared: Prepared
    ) -> AnyPipeline:
        """The pipeline with the shorter predicted step among the executors, in a share of the cap. Both searches share the
        prepared step and the time limit."""
        step, cluster, executor = self.step, self.cluster, self._executor
        asked = replace(self._asked, memory_share=memory_share)
        as_one, start_s = None, perf_counter()
        if isinstance(cluster, Cluster) and executor != MPMD:
            try:
                as_one = spmd_planning.find(step, cluster, asked, progress, cutoff_s, prepared)
            except (InfeasibleError, InputError) as e:
                if executor == SPMD:
                    raise
                progress(f"not as one program for all stages: {e}")
            else:
                if executor == SPMD:
                    return as_one
                cutoff_s = as_one.plan.estimates.step_s
        as_one_s = perf_counter() - start_s
        try:
            found = pipelines.find(step, cluster, asked, progress, cutoff_s, prepared)
            if isinstance(cluster, MixedCluster) and asked.stages is None:
                plain = prepared.parts[found.plan.microbatches * found.plan.num_replicas]
                told_s = perf_counter()
                _tell_of_parts(step, cluster, found.plan, plain, progress)
                found = found.waited("one kind of device alone", perf_counter() - told_s)
            is_tried = isinstance(cluster, Cluster) and executor != MPMD
            return found.waited(SPMD, as_one_s) if is_tried else found
        except (InfeasibleError, InputError) as e:
            if as_one is None:
                raise
            progress(f"not with a program per stage: {e}")
            return as_one.waited(MPMD, perf_counter() - start_s - as_one_s)


def _tell_of_parts(step: Step, cluster: MixedCluster, plan: Plan, parts: Parts, progress: Progress) -> None:
    """Warns if one program on the nodes of one kind is predicted to be faster than the pipeline on all nodes."""
    alone_s = dict[str, float]()
    for group, cap_bytes in zip(cluster.groups, cluster.caps(plan.memory_bytes), strict=True):
        if parts.least_s(group) > MUCH_FASTER * plan.estimates.step_s:
            continue
        progress(f"looking for one program on {group.name} alone")
        with suppress(InfeasibleError):
            found = planning.find(
                step, group, planning.options(step, group, Options(memory=cap_bytes)), progress
            )
            alone_s[group.name] = found.plan.estimates.step_s
    fastest = min(alone_s, key=alone_s.__getitem__, default=None)
    if fastest is not None and alone_s[fastest] < plan.estimates.step_s:
        warn(
            f"{fastest} alone is predicted to run {step.name} in {format_seconds(alone_s[fastest])}, and all of "
            f"{cluster.name} in {format_seconds(plan.estimates.step_s)}. Ask for it alone, or give the step a larger batch"
        )
