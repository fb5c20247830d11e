"""One search: for the step as it is, and for steps that hold less: that recompute, use the host, take their batch in parts.

Each mesh shape worth trying is priced and solved without a cap, and the fastest plan that fits wins (`search.trials`). Where
communication costs much, meshes of three axes that split an axis of the best one are tried, too (`search.finer_meshes`);
where nothing fits as it is, only in the end, with the step that the best plan runs. Where faster ones do not fit, what costs
next to nothing to recompute is, on the fastest of these meshes. Then that mesh is solved under the cap, other steps that
recompute are searched (`search.recomputation`, `search.attempts`), and last, where still faster ones might be, the other
meshes under the cap. Where nothing fits even so, or what fits is much slower than it would be without a cap, state that
takes much of it is tried in the host's memory (`search.memory.offload`); then the step is rewritten to go through its batch
in 2, 4, 8, ... microbatches (`search.memory.microbatches`). All this is done with it, for as long as that finds better
plans.

A step in more microbatches, or one that recomputes, does all that the plain one does. So lower bounds on plans of the plain
step without a cap are taken to bound theirs, less what recomputing is estimated to save of the time to keep things; but for
what is faster recomputed than stacked up: that is tried by itself.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import chain, islice

from autoshard.cost_model.errors import first_line
from autoshard.cost_model.units import format_mesh
from autoshard.search import infeasible
from autoshard.search.attempts import LEAST_ATTEMPT_S, Attempts
from autoshard.search.finer_meshes import FinerMeshes
from autoshard.search.found import Found
from autoshard.search.host_arguments import HostArguments
from autoshard.search.memory.batch_states import NotSplittableError
from autoshard.search.memory.microbatches import batch_divisors, microbatched
from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import RELATIVE_GAP, ROUNDING, Known, MeshProblem, StepProblem
from autoshard.search.microbatch_counts import MicrobatchCounts, least_s
from autoshard.search.options import OFFLOADED, RESIDUALS
from autoshard.search.problem.memory_floor import floor_bytes, working_bytes
from autoshard.search.recomputation import (
    MAX_MESHES,
    Candidate,
    Estimates,
    FreeSolution,
    in_order,
    without_cap,
)
from autoshard.search.solver.clock import Deadline
from autoshard.search.trials import Bounds, Plain, Trials

FIRST_SHARE = 0.2
"""Of the time for the step and all that recompute, what it may take to be held to the cap before these are tried. Source: a
choice of ours; steps that recompute are often faster and sooner found."""

WORTH = 0.1
"""By how much a plan may be slower than one without a cap, before microbatches are tried. Source: a choice of ours; two
microbatches gather each split parameter twice."""

SPLIT_SHARE = 0.4
"""Of the time left for microbatches, what one number of them may take. Source: a choice of ours."""

MAX_MICROBATCHES = 64
"""The most that are tried where the user names no number. Source: a choice of ours."""

Least = Callable[[], StepProblem]
"""Makes the step that holds least ready; that takes long, and only the last one is asked."""


class StepSearch:
    """The search for one step.

    Attributes:
      trials: what is tried of it.
      finer: its meshes of three axes.
      shapes: the meshes that are tried, and those of three axes of which something is proven.
      floors_s: by mesh, a lower bound on all plans.
      savings: what may be recomputed of the step as it is.
      free: the fastest strategies without a cap, where they are faster than those under the cap.
      working_bytes: besides its arguments, what the step holds at least on any mesh, undivided.
      split_s: by their number, a lower bound on plans in microbatches that were tried, without a cap.
      tried: what was done to the step in vain, besides recomputing, for a message.
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
        self.free: FreeSolution | None = None
        self.working_bytes = 0.0
        self.split_s: dict[int, float] = {}
        self.tried = ""
        self.host_arguments = HostArguments(self.step, self.cluster, self.options)
        self.trials.hosted = self.host_arguments.asked_for

    @property
    def best(self) -> Found | None:
        """The best plan so far."""
        return self.trials.best

    @property
    def cutoff_s(self) -> float:
        """What a better plan has to stay below."""
        return self.trials.cutoff_s

    def run(self) -> Found:
        """The best plan.

        Raises:
          InfeasibleError: nothing fits the cap; says what would.
          InputError: the step cannot be split into the microbatches that are asked for.
        """
        first = self.trials.plain(
            microbatched(self.step, self.options.microbatches or 1), self.options.limit_s
        )
        pinned = ((one.memory, one.pinned(self.pins)) for one in first.on_meshes)
        self.working_bytes = min(working_bytes(*one) for one in pinned)
        self.host_arguments.check_room(first.on_meshes)
        least = self._held_down(first, self.options.limit_s / 2)
        if self.options.offload is None and self.cluster.host_bytes_per_node:
            least = self._offloaded(first) or least
        if self.options.microbatches is None:
            least = self._in_microbatches() or least
        if self.best is None:
            self.progress("no plan so far; looking for the smallest peak")
            smallest = self._of_smallest_peak(first, least())
            self.trials.takes(smallest)
            self.watch.lap("solve")
            return smallest
        if self.best.step_problem is not first.step_problem:
            self._elsewhere(self.best, first.step_problem)
        best, finer = self.finer.finish(self.best, first.step_problem, self.floors_s)
        own = [best.on_mesh.shape] if best.on_mesh.shape in self.trials.proven_s(best.step_problem) else []
        self.shapes = tuple(dict.fromkeys((*self.shapes, *finer, *own)))
        return best

    @property
    def bounds_s(self) -> Bounds:
        """By mesh, a lower bound on plans in as many microbatches that recompute what the best one does."""
        return {shape: self._bound_s(shape) for shape in self.shapes}

    def _bound_s(self, shape: tuple[int, ...]) -> float:
        """The same for one mesh. Some steps are faster for recomputing: what is proven of those that do not counts only
        where nothing else is known, less what is estimated to be saved."""
        own_s = self.trials.proven_s(self.best.step_problem) if self.best else {}
        gain_s = self.trials.gains_s.get(self.best.step_problem, 0.0) if self.best else 0.0
        floor_s = {**self.floors_s, **self.finer.floors_s}.get(shape, -math.inf) - gain_s
        if has_loops(self.step) or gain_s:
            return own_s.get(shape, floor_s)
        return max(own_s.get(shape, -math.inf), floor_s)

    def _elsewhere(self, best: Found, plain: StepProblem) -> None:
        """Looks for better plans of the best plan's step on the other meshes, where nothing is proven of all steps."""
        deadline = Deadline.after(self.options.limit_s / 2, self.clock)
        others = [shape for shape in self.trials.shapes if shape != best.on_mesh.shape]
        for shape in sorted(others, key=self.floors_s.__getitem__):
            known = self.finer.known(best.step_problem, shape, plain, self.floors_s)
            own_s = self.trials.proven_s(best.step_problem).get(shape, -math.inf)
            if max(known.bound_s, own_s) < self.trials.least_s and not deadline.is_over:
                self.progress(f"the same on mesh {format_mesh(shape)}")
                on_mesh = self.trials.put_on(best.step_problem, shape)
                self.trials.improve(best.step_problem, on_mesh, deadline.left_s, known=known)

    def _held_down(self, plain: Plain, time_limit_s: float) -> Least:
        """Looks for better plans where the fastest ones do not fit: of the step as it is, and of steps that recompute; the
        step that holds least of all those considered."""
        is_first, step_problem = not self.floors_s, plain.step_problem
        if is_first:
            self.floors_s = plain.floors_s
        free = [one for one in plain.free if one.cost_s < self.trials.least_s]
        if is_first:
            self.free = next(iter(free), None)
        deadline = Deadline.after(time_limit_s, self.clock)
        if is_hopeless := self._is_hopeless(plain.on_meshes):
            self.trials.under_cap(step_problem, plain.put_off, deadline)  # which proves it
        elif is_first:
            free, deadline = self.finer.free(plain, free), Deadline.after(time_limit_s, self.clock)
        if self.options.remat == "never" and not self._may_wait:
            self.trials.under_cap(step_problem, plain.put_off, deadline)
            return lambda: step_problem
        if is_hopeless:
            return partial(self._most_frugal, step_problem, plain.on_meshes)
        found, deadline = list[Candidate](), Deadline.after(time_limit_s, self.clock)
        built = self._attempts(step_problem, deadline).make(self._offered(plain, free, found, deadline))
        most = max(found, key=lambda candidate: candidate.saved_bytes, default=None)
        if self.best is None and most and most not in built:
            self._attempts(step_problem, Deadline.after(LEAST_ATTEMPT_S, self.clock)).make([most])
        self.watch.lap("recompute")
        if is_first:
            self.savings = tuple(c for c in found if not c.waiting)
        self.trials.under_cap(step_problem, plain.put_off, deadline)
        if self.best is not None or not most:
            return lambda: step_problem
        return partial(self.trials.recomputing, step_problem, most.sites, most.waiting)

    def _offered(
        self, plain: Plain, free: Sequence[FreeSolution], found: list[Candidate], deadline: Deadline
    ) -> Iterator[Candidate]:
        """What may be recomputed or wait on the host, the most promising first; it is added to what was found.

        On the fastest mesh first what costs next to nothing to recompute: plans that recompute nothing are hardly faster.
        Then these are looked for there. On other meshes estimates are made only when the best one on the fastest was tried,
        and only where they may be better than that and than what it led to.
        """
        step_problem, may_recompute = plain.step_problem, self.options.remat != "never"
        limit_bytes, before = self.options.memory_bytes, step_problem.rewritten.before

        @cache
        def estimates(one: FreeSolution) -> Estimates:
            return Estimates(step_problem, one, self.pins, limit_bytes, deadline)

        def offer(more: Iterable[Candidate]) -> Iterator[Candidate]:
            for candidate in more:
                found.append(
                    replace(candidate, sites=before(candidate.sites), waiting=before(candidate.waiting))
                )
                self.watch.lap("recompute")
                yield found[-1]

        if free and may_recompute:
            yield from offer(estimates(free[0]).next_to_nothing())
        fastest = [one for one in plain.put_off if free and one is free[0].on_mesh]
        self.trials.under_cap(step_problem, fastest, deadline.share(FIRST_SHARE))
        free = [one for one in free if one.cost_s < self.trials.least_s]
        free += self._unhindered(plain, free)
        may_gain, left = has_loops(step_problem.step), list[Candidate]()
        num_before = len(found)  # what these promised was tried
        others = self._hardly_slower(plain, found) if may_gain else ()
        for one in islice(chain(free, others), MAX_MESHES):
            best_s = min((self.cutoff_s, *(c.cost_s for c in found[num_before:])))
            least_s = one.cost_s + self._least_again_s(one, found[num_before:])
            if may_gain or self.best is None or least_s < (1 - RELATIVE_GAP) * best_s:
                more = estimates(one).candidates(best_s, may_recompute, self._may_wait)
                left = in_order([*left, *offer(more)])
                yield from left[:1]
                del left[:1]
        yield from left

    def _least_again_s(self, free: FreeSolution, found: Sequence[Candidate]) -> float:
        """What it takes to hold so much less that strategies fit, at the least, by what was found on another mesh."""
        missing_bytes = free.on_mesh.memory.peak(free.labels).num_bytes - self.options.memory_bytes
        enough = (c for c in found if c.saved_bytes >= missing_bytes)
        return min((c.cost_s - c.free.cost_s if c.waiting else c.more_s for c in enough), default=0.0)

    def _is_hopeless(self, on_meshes: Sequence[MeshProblem]) -> bool:
        """Whether nothing can fit, whatever is recomputed or waits on the host."""
        limit_bytes = (1 + ROUNDING) * self.options.memory_bytes
        return self.best is None and all(self._floor_bytes(one) > limit_bytes for one in on_meshes)

    def _floor_bytes(self, on_mesh: MeshProblem) -> float:
        return floor_bytes(on_mesh.memory, on_mesh.pinned(self.pins))

    def _most_frugal(self, plain: StepProblem, on_meshes: Sequence[MeshProblem]) -> StepProblem:
        """The step that holds least, where nothing fits."""
        deadline = Deadline.after(LEAST_ATTEMPT_S, self.clock)
        free, _ = without_cap([min(on_meshes, key=self._floor_bytes)], self.pins, math.inf, deadline)
        limit_bytes = self.options.memory_bytes
        estimates = (Estimates(plain, one, self.pins, limit_bytes, deadline) for one in free)
        found = [candidate for each in estimates for candidate in each.candidates()]
        if not found or self.options.remat == "never":
            return plain
        most = max(found, key=lambda candidate: candidate.saved_bytes)
        return self.trials.recomputing(plain, plain.rewritten.before(most.sites), frozenset())

    def _unhindered(self, plain: Plain, free: Sequence[FreeSolution]) -> list[FreeSolution]:
        """Plans of a step with loops, which may be faster for recomputing though they fit as they are; the best first."""
        if not has_loops(plain.step_problem.step):
            return []
        known, found = {one.on_mesh.shape for one in free}, list(plain.found)
        if self.best and self.best.step_problem is plain.step_problem:
            found.append(self.best)  # on a mesh of three axes, perhaps
        fastest = {one.on_mesh.shape: one for one in found if one.on_mesh.shape not in known}
        return [
            FreeSolution(one.on_mesh, one.labels, one.on_mesh.problem.cost_s(one.labels))
            for one in sorted(fastest.values(), key=lambda one: one.cost_s)
        ]

    def _hardly_slower(self, plain: Plain, found: Sequence[Candidate]) -> Iterator[FreeSolution]:
        """Good strategies of a step with loops on the mesh that promises most besides the best plan's, where that has been
        promised to be faster for recomputing: elsewhere more of that may be so."""
        best, cutoff_s = self.best, (1 + RELATIVE_GAP) * self.cutoff_s
        if best is None or not any(one.cost_s < self.cutoff_s for one in found):
            return
        others = [one for one in plain.on_meshes if one.shape != best.on_mesh.shape]
        for on_mesh in sorted(others, key=lambda one: plain.floors_s[one.shape])[:1]:
            share = Deadline.after(self.options.limit_s, self.clock).share(FIRST_SHARE)
            known = Known(bound_s=plain.floors_s[on_mesh.shape])
            yield from without_cap([on_mesh], self.pins, cutoff_s, share, known)[0]

    def _attempts(self, plain: StepProblem, deadline: Deadline) -> Attempts:
        """At steps that recompute, made of this one."""
        known = partial(self.finer.known, plain=plain, floors_s=self.floors_s)
        return Attempts(self.trials, plain, known, deadline)

    @property
    def _may_wait(self) -> bool:
        """Whether residuals may wait on the host."""
        offload = self.options.offload
        is_asked = offload is None or (not isinstance(offload, str) and RESIDUALS in offload)
        return is_asked and self.cluster.host_bytes_per_node > 0

    def _offloaded(self, first: Plain) -> Least | None:
        """Looks for better plans with more and more state in the host's memory; where none fits, the step that holds least
        of all those considered. What made no plan better is left alone; where there is no plan, an optimizer's state stays
        there for what is tried next, as it is of no use before the update."""
        pinned = ((one.memory, one.pinned(self.pins)) for one in first.on_meshes)
        held_bytes = min(memory.least_bytes(kept) for memory, kept in pinned)
        least, kinds, best_hosted = None, list[str](), self.trials.hosted
        for kind in OFFLOADED:
            if not self.host_arguments.is_worth_moving(self.host_arguments.of_kinds([kind])):
                continue
            kinds.append(kind)
            hosted = self.host_arguments.of_kinds(kinds)
            is_wanted = (
                self._is_wanting and not self._is_vain_on_host(hosted, held_bytes)
                if self.best
                else not self.host_arguments.is_too_much(hosted, self.working_bytes)
            )
            if not is_wanted:
                continue
            self.trials.hosted, before = hosted, self.best
            self.progress(f"{' and '.join(kinds).replace('_', ' ')} on the host")
            plain = self.trials.plain(first.step_problem.traced, self.options.limit_s / 2)
            least = self._held_down(plain, self.options.limit_s / 4)
            if self.best is not before:
                best_hosted = hosted
        self.trials.hosted = (
            best_hosted
            if self.best
            else self.trials.hosted & self.host_arguments.of_kinds(list(OFFLOADED)[:1])
        )
        return None if self.best else least

    def _is_vain_on_host(self, hosted: frozenset[int], held_bytes: float) -> bool:
        """Whether a step that holds so much at least has to recompute even with arguments on the host, and copying these
        and computing that makes it as slow as the best plan."""
        moved_bytes = self.host_arguments.least_bytes(hosted)
        missing_bytes = held_bytes - moved_bytes - (1 + ROUNDING) * self.options.memory_bytes
        if self.free is None or missing_bytes <= 0:
            return False
        copied_s = 2 * float(self.cluster.host_link.copy_s(moved_bytes))
        again_s = min((c.more_s for c in self.savings if c.saved_bytes >= missing_bytes), default=0.0)
        return self.free.cost_s + copied_s + again_s >= self.cutoff_s

    def _in_microbatches(self) -> Least | None:
        """Looks for better plans in microbatches; where none fits, the step that holds least of all those considered.

        Without a plan, the fewest that do are found by bisection. With one, few are tried, which tell whether more may be
        worth it; then as many as need recompute nothing.
        """
        deadline = Deadline.after(self.options.limit_s, self.clock)
        counts = [n for n in batch_divisors(self.step) if 1 < n <= MAX_MICROBATCHES]
        if not counts or not self._is_wanting:
            return None
        useful, needed = self._most_useful(counts), self._needed_counts
        if self.best is None:
            if hopeless := self._hopeless_in(useful):
                return hopeless
            first = min(needed.fewest, max(counts))
            return self._in_fewest([n for n in counts if n >= first], deadline)
        few = [n for n in counts if n < min(needed.enough, useful)]
        for some in (few, counts[len(few) :]):
            self._in_more_and_more(some, deadline)
        return None

    def _in_fewest(self, counts: Sequence[int], deadline: Deadline) -> Least | None:
        """Bisects for the fewest microbatches that have a plan, and so the fastest; the step that holds least if there is
        none. When time is over without a plan, the most are tried after all."""
        least, left = None, list(counts)
        while left and not (deadline.is_over and self.best):
            count = left[-1] if deadline.is_over else left[len(left) // 2]
            before, least = self.best, self._split_in(count, self._share_s(deadline))
            if least is None:
                break
            left = [n for n in left if n > count] if self.best is before else [n for n in left if n < count]
        return None if self.best else least

    def _in_more_and_more(self, counts: Sequence[int], deadline: Deadline) -> None:
        """Tries one number of microbatches after another, as long as plans get better."""
        for count in counts:
            if deadline.is_over or not self._is_wanting or self._is_vain_in(count):
                break
            before = self.best
            if self._split_in(count, self._share_s(deadline)) is None or self.best is before:
                break

    def _share_s(self, deadline: Deadline) -> float:
        """Seconds for one number of microbatches."""
        return max(SPLIT_SHARE * deadline.left_s, LEAST_ATTEMPT_S)

    def _is_vain_in(self, count: int) -> bool:
        """Whether a step in so many microbatches would be as slow as the best plan, by those that were tried."""
        if self.free is None or self.best is None:
            return False
        return least_s(count, self.free.cost_s, self.split_s) >= self.cutoff_s

    def _most_useful(self, counts: Sequence[int]) -> int:
        """The largest number of microbatches that leaves every device an example."""
        size = max(batch_divisors(self.step))
        return max((n for n in counts if n * self.cluster.num_devices <= size), default=min(counts))

    def _hopeless_in(self, count: int) -> Least | None:
        """The step in so many microbatches, if nothing can fit even then."""
        try:
            step_problem = self.trials.made_ready(microbatched(self.step, count))
        except NotSplittableError:
            return None
        on_meshes = [self.trials.put_on(step_problem, shape) for shape in self.trials.shapes]
        if not self._is_hopeless(on_meshes):
            return None
        self.tried = f"Nothing would fit in {count} microbatches either."
        return partial(self._most_frugal, step_problem, on_meshes)

    def _split_in(self, count: int, time_limit_s: float) -> Least | None:
        """Looks for better plans in that many microbatches; the step that holds least, None if it cannot be split."""
        try:
            step = microbatched(self.step, count)
        except NotSplittableError as e:
            self.tried = f"It has no microbatches: {first_line(e)}."
            return None
        plain = self.trials.plain(step, time_limit_s / 2)
        self.split_s[count] = min(one.promised_s(one.pinned(self.pins)) for one in plain.on_meshes)
        self.tried = f"Up to {count} microbatches were tried too."
        return self._held_down(plain, time_limit_s / 2)

    @property
    def _is_wanting(self) -> bool:
        """Whether the best plan is slower than one without a cap by so much that there may be a better one, and there is
        time to look for it; where there is no plan, there is."""
        if self.best is not None and self.trials.deadline.is_over:
            return False
        return self.free is not None and self.cutoff_s > (1 + WORTH) * self.free.cost_s

    @property
    def _needed_counts(self) -> MicrobatchCounts:
        """How many microbatches the step needs, where its fastest strategies do not fit as it is."""
        assert self.free is not None, "a step is split where it is faster without a cap"
        most_saved_bytes = max((c.saved_bytes for c in self.savings), default=0.0)
        return MicrobatchCounts.of(self.free, self.options.memory_bytes, most_saved_bytes)

    def _forbidden_s(self, first: Plain) -> float | None:
        """Seconds per step of a plan that recomputes, where that is forbidden and would fit."""
        if self.options.remat != "never":
            return None
        options = replace(self.options, remat=None, time_limit_s=infeasible.TIME_LIMIT_S)
        trials = Trials(self.step, self.trials.marks, self.cluster, options, self.progress, self.clock)
        allowed = StepSearch(trials)
        allowed._held_down(first, infeasible.TIME_LIMIT_S / 2)
        return allowed.best.cost_s if allowed.best else None

    def _of_smallest_peak(self, first: Plain, least: StepProblem) -> Found:
        """The plan of the smallest peak, of the step as it is, of the one that holds least, or of all that was found, where
        that fits after all.

        Raises:
          InfeasibleError: it does not; says what would.
        """
        options, deadline = self.options, Deadline.after(infeasible.TIME_LIMIT_S, self.clock)
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
