"""The search: from a traced step and a cluster to a plan.

A plan that is searched is the best that `search.step_search` finds. One that is loaded is priced, solved and checked in the
same way, with its decisions as the only strategies left.
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, InputError, PlanError
from autoshard.cost_model.units import format_bytes, format_mesh
from autoshard.search.found import Found
from autoshard.search.garbage import uncollected
from autoshard.search.handing_over import handed_over, unseen_between_likes
from autoshard.search.ir.graph import Site, Step
from autoshard.search.ir.sharding import StepSharding
from autoshard.search.ir.spec import AXIS_NAMES
from autoshard.search.long_sequences import BLOCKWISE, holds_too_much, may_want_blocks, without_ring
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.memory.microbatches import microbatched
from autoshard.search.mesh_problem import Known, MeshProblem, StepProblem, TooLargeError
from autoshard.search.options import DEFAULT_TIME_LIMIT_S, Options, Progress
from autoshard.search.plan.decisions import EDITED, apart, hosted, node_names
from autoshard.search.plan.edits import marks_of
from autoshard.search.plan.estimates import estimate
from autoshard.search.plan.executors import JIT
from autoshard.search.plan.plan import Plan
from autoshard.search.plan.recognition import check_is_for, outlined
from autoshard.search.plan.reconciliation import ContradictionError, Reconciled, reconciled
from autoshard.search.plan.retention import CoarseError, RetentionCodec
from autoshard.search.plan.shardings import step_sharding
from autoshard.search.problem.fingerprint import fingerprint
from autoshard.search.problem.flat_program import flatten
from autoshard.search.problem.folding import fold
from autoshard.search.problem.likes import folded_like
from autoshard.search.problem.shortening import Shortened, shortened
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import WorkClock
from autoshard.search.solver.pbqp import Labels
from autoshard.search.step_search import StepSearch
from autoshard.search.stopwatch import Stopwatch
from autoshard.search.trials import Trials

ROOM = 0.1
"""Of the cap: where few layers leave so much, each standing for many, all are searched for what needs less to wait. Source:
a choice of ours."""

FAR = 1.5
"""Times the cap: where few layers hold more at the least, all are not searched. Source: a choice of ours; what is decided
otherwise in one layer than in its like saves a share of what layers hold."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """A plan, and the strategies behind it.

    Attributes:
      plan: the plan.
      problem: the step that was searched, made ready.
      on_mesh: the problem that it solves.
      chosen: a strategy for each node.
      bound_s: what the plan's gap is reckoned from, in seconds; -inf where nothing is proven.
      short: where a step that stands for a deeper one was searched.
      anew: names of decisions of a loaded plan that contradicted what was edited in it, and were made anew or fell away.
    """

    plan: Plan
    problem: StepProblem
    on_mesh: MeshProblem
    chosen: Labels
    bound_s: float = -math.inf
    short: Shortened | None = None
    anew: tuple[str, ...] = ()

    def bounded(self, bound_s: float) -> "SearchResult":
        """The same, certified by a lower bound on what computation and communication take together under any plan."""
        cost_s = self.on_mesh.problem.cost_s(self.chosen)
        gap = max(0.0, 1.0 - bound_s / cost_s) if cost_s > 0 else 0.0
        return replace(self, plan=replace(self.plan, gap=gap), bound_s=bound_s)

    @property
    def holds_little(self) -> bool:
        """Whether residuals wait on the host, and so many of them that fewer might do."""
        room_bytes = self.plan.memory_bytes - self.plan.estimates.peak_bytes
        return bool(self.problem.waiting) and room_bytes > ROOM * self.plan.memory_bytes

    def waited(self, part: str, seconds: float) -> "SearchResult":
        """With what its user has waited for besides."""
        return replace(self, plan=replace(self.plan, search_s={**self.plan.search_s, part: seconds}))

    @property
    def step(self) -> Step:
        """What runs: the traced step, with what the plan recomputes."""
        return self.whole.problem.step

    @property
    def sharding(self) -> StepSharding:
        """The plan spelled out for the executor."""
        return self.whole._sharding

    @cached_property
    def _sharding(self) -> StepSharding:
        return step_sharding(self.on_mesh.memory.costed, self.chosen)

    @cached_property
    def whole(self) -> "SearchResult":
        """The same with the problem of the whole step, where a shorter one stood for it.

        Raises:
          PlanError: what is decided of one layer for many does not go together in all of them.
        """
        if self.short is None:
            return self
        try:
            return self._handed_to(self.short.whole)
        except NoFitError as e:
            raise PlanError(
                "the decisions for one of several equal layers contradict each other in the others. Undo the last edit, or "
                "search again"
            ) from e

    def check_goes_together(self) -> None:
        """Checks that the whole step can take the strategies, where a shorter one stood for it, and fits with them.

        Raises:
          NoFitError: it cannot, or does not.
        """
        unseen = unseen_between_likes(self.on_mesh, self.chosen) if self.short else ()
        if self.short is None or not unseen:
            return
        limit_bytes = self.plan.memory_bytes
        try:
            longer = self._handed_to(self.short.paired(unseen))
        except CoarseError:  # it recomputes some of what one op stands for there
            longer = self._handed_to(self.short.whole)
        if longer.on_mesh.predicted(longer.chosen, limit_bytes).needed_bytes > limit_bytes:
            raise NoFitError(
                "values that layers pass to one another take more than the memory limit", bound_s=self.bound_s
            )

    def _handed_to(self, step: Step) -> "SearchResult":
        """The same with the problem of a step for which that of the plan stands.

        Raises:
          NoFitError: the strategies do not go together there.
        """
        resharder = self.on_mesh.memory.costed.resharder
        cluster = resharder.mesh.cluster
        problem = _step_problem(step, self.plan, cluster, "the plan", self.problem)
        on_mesh = problem.on(cluster, self.on_mesh.shape, resharder)
        chosen = handed_over(self.on_mesh, self.chosen, on_mesh)
        return replace(self, problem=problem, on_mesh=on_mesh, chosen=chosen, short=None)


@uncollected()
def find(
    step: Step, cluster: Cluster, options: Options, progress: Progress = lambda line: None
) -> SearchResult:
    """Searches for the fastest plan that fits: of the step as it is, and where long sequences may want it, of the step with
    its attention in blocks.

    Args:
      step: the traced step.
      cluster: where it will run.
      options: the cap, and what is fixed beforehand.
      progress: called with one line per stage.

    Raises:
      InfeasibleError: nothing fits the cap; says what would.
      InputError: the mesh or a pin does not suit the cluster or the step.
    """
    in_blocks = blockwise(step)
    if in_blocks is None:
        return _find(step, cluster, options, progress)
    spelled_out, refused = None, list[InfeasibleError]()
    try:
        if not holds_too_much(step, in_blocks, cluster.num_devices, options.memory_bytes):
            spelled_out = _find(step, cluster, options, progress)
            costed, plan = spelled_out.on_mesh.memory.costed, spelled_out.plan
            if not may_want_blocks(costed, spelled_out.chosen, plan.estimates.collectives, in_blocks):
                return spelled_out
    except InfeasibleError as e:
        refused.append(e)
    progress("attention in blocks")
    if said := without_ring(in_blocks, cluster.num_devices):
        progress(said)
    try:
        found = _find(in_blocks, cluster, options, progress)
    except InfeasibleError as e:
        if spelled_out:
            return spelled_out
        raise min((*refused, e), key=lambda one: one.smallest_bytes) from None
    return min(filter(None, (spelled_out, found)), key=lambda one: one.plan.estimates.step_s)


def _find(step: Step, cluster: Cluster, options: Options, progress: Progress) -> SearchResult:
    """The fastest plan of one step that fits.

    Raises:
      InfeasibleError: nothing fits the cap; says what would.
    """
    watch = Stopwatch(step.trace_s)
    short = shortened(step, _told_apart(step, _said(options)))
    watch.lap("graph")
    few, refused = None, list[InfeasibleError]()
    try:
        few = _by_few_layers(step, short, cluster, options, progress, watch) if short else None
    except InfeasibleError as e:
        if e.smallest_bytes > FAR * options.memory_bytes:
            raise
        refused.append(e)
    if few and not few.holds_little:
        return few
    if short:
        progress("all layers")
    try:
        whole = _found(step, None, cluster, options, progress, watch)
    except InfeasibleError as e:
        if few:
            return few
        raise min((*refused, e), key=lambda one: one.smallest_bytes) from None
    return min(filter(None, (few, whole)), key=lambda one: one.plan.estimates.step_s)


def _by_few_layers(
    step: Step, short: Shortened, cluster: Cluster, options: Options, progress: Progress, watch: Stopwatch
) -> SearchResult | None:
    """What a search of a step that stands for it finds; nothing where the step cannot do all that few of its layers can.

    Raises:
      InfeasibleError: nothing fits, unless the step recomputes across layers.
    """
    with suppress(NoFitError, PlanError):
        found = _found(step, short, cluster, options, progress, watch)
        if found.problem.waiting:  # each layer's residuals wait for another layer
            progress("the same on all layers")
            return _on_all_layers(found, step, cluster, options, watch)
        found.check_goes_together()
        watch.lap("graph")
        return replace(found, plan=replace(found.plan, search_s=watch.seconds))
    return None


def _found(
    step: Step,
    short: Shortened | None,
    cluster: Cluster,
    options: Options,
    progress: Progress,
    watch: Stopwatch,
) -> SearchResult:
    """The fastest plan of a step, or of one that stands for it, that fits."""
    searched = short.step if short else step
    marks = _marks(searched, options.pins or {})
    search = StepSearch(Trials(searched, marks, cluster, options, progress, options.new_clock(), watch))
    best = search.run()
    found = _finished(step, best, cluster, options, search.shapes, watch, short)
    bounds_s = search.bounds_s
    tried = search.trials.tried.candidates(best, bounds_s)
    return replace(found, plan=replace(found.plan, candidates=tried)).bounded(min(bounds_s.values()))


def _on_all_layers(
    few: SearchResult, step: Step, cluster: Cluster, options: Options, watch: Stopwatch
) -> SearchResult:
    """What was found of few layers, made as good as it can be on all.

    Raises:
      NoFitError: it does not fit there.
      PlanError: the whole step cannot recompute what few of its layers can.
    """
    problem = _step_problem(step, few.plan, cluster, "the plan")
    watch.lap("graph")
    on_mesh = problem.on(cluster, few.on_mesh.shape, few.on_mesh.memory.costed.resharder)
    watch.lap("strategies")
    known = Known(handed_over(few.on_mesh, few.chosen, on_mesh))
    limit_bytes, kept = options.memory_bytes, on_mesh.pinned(options.pins or {})
    solution, device = on_mesh.fitting(kept, limit_bytes, options.limit_s, known=known)
    watch.lap("solve")
    best = Found(problem, on_mesh, solution.labels, limit_bytes, device)
    found = _finished(step, best, cluster, options, few.plan.meshes, watch, None)
    found = replace(found, plan=replace(found.plan, candidates=few.plan.candidates))
    return found.bounded(min(few.bound_s, solution.bound_s))


def apply(step: Step, plan: Plan, cluster: Cluster, place: str = "plan") -> SearchResult:
    """A loaded plan against the step that it is for: its decisions honoured, re-priced and re-checked.

    Raises:
      PlanError: the plan is for another step, or decides something impossible; two edits contradict each other.
      InfeasibleError: what it decides does not fit its memory cap.
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
        labels, device = e.labels, e.predicted  # the compiler may have been asked, which has the last word
    watch.lap("solve")
    forced = Found(step_problem, on_mesh, labels, plan.memory_bytes, device)
    found = _finished(step, forced, cluster, Options(plan.memory_bytes), plan.meshes, watch, short)
    was_s, is_s = plan.estimates.step_s, found.plan.estimates.step_s
    gap = plan.gap if plan.is_sealed and math.isclose(is_s, was_s, rel_tol=1e-6) else None
    tried = plan.candidates if gap is not None else ()
    kept = {"options": plan.options, "cluster": plan.cluster, "gap": gap, "candidates": tried}
    found = replace(found, plan=replace(found.plan, **kept))
    gone = [name for _, name in on_mesh.codec.unknown(plan.decisions)]
    anew = [name for node in decisions.anew for name in on_mesh.codec.names[node]]
    return replace(found, anew=(*gone, *anew))


