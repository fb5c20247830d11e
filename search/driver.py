"""The search: from a traced step and a cluster to a plan.

`find` returns the best plan of `search.space.queue`. A deep step is searched as a shortened one
(`search.problem.shortening`), and the strategies are carried to the whole step.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.errors import InfeasibleError, PlanError
from autoshard.search.garbage import uncollected
from autoshard.search.ir.graph import Step
from autoshard.search.memory.attention.rewriting import blockwise
from autoshard.search.mesh_problem import Known
from autoshard.search.options import LATEST, Options, Progress, pin_marks
from autoshard.search.result import Form, SearchResult, finished, planned
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.space.found import Found
from autoshard.search.space.long_sequences import OtherForm, blocks_add_s, slower_adds_s, without_ring
from autoshard.search.space.queue import Queue
from autoshard.search.space.trials import Trials
from autoshard.search.space.warm_starts import for_whole_step
from autoshard.search.stopwatch import Stopwatch

MAX_SHORT_PEAK = 1.5
"""If the shortened step needs more than this multiple of the cap, the whole step is not searched. Source: a choice of
ours; different decisions in represented layers save only a share of the layers' memory."""


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
    if few and (deadline.is_over or not few.leaves_memory_unused):
        return few
    if has_short:
        progress("all layers")
    left = options.until(deadline) if few or options.is_limited else options
    own = [one for one in forms if few is None or one.attention == few.plan.attention]
    whole = [replace(one, short=None) for one in own]
    return _faster(few, refused, partial(_found, whole, cluster, left, progress, watch))


def _faster(
    first: SearchResult | None, refused: Sequence[InfeasibleError], search: Callable[[], SearchResult]
) -> SearchResult:
    """The faster plan of a first search, if it found one, and of a second search.

    Raises:
      InfeasibleError: neither search found a plan. The error is the one with the smallest peak.
    """
    try:
        second = search()
    except InfeasibleError as e:
        if first:
            return first
        raise min((*refused, e), key=lambda one: one.smallest_bytes) from None
    return min(filter(None, (first, second)), key=lambda one: one.plan.estimates.step_s)


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
    found = finished(form, best, cluster, trials.options, tuple(bounds_s), trials.watch)
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
    problem = planned(step, few.plan, cluster, "the plan")
    watch.lap("graph")
    on_mesh = problem.on(cluster, few.on_mesh.shape, few.on_mesh.memory.costed.resharder)
    watch.lap("strategies")
    known = Known(for_whole_step(few.on_mesh, few.chosen, on_mesh))
    limit_bytes, kept = options.memory_bytes, on_mesh.pinned(options.pins or {})
    solution, device = on_mesh.fitting(kept, limit_bytes, options.limit_s, known=known)
    watch.lap("solve")
    best = Found(problem, on_mesh, solution.labels, limit_bytes, device)
    found = finished(Form(step, None), best, cluster, options, few.plan.meshes, watch)
    return found.with_plan(candidates=few.plan.candidates).bounded(min(few.bound_s, solution.bound_s))
