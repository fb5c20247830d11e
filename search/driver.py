"""The search: from a traced step and a cluster to a plan.

Each mesh shape worth trying is priced and solved, and the fastest plan that fits wins; ties go to the first.
A plan that is loaded goes the same way, with its decisions as the only strategies left.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, PlanError
from cost_model.units import format_bytes, format_mesh
from search import infeasible
from search.deadline import Deadline
from search.device.prediction import Prediction
from search.ir.graph import Site, Step
from search.ir.sharding import StepSharding
from search.ir.spec import AXIS_NAMES
from search.mesh_problem import (
    DEFAULT_TIME_LIMIT_S,
    MeshProblem,
    Options,
    Progress,
    StepProblem,
    candidate_shapes,
)
from search.plan.decisions import apart
from search.plan.estimates import estimate
from search.plan.plan import Plan
from search.plan.retention import RetentionCodec
from search.plan.shardings import step_sharding
from search.problem.flat_program import flatten
from search.problem.folding import fold
from search.recomputation import Candidate, candidates, without_cap
from search.solver.branch_and_bound import NoFitError
from search.solver.pbqp import Labels
from search.stopwatch import Stopwatch

ATTEMPT_SHARE = 0.4
"""Of the time left, what a step that recomputes may take to be searched. Source: a choice of ours."""

LEAST_ATTEMPT_S = 2.0
"""Seconds that it may take at least, as long as there is no plan. Source: a choice of ours."""

MISSED_SHARE = 0.1
"""Of the cap: where a step did not fit, what the next one has to save besides. Source: a choice of ours."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and the strategies behind it.

    Attributes:
      plan: the plan.
      step: what runs: the traced step, with what the plan recomputes.
      on_mesh: the problem that it solves.
      chosen: a strategy for each node.
      bound_s: what the plan's gap is reckoned from, in seconds; -inf where nothing is proven.
    """

    plan: Plan
    step: Step
    on_mesh: MeshProblem
    chosen: Labels
    bound_s: float = -math.inf

    def bounded(self, bound_s: float) -> "SearchResult":
        """The same, certified by a lower bound on what computation and communication take together under any plan."""
        cost_s = self.on_mesh.problem.cost_s(self.chosen)
        gap = max(0.0, 1.0 - bound_s / cost_s) if cost_s > 0 else 0.0
        return replace(self, plan=replace(self.plan, gap=gap), bound_s=bound_s)

    @cached_property
    def sharding(self) -> StepSharding:
        """The plan spelled out for the executor."""
        return step_sharding(self.on_mesh.memory.costed, self.chosen)


@dataclass(frozen=True, eq=False)
class _Found:
    """Strategies that fit, and what a device does under them.

    Attributes:
      step_problem: of the step with what is recomputed.
      on_mesh: the problem that they solve.
      labels: a strategy for each node.
      device: what a device does.
    """

    step_problem: StepProblem
    on_mesh: MeshProblem
    labels: Labels
    device: Prediction

    @property
    def cost_s(self) -> float:
        """Computation and communication, one after the other: what the solver minimises."""
        return self.on_mesh.problem.cost_s(self.labels)


def find(
    step: Step, cluster: Cluster, options: Options, progress: Progress = lambda line: None
) -> SearchResult:
    """Searches for the fastest plan that fits.

    Args:
      step: the traced step.
      cluster: where it will run.
      options: the cap, and what is fixed beforehand.
      progress: called with one line per stage.

    Raises:
      InfeasibleError: nothing fits the cap; says what would.
      InputError: the mesh or a pin does not suit the cluster or the step.
    """
    return _Search(step, cluster, options, progress).run()


class _Search:
    """One search: of the step as it is, then of steps that recompute, for as long as that may be faster.

    Attributes:
      best: the best plan so far.
      bounds_s: by mesh, a lower bound on plans that recompute what the best one does.
      roomy: meshes on which memory made no difference.
    """

    def __init__(self, step: Step, cluster: Cluster, options: Options, progress: Progress) -> None:
        self.step, self.cluster, self.options, self.progress = step, cluster, options, progress
        self.pins, self.marks = options.pins or {}, _marks(step, options.pins or {})
        self.watch = Stopwatch(step.trace_s)
        self.shapes = candidate_shapes(cluster, options)
        self.best: _Found | None = None
        self.bounds_s: dict[tuple[int, ...], float] = {}
        self.roomy: set[tuple[int, ...]] = set()

    def run(self) -> SearchResult:
        plain = self._made_ready()
        deadline = Deadline.after(self.options.time_limit_s)
        tried: list[MeshProblem] = []
        for i, shape in enumerate(self.shapes):
            self.progress(f"mesh {format_mesh(shape)} ({i + 1} of {len(self.shapes)})")
            tried.append(self._put_on(plain, shape))
            share_s = deadline.left_s / (len(self.shapes) - i)
            self.bounds_s[shape] = self._improve(plain, tried[-1], share_s)
        frugal = plain if self.options.remat == "never" else self._recompute(plain, tried)
        if self.best is None:
            self.progress("no plan so far; looking for the smallest peak")
            if frugal is not plain:
                tried = [self._put_on(frugal, shape) for shape in self.shapes]
            self.best = self._of_smallest_peak(frugal, tried)
            self.watch.lap("solve")
        found = _finished(self.marks, self.best, self.cluster, self.options, self.shapes, self.watch)
        return found.bounded(min(self.bounds_s.values()))

    @property
    def cutoff_s(self) -> float:
        """What a better plan has to stay below."""
        return self.best.cost_s if self.best else math.inf

    def _made_ready(self, sites: frozenset[Site] = frozenset()) -> StepProblem:
        step_problem = StepProblem.of(self.step, self.marks, self.cluster.device, sites)
        self.watch.lap("graph")
        return step_problem

    def _put_on(self, step_problem: StepProblem, shape: tuple[int, ...]) -> MeshProblem:
        on_mesh = step_problem.on(self.cluster, shape)
        self.watch.lap("strategies")
        return on_mesh

    def _improve(self, step_problem: StepProblem, on_mesh: MeshProblem, time_limit_s: float) -> float:
        """Looks for a better plan on one mesh; a lower bound on all of its plans that fit."""
        kept = on_mesh.pinned(self.pins)
        try:
            solution, device = on_mesh.fitting(kept, self.options.memory_bytes, time_limit_s, self.cutoff_s)
            self.best = _Found(step_problem, on_mesh, solution.labels, device)
            if not solution.stats.num_rows:
                self.roomy.add(on_mesh.shape)
            return solution.bound_s
        except NoFitError as e:
            if e.num_rows == 0:
                self.roomy.add(on_mesh.shape)
            return e.bound_s
        finally:
            self.watch.lap("solve")

    def _recompute(self, plain: StepProblem, tried: Sequence[MeshProblem]) -> StepProblem:
        """Looks for better plans among steps that recompute; the step that holds least of all those considered."""
        limit_bytes, deadline = self.options.memory_bytes, Deadline.after(self.options.time_limit_s / 2)
        cramped = [on_mesh for on_mesh in tried if on_mesh.shape not in self.roomy]
        free, bounds_s = without_cap(cramped, self.pins, self.cutoff_s, deadline)
        found = candidates(plain, free, self.pins, limit_bytes, self.cutoff_s, deadline)
        self.watch.lap("recompute")
        self._try(found, self.bounds_s | bounds_s)
        if self.best is not None or not found:
            return plain
        return self._made_ready(max(found, key=lambda candidate: candidate.saved_bytes).sites)

    def _try(self, found: Sequence[Candidate], bounds_s: Mapping[tuple[int, ...], float]) -> None:
        """Builds and solves steps that recompute, until none promises to be better than the best plan."""
        deadline, least_saved_bytes = Deadline.after(self.options.time_limit_s / 2), 0.0
        for candidate in found:
            if self.best and (deadline.is_over or candidate.cost_s >= self.cutoff_s):
                break
            if candidate.saved_bytes < least_saved_bytes:
                continue
            self.progress(f"recomputing {len(candidate.sites)} ops on mesh {format_mesh(candidate.shape)}")
            step_problem, before = self._made_ready(candidate.sites), self.best
            on_mesh = self._put_on(step_problem, candidate.shape)
            time_limit_s = max(ATTEMPT_SHARE * deadline.left_s, LEAST_ATTEMPT_S)
            bound_s = self._improve(step_problem, on_mesh, time_limit_s)
            if self.best is before:
                least_saved_bytes = candidate.saved_bytes + MISSED_SHARE * self.options.memory_bytes
            else:
                self.bounds_s = {**bounds_s, candidate.shape: bound_s}

    def _forbidden_s(self, plain: StepProblem, tried: Sequence[MeshProblem]) -> float | None:
        """Seconds per step of a plan that recomputes, where that is forbidden and would fit."""
        if self.options.remat != "never":
            return None
        options = replace(self.options, remat=None, time_limit_s=infeasible.TIME_LIMIT_S)
        allowed = _Search(self.step, self.cluster, options, self.progress)
        allowed.bounds_s = self.bounds_s
        allowed._recompute(plain, tried)
        return allowed.best.cost_s if allowed.best else None

    def _of_smallest_peak(self, step_problem: StepProblem, tried: Sequence[MeshProblem]) -> _Found:
        """The plan of the smallest peak, where that fits after all.

        Raises:
          InfeasibleError: it does not; says what would.
        """
        options, deadline = self.options, Deadline.after(infeasible.TIME_LIMIT_S)
        is_proven = not step_problem.sites and min(self.bounds_s.values()) == math.inf
        smallest = infeasible.smallest_peak(tried, options, deadline)
        if smallest is None or smallest.peak.num_bytes > options.memory_bytes:
            forbidden_s = self._forbidden_s(step_problem, tried)
            raise infeasible.explain(
                step_problem, self.cluster, options, smallest, is_proven, deadline, forbidden_s
            )
        on_mesh, labels = smallest.on_mesh, smallest.labels
        return _Found(step_problem, on_mesh, labels, on_mesh.predicted(labels, options.memory_bytes))


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> SearchResult:
    """A loaded plan against the step that it is for: its decisions honoured, re-priced and re-checked.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    watch = Stopwatch(step.trace_s)
    marks = _marks(step, plan.options.get("pin", {}))
    sites = _recomputed_sites(step, marks, plan, place)
    step_problem = StepProblem.of(step, marks, cluster.device, sites, apart(step, plan.decisions))
    if plan.fingerprint != step_problem.fingerprint:
        raise PlanError(
            f"{place} was made for another step (its {plan.step!r} has fingerprint {plan.fingerprint}, this "
            f"{step.name!r} has {step_problem.fingerprint}). Search again for this one"
        )
    shape = tuple(plan.decisions.mesh.values())
    if tuple(plan.decisions.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(plan.decisions.mesh)}")
    watch.lap("graph")
    on_mesh = step_problem.on(cluster, shape)
    kept = on_mesh.codec.allowed(plan.decisions, place)
    watch.lap("strategies")
    try:
        solution, device = on_mesh.fitting(kept, plan.memory_bytes, DEFAULT_TIME_LIMIT_S)
    except NoFitError as e:
        raise InfeasibleError(
            f"what {place} decides does not fit its cap of {format_bytes(plan.memory_bytes)} a device, or contradicts "
            "itself. Undo the last edit, or raise memory_bytes"
        ) from e
    watch.lap("solve")
    forced = _Found(step_problem, on_mesh, solution.labels, device)
    found = _finished(marks, forced, cluster, Options(plan.memory_bytes), plan.meshes, watch)
    was_s, is_s = plan.estimates.unhidden_s, found.plan.estimates.unhidden_s
    gap = plan.gap if math.isclose(is_s, was_s, rel_tol=1e-6) else None
    return replace(found, plan=replace(found.plan, options=plan.options, cluster=plan.cluster, gap=gap))


