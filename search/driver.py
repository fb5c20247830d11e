"""The search: from a traced step and a cluster to a plan.

`find` returns the best plan of `search.space.queue`. A deep step is searched as a shortened one
(`search.problem.shortening`), and the strategies are carried to the whole step. `apply` takes a loaded plan: it prices,
solves and checks the step in the way of a search, with the plan's decisions as the only strategies.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.units import format_bytes, format_mesh
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Site, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.mesh_problem import Known, MeshProblem, StepProblem, TooLargeError
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, LATEST, Options, Progress, pin_marks
from autoshard.search.plan.decisions import EDITED, apart, hosted, node_names, updated_there
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.estimates import estimate
from autoshard.search.plan.executors import JIT
from autoshard.search.plan.plan import Plan, PlanOnStep
from autoshard.search.plan.recognition import check_is_for, outlined
from autoshard.search.plan.reconciliation import ContradictionError, Reconciled, reconciled
from autoshard.search.plan.retention import CoarseError, RetentionCodec
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.equivalence import folded_like
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.shortening import Shortened, shortened
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline, WorkClock
from autoshard.search.solver.pbqp import Labels
from autoshard.search.space.found import Found
from autoshard.search.space.long_sequences import (
    BLOCKWISE,
    OtherForm,
    blocks_add_s,
    slower_adds_s,
    without_ring,
)
from autoshard.search.space.queue import Queue
from autoshard.search.space.trials import Trials
from autoshard.search.space.warm_starts import for_whole_step, passed_between_layers
from autoshard.search.stopwatch import Stopwatch

UNUSED_SHARE = 0.1
"""If residuals are offloaded and this share of the cap stays unused, the whole step is searched for a plan that
offloads less. The shortened step is too coarse for that, because each of its layers stands for many. Source: a choice
of ours."""

MAX_SHORT_PEAK = 1.5
"""If the shortened step needs more than this multiple of the cap, the whole step is not searched. Source: a choice of
ours; different decisions in represented layers save only a share of the layers' memory."""


@dataclass(frozen=True, eq=False)
class Form:
    """A form of a step: as it is written, or with its attention in blocks.

    Attributes:
      step: the step.
      short: the shortened step that represents it; None if the whole step is searched.
    """

    step: Step
    short: Shortened | None

    @classmethod
    def of(cls, step: Step, options: Options) -> "Form":
        """A form with its shortened step, if it has equal layers."""
        return cls(step, shortened(step, _equivalence_keys(step, _options_json(options))))

    @property
    def searched(self) -> Step:
        """The step that is searched."""
        return self.short.step if self.short else self.step

    @property
    def attention(self) -> str:
        """The word of a plan for its attention."""
        return BLOCKWISE if self.step.spelled_out else ""