def choices(step: Step, plan: Plan, cluster: Cluster, name: str, place: str = "plan") -> tuple[str, ...]:
    """All that a decision of a plan can be, whatever the others are.

    Raises:
      PlanError: the plan is for another step, or decides nothing under this name.
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
    """The step as a plan rewrites it, made ready; or one that stands for it, which is said then.

    Where a plan tells apart what one op stands for, the whole step is folded as the one that would stand for it. A plan of a
    search that went through all layers has names of its own.
    """
    waits = any("offload" in said for said in plan.decisions.retention.values())
    short = None if waits else shortened(step, _told_apart(step, plan.options))
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
    """A step that stands for the whole one as a plan rewrites it.

    Raises:
      CoarseError: the plan tells apart what one op or argument stands for.
      PlanError: the plan says what makes no sense there.
    """
    said = dict(zip((a.name for a in step.arguments), apart(step, plan.decisions), strict=True))
    if any(said[name] != said[a.name] for a in short.step.arguments for name in a.alike):
        raise CoarseError
    return _step_problem(short.step, plan, cluster, place)


def _as_edited(short: Shortened, plan: Plan, cluster: Cluster, place: str) -> StepProblem:
    """The whole step, folded as the one that stands for it where nothing is recomputed."""
    marks = _marks(short.step, plan.options.get("pin", {}))
    like = StepProblem.of(_in_microbatches(short.step, plan, place), marks, cluster.device, clock=WorkClock())
    return _step_problem(short.whole, plan, cluster, place, like)


def _knows(step_problem: StepProblem, plan: Plan) -> bool:
    """Whether a plan's decisions have the names that there are in a step."""
    names = {name for names in node_names(step_problem.graph) for name in names}
    return names.issuperset(plan.decisions.ops) and names.issuperset(plan.decisions.copies)


