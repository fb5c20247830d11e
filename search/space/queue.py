"""The search for the fastest plan of one step that fits the memory cap: a queue of candidates.

A candidate is a set of plans that is not searched yet. There are three kinds, each a part of the one before it:

1. A *variant* of the step: its number of microbatches, and the arguments in host memory. When its turn comes, it is
   solved without a cap, first on the mesh that promises most. Strategies that fit are a plan.
2. A *mesh* of a variant. In its turns it is solved without a cap, gets a bound under the cap, and minimum cuts select ops to
   recompute and residuals to offload, at several prices of memory. Recomputation may also make a plan that fits faster.
3. A *rewrite*: one of these selections, or none. When its turn comes, the step is rewritten and solved under the cap, and
   its kernels are simulated. If they fit, that is a plan. A search that needs more time goes on in a later turn.

A step with attention has two forms (`search.space.long_sequences`). The second one is a candidate, too. When its turn comes,
its variants join the queue, and the search may take a quarter longer.

The candidate with the least estimated time has the next turn (`search.space.candidates`). Before there is a plan,
a rewrite that saves enough by itself comes first. If no estimate is below the best plan, its step and those
of earlier best plans have turns on other meshes. The queue ends if those promise nothing either, or if time is over.
Without a good plan it has as long again for each form of the step, or the second half of the time that the user allows.
If there is none at all, the fastest candidate that seems to fit then comes first, or else the one with the least memory.

If the compiler finds that a plan needs more than it may, the search goes on under a lower cap (`Queue.under`).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

from autoshard.cost_model.errors import InfeasibleError, first_line
from autoshard.cost_model.meshes import finer_shapes
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.memory.host_updates import host_updates, least_copy_s, least_update_s, updatable
from autoshard.search.memory.microbatches import batch_divisors, microbatched
from autoshard.search.mesh_problem import ROUNDING, MeshProblem
from autoshard.search.options import LATEST, OFFLOADED, Options, Progress, named_axes
from autoshard.search.problem.memory_floor import floor_bytes, working_bytes
from autoshard.search.space import infeasible
from autoshard.search.space.candidates import (
    Candidate,
    OfForm,
    OfPlan,
    OfRewrite,
    OfVariant,
    OnMesh,
    SolvedVariant,
    UpdatedElsewhere,
)
from autoshard.search.space.certificate import Certificate
from autoshard.search.space.found import Found
from autoshard.search.space.host_arguments import HostArguments
from autoshard.search.space.long_sequences import OtherForm
from autoshard.search.space.rewrites import UncappedSolution
from autoshard.search.space.smallest_peak import Misfit, Unfitting
from autoshard.search.space.trials import Baseline, Trials, turn_s
from autoshard.search.space.variants import Saving, Variant, Variants
from autoshard.search.step_problem import StepProblem

MAX_MICROBATCHES = 64
"""Largest number of microbatches that is tried if the user names none. Source: a choice of ours."""

POOR = 2.0
"""A plan that takes more than this multiple of a candidate's estimate is as good as none. Source: a choice of ours;
estimates err by 10 to 30%."""

MAX_FINER = 2
"""Number of meshes of three axes on which the best plan's step is tried if there are examples for all devices. Source: of up
to four splits of a mesh, the first two gave the whole gain in twelve models on four clusters."""


class Queue:
    """The search for one step.

    Attributes:
      trials: the step's best plan so far, and its bounds.
      certificate: lower bounds on all plans.
      variants: the estimates of variants; None if all that is fastest fits.
      open: the candidates.
      solved: the variants that were solved without a cap.
      misfits: the variants of which nothing can fit.
      tried: a sentence for the error message on variants that were tried without success.
      host_arguments: the arguments that may rest in host memory.
      tried_elsewhere: steps of plans, with the meshes on which they were solved again.
      is_begun: whether the undivided step was solved.
      form: another form of the step; None if there is none.
      other: the search for the other form, once it is begun.
      floor_s: seconds of the best plan under a higher cap. Lower estimates do not count.
    """

    certificate: Certificate

    def __init__(self, trials: Trials, form: OtherForm | None = None) -> None:
        self.trials, self.step, self.options = trials, trials.step, trials.options
        self.variants: Variants | None = None
        self.open: list[Candidate] = []
        self.solved: list[SolvedVariant] = []
        self.misfits: list[Misfit] = []
        self.tried = ""
        self.host_arguments = HostArguments(self.step, trials.cluster, self.options)
        self.is_begun, self.floor_s = False, 0.0
        self.tried_elsewhere: set[tuple[StepProblem, tuple[int, ...]]] = set()
        self.form = form
        self.other: Queue | None = None

    @property
    def best(self) -> Found | None:
        """The best plan so far."""
        return self.trials.best

    def run(self) -> Found:
        """The best plan.

        Raises:
          InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
          InputError: the step cannot be split into the number of microbatches that the user names.
        """
        if not self.is_begun:
            self._begin()
        self._go_through()
        return self.best or self._plan_of_smallest_peak()

    def _plan_of_smallest_peak(self) -> Found:
        """The plan of the smallest peak in any form, if it fits after all.

        Raises:
          InfeasibleError: it does not fit.
        """
        refused, searches = list[InfeasibleError](), self._searches
        deadline = infeasible.until(self.options, self.trials.deadline)
        for n, one in enumerate(searches):
            share = deadline.share(1 / (len(searches) - n))
            try:
                return one._unfitting.plan_of_smallest_peak(_found, share)
            except InfeasibleError as e:
                refused.append(e)
        raise min(refused, key=lambda e: e.smallest_bytes)

    @property
    def _unfitting(self) -> Unfitting:
        """The search for this form of the step, without a plan."""
        rewrites = [rewrite for solved in self.solved for rewrite in solved.rewrites]
        return Unfitting(
            self.trials, self.certificate.first, self.misfits, rewrites, not self.open, self.tried
        )

    @property
    def _searches(self) -> tuple["Queue", ...]:
        """The searches for each form of the step that are begun."""
        return (self, self.other) if self.other else (self,)

    @property
    def winner(self) -> "Queue":
        """The search for the form of the step that has the best plan."""
        return next(one for one in self._searches if self.best and one.trials.owns(self.best))

    def under(self, options: Options, progress: Progress) -> "Queue":
        """The search under a lower cap, to be run. It knows the variants that are solved, and the best plan's step."""
        lower = self._under(self.trials.under(options, progress))
        if self.other:
            of_other = self.other.trials.under(options, progress, lower.trials.shared)
            lower.other = self.other._under(of_other)
        return lower

    def _under(self, trials: Trials) -> "Queue":
        """The search for one form of the step with the trials of a lower cap."""
        lower, first = Queue(trials, self.form), self.certificate.first
        lower.certificate, lower.is_begun = Certificate(trials, first), True
        lower.misfits, lower.tried = [*self.misfits], self.tried
        if self.variants:
            lower.variants = variants = self.variants.under(trials.options.memory_bytes)
            unopened = (one.variant for one in self.open if isinstance(one, OfVariant))
            lower.open += [OfVariant(variants, one, lower._solved) for one in unopened]
        elif fastest := next(_fitting(first), None):
            lower._open_variants(fastest, first.on_meshes)
        for solved in self.solved:
            lower.open += lower._meshes(solved.variant, _untried(solved.baseline), None, solved.others)
        if self.form and not self.other:
            lower.open.append(OfForm(first, self.form, lower._begin_other))
        if best := self.best:
            lower.floor_s = best.cost_s
        if best and self.trials.owns(best):
            shape, least_bytes = best.on_mesh.shape, best.peak.num_bytes
            lower.open.append(OfPlan(trials, lower.certificate, best, shape, least_bytes=least_bytes))
        return lower

    def _go_through(self) -> None:
        """Gives the candidates their turns."""
        self.trials.watch.lap("recompute")
        for search, candidate in self._turns():
            before = self.best
            search.open.remove(candidate)
            # A turn may close other candidates, so the open ones are read after it.
            found = [*candidate.take(turn_s(self.trials.deadline))]
            search.open += found
            self.trials.watch.lap("recompute")
            if isinstance(candidate, OfPlan):
                search.tried_elsewhere.add((candidate.plan.step_problem, candidate.shape))
            search._learn()
            if self.best and self.best is not before:
                for one in self._searches:
                    one._meet_neighbours(self.best)

    def _turns(self) -> Iterator[tuple["Queue", Candidate]]:
        """The candidates in the order of their turns, each with the search that it is a part of. In the time besides, any
        plan is looked for; if the user limits the time, that is the second half of it."""
        while not self._is_late and (candidate := self._most_promising()):
            yield candidate
        if not self._has_good_plan and any(one.open for one in self._searches):
            self.trials.extend(len(self._searches))
            yield from self._turns_besides()

    @property
    def _is_late(self) -> bool:
        """True if time is over, or half of a limit of the user's is without a good plan."""
        deadline, options = self.trials.deadline, self.options
        is_half_over = options.is_limited and deadline.left_s < options.limit_s / 2
        return deadline.is_over or (is_half_over and not self._has_good_plan)

    def _turns_besides(self) -> Iterator[tuple["Queue", Candidate]]:
        """The candidates that have turns in the time besides."""
        while not self.trials.deadline.is_over:
            candidate = self._most_promising() if self.best else self._most_likely()
            if candidate is None:
                return
            yield candidate

    @property
    def _has_good_plan(self) -> bool:
        """True if there is a plan, and no candidate promises one that is far faster."""
        estimates_s = (one.estimate_s for search in self._searches for one in search.open)
        return self.best is not None and self.best.cost_s <= POOR * min(estimates_s, default=math.inf)

    def _most_promising(self) -> tuple["Queue", Candidate] | None:
        """The candidate whose turn is next, with its search; None if none promises a better plan."""
        every = [(search, one) for search in self._searches for one in search.open]
        promising = [one for one in every if self.best is None or one[1].estimate_s < self.trials.least_s]
        if self.best is None:
            return min(promising, key=lambda one: self._urgency(one[1]), default=None)
        return min(promising, key=lambda one: (_rank(one[1]), one[1].estimate_s), default=None)

    def _urgency(self, candidate: Candidate) -> tuple[float, ...]:
        """The key by which candidates are ordered if there is no plan, the next one first. A rewrite that saves
        enough is a plan soon; others may be faster, but the solver must find strategies that hold less."""
        saves_enough = isinstance(candidate, OfRewrite) and candidate.saves_enough
        return not saves_enough, max(candidate.estimate_s, self.floor_s), candidate.least_bytes

    def _most_likely(self) -> tuple["Queue", Candidate] | None:
        """The candidate that most likely leads to a plan, with its search; None if there is none.

        It is the fastest one whose estimated memory is enough, or else the one of the least memory. A rewrite comes before
        its mesh.
        """

        def key(one: tuple[Queue, Candidate]) -> tuple[bool, float, bool, float]:
            estimate_s, least_bytes = one[1].estimate_s, one[1].least_bytes
            if least_bytes <= self.options.memory_bytes and estimate_s < math.inf:
                return False, estimate_s, False, least_bytes
            return True, least_bytes, not isinstance(one[1], OfRewrite), estimate_s

        return min(((search, one) for search in self._searches for one in search.open), key=key, default=None)

    # --- the beginning

    def _begin(self) -> Baseline:
        """Solves the undivided step, and opens the queue with all that may be better."""
        trials, before = self.trials, self.best
        step_problem = self._prepared(Variant(1))
        on_meshes = trials.on_all_meshes(step_problem)
        first = trials.baseline(step_problem, on_meshes, trials.deadline.left_s)
        self.certificate = Certificate(trials, first)
        self.host_arguments.check_room(on_meshes)
        uncapped = [one for one in first.uncapped if one.cost_s < trials.least_s]
        if uncapped:
            self._open_variants(uncapped[0], on_meshes)
        if self._cannot_fit(on_meshes):
            trials.under_cap(step_problem, first.deferred)  # proves that nothing fits
            self.misfits.append(Misfit(step_problem, on_meshes))
        else:
            self.open += self._meshes(Variant(1), first, before)
        if self.form:
            self.open.append(OfForm(first, self.form, self._begin_other))
        if self.best and self.best is not before:
            self._meet_neighbours(self.best)
        return first

    def _begin_other(self, form: OtherForm) -> None:
        """Begins the search for another form of the step."""
        self.trials.progress(form.name)
        self.trials.extend(LATEST - 1)
        self.other = Queue(self.trials.of_form(form.step, form.marks))
        self.other._begin()

    def _open_variants(self, fastest: UncappedSolution, on_meshes: Sequence[MeshProblem]) -> None:
        """Opens the variants besides the step as it is written, with estimates from its fastest strategies."""
        pinned = ((one.memory, one.pinned(self.trials.pins)) for one in on_meshes)
        least_bytes = min(working_bytes(*one) for one in pinned)
        shard_bytes = {kind: self.host_arguments.shard_bytes(role) for kind, role in OFFLOADED.items()}
        every = [*self._all_variants(least_bytes)]
        self.variants = variants = Variants.of(fastest, self.options.memory_bytes, shard_bytes)
        if self.options.may_recompute:
            variants.assume_recomputation(least_bytes)
        self.open += [OfVariant(variants, one, self._solved) for one in every]

    def _all_variants(self, least_bytes: float) -> Iterator[Variant]:
        """The variants besides the first one, without those whose arguments alone are too large for the device.

        Args:
          least_bytes: lower bound on the undivided memory besides the arguments, on any mesh.
        """
        counts = [1]
        if self.options.microbatches is None:
            counts += [n for n in batch_divisors(self.step) if 1 < n <= MAX_MICROBATCHES]
        for kinds in self._kinds_on_host():
            hosted = self._hosted(kinds)
            for num in counts:
                work_bytes = least_bytes if num == 1 else 0.0
                if (kinds or num > 1) and not self.host_arguments.is_too_much(hosted, work_bytes):
                    yield Variant(num, kinds)

    def _kinds_on_host(self) -> Iterator[tuple[str, ...]]:
        """Kinds of arguments that may rest in host memory together: none, one, and more and more."""
        kinds: tuple[str, ...] = ()
        yield kinds
        may_move = self.options.offload is None and self.trials.cluster.host_bytes_per_node > 0
        for kind in OFFLOADED if may_move else ():
            if self.host_arguments.is_worth_moving(self.host_arguments.of_kinds([kind])):
                kinds = (*kinds, kind)
                yield kinds

    def _hosted(self, kinds: Sequence[str]) -> frozenset[int]:
        """The arguments in host memory: those that the user wants there, and some kinds."""
        return self.host_arguments.asked_for | self.host_arguments.of_kinds(kinds)

    # --- variants

    def _prepared(self, variant: Variant) -> StepProblem:
        """A variant, prepared for all meshes.

        Raises:
          NotSplittableError: the step cannot be split into so many microbatches.
        """
        step = microbatched(self.step, self.options.microbatches or variant.microbatches)
        return self.trials.made_ready(step, self._hosted(variant.kinds))

    def _on_meshes(self, variant: Variant) -> tuple[StepProblem, list[MeshProblem]] | None:
        """A variant on its meshes; first comes the one where the step as it is written promises to be fastest. None if
        there is no such variant, or if nothing of it can fit."""
        trials, num = self.trials, variant.microbatches
        if variant.kinds:
            trials.progress(f"{' and '.join(variant.kinds).replace('_', ' ')} on the host")
        try:
            step_problem = self._prepared(variant)
        except NotSplittableError as e:
            self.tried = self.tried or f"Microbatches were not tried: {first_line(e)}."
            refused = num if e.other else 1  # a step that refuses a number refuses its multiples
            self._drop(lambda one: one.microbatches > 1 and one.microbatches % refused == 0)
            return None
        on_meshes = trials.on_all_meshes(step_problem)
        if self._cannot_fit(on_meshes):
            self.tried = f"Nothing would fit in {num} microbatches either." if num > 1 else self.tried
            self._drop(lambda one: one.needs_no_less_than(variant))
            self.misfits.append(Misfit(step_problem, on_meshes))
            return None
        self.tried = f"Up to {num} microbatches were tried too." if num > 1 else self.tried
        first_s = self.certificate.first.estimates_s
        return step_problem, sorted(on_meshes, key=lambda one: first_s[one.shape])

    def _solved(self, variant: Variant, limit_s: float) -> Iterable[Candidate]:
        """Solves a variant without a cap, on the mesh where it promises to be fastest. Returns the meshes on which it may
        have a better plan."""
        if (made := self._on_meshes(variant)) is None:
            return ()
        before, (step_problem, (on_mesh, *others)) = self.best, made
        baseline = self.trials.baseline(step_problem, (on_mesh,), limit_s)
        if self.variants:
            solutions_s = [one.cost_s for one in (*baseline.uncapped, *_fitting(baseline))]
            self.variants.took(variant, min(solutions_s, default=baseline.floors_s[on_mesh.shape]))
        return self._meshes(variant, baseline, before, others)

    def _cannot_fit(self, on_meshes: Sequence[MeshProblem]) -> bool:
        """True if nothing can fit, whatever is recomputed or offloaded."""
        if self.best is not None:
            return False
        least_bytes = min(floor_bytes(one.memory, one.pinned(self.trials.pins)) for one in on_meshes)
        return least_bytes > (1 + ROUNDING) * self.options.memory_bytes

    def _drop(self, is_out: Callable[[Variant], bool]) -> None:
        """Leaves out variants."""
        self.open = [one for one in self.open if not (isinstance(one, OfVariant) and is_out(one.variant))]

    def _meshes(
        self,
        variant: Variant,
        baseline: Baseline,
        before: Found | None,
        others: Sequence[MeshProblem] = (),
    ) -> list[Candidate]:
        """The meshes on which a solved variant may have a better plan: with recomputation those where it fits, too, and
        others on which it was not solved."""
        uncapped = [one for one in baseline.uncapped if one.cost_s < self.trials.least_s]
        memory_bound = {one.on_mesh for one in uncapped}
        uncapped += [one for one in _fitting(baseline) if one.on_mesh not in memory_bound]
        fastest = min(
            (*uncapped, *baseline.uncapped, *_fitting(baseline)), key=lambda one: one.cost_s, default=None
        )
        if fastest is None:
            return []
        solved = SolvedVariant(
            self.trials, self.certificate, self.variants, variant, baseline, before, fastest, tuple(others)
        )
        self.solved.append(solved)
        known = {one.on_mesh: one for one in uncapped}
        others = [*(one for one in baseline.deferred if one not in known), *others]
        return [OnMesh(solved, one.shape, known.get(one)) for one in (*known, *others)]

    def _learn(self) -> None:
        """Corrects the estimates of variants by the results so far."""
        if self.variants is None:
            return
        for solved in self.solved:
            if solved.variant == Variant(1):
                again = (one.rewrite for one in solved.rewrites if not one.rewrite.offloads)
                savings = [Saving(one.saved_bytes, one.more_s) for one in again if one.sites]
                self.variants.savings = savings or self.variants.savings
            if not solved.has_missed and not any(self._may_improve(one, solved) for one in self.open):
                solved.has_missed = True
                if self.best is solved.before:
                    nearest = self.trials.nearest_of(solved.baseline.step_problem)
                    self.variants.missed(solved.variant, nearest)

    def _may_improve(self, candidate: Candidate, solved: SolvedVariant) -> bool:
        """True if a candidate is a part of a variant that promises a better plan."""
        mesh = candidate.mesh if isinstance(candidate, OfRewrite) else candidate
        return (
            isinstance(mesh, OnMesh) and mesh.solved is solved and candidate.estimate_s < self.trials.least_s
        )

    # --- the best plan on other meshes

    def _meet_neighbours(self, best: Found) -> None:
        """Opens the neighbours of a new best plan. They replace those of earlier plans of the same step on these meshes.
        A plan in another form has none here."""
        if not self.trials.owns(best):
            return
        step_problem, own = best.step_problem, best.on_mesh.shape
        shapes = dict.fromkeys((own, *self.trials.shapes, *self._finer_shapes(best)))
        self.open = [one for one in self.open if not _is_replaced(one, step_problem, shapes)]
        solved = next((one for one in self.solved if one.is_of(step_problem)), None)
        for shape in shapes:
            if shape == own or (step_problem, shape) not in self.tried_elsewhere:
                self.open.append(OfPlan(self.trials, self.certificate, best, shape, solved))
        updated = self._updated_elsewhere(best)
        if updated is not None:
            self.open.append(UpdatedElsewhere(self.trials, best, updated))

    def _finer_shapes(self, best: Found) -> tuple[tuple[int, ...], ...]:
        """Splits of the plan's mesh or another one into three axes, unless the user asks for a mesh or an axis.

        If examples alone do not split evenly over all devices, a mesh of two axes says little about those of three.
        """
        trials = self.trials
        if self.options.mesh is not None or named_axes(trials.pins):
            return ()
        finer = finer_shapes(trials.cluster, best.on_mesh.shape, *trials.shapes)
        has_examples = max(batch_divisors(self.step), default=1) % trials.cluster.num_devices == 0
        return finer[:MAX_FINER] if has_examples else finer

    def _updated_elsewhere(self, best: Found) -> frozenset[int] | None:
        """The arguments to update on the host if the best plan's are updated on the device, and the reverse; None if that
        cannot pay."""
        before, cluster = best.step_problem, self.trials.cluster
        if not before.hosted or not cluster.host_update_bytes_per_s:
            return None
        of_step = before.traced, host_updates(before.traced, before.hosted), cluster
        gain_s = min(best.device.waited_s, 2 * least_copy_s(*of_step))  # copies one way after the other
        if not before.updated and least_update_s(*of_step) >= gain_s:
            return None
        return frozenset[int]() if before.updated else updatable(before.traced, before.hosted)