@dataclass(frozen=True, eq=False)
class SearchResult(PlanOnStep):
    """A plan of one program, and the strategies behind it.

    Attributes:
      problem: the prepared step that was searched.
      on_mesh: the problem that the plan solves.
      chosen: a strategy for each node.
      bound_s: the lower bound behind the plan's gap, in seconds; -inf if nothing is proven.
      short: the shortened step, if one was searched.
      anew: names of decisions of a loaded plan that contradicted its edits, and were decided anew or dropped.
      under: goes on with the search under a lower cap, to find a plan there; None if there is no search.
    """

    problem: StepProblem
    on_mesh: MeshProblem
    chosen: Labels
    bound_s: float = -math.inf
    short: Shortened | None = None
    anew: tuple[str, ...] = ()
    under: "GoOn | None" = None

    def bounded(self, bound_s: float) -> "SearchResult":
        """The result, certified by a lower bound on the computation and communication of all plans."""
        cost_s = self.on_mesh.problem.cost_s(self.chosen)
        gap = max(0.0, 1.0 - bound_s / cost_s) if cost_s > 0 else 0.0
        return replace(self.with_plan(gap=gap), bound_s=bound_s)

    @property
    def keeps_to_cap(self) -> bool:
        """True if the predicted peak does. Where nothing does, the plan keeps to its cap without overlap."""
        return self.plan.estimates.peak_bytes <= self.plan.memory_bytes

    @property
    def leaves_memory_unused(self) -> bool:
        """True if residuals are offloaded and so much memory is unused that fewer might be enough."""
        room_bytes = self.plan.memory_bytes - self.plan.estimates.peak_bytes
        return bool(self.problem.offloaded_sites) and room_bytes > UNUSED_SHARE * self.plan.memory_bytes

    @property
    def found(self) -> Found:
        """The plan as a solution of the search."""
        return Found(self.problem, self.on_mesh, self.chosen, self.plan.memory_bytes)

    @property
    def step(self) -> Step:
        """The step that runs: the traced step with the plan's recomputation and offloading."""
        return self.whole.problem.step

    @property
    def sharding(self) -> StepSharding:
        """The plan's shardings in full, for the executor."""
        return self.whole._sharding

    @cached_property
    def _sharding(self) -> StepSharding:
        return step_sharding(self.on_mesh.memory.costed, self.chosen)

    @cached_property
    def whole(self) -> "SearchResult":
        """The result for the whole step, if a shortened one was searched.

        Raises:
          PlanError: decisions for representative layers contradict each other in the whole step.
        """
        if self.short is None:
            return self
        try:
            return self._for_step(self.short.whole)
        except NoFitError as e:
            raise PlanError(
                "the decisions for one of several equal layers contradict each other in the others. Undo the last edit, or "
                "search again"
            ) from e

    def check_goes_together(self) -> None:
        """Checks that the strategies of a shortened step suit the whole step and fit there.

        Raises:
          NoFitError: they do not.
        """
        blocks = passed_between_layers(self.on_mesh, self.chosen) if self.short else ()
        if self.short is None or not blocks:
            return
        limit_bytes = self.plan.memory_bytes
        try:
            longer = self._for_step(self.short.paired(blocks))
        except CoarseError:  # it recomputes only some of the ops that one op represents there
            longer = self._for_step(self.short.whole)
        if longer.on_mesh.predicted(longer.chosen, limit_bytes).needed_bytes > limit_bytes:
            raise NoFitError(
                "values that layers pass to one another take more than the memory limit", bound_s=self.bound_s
            )

    def _for_step(self, step: Step) -> "SearchResult":
        """The result for a step that the plan's step represents.

        Raises:
          NoFitError: the strategies contradict each other there.
        """
        resharder = self.on_mesh.memory.costed.resharder
        cluster = resharder.mesh.cluster
        problem = _step_problem(step, self.plan, cluster, "the plan", self.problem)
        on_mesh = problem.on(cluster, self.on_mesh.shape, resharder)
        chosen = for_whole_step(self.on_mesh, self.chosen, on_mesh)
        return replace(self, problem=problem, on_mesh=on_mesh, chosen=chosen, short=None)


type GoOn = Callable[[Options, Progress], SearchResult]
"""Goes on with a search under a lower cap, with what it has learned."""


@uncollected()
def find(
    step: Step, cluster: Cluster, options: Options, progress: Progress = lambda line: None
) -> SearchResult:
    """Searches for the fastest plan that fits, of the step as it is written and of the step with its attention in blocks.

    The form that seems faster is searched first (`search.space.long_sequences`).

    Raises:
      InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
      InputError: the mesh or a pin does not suit the cluster or the step.
    """
    in_blocks = blockwise(step)
    if in_blocks is None:
        return find_as_written(step, cluster, options, progress)
    if said := without_ring(in_blocks, cluster.num_devices):
        progress(said)
    forms = (step, in_blocks) if blocks_add_s(in_blocks, cluster) >= 0 else (in_blocks, step)
    if forms[0] is in_blocks:
        progress("attention in blocks")
    return _find_forms(forms, cluster, options, progress)


def find_under(
    first: SearchResult,
    step: Step,
    cluster: Cluster,
    options: Options,
    progress: Progress = lambda line: None,
) -> SearchResult:
    """The fastest plan that fits a lower cap than the one of the first search, which goes on if it can.

    Raises:
      InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
    """
    with suppress(NoFitError, PlanError):
        if first.under:
            return first.under(options, progress)
    return find(step, cluster, options, progress)


def find_as_written(
    step: Step, cluster: Cluster, options: Options, progress: Progress = lambda line: None
) -> SearchResult:
    """The fastest plan that fits of the step as it is written, whatever its attention.

    Raises:
      InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
    """
    return _find_forms((step,), cluster, options, progress)


