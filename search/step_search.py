"""The search for the fastest plan of one step that fits the memory cap.

1. The baseline (the step without extra recomputation) is solved without a cap on every mesh of one or two axes. The
   fastest solution that fits is the best plan so far (`search.trials`).
2. Meshes of three axes follow if communication takes much of the step (`search.finer_meshes`).
3. If a faster solution does not fit, steps that recompute ops or offload residuals are built (`search.recomputation`,
   `search.attempts`). After them, deferred meshes are solved under the cap. While there is no plan, the smallest of
   these steps decides: if it misses the cap, 4 comes first.
4. If no plan fits, or the cap makes the step slower, 1 and 3 are repeated for variants of the step, the most promising
   first: in microbatches, with arguments in host memory, or both (`search.variants`).
5. State on the host is updated there at first if that takes less time than its copies would, and in the best plan also
   in the other place (`search.memory.host_updates`).
6. The best plan's rewritten step is tried on the other meshes. If there is no plan, the plan of the smallest peak is tried.

A rewritten step computes all that the baseline computes, so lower bounds on uncapped baselines hold for it, too. Loops
are the exception: to recompute may be faster than to stack residuals, and the bounds fall by the estimated gain.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice

from autoshard.cost_model.errors import first_line
from autoshard.cost_model.units import format_mesh
from autoshard.search import infeasible
from autoshard.search.attempts import LEAST_ATTEMPT_S, Attempts
from autoshard.search.finer_meshes import FinerMeshes
from autoshard.search.found import Found, NotFasterError
from autoshard.search.host_arguments import HostArguments
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.memory.host_updates import host_updates, least_copy_s, least_update_s, updatable
from autoshard.search.memory.microbatches import batch_divisors, microbatched
from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import RELATIVE_GAP, ROUNDING, UNKNOWN, Known, MeshProblem, StepProblem
from autoshard.search.options import OFFLOADED, RESIDUALS
from autoshard.search.problem.memory_floor import floor_bytes, working_bytes
from autoshard.search.recomputation import (
    MAX_MESHES,
    Candidate,
    Estimates,
    UncappedSolution,
    in_order,
    without_cap,
)
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline
from autoshard.search.trials import Baseline, Bounds, Trials
from autoshard.search.variants import Saving, Variant, Variants
from autoshard.search.warm_starts import for_rewritten_step

FIRST_SHARE = 0.2
"""Share of the time for the baseline and all steps that recompute. The fastest mesh may take it under the cap before
steps that recompute are tried. Source: a choice of ours; steps that recompute are often faster and found sooner."""

VARIANT_SHARE = 0.4
"""Share of the time left for variants that one of them may take. Source: a choice of ours."""

MAX_MICROBATCHES = 64
"""Largest number of microbatches that is tried if the user names none. Source: a choice of ours."""

Least = Callable[[], StepProblem]
"""Makes the step that needs the least memory. That takes long, so only the last such function is called."""


class StepSearch:
    """The search for one step.

    Attributes:
      trials: the step's best plan so far, and its bounds.
      finer: its meshes of three axes.
      shapes: the meshes of the search, and those of three axes with a proven bound.
      floors_s: lower bounds on all plans, by mesh.
      savings: candidates for recomputation in the undivided step.
      first: the step as it was traced.
      given_up: baselines of which nothing seemed to fit. They are searched at length if nothing else fits.
      uncapped: the fastest uncapped solution, if it is faster than all plans under the cap.
      working_bytes: lower bound on the undivided memory besides the arguments, on any mesh.
      tried: a sentence for the error message on rewrites that were tried without success.
      host_arguments: the arguments that may rest in host memory.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials, self.finer, self.shapes = trials, FinerMeshes(trials), trials.shapes
        self.step, self.cluster, self.options, self.pins = (
            trials.step,
            trials.cluster,
            trials.options,
            trials.pins,
        )
        self.progress, self.clock, self.watch = trials.progress, trials.clock, trials.watch
        self.floors_s: Bounds = {}
        self.savings: tuple[Candidate, ...] = ()
        self.first: Baseline | None = None
        self.uncapped: UncappedSolution | None = None
        self.given_up: list[Baseline] = []
        self.working_bytes = 0.0
        self.tried = ""
        self.host_arguments = HostArguments(self.step, self.cluster, self.options)

    @property
    def best(self) -> Found | None:
        """The best plan so far."""
        return self.trials.best

    @property
    def cutoff_s(self) -> float:
        """Seconds that a better plan must stay below."""
        return self.trials.cutoff_s

    def run(self) -> Found:
        """The best plan.

        Raises:
          InfeasibleError: nothing fits the cap. The message says how the cap or the request could change.
          InputError: the step cannot be split into the number of microbatches that the user names.
          NotFasterError: no plan is faster than the rival.
        """
        step_problem = self._variant(Variant(1))
        on_meshes = self.trials.on_all_meshes(step_problem)
        first = self.trials.baseline(step_problem, on_meshes, self.options.limit_s)
        pinned = ((one.memory, one.pinned(self.pins)) for one in first.on_meshes)
        self.working_bytes = min(working_bytes(*one) for one in pinned)
        self.host_arguments.check_room(first.on_meshes)
        least = self._search_under_cap(first, self.options.limit_s / 2)
        if self.uncapped is not None:
            least = self._in_variants(self.uncapped, step_problem) or least
        while self.best is None and self.given_up and not self.trials.deadline.is_over:
            baseline = self.given_up.pop(0)
            self._recomputed(baseline, baseline.uncapped, self.options.limit_s / 4, may_give_up=False)
        if self.best is None:
            self.progress("no plan so far; looking for the smallest peak")
            smallest = self._of_smallest_peak(first, least())
            self.trials.takes(smallest)
            self.watch.lap("solve")
            return smallest
        if self.trials.rival and self.best is self.trials.rival.found:
            raise NotFasterError
        self._updated_elsewhere(self.best)
        if self.best.step_problem is not first.step_problem:
            self._on_other_meshes(self.best, first.step_problem)
        best, finer = self.finer.finish(self.best, first.step_problem, self.floors_s)
        own = [best.on_mesh.shape] if best.on_mesh.shape in self.trials.proven_s(best.step_problem) else []
        self.shapes = tuple(dict.fromkeys((*self.shapes, *finer, *own)))
        return best

    @property
    def uncapped_bounds_s(self) -> Bounds:
        """By mesh, a lower bound on all plans, without a cap and less what recomputation may gain in loops."""
        gain_s = max(self.trials.gains_s.values(), default=0.0)
        return {
            shape: bound_s - gain_s for shape, bound_s in {**self.floors_s, **self.finer.floors_s}.items()
        }

    @property
    def bounds_s(self) -> Bounds:
        """By mesh, a lower bound on plans with the best plan's microbatches, recomputation and offloading."""
        return {shape: self._bound_s(shape) for shape in self.shapes}

    def _bound_s(self, shape: tuple[int, ...]) -> float:
        """A lower bound on plans of the best plan's step on one mesh.

        Loops may be faster with recomputation. Then the baseline's bound counts only if the step has no bound of its
        own, and less the estimated gain.
        """
        own_s = self.trials.proven_s(self.best.step_problem) if self.best else {}
        gain_s = self.trials.gains_s.get(self.best.step_problem, 0.0) if self.best else 0.0
        floor_s = {**self.floors_s, **self.finer.floors_s}.get(shape, -math.inf) - gain_s
        if has_loops(self.step) or gain_s:
            return own_s.get(shape, floor_s)
        return max(own_s.get(shape, -math.inf), floor_s)

    def _on_other_meshes(self, best: Found, baseline: StepProblem) -> None:
        """Looks for better plans of the best plan's step on the other meshes, unless the bounds rule them out."""
        deadline = Deadline.after(min(self.options.limit_s / 2, self.trials.latest.left_s), self.clock)
        others = [shape for shape in self.trials.shapes if shape != best.on_mesh.shape]
        for shape in sorted(others, key=self.floors_s.__getitem__):
            known = self.finer.known(best.step_problem, shape, baseline, self.floors_s)
            own_s = self.trials.proven_s(best.step_problem).get(shape, -math.inf)
            if max(known.bound_s, own_s) < self.trials.least_s and not deadline.is_over:
                self.progress(f"the same on mesh {format_mesh(shape)}")
                on_mesh = self.trials.put_on(best.step_problem, shape)
                self.trials.improve(best.step_problem, on_mesh, deadline.left_s, known=known)

    def _updated_elsewhere(self, best: Found) -> None:
        """Looks for a better plan with the updates of hosted state in the other place: on the host, or on the device."""
        before = best.step_problem
        if not before.hosted or not self.cluster.host_update_bytes_per_s:
            return
        of_step = before.traced, host_updates(before.traced, before.hosted), self.cluster
        gain_s = min(best.device.waited_s, 2 * least_copy_s(*of_step))  # copies one way after the other
        if not before.updated and least_update_s(*of_step) >= gain_s:
            return
        self.progress("updated on the device" if before.updated else "updated on the host")
        updated = frozenset[int]() if before.updated else updatable(before.traced, before.hosted)
        step_problem = self.trials.updating_there(before, updated)
        on_mesh = self.trials.put_on(step_problem, best.on_mesh.shape)
        known = UNKNOWN
        with suppress(NoFitError):
            known = Known(for_rewritten_step(best.on_mesh, best.labels, on_mesh))
        self.trials.improve(step_problem, on_mesh, self.options.limit_s / 4, known=known)

    def _search_under_cap(self, baseline: Baseline, time_limit_s: float) -> Least:
        """Looks for better plans if the fastest uncapped solutions do not fit: plans of the baseline, and of steps that
        recompute or offload. Returns the step that needs the least memory."""
        is_first, step_problem = not self.floors_s, baseline.step_problem
        if is_first:
            self.floors_s = baseline.floors_s
        uncapped = [one for one in baseline.uncapped if one.cost_s < self.trials.least_s]
        if is_first:
            self.first, self.uncapped = baseline, next(iter(uncapped), None)
        deadline = Deadline.after(time_limit_s, self.clock)
        if cannot_fit := self._cannot_fit(baseline.on_meshes):
            self.trials.under_cap(step_problem, baseline.deferred, deadline)  # proves that nothing fits
        elif is_first:
            uncapped, deadline = (
                self.finer.uncapped(baseline, uncapped),
                Deadline.after(time_limit_s, self.clock),
            )
        if self.options.remat == "never" and not self._may_offload:
            self.trials.under_cap(step_problem, baseline.deferred, deadline)
            return lambda: step_problem
        if cannot_fit:
            return partial(self._smallest_step, step_problem, baseline.on_meshes)
        return self._recomputed(baseline, uncapped, time_limit_s)

    def _recomputed(
        self,
        baseline: Baseline,
        uncapped: Sequence[UncappedSolution],
        time_limit_s: float,
        may_give_up: bool = True,
    ) -> Least:
        """Looks for better plans of steps that recompute or offload, then of the baseline on its deferred meshes. Returns
        the step that needs the least memory.

        Without a plan, these are given up as soon as the smallest of them misses the cap: steps with more arguments on the
        host or more microbatches are tried first.
        """
        step_problem, found = baseline.step_problem, list[Candidate]()
        deadline = Deadline.after(time_limit_s, self.clock)

        @cache
        def estimates(one: UncappedSolution) -> Estimates:
            return Estimates(step_problem, one, self.pins, self.options.memory_bytes, deadline)

        @cache
        def smallest() -> list[Candidate]:
            """The candidates that need the least memory on the fastest mesh, the smallest last."""
            candidates = estimates(uncapped[0]).smallest(self.options.remat != "never", self._may_offload)
            return [self._of_traced(step_problem, one) for one in candidates]

        attempts = self._attempts(step_problem, deadline)
        offered = self._offered(baseline, uncapped, found, estimates, deadline)
        built = attempts.make(offered, smallest if may_give_up and uncapped else None)
        deferred = baseline.deferred
        if attempts.has_given_up:
            self.given_up.append(baseline)
            found += smallest()
            deferred = [one for one in deferred if one is not uncapped[0].on_mesh]
        if baseline is self.first:
            self.savings = tuple(c for c in found if not c.offloaded_sites)
        most = max(found, key=lambda candidate: candidate.saved_bytes, default=None)
        if self.best is None and most and not attempts.has_given_up and most not in built:
            self._attempts(step_problem, Deadline.after(LEAST_ATTEMPT_S, self.clock)).make([most])
        self.watch.lap("recompute")
        self.trials.under_cap(step_problem, deferred, deadline)
        if self.best is not None or not most:
            return lambda: step_problem
        return partial(self.trials.recomputing, step_problem, most.sites, most.offloaded_sites)

    def _of_traced(self, step_problem: StepProblem, candidate: Candidate) -> Candidate:
        """A candidate with the sites of the step before it was rewritten."""
        before = step_problem.rewritten.before
        sites, offloaded_sites = before(candidate.sites), before(candidate.offloaded_sites)
        return replace(candidate, sites=sites, offloaded_sites=offloaded_sites)

    def _offered(
        self,
        baseline: Baseline,
        uncapped: Sequence[UncappedSolution],
        found: list[Candidate],
        estimates: Callable[[UncappedSolution], Estimates],
        deadline: Deadline,
    ) -> Iterator[Candidate]:
        """Candidates for recomputation and offloading, the most promising first. Each is appended to `found`.

        On the fastest mesh, candidates of negligible cost come first, because plans without recomputation are hardly
        faster. Next, that mesh is solved under the cap. Another mesh is estimated only after the best candidate of the
        mesh before it was tried, and only if it may be better than all plans and candidates so far.
        """
        step_problem, may_recompute = baseline.step_problem, self.options.remat != "never"

        def offer(more: Iterable[Candidate]) -> Iterator[Candidate]:
            for candidate in more:
                found.append(self._of_traced(step_problem, candidate))
                self.watch.lap("recompute")
                yield found[-1]

        if uncapped and may_recompute:
            yield from offer(estimates(uncapped[0]).negligible())
        fastest = [one for one in baseline.deferred if uncapped and one is uncapped[0].on_mesh]
        self.trials.under_cap(step_problem, fastest, deadline.share(FIRST_SHARE))
        uncapped = [one for one in uncapped if one.cost_s < self.trials.least_s]
        uncapped += self._fitting_baselines(baseline, uncapped)
        may_gain, left = has_loops(step_problem.step), list[Candidate]()
        num_before = len(found)  # candidates before these were tried
        others = self._nearly_as_fast(baseline, found) if may_gain else ()
        for one in islice(chain(uncapped, others), MAX_MESHES):
            best_s = min((self.cutoff_s, *(c.cost_s for c in found[num_before:])))
            least_s = one.cost_s + self._least_relief_s(one, found[num_before:])
            if may_gain or self.best is None or least_s < (1 - RELATIVE_GAP) * best_s:
                more = estimates(one).candidates(best_s, may_recompute, self._may_offload)
                left = in_order([*left, *offer(more)])
                yield from left[:1]
                del left[:1]
        yield from left

    def _least_relief_s(self, uncapped: UncappedSolution, found: Sequence[Candidate]) -> float:
        """Smallest number of seconds that recomputation or offloading adds until strategies fit, by the candidates
        found on another mesh."""
        missing_bytes = uncapped.on_mesh.memory.peak(uncapped.labels).num_bytes - self.options.memory_bytes
        enough = (c for c in found if c.saved_bytes >= missing_bytes)
        return min(
            (c.cost_s - c.uncapped.cost_s if c.offloaded_sites else c.more_s for c in enough), default=0.0
        )

    def _cannot_fit(self, on_meshes: Sequence[MeshProblem]) -> bool:
        """True if nothing can fit, whatever is recomputed or offloaded."""
        limit_bytes = (1 + ROUNDING) * self.options.memory_bytes
        return self.best is None and all(self._floor_bytes(one) > limit_bytes for one in on_meshes)

    def _floor_bytes(self, on_mesh: MeshProblem) -> float:
        return floor_bytes(on_mesh.memory, on_mesh.pinned(self.pins))

    def _smallest_step(self, baseline: StepProblem, on_meshes: Sequence[MeshProblem]) -> StepProblem:
        """The step that needs the least memory, if nothing fits."""
        deadline = Deadline.after(LEAST_ATTEMPT_S, self.clock)
        uncapped, _ = without_cap([min(on_meshes, key=self._floor_bytes)], self.pins, math.inf, deadline)
        limit_bytes = self.options.memory_bytes
        estimates = (Estimates(baseline, one, self.pins, limit_bytes, deadline) for one in uncapped)
        found = [candidate for each in estimates for candidate in each.candidates()]
        if not found or self.options.remat == "never":
            return baseline
        most = max(found, key=lambda candidate: candidate.saved_bytes)
        return self.trials.recomputing(baseline, baseline.rewritten.before(most.sites), frozenset())

    def _fitting_baselines(
        self, baseline: Baseline, uncapped: Sequence[UncappedSolution]
    ) -> list[UncappedSolution]:
        """Baseline plans of a step with loops, the fastest first. They fit, but recomputation may make them faster."""
        if not has_loops(baseline.step_problem.step):
            return []
        known, found = {one.on_mesh.shape for one in uncapped}, list(baseline.found)
        if self.best and self.best.step_problem is baseline.step_problem:
            found.append(self.best)  # its mesh may have three axes
        fastest = {one.on_mesh.shape: one for one in found if one.on_mesh.shape not in known}
        return [
            UncappedSolution(one.on_mesh, one.labels, one.on_mesh.problem.cost_s(one.labels))
            for one in sorted(fastest.values(), key=lambda one: one.cost_s)
        ]

    def _nearly_as_fast(self, baseline: Baseline, found: Sequence[Candidate]) -> Iterator[UncappedSolution]:
        """Good strategies of a step with loops on the most promising mesh besides the best plan's.

        They matter if a candidate promised to be faster than the best plan thanks to recomputation. More ops may gain
        on another mesh.
        """
        best, cutoff_s = self.best, (1 + RELATIVE_GAP) * self.cutoff_s
        if best is None or not any(one.cost_s < self.cutoff_s for one in found):
            return
        others = [one for one in baseline.on_meshes if one.shape != best.on_mesh.shape]
        for on_mesh in sorted(others, key=lambda one: baseline.floors_s[one.shape])[:1]:
            share = Deadline.after(self.options.limit_s, self.clock).share(FIRST_SHARE)
            known = Known(bound_s=baseline.floors_s[on_mesh.shape])
            yield from without_cap([on_mesh], self.pins, cutoff_s, share, known)[0]

    def _attempts(self, baseline: StepProblem, deadline: Deadline) -> Attempts:
        """Attempts at steps that recompute, made from this baseline."""
        known = partial(self.finer.known, baseline=baseline, floors_s=self.floors_s)
        return Attempts(self.trials, baseline, known, deadline)

    @property
    def _may_offload(self) -> bool:
        """True if residuals may be offloaded to the host."""
        offload = self.options.offload
        is_asked = offload is None or (not isinstance(offload, str) and RESIDUALS in offload)
        return is_asked and self.cluster.host_bytes_per_node > 0

    def _in_variants(self, uncapped: UncappedSolution, first: StepProblem) -> Least | None:
        """Looks for better plans in microbatches and with arguments in host memory. If nothing fits, returns the step that
        needs the least memory."""
        savings = [Saving(c.saved_bytes, c.more_s) for c in self.savings]
        shard_bytes = {kind: self.host_arguments.shard_bytes(role) for kind, role in OFFLOADED.items()}
        variants = Variants.of(
            uncapped, self.options.memory_bytes, shard_bytes, savings, self._all_variants()
        )
        if not savings and self.options.remat != "never":
            variants.assume_recomputation(self.working_bytes)
        needed_bytes = self.trials.rewritten_bytes(first)
        if self.best is None and needed_bytes < math.inf:
            variants.missed(Variant(1), needed_bytes)
        deadline, is_late = Deadline.after(self.options.limit_s, self.clock), False
        least, least_bytes = None, math.inf
        while not deadline.is_over or not (self.best or is_late):
            if deadline.is_over:  # without a plan, it takes as long again, and the surest variant comes first
                deadline, is_late = Deadline.after(self.options.limit_s, self.clock), True
                variant = variants.smallest()
            else:
                variant = variants.next(self.trials.least_s)
            if variant is None:
                break
            tried = self._try(variant, variants, max(VARIANT_SHARE * deadline.left_s, LEAST_ATTEMPT_S))
            if tried and variants.least_bytes(variant) < least_bytes:
                least, least_bytes = tried, variants.least_bytes(variant)
        return None if self.best else least

    def _all_variants(self) -> Iterator[Variant]:
        """The variants besides the first one, without those whose arguments alone are too large for the device."""
        counts = [1]
        if self.options.microbatches is None:
            counts += [n for n in batch_divisors(self.step) if 1 < n <= MAX_MICROBATCHES]
        for kinds in self._kinds_on_host():
            hosted = self._hosted(kinds)
            for count in counts:
                working_bytes = self.working_bytes if count == 1 else 0.0
                if (kinds or count > 1) and not self.host_arguments.is_too_much(hosted, working_bytes):
                    yield Variant(count, kinds)

    def _kinds_on_host(self) -> Iterator[tuple[str, ...]]:
        """Kinds of arguments that may rest in host memory together: none, one, and more and more."""
        kinds: tuple[str, ...] = ()
        yield kinds
        for kind in OFFLOADED if self._may_move_arguments else ():
            if self.host_arguments.is_worth_moving(self.host_arguments.of_kinds([kind])):
                kinds = (*kinds, kind)
                yield kinds

    @property
    def _may_move_arguments(self) -> bool:
        """True if the search may put arguments into host memory."""
        return self.options.offload is None and self.cluster.host_bytes_per_node > 0

    def _hosted(self, kinds: Sequence[str]) -> frozenset[int]:
        """The arguments in host memory: those that the user wants there, and some kinds."""
        return self.host_arguments.asked_for | self.host_arguments.of_kinds(kinds)

    def _variant(self, variant: Variant) -> StepProblem:
        """A variant, prepared for all meshes.

        Raises:
          NotSplittableError: the step cannot be split into so many microbatches.
        """
        step = microbatched(self.step, self.options.microbatches or variant.microbatches)
        return self.trials.made_ready(step, self._hosted(variant.kinds))

    def _try(self, variant: Variant, variants: Variants, time_limit_s: float) -> Least | None:
        """Looks for better plans of a variant, and corrects the estimates of the others. Returns the step that needs the
        least memory; None if the step cannot be split."""
        if variant.kinds:
            self.progress(f"{' and '.join(variant.kinds).replace('_', ' ')} on the host")
        try:
            step_problem = self._variant(variant)
        except NotSplittableError as e:
            self.tried = f"It has no microbatches: {first_line(e)}."
            variants.drop_microbatches()
            return None
        count, before = variant.microbatches, self.best
        on_meshes = self.trials.on_all_meshes(step_problem)
        if self._cannot_fit(on_meshes):
            self.tried = f"Nothing would fit in {count} microbatches either." if count > 1 else self.tried
            variants.drop_larger(variant)
            return partial(self._smallest_step, step_problem, on_meshes)
        baseline = self.trials.baseline(step_problem, on_meshes, time_limit_s / 2)
        promised_s = min(one.promised_s(one.pinned(self.pins)) for one in on_meshes)
        variants.took(variant, promised_s)
        if count > 1:
            self.tried = f"Up to {count} microbatches were tried too."
        least = self._search_under_cap(baseline, time_limit_s / 2)
        if self.best is before and promised_s < self.trials.least_s:
            variants.missed(variant, self.trials.rewritten_bytes(step_problem))
        return least

    def _forbidden_s(self, first: Baseline) -> float | None:
        """Seconds per step of a plan that recomputes, if recomputation is forbidden and would fit."""
        if self.options.remat != "never":
            return None
        limit_s = infeasible.limit_s(self.options)
        options = replace(self.options, remat=None, time_limit_s=limit_s)
        trials = Trials(self.step, self.trials.marks, self.cluster, options, self.progress, self.clock)
        allowed = StepSearch(trials)
        allowed._search_under_cap(first, limit_s / 2)
        return allowed.best.cost_s if allowed.best else None

    def _of_smallest_peak(self, first: Baseline, least: StepProblem) -> Found:
        """The plan of the smallest peak, if it fits after all: of the baseline, of the smallest step, or of all
        strategies that the search met.

        Raises:
          InfeasibleError: it does not fit. The message says how the cap or the request could change.
        """
        options, deadline = self.options, Deadline.after(infeasible.limit_s(self.options), self.clock)
        is_first = least is first.step_problem
        tried = {first.step_problem: first.on_meshes}
        if not is_first:
            tried[least] = tuple(self.trials.put_on(least, shape) for shape in self.trials.shapes)
        found = {one: infeasible.smallest_peak(tried[one], options, deadline) for one in tried}
        peaks = {one: smallest for one, smallest in found.items() if smallest}
        best = min(peaks, key=lambda one: peaks[one].peak.num_bytes, default=least)
        smallest, nearest = peaks.get(best), self.trials.nearest
        proven_s = self.trials.proven_s(best)
        is_proven = is_first and all(proven_s.get(shape) == math.inf for shape in self.trials.shapes)
        if nearest and (smallest is None or nearest.peak.num_bytes < smallest.peak.num_bytes):
            best, smallest = nearest.step_problem, infeasible.Smallest.of(nearest, smallest)
        if smallest is None or smallest.peak.num_bytes > options.memory_bytes:
            explain = partial(infeasible.explain, best, self.cluster, options, smallest, is_proven, deadline)
            raise explain(forbidden_s=self._forbidden_s(first), also_tried=self.tried)
        return Found(best, smallest.on_mesh, smallest.labels, options.memory_bytes)