def _step_problem(
    step: Step, plan: Plan, cluster: Cluster, place: str, like: StepProblem | None = None
) -> StepProblem:
    """The step as a plan rewrites it, made ready; folded like one that stands for it, if there is one."""
    marks = _marks(step, plan.options.get("pin", {}))
    split = _in_microbatches(step, plan, place)
    sites = waiting = frozenset[Site]()
    plain = folded_like(flatten(split), like.plain) if like else None
    if said := plan.decisions.retention:
        plain = plain or fold(flatten(split), marks)
        sites, waiting = RetentionCodec(plain).read(said, place)
    on_host, decided = hosted(step, plan.decisions, place), apart(step, plan.decisions)
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
        waiting,
        decided,
        known=plain,
        clock=WorkClock(),
        like=like.graph.folded if like else None,
    )


def _reconciled(on_mesh: MeshProblem, plan: Plan, place: str) -> Reconciled:
    """What a plan's decisions leave, but for those that gave way to an edit."""
    codec = on_mesh.codec
    kept = codec.allowed(plan.decisions, place, plan.edited)
    try:
        return reconciled(on_mesh.problem, kept, codec.firmness(plan.decisions, plan.edited), EDITED)
    except ContradictionError as e:
        said = [f"{codec.names[node][0]!r} as {codec.said(node, plan.decisions)!r}" for node in e.nodes]
        raise PlanError(
            f"{place}: {' and '.join(said)} contradict each other, and both were edited. Undo one of the two, or delete "
            "it to have it decided anew"
        ) from e