def _find_forms(
    steps: Sequence[Step], cluster: Cluster, options: Options, progress: Progress
) -> SearchResult:
    """The fastest plan that fits, of a step in some forms.

    Raises:
      InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
    """
    watch = Stopwatch(steps[0].trace_s)
    deadline = Deadline.after(LATEST * options.limit_s, options.new_clock())
    options = replace(options, clock=deadline.clock)
    forms = [Form.of(one, options) for one in steps]
    watch.lap("graph")
    few, refused, has_short = None, list[InfeasibleError](), forms[0].short is not None
    try:
        few = _by_few_layers(forms, cluster, options, progress, watch) if has_short else None
    except InfeasibleError as e:
        if e.smallest_bytes > MAX_SHORT_PEAK * options.memory_bytes:
            raise
        refused.append(e)
    if few and few.keeps_to_cap and (deadline.is_over or not few.leaves_memory_unused):
        return few
    if has_short:
        progress("all layers")
    left = options.until(deadline) if few else options
    own = [one for one in forms if few is None or one.attention == few.plan.attention]
    whole = [replace(one, short=None) for one in own]
    return _faster(few, refused, partial(_found, whole, cluster, left, progress, watch))


def _faster(
    first: SearchResult | None, refused: Sequence[InfeasibleError], search: Callable[[], SearchResult]
) -> SearchResult:
    """The faster plan of a first search, if it found one, and of a second search. A plan whose predicted peak keeps to the
    cap is better than one that only does without overlap.

    Raises:
      InfeasibleError: neither search found a plan. The error is the one with the smallest peak.
    """
    try:
        second = search()
    except InfeasibleError as e:
        if first:
            return first
        raise min((*refused, e), key=lambda one: one.smallest_bytes) from None
    both = filter(None, (first, second))
    return min(both, key=lambda one: (not one.keeps_to_cap, one.plan.estimates.step_s))


def _by_few_layers(
    forms: Sequence[Form], cluster: Cluster, options: Options, progress: Progress, watch: Stopwatch
) -> SearchResult | None:
    """The best plan of a shortened step; None if its strategies or its recomputation do not suit the whole step.

    Raises:
      InfeasibleError: nothing fits, unless the step recomputes across layers.
    """
    with suppress(NoFitError, PlanError):
        found = _found(forms, cluster, options, progress, watch)
        form = next(one for one in forms if one.attention == found.plan.attention)
        return _suited(found, form.step, cluster, options, progress, watch)
    return None


def _suited(
    few: SearchResult, step: Step, cluster: Cluster, options: Options, progress: Progress, watch: Stopwatch
) -> SearchResult:
    """The shortened step's plan, if it suits the whole step. If it offloads residuals, the whole step is solved with it.

    Raises:
      NoFitError: its strategies do not suit the whole step, or nothing fits there.
      PlanError: the whole step cannot recompute the ops that the shortened step recomputes.
    """

    def under(lower: Options, report: Progress) -> SearchResult:
        assert few.under is not None, "it was searched"
        return _suited(few.under(lower, report), step, cluster, lower, report, Stopwatch(step.trace_s))

    if few.problem.offloaded_sites:  # when a layer's residuals are copied depends on its neighbours
        progress("the same on all layers")
        return replace(_on_all_layers(few, step, cluster, options, watch), under=under)
    few.check_goes_together()
    watch.lap("graph")
    return replace(few.with_plan(search_s=watch.seconds), under=under)


def _found(
    forms: Sequence[Form], cluster: Cluster, options: Options, progress: Progress, watch: Stopwatch
) -> SearchResult:
    """The fastest plan that fits, of a step in one form or two, or of shortened steps that represent them.

    Raises:
      InfeasibleError: nothing fits.
    """
    first, pins = forms[0].searched, options.pins or {}
    trials = Trials(first, pin_marks(first, pins), cluster, options, progress, options.new_clock(), watch)
    other = None
    if len(forms) > 1:
        step, in_blocks = forms[1].searched, next(one.step for one in forms if one.attention)
        name = "attention in blocks" if forms[1].attention else "attention as it is written"
        other = OtherForm(step, pin_marks(step, pins), name, slower_adds_s(in_blocks, cluster))
    return _result(Queue(trials, other), forms, cluster)