def _finished(
    marks: Sequence[str],
    found: _Found,
    cluster: Cluster,
    options: Options,
    meshes: tuple[tuple[int, ...], ...],
    watch: Stopwatch,
) -> SearchResult:
    costed, step_problem = found.on_mesh.memory.costed, found.step_problem
    retention = _retention(step_problem.traced, marks).said(step_problem.sites) if step_problem.sites else {}
    plan = Plan(
        step=step_problem.step.name,
        fingerprint=step_problem.fingerprint,
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_said(options),
        meshes=meshes,
        memory_bytes=options.memory_bytes,
        decisions=replace(found.on_mesh.codec.decisions(found.labels), retention=retention),
        estimates=estimate(costed, found.labels, found.device),
        gap=None,
    )
    watch.lap("plan")
    plan = replace(plan, search_s=watch.seconds)
    return SearchResult(plan, step_problem.step, found.on_mesh, found.labels)


def _retention(step: Step, marks: Sequence[str]) -> RetentionCodec:
    return RetentionCodec(fold(flatten(step), marks))


def _recomputed_sites(step: Step, marks: Sequence[str], plan: Plan, place: str) -> frozenset[Site]:
    """What a plan recomputes."""
    said = plan.decisions.retention
    return _retention(step, marks).read(said, place) if said else frozenset()


def _marks(step: Step, pins: Mapping[str, Any]) -> list[str]:
    """What keeps arguments apart. A plan repeats the pins of its search, so that both fold the step alike."""
    return [str(pins.get(a.name, "")) for a in step.arguments]


def _said(options: Options) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    said: dict[str, Any] = {}
    if options.mesh is not None:
        said["mesh"] = list(options.mesh)
    if options.remat is not None:
        said["remat"] = options.remat
    if options.pins:
        said["pin"] = {name: str(spec) for name, spec in sorted(options.pins.items())}
    return said


def primitives_without_rule(step: Step) -> dict[str, tuple[int, str]]:
    """Primitives that are replicated for want of a rule, where there is data to split: how many ops, and where the
    first one stands."""
    found: dict[str, tuple[int, str]] = {}
    for op in flatten(step).ops:
        if op.op is not None and op.rule.is_unknown and any(f.size > 1 for f in op.rule.factors):
            count, where = found.get(op.name, (0, op.op.where))
            found[op.name] = (count + 1, where)
    return found