def _finished(
    step: Step,
    found: Found,
    cluster: Cluster,
    options: Options,
    meshes: tuple[tuple[int, ...], ...],
    watch: Stopwatch,
    short: Shortened | None,
) -> SearchResult:
    costed, step_problem = found.on_mesh.memory.costed, found.step_problem
    sites, waiting = step_problem.sites, step_problem.waiting
    retention = RetentionCodec(step_problem.plain).said(sites, waiting) if sites or waiting else {}
    split = step_problem.traced
    decisions = found.on_mesh.codec.decisions(found.labels)
    arguments = {argument.name: decisions.arguments[argument.name] for argument in step.arguments}
    plan = Plan(
        step=step.name,
        fingerprint=fingerprint(step.spelled_out or step),
        jax=jax.__version__,
        cluster=cluster.to_json(),
        options=_said(options),
        meshes=meshes,
        memory_bytes=options.memory_bytes,
        executor=JIT,
        microbatches=split.num_microbatches,
        retention=retention,
        shardings=(replace(decisions, arguments=arguments).sharding,),
        estimates=estimate(costed, found.labels, found.device, found.hidden_s, found.host_bytes),
        outline=outlined(step.spelled_out or step),
        attention=BLOCKWISE if step.spelled_out else "",
    )
    watch.lap("plan")
    plan = replace(plan, marks=marks_of(plan), search_s=watch.seconds)
    return SearchResult(plan, step_problem, found.on_mesh, found.labels, short=short)


def _in_microbatches(step: Step, plan: Plan, place: str) -> Step:
    """The step that a plan runs, before anything is recomputed."""
    try:
        return microbatched(step, plan.decisions.microbatches)
    except InputError as e:
        raise PlanError(f"{place}: microbatches: {e}") from e


def _marks(step: Step, pins: Mapping[str, Any]) -> list[str]:
    """What keeps arguments apart. A plan repeats the pins of its search, so that both fold the step alike."""
    return [str(pins.get(a.name, "")) for a in step.arguments]


def _told_apart(step: Step, options: Mapping[str, Any]) -> list[Any]:
    """Per argument, what keeps it from standing for others: its pin, or that it is named to rest on the host."""
    offload = options.get("offload", ())
    named = () if isinstance(offload, str) else tuple(offload)
    is_named = [a.name.startswith(named) for a in step.arguments]
    return list(zip(_marks(step, options.get("pin", {})), is_named, strict=True))


def _said(options: Options) -> dict[str, Any]:
    """The options that were given, JSON-ready."""
    said: dict[str, Any] = {}
    if options.mesh is not None:
        said["mesh"] = list(options.mesh)
    if options.remat is not None:
        said["remat"] = options.remat
    if options.offload is not None:
        said["offload"] = options.offload if isinstance(options.offload, str) else list(options.offload)
    if options.microbatches is not None:
        said["microbatches"] = options.microbatches
    if options.pins:
        said["pin"] = {name: str(spec) for name, spec in sorted(options.pins.items())}
    return said