def _result(search: Queue, forms: Sequence[Form], cluster: Cluster) -> SearchResult:
    """The result of a search, of a step or of the shortened step that represents it.

    Raises:
      InfeasibleError: nothing fits.
    """
    best, won = search.run(), search.winner
    form, trials = next(one for one in forms if one.searched is won.step), won.trials

    def under(lower: Options, report: Progress) -> SearchResult:
        return _result(search.under(lower, report), forms, cluster)

    bounds_s = won.certificate.bounds_s(best)
    found = _finished(form, best, cluster, trials.options, tuple(bounds_s), trials.watch)
    tried = trials.tried.candidates(best, bounds_s)
    return replace(found, under=under).with_plan(candidates=tried).bounded(min(bounds_s.values()))


def _on_all_layers(
    few: SearchResult, step: Step, cluster: Cluster, options: Options, watch: Stopwatch
) -> SearchResult:
    """The shortened step's plan as a warm start for the whole step.

    Raises:
      NoFitError: nothing fits there.
      PlanError: the whole step cannot recompute the ops that the shortened step recomputes.
    """
    problem = _step_problem(step, few.plan, cluster, "the plan")
    watch.lap("graph")
    on_mesh = problem.on(cluster, few.on_mesh.shape, few.on_mesh.memory.costed.resharder)
    watch.lap("strategies")
    known = Known(for_whole_step(few.on_mesh, few.chosen, on_mesh))
    limit_bytes, kept = options.memory_bytes, on_mesh.pinned(options.pins or {})
    solution, device = on_mesh.fitting(kept, limit_bytes, options.limit_s, known=known)
    watch.lap("solve")
    best = Found(problem, on_mesh, solution.labels, limit_bytes, device)
    found = _finished(Form(step, None), best, cluster, options, few.plan.meshes, watch)
    return found.with_plan(candidates=few.plan.candidates).bounded(min(few.bound_s, solution.bound_s))


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
        if not isinstance(e, TooLargeError) or e.predicted.least.num_bytes > plan.memory_bytes:
            raise InfeasibleError(
                f"the decisions of {place} do not fit its cap of {format_bytes(plan.memory_bytes)} a device. "
                "Undo the last edit, or raise memory_bytes"
            ) from e
        labels, device = e.labels, e.predicted  # the compiler, if it was asked, overrules the prediction
    watch.lap("solve")
    forced = Found(step_problem, on_mesh, labels, plan.memory_bytes, device)
    form, forced_options = Form(step, short), Options(plan.memory_bytes)
    found = _finished(form, forced, cluster, forced_options, plan.meshes, watch)
    was_s, is_s = plan.estimates.step_s, found.plan.estimates.step_s
    gap = plan.gap if plan.is_sealed and math.isclose(is_s, was_s, rel_tol=1e-6) else None
    tried = plan.candidates if gap is not None else ()
    found = found.with_plan(options=plan.options, cluster=plan.cluster, gap=gap, candidates=tried)
    gone = [name for _, name in on_mesh.codec.unknown(plan.decisions)]
    anew = [name for node in decisions.anew for name in on_mesh.codec.names[node]]
    return replace(found, anew=(*gone, *anew))


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
    short = None if offloads else shortened(step, _equivalence_keys(step, plan.options))
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
        return _step_problem(step, plan, cluster, place), None
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
    return _step_problem(short.step, plan, cluster, place)


def _as_edited(short: Shortened, plan: Plan, cluster: Cluster, place: str) -> StepProblem:
    """The prepared whole step, folded as the shortened step without recomputation."""
    marks = pin_marks(short.step, plan.options.get("pin", {}))
    like = StepProblem.of(_in_microbatches(short.step, plan, place), marks, cluster.device, clock=WorkClock())
    return _step_problem(short.whole, plan, cluster, place, like)


def _knows(step_problem: StepProblem, plan: Plan) -> bool:
    """True if a step has all ops and copies that a plan names."""
    names = {name for names in node_names(step_problem.graph) for name in names}
    return names.issuperset(plan.decisions.ops) and names.issuperset(plan.decisions.copies)


