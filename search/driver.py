"""The search: from a traced step and a cluster to a plan.

Each mesh shape worth trying is priced and solved, and the fastest plan that fits wins; ties go to the first.
A plan that is loaded goes the same way, with its decisions as the only strategies left.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from cost_model.cluster import Cluster
from cost_model.errors import InfeasibleError, PlanError
from cost_model.units import format_bytes
from search.device.prediction import Prediction
from search.infeasible import explain
from search.ir.factors import has_rule
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
from search.solver import branch_and_bound


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and the strategies behind it."""

    plan: Plan
    on_mesh: MeshProblem
    chosen: tuple[int, ...]

    @cached_property
    def sharding(self) -> StepSharding:
        """The plan spelled out for the executor."""
        return step_sharding(self.on_mesh.memory.costed, self.chosen)


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
    clock = _Clock(step)
    pins = options.pins or {}
    ground = StepProblem.of(step, _marks(step, pins), cluster.device)
    clock.lap("graph")
    shapes, best, bound_s = candidate_shapes(cluster, options), None, math.inf
    tried: list[MeshProblem] = []
    for i, shape in enumerate(shapes):
        progress(f"mesh {'x'.join(map(str, shape))} ({i + 1} of {len(shapes)})")
        on_mesh = ground.on(cluster, shape)
        tried.append(on_mesh)
        kept = on_mesh.pinned(pins)
        clock.lap("strategies")
        left_s = max(options.time_limit_s - clock.seconds.get("solve", 0.0), 1.0) / (len(shapes) - i)
        cutoff_s = best[1].cost_s if best else math.inf
        try:
            solution, found = on_mesh.fitting(kept, options.memory_bytes, left_s, cutoff_s)
            best, bound_s = (on_mesh, solution, found), min(bound_s, solution.bound_s)
        except branch_and_bound.NoFitError as e:
            bound_s = min(bound_s, e.bound_s)
        clock.lap("solve")
    if best is None:
        progress("nothing fits; looking for what would")
        raise explain(ground, cluster, options, tried)
    on_mesh, solution, found = best
    gap = max(0.0, 1.0 - bound_s / solution.cost_s) if solution.cost_s > 0 else 0.0
    return _finished(ground, on_mesh, solution, found, cluster, options, gap, clock)


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> SearchResult:
    """A loaded plan against the step that it is for: its decisions honoured, re-priced and re-checked.

    Raises:
      PlanError: the plan is for another step, or decides something impossible.
      InfeasibleError: what it decides does not fit its memory cap.
    """
    clock = _Clock(step)
    marks = _marks(step, plan.options.get("pin", {}))
    ground = StepProblem.of(step, marks, cluster.device, apart(step, plan.decisions))
    if plan.fingerprint != ground.fingerprint:
        raise PlanError(
            f"{place} was made for another step (its {plan.step!r} has fingerprint {plan.fingerprint}, this "
            f"{step.name!r} has {ground.fingerprint}). Search again for this one"
        )
    shape = tuple(plan.decisions.mesh.values())
    if tuple(plan.decisions.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(plan.decisions.mesh)}")
    clock.lap("graph")
    on_mesh = ground.on(cluster, shape)
    kept = on_mesh.codec.allowed(plan.decisions, place)
    clock.lap("strategies")
    try:
        solution, device = on_mesh.fitting(kept, plan.memory_bytes, DEFAULT_TIME_LIMIT_S)
    except branch_and_bound.NoFitError as e:
        raise InfeasibleError(
            f"what {place} decides does not fit its cap of {format_bytes(plan.memory_bytes)} a device, or contradicts "
            "itself. Undo the last edit, or raise memory_bytes"
        ) from e
    clock.lap("solve")
    found = _finished(ground, on_mesh, solution, device, cluster, Options(plan.memory_bytes), None, clock)
    is_unchanged = math.isclose(found.plan.estimates.step_s, plan.estimates.step_s, rel_tol=1e-6)
    gap = plan.gap if is_unchanged else None
    return replace(found, plan=replace(found.plan, options=plan.options, cluster=plan.cluster, gap=gap))


def _finished(
    ground: StepProblem,
    on_mesh: MeshProblem,
    solution: branch_and_bound.Solution,
    device: Prediction,
    cluster: Cluster,
    options: Options,
    gap: float | None,
    clock: "_Clock",
) -> SearchResult:
    plan = Plan(
        step=ground.step.name,
        fingerprint=ground.fingerprint,
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_said(options),
        memory_bytes=options.memory_bytes,
        decisions=on_mesh.codec.decisions(solution.labels),
        estimates=estimate(on_mesh.memory.costed, solution.labels, device),
        gap=gap,
    )
    clock.lap("plan")
    return SearchResult(replace(plan, search_s=clock.seconds), on_mesh, solution.labels)


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
    """Primitives that are replicated for want of a rule: how many ops, and the first one's source line."""
    found: dict[str, tuple[int, str]] = {}
    for op in flatten(step).ops:
        if op.op is not None and not has_rule(op.name):
            count, source = found.get(op.name, (0, op.op.source))
            found[op.name] = (count + 1, source)
    return found


class _Clock:
    """Seconds by stage."""

    def __init__(self, step: Step) -> None:
        self.seconds: dict[str, float] = {"trace": step.trace_s}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now
