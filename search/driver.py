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
from search.ir.graph import Step
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
from search.plan.shardings import step_sharding
from search.problem.flat_program import flatten
from search.solver.branch_and_bound import NoFitError
from search.solver.pbqp import Labels
from search.stopwatch import Stopwatch


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and the strategies behind it.

    Attributes:
      plan: the plan.
      on_mesh: the problem that it solves.
      chosen: a strategy for each node.
      bound_s: what the plan's gap is reckoned from, in seconds; -inf where nothing is proven.
    """

    plan: Plan
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
    """Strategies that fit, and what a device does under them."""

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
    watch = Stopwatch(step.trace_s)
    pins = options.pins or {}
    step_problem = StepProblem.of(step, _marks(step, pins), cluster.device)
    watch.lap("graph")
    shapes, deadline = candidate_shapes(cluster, options), Deadline.after(options.time_limit_s)
    best, bounds_s, tried = None, [], []
    for i, shape in enumerate(shapes):
        progress(f"mesh {format_mesh(shape)} ({i + 1} of {len(shapes)})")
        tried.append(on_mesh := step_problem.on(cluster, shape))
        kept = on_mesh.pinned(pins)
        watch.lap("strategies")
        cutoff_s, share_s = best.cost_s if best else math.inf, deadline.left_s / (len(shapes) - i)
        try:
            solution, device = on_mesh.fitting(kept, options.memory_bytes, share_s, cutoff_s)
            best = _Found(on_mesh, solution.labels, device)
            bounds_s.append(solution.bound_s)
        except NoFitError as e:
            bounds_s.append(e.bound_s)
        watch.lap("solve")
    if best is None:
        progress("no plan so far; looking for the smallest peak")
        best = _of_smallest_peak(step_problem, cluster, options, tried, min(bounds_s) == math.inf)
        watch.lap("solve")
    return _finished(step_problem, best, cluster, options, shapes, watch).bounded(min(bounds_s))


def _of_smallest_peak(
    step_problem: StepProblem,
    cluster: Cluster,
    options: Options,
    tried: Sequence[MeshProblem],
    is_proven: bool,
) -> "_Found":
    """The plan of the smallest peak, where that fits after all.

    Raises:
      InfeasibleError: it does not; says what would.
    """
    deadline = Deadline.after(infeasible.TIME_LIMIT_S)
    smallest = infeasible.smallest_peak(tried, options, deadline)
    if smallest is None or smallest.peak.num_bytes > options.memory_bytes:
        raise infeasible.explain(step_problem, cluster, options, smallest, is_proven, deadline)
    on_mesh, labels = smallest.on_mesh, smallest.labels
    return _Found(on_mesh, labels, on_mesh.predicted(labels, options.memory_bytes))


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> SearchResult:
    """A loaded plan against the step that it is for: its decisions honoured, re-priced and re-checked.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    watch = Stopwatch(step.trace_s)
    marks = _marks(step, plan.options.get("pin", {}))
    step_problem = StepProblem.of(step, marks, cluster.device, apart(step, plan.decisions))
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
    forced = _Found(on_mesh, solution.labels, device)
    found = _finished(step_problem, forced, cluster, Options(plan.memory_bytes), plan.meshes, watch)
    was_s, is_s = plan.estimates.unhidden_s, found.plan.estimates.unhidden_s
    gap = plan.gap if math.isclose(is_s, was_s, rel_tol=1e-6) else None
    return replace(found, plan=replace(found.plan, options=plan.options, cluster=plan.cluster, gap=gap))


def _finished(
    step_problem: StepProblem,
    found: _Found,
    cluster: Cluster,
    options: Options,
    meshes: tuple[tuple[int, ...], ...],
    watch: Stopwatch,
) -> SearchResult:
    costed = found.on_mesh.memory.costed
    plan = Plan(
        step=step_problem.step.name,
        fingerprint=step_problem.fingerprint,
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_said(options),
        meshes=meshes,
        memory_bytes=options.memory_bytes,
        decisions=found.on_mesh.codec.decisions(found.labels),
        estimates=estimate(costed, found.labels, found.device),
        gap=None,
    )
    watch.lap("plan")
    return SearchResult(replace(plan, search_s=watch.seconds), found.on_mesh, found.labels)


def _marks(step: Step, pins: Mapping[str, Any]) -> list[str]:
    """What keeps arguments apart. A plan repeats the pins of its search, so that both fold the step alike."""
    return [str(pins.get(a.name, "")) for a in step.arguments]


def _said(options: Options) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    said: dict[str, Any] = {}
    if options.mesh is not None:
        said["mesh"] = list(options.mesh)
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
