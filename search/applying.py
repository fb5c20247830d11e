"""A loaded plan on its step: its decisions are priced, solved and checked as in a search, as the only strategies."""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.cost_model.units import format_bytes
from autoshard.search.device.prediction import Prediction
from autoshard.search.ir.graph import Step
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.mesh_problem import MeshProblem, TooLargeError
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, Options, pin_marks
from autoshard.search.plan.decisions import EDITED, apart, node_names
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.recognition import check_is_for
from autoshard.search.plan.reconciliation import ContradictionError, Reconciled, reconciled
from autoshard.search.plan.retention import CoarseError
from autoshard.search.problem.shortening import Shortened, shortened
from autoshard.search.result import Form, SearchResult, equivalence_keys, finished, in_microbatches, planned
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import WorkClock
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.found import Found
from autoshard.search.space.long_sequences import BLOCKWISE
from autoshard.search.step_problem import StepProblem
from autoshard.search.stopwatch import Stopwatch


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> SearchResult:
    """Applies a loaded plan to its step: keeps its decisions, prices them and checks them.

    Raises:
      PlanError: the plan is for another step or decides something impossible, or two of its edits contradict each
        other.
      InfeasibleError: the decisions do not fit the plan's memory cap.
    """
    watch = Stopwatch(step.trace_s)
    check_is_for(plan, step, place)
    step = _as_planned(step, plan, place)
    step_problem, short = _read(step, plan, cluster, place)
    watch.lap("graph")
    on_mesh = step_problem.on(cluster, tuple(plan.decisions.mesh.values()))
    decisions = _reconciled(on_mesh, plan, place)
    watch.lap("strategies")
    try:
        solution, device = on_mesh.fitting(decisions.kept, plan.memory_bytes, DEFAULT_TIME_LIMIT_S)
        labels = solution.labels
    except NoFitError as e:
        labels, device = _nearest(on_mesh, decisions.kept, plan.memory_bytes, e)
        if device.least.num_bytes > plan.memory_bytes:
            raise InfeasibleError(
                f"the decisions of {place} do not fit its cap of {format_bytes(plan.memory_bytes)} a device. "
                "Undo the last edit, or raise memory_bytes"
            ) from e
    device = device.with_overlap(min(plan.overlap, device.overlap))
    watch.lap("solve")
    forced = Found(step_problem, on_mesh, labels, plan.memory_bytes, device)
    form, forced_options = Form(step, short), Options(plan.memory_bytes)
    found = finished(form, forced, cluster, forced_options, plan.meshes, watch)
    was_s, is_s = plan.estimates.step_s, found.plan.estimates.step_s
    gap = plan.gap if plan.is_sealed and math.isclose(is_s, was_s, rel_tol=1e-6) else None
    tried = plan.candidates if gap is not None else ()
    found = found.with_plan(options=plan.options, cluster=plan.cluster, gap=gap, candidates=tried)
    gone = [name for _, name in on_mesh.codec.unknown(plan.decisions)]
    anew = [name for node in decisions.anew for name in on_mesh.codec.names[node]]
    return replace(found, anew=(*gone, *anew))


def _nearest(
    on_mesh: MeshProblem, kept: Sequence[np.ndarray], limit_bytes: int, refused: NoFitError
) -> tuple[Labels, Prediction]:
    """The cheapest of the kept strategies, if none fit in program order. Their kernels may fit nevertheless."""
    if isinstance(refused, TooLargeError):
        return refused.labels, refused.predicted.within_limit
    labels = on_mesh.suited(kept)
    return labels, on_mesh.predicted(labels, limit_bytes).within_limit


def choices(step: Step, plan: Plan, cluster: Cluster, name: str, place: str = "plan") -> tuple[str, ...]:
    """All possible choices of one decision of a plan, whatever the other decisions are.

    Raises:
      PlanError: the plan is for another step, or has no decision of this name.
    """
    check_is_for(plan, step, place)
    step_problem, _ = _read(_as_planned(step, plan, place), plan, cluster, place)
    on_mesh = step_problem.on(cluster, tuple(plan.decisions.mesh.values()))
    return on_mesh.codec.choices(name, place)


def _as_planned(step: Step, plan: Plan, place: str) -> Step:
    """The step with its attention as the plan has it.

    Raises:
      PlanError: it has no attention that can be computed in blocks.
    """
    if not plan.attention:
        return step
    in_blocks = blockwise(step)
    if plan.attention != BLOCKWISE or in_blocks is None:
        raise PlanError(
            f"{place}: attention is {plan.attention!r}, and {step.name} has no attention that can be computed so. Delete "
            "the key, or search again"
        )
    return in_blocks


def _read(step: Step, plan: Plan, cluster: Cluster, place: str) -> tuple[StepProblem, Shortened | None]:
    """The prepared step with a plan's rewrites, and the shortened step if that one was prepared.

    A plan may decide differently for layers that one layer represents. Then the whole step is folded as the shortened
    step would be. A plan of a search through all layers has names of its own.
    """
    offloads = any("offload" in entry for entry in plan.decisions.retention.values())
    short = None if offloads else shortened(step, equivalence_keys(step, plan.options))
    wrong: list[PlanError] = []
    for read in (partial(_as_searched, step, short), partial(_as_edited, short)) if short else ():
        try:
            found = read(plan, cluster, place)
            if plan.edited or _knows(found, plan):
                return found, short if found.graph.folded.program.is_shortened else None
        except CoarseError:
            continue
        except PlanError as e:
            wrong.append(e)
    try:
        return planned(step, plan, cluster, place), None
    except PlanError as e:
        raise next(iter(wrong), e) from None


def _as_searched(step: Step, short: Shortened, plan: Plan, cluster: Cluster, place: str) -> StepProblem:
    """The prepared shortened step with a plan's rewrites.

    Raises:
      CoarseError: the plan separates ops or arguments that one op or argument represents.
      PlanError: the plan names something that the shortened step does not have.
    """
    keys = dict(zip((a.name for a in step.arguments), apart(step, plan.decisions), strict=True))
    if any(keys[name] != keys[a.name] for a in short.step.arguments for name in a.alike):
        raise CoarseError
    return planned(short.step, plan, cluster, place)


def _as_edited(short: Shortened, plan: Plan, cluster: Cluster, place: str) -> StepProblem:
    """The prepared whole step, folded as the shortened step without recomputation."""
    marks = pin_marks(short.step, plan.options.get("pin", {}))
    like = StepProblem.of(in_microbatches(short.step, plan, place), marks, cluster.device, clock=WorkClock())
    return planned(short.whole, plan, cluster, place, like)


def _knows(step_problem: StepProblem, plan: Plan) -> bool:
    """True if a step has all ops and copies that a plan names."""
    names = {name for names in node_names(step_problem.graph) for name in names}
    return names.issuperset(plan.decisions.ops) and names.issuperset(plan.decisions.copies)


def _reconciled(on_mesh: MeshProblem, plan: Plan, place: str) -> Reconciled:
    """The strategies that a plan's decisions allow, without decisions that contradict an edit."""
    codec = on_mesh.codec
    kept = codec.allowed(plan.decisions, place, plan.edited)
    try:
        return reconciled(on_mesh.problem, kept, codec.firmness(plan.decisions, plan.edited), EDITED)
    except ContradictionError as e:
        edits = [f"{codec.names[node][0]!r} as {codec.text_of(node, plan.decisions)!r}" for node in e.nodes]
        raise PlanError(
            f"{place}: {' and '.join(edits)} contradict each other, and both were edited. Undo one of the two, or delete "
            "it to have it decided anew"
        ) from e