def _step_problem(
    step: Step, plan: Plan, cluster: Cluster, place: str, like: StepProblem | None = None
) -> StepProblem:
    """The prepared step with a plan's rewrites, folded like the shortened step if one is given."""
    marks = pin_marks(step, plan.options.get("pin", {}))
    split = _in_microbatches(step, plan, place)
    sites = offloaded_sites = frozenset[Site]()
    program = folded_like(flatten(split), like.traced_program) if like else None
    if retention := plan.decisions.retention:
        program = program or fold(flatten(split), marks)
        sites, offloaded_sites = RetentionCodec(program).read(retention, place)
    on_host, decided = hosted(step, plan.decisions, place), apart(step, plan.decisions)
    updated = updated_there(split, plan.decisions, on_host, cluster, place)
    shape = tuple(plan.decisions.mesh.values())
    if tuple(plan.decisions.mesh) != AXIS_NAMES.get(len(shape)):
        raise PlanError(f"{place}: wanted mesh axes named {AXIS_NAMES}, got {tuple(plan.decisions.mesh)}")
    if plan.num_devices != cluster.num_devices:
        raise PlanError(
            f"{place}: its mesh {format_mesh(shape)} has {plan.num_devices} devices, its cluster {cluster.name} has "
            f"{cluster.num_devices}. Give the axes sizes whose product is {cluster.num_devices}"
        )
    return StepProblem.of(
        split,
        marks,
        cluster.device,
        sites,
        on_host,
        offloaded_sites,
        decided,
        known=program,
        clock=WorkClock(),
        like=like.graph.folded if like else None,
        updated=updated,
    )


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


def _finished(
    form: Form,
    found: Found,
    cluster: Cluster,
    options: Options,
    meshes: tuple[tuple[int, ...], ...],
    watch: Stopwatch,
) -> SearchResult:
    costed, step_problem = found.on_mesh.memory.costed, found.step_problem
    sites, offloaded_sites = step_problem.sites, step_problem.offloaded_sites
    retention = (
        RetentionCodec(step_problem.traced_program).decisions(sites, offloaded_sites)
        if sites or offloaded_sites
        else {}
    )
    step, split = form.step, step_problem.traced
    decisions = found.on_mesh.codec.decisions(found.labels)
    arguments = {argument.name: decisions.arguments[argument.name] for argument in step.arguments}
    plan = Plan(
        step=step.name,
        fingerprint=fingerprint(step.spelled_out or step),
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_options_json(options),
        meshes=meshes,
        memory_bytes=options.memory_bytes,
        executor=JIT,
        microbatches=split.num_microbatches,
        retention=retention,
        shardings=(replace(decisions, arguments=arguments).sharding,),
        estimates=estimate(costed, found.labels, found.device, found.hidden_s, found.host_bytes),
        outline=outlined(step.spelled_out or step),
        attention=form.attention,
    )
    watch.lap("plan")
    plan = replace(plan, marks=marks_of(plan), search_s=watch.seconds)
    return SearchResult(plan, step_problem, found.on_mesh, found.labels, short=form.short)


def _in_microbatches(step: Step, plan: Plan, place: str) -> Step:
    """The step that a plan runs, before recomputation."""
    try:
        return microbatched(step, plan.decisions.microbatches)
    except InputError as e:
        raise PlanError(f"{place}: microbatches: {e}") from e


def _equivalence_keys(step: Step, options: Mapping[str, Any]) -> list[Any]:
    """Per argument, the key of its equivalence class: its pin, and whether it is named to rest on the host."""
    offload = options.get("offload", ())
    named = () if isinstance(offload, str) else tuple(offload)
    is_named = [a.name.startswith(named) for a in step.arguments]
    return list(zip(pin_marks(step, options.get("pin", {})), is_named, strict=True))


def _options_json(options: Options) -> dict[str, Any]:
    """The options that the user gave, JSON-ready."""
    given: dict[str, Any] = {}
    if options.mesh is not None:
        given["mesh"] = list(options.mesh)
    if options.remat is not None:
        given["remat"] = options.remat
    if options.offload is not None:
        given["offload"] = options.offload if isinstance(options.offload, str) else list(options.offload)
    if options.microbatches is not None:
        given["microbatches"] = options.microbatches
    if options.pins:
        given["pin"] = {name: str(spec) for name, spec in sorted(options.pins.items())}
    return given