def _found(trials: Trials) -> Found | None:
    """The best plan of another search."""
    queue = Queue(trials)
    queue._begin()
    queue._go_through()
    return queue.best


def _untried(baseline: Baseline) -> Baseline:
    """A solved variant under a lower cap, to which none of its strategies may keep."""
    every = sorted((*baseline.uncapped, *_fitting(baseline)), key=lambda one: one.cost_s)
    return replace(baseline, uncapped=tuple(every), found=(), deferred=baseline.on_meshes)


def _rank(candidate: Candidate) -> int:
    """Candidates of a lower rank have their turns first."""
    return 1 if _is_of_plan(candidate) else 0


def _is_replaced(
    candidate: Candidate, step_problem: StepProblem, shapes: Collection[tuple[int, ...]]
) -> bool:
    """True if the neighbours of a new best plan on these meshes replace a candidate."""
    if isinstance(candidate, OfPlan):
        return candidate.plan.step_problem is step_problem and candidate.shape in shapes
    return isinstance(candidate, UpdatedElsewhere)


def _is_of_plan(candidate: Candidate) -> bool:
    return isinstance(candidate, OfPlan | UpdatedElsewhere)


def _fitting(baseline: Baseline) -> Iterator[UncappedSolution]:
    """Baseline plans that fit, the fastest first."""
    for one in sorted(baseline.found, key=lambda one: one.cost_s):
        yield UncappedSolution(one.on_mesh, one.labels, one.on_mesh.problem.cost_s(one.labels))
