"""Candidates: sets of plans that are not searched yet, each with an estimate of its best plan.

Estimates order candidates, and results correct them. A rewrite saves some of the missing bytes, and other strategies must
save the rest. The estimate takes a lower bound on their time. A result that is slower raises all estimates on its mesh by
its error for each of these bytes: half of the way, because neighbouring estimates differ by less than their error. A plan
that is faster than its corrected estimate lowers them again.

If a rewrite misses the cap before there is a plan, others have to save as many bytes more until there is one. The one that
saves most has a turn in any case.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from autoshard.cost_model.compute import pass_s_per_byte
from autoshard.cost_model.meshes import finer_shapes
from autoshard.cost_model.units import format_mesh
from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import FIRST_SHARE, Known, MeshProblem
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.cap_curve import CapCurve
from autoshard.search.solver.clock import Deadline
from autoshard.search.space.certificate import Certificate
from autoshard.search.space.found import Found
from autoshard.search.space.long_sequences import OtherForm
from autoshard.search.space.rewrites import (
    ESTIMATE_GAP,
    Estimates,
    Rewrite,
    UncappedSolution,
    without_cap,
)
from autoshard.search.space.trials import Baseline, Trials, progress_prefix
from autoshard.search.space.variants import MISSES_BY, Variant, Variants
from autoshard.search.space.warm_starts import for_finer_mesh, for_rewritten_step
from autoshard.search.step_problem import StepProblem

LOOPS_MARGIN = 0.03
"""Largest relative error of a loop's recomputation estimate. Source: an LSTM whose estimates are 2 to 3% too high."""

RESIDUAL_PASSES = 5
"""Largest number of passes through memory that a residual takes, if a loop stacks it. Source: `search.memory.passes`."""

AGAIN = 1.25
"""Multiple of its estimate at which a rewrite has another turn, if the turn before it found nothing in time. Source: a
choice of ours."""


class Candidate(Protocol):
    """A set of plans that is not searched yet."""

    @property
    def estimate_s(self) -> float:
        """Estimated seconds of its best plan; infinite if nothing seems to fit."""
        ...

    @property
    def least_bytes(self) -> float:
        """Estimated memory of its smallest plan. It is asked only while there is no plan."""
        ...

    def take(self, limit_s: float) -> Iterable["Candidate"]:
        """Searches it for about so many seconds. Returns the candidates that are a part of it."""
        ...


@dataclass(frozen=True, eq=False)
class OfVariant:
    """A variant of the step.

    Attributes:
      variants: the estimates of all variants.
      variant: its microbatches, and its arguments in host memory.
      open: solves a variant without a cap, and returns its meshes.
    """

    variants: Variants
    variant: Variant
    open: Callable[[Variant, float], Iterable[Candidate]]

    @property
    def estimate_s(self) -> float:
        return self.variants.seconds(self.variant, MISSES_BY)  # one that may fit is worth a try

    @property
    def least_bytes(self) -> float:
        return self.variants.least_bytes(self.variant)

    def take(self, limit_s: float) -> Iterable[Candidate]:
        return self.open(self.variant, limit_s)


@dataclass(frozen=True, eq=False)
class OfForm:
    """Another form of the step, whose search is not begun.

    Attributes:
      first: the undivided step in the first form, solved without a cap.
      form: the other form.
      begin: begins the search for it.
      least_bytes: zero, because nothing is known of its memory. It comes first among candidates of small memory.
    """

    first: Baseline
    form: OtherForm
    begin: Callable[[OtherForm], None]
    least_bytes: float = 0.0

    @property
    def estimate_s(self) -> float:
        """Seconds without a cap, by those of the first form."""
        return min(self.first.estimates_s.values()) + self.form.more_s

    def take(self, limit_s: float) -> Iterable[Candidate]:
        """Begins the search, whose candidates then join the queue."""
        self.begin(self.form)
        return ()


@dataclass(eq=False)
class SolvedVariant:
    """A variant that was solved without a cap, and what its rewrites teach.

    Attributes:
      trials: the trials of the step.
      certificate: its lower bounds.
      variants: the estimates of all variants; None if all that is fastest fits.
      variant: the variant.
      baseline: its solutions.
      before: the best plan before it was solved.
      fastest: its fastest uncapped solution.
      others: the meshes on which it was not solved.
      rewrites: its rewrites, on all meshes that were estimated.
      is_estimated: whether rewrites were estimated on some mesh.
      enough_bytes: bytes beyond those that are missing that a rewrite should save, by the misses so far.
      has_missed: whether other variants know that it has no better plan.
    """

    trials: Trials
    certificate: Certificate
    variants: Variants | None
    variant: Variant
    baseline: Baseline
    before: Found | None
    fastest: UncappedSolution
    others: tuple[MeshProblem, ...] = ()
    rewrites: list["OfRewrite"] = field(default_factory=list)
    is_estimated: bool = False
    enough_bytes: float = -math.inf
    has_missed: bool = False

    def is_of(self, step_problem: StepProblem) -> bool:
        """True if a step is the variant or a rewrite of it."""
        own = self.baseline.step_problem
        return (own.traced, own.hosted) == (step_problem.traced, step_problem.hosted)

    @cached_property
    def has_loops(self) -> bool:
        """Whether to recompute may be faster than to stack residuals of a loop."""
        return has_loops(self.baseline.step_problem.step)

    @property
    def least_bytes(self) -> float:
        """Memory of the strategies that came nearest to the cap; if there are none, the estimate."""
        nearest = self.trials.nearest_of(self.baseline.step_problem)
        if nearest or self.variants is None:
            return nearest.peak.num_bytes if nearest else math.inf
        return self.variants.least_bytes(self.variant)

    @property
    def most_bytes(self) -> float:
        """The most bytes that a rewrite saves beyond those that are missing."""
        return max((one.spare_bytes for one in self.rewrites), default=0.0)

    def relief_s(self, uncapped: UncappedSolution | None) -> float:
        """Seconds that rewrites add until some strategies fit, by the rewrites on other meshes. A rewrite saves the same
        share of the memory on all meshes."""
        if not self.is_estimated:
            return 0.0
        enough = [one for one in self.rewrites if one.spare_bytes >= 0]
        if uncapped:
            missing_share = 1 - self.trials.options.memory_bytes / uncapped.peak_bytes
            enough = [one for one in self.rewrites if one.saved_share >= missing_share]
        return min((one.rewrite.relief_s for one in enough), default=math.inf)

    def promised_s(self, shape: tuple[int, ...]) -> float:
        """Estimated seconds of the uncapped step on a mesh. If the variant was not solved there, the mesh is as much slower
        as for the undivided step, or else halfway between the fastest solution and its computation."""
        if shape in self.baseline.estimates_s:
            return self.baseline.estimates_s[shape]
        first_s = self.certificate.first.estimates_s
        there_s = first_s.get(self.fastest.on_mesh.shape, 0.0)
        if shape in first_s and there_s:
            return self.fastest.cost_s * first_s[shape] / there_s
        return (self.fastest.computed_s + self.fastest.cost_s) / 2

    def known(self, on_mesh: MeshProblem) -> Known:
        """A bound on the uncapped step on a mesh, and a warm start from the fastest solution if the mesh splits its mesh."""
        before = self.fastest.on_mesh
        known = Known(bound_s=self.baseline.floors_s.get(on_mesh.shape, -math.inf))
        if on_mesh.shape not in finer_shapes(self.trials.cluster, before.shape):
            return known
        return replace(known, start=for_finer_mesh(before, self.fastest.labels, on_mesh))

    def residuals_s(self, num_bytes: float) -> float:
        """Seconds to write and read residuals of so many bytes, at most. Recomputation may save them though memory is
        plenty."""
        return RESIDUAL_PASSES * pass_s_per_byte(self.trials.cluster.device) * num_bytes

    def seems_to_fit(self, rewrite: "OfRewrite") -> bool:
        """True if a rewrite saves enough to keep to the cap, by the misses so far, or if none saves more. Once there is a
        plan, no rewrite is left out."""
        has_plan = self.trials.best is not None
        return has_plan or rewrite.spare_bytes >= min(self.enough_bytes, self.most_bytes)


@dataclass(eq=False)
class OnMesh:
    """A variant on a mesh where memory is short, where it was not solved, or where recomputation may be faster.

    Attributes:
      solved: the variant, solved without a cap on some mesh.
      shape: the mesh.
      uncapped: its fastest strategies there, once they are known.
      is_bounded: whether the step without a rewrite has a lower bound under the cap.
      missing_bytes: bytes that rewrites must save, once they are estimated.
      least_spare_bytes: bytes beyond those that a rewrite must save, because others were proven to need more than the cap.
      error_s_per_byte: seconds beyond the estimate, for each byte that other strategies than the fastest ones save.
    """

    solved: SolvedVariant
    shape: tuple[int, ...]
    uncapped: UncappedSolution | None = None
    is_bounded: bool = False
    missing_bytes: float = 0.0
    least_spare_bytes: float = -math.inf
    error_s_per_byte: float = 0.0

    @property
    def estimate_s(self) -> float:
        """Seconds without a cap, and those that rewrites add. If there is a plan, and rewrites are estimated on no mesh yet,
        the seconds that they may save count, too."""
        relief_s = self.solved.relief_s(self.uncapped)
        if self.uncapped is None:
            return self.solved.promised_s(self.shape) + relief_s
        may_save = self.solved.trials.best is not None and not self.solved.is_estimated
        saved_s = self.solved.residuals_s(self.uncapped.peak_bytes) if may_save else 0.0
        return self.uncapped.cost_s + relief_s - saved_s

    @property
    def least_bytes(self) -> float:
        return self.solved.least_bytes

    def take(self, limit_s: float) -> Iterable[Candidate]:
        """The first turn solves it without a cap, if that was not done yet; the second one finds a bound under the cap; the
        third one estimates rewrites."""
        trials, baseline, on_mesh = self.solved.trials, self.solved.baseline, self.on_mesh
        step_problem = baseline.step_problem
        deadline = Deadline.after(limit_s, trials.clock)
        if self.uncapped is None:
            known = self.solved.known(on_mesh)
            self.uncapped = without_cap(on_mesh, trials.pins, trials.least_s, limit_s, known)
            return [self] if self.uncapped else []
        options = trials.options
        is_new = on_mesh in baseline.deferred or on_mesh not in baseline.on_meshes
        if not self.is_bounded and is_new:
            cap_bytes, curve = options.memory_bytes, self._curve
            curve.refine(cap_bytes, deadline)
            bound_s = max(self.uncapped.cost_s, curve.at(cap_bytes))
            self.is_bounded = True
            self.missing_bytes = self.uncapped.peak_bytes - cap_bytes
            unchanged = Rewrite(self.uncapped, frozenset(), bound_s, 0.0, 0.0)
            return [self, OfRewrite(self, unchanged)] if bound_s < trials.least_s else [self]
        estimates = Estimates(
            step_problem, self.uncapped, trials.pins, options.memory_bytes, self._curve, deadline
        )
        found = estimates.rewrites(options.may_recompute, trials.may_offload_residuals)
        rewrites = [OfRewrite(self, one.of_traced(step_problem)) for one in found]
        self.missing_bytes, self.solved.is_estimated = estimates.missing_bytes, True
        self.solved.rewrites += rewrites
        return rewrites

    @property
    def on_mesh(self) -> MeshProblem:
        """Its problem there."""
        return self.solved.trials.put_on(self.solved.baseline.step_problem, self.shape)

    @cached_property
    def _curve(self) -> CapCurve:
        """Lower bounds on the step without a rewrite, under every cap."""
        return self.on_mesh.cap_curve(self.on_mesh.pinned(self.solved.trials.pins), ESTIMATE_GAP)


@dataclass(eq=False)
class OfRewrite:
    """A rewrite of a variant on a mesh.

    Attributes:
      mesh: the variant on the mesh.
      rewrite: the ops to recompute and the residuals to offload, if any.
      num_turns: number of turns that found no plan.
      later_s: the estimate after these.
    """

    mesh: OnMesh
    rewrite: Rewrite
    num_turns: int = 0
    later_s: float = math.inf

    @property
    def spare_bytes(self) -> float:
        """Bytes that the rewrite saves beyond those that are missing."""
        return self.rewrite.saved_bytes - self.mesh.missing_bytes

    @property
    def saved_share(self) -> float:
        """The share that the rewrite saves of the memory without a cap."""
        held_bytes = self.mesh.missing_bytes + self.mesh.solved.trials.options.memory_bytes
        return self.rewrite.saved_bytes / held_bytes

    @property
    def saves_enough(self) -> bool:
        """True if the fastest strategies seem to keep to the cap with this rewrite, and were not tried yet."""
        if self.num_turns or self.estimate_s == math.inf:
            return False
        keeps_to_cap = self.rewrite.relief_bytes >= self.mesh.missing_bytes
        return keeps_to_cap and self.spare_bytes >= self.mesh.solved.enough_bytes

    @property
    def estimate_s(self) -> float:
        """The estimate as corrected by results on the mesh. The stacking of a loop's residuals is estimated too high."""
        solved = self.mesh.solved
        is_too_little = self.spare_bytes < self.mesh.least_spare_bytes
        if self.num_turns:
            return self.later_s
        if is_too_little or self.rewrite.cost_s == math.inf or not solved.seems_to_fit(self):
            return math.inf
        most_s = solved.residuals_s(self.rewrite.saved_bytes) if solved.has_loops else 0.0
        error_s = min(LOOPS_MARGIN * solved.trials.cutoff_s, most_s)
        return self.rewrite.cost_s + self.mesh.error_s_per_byte * self._missing_bytes - error_s

    @property
    def _missing_bytes(self) -> float:
        """Bytes that other strategies than the fastest ones must save."""
        return max(0.0, -self.spare_bytes)

    def _correct(self, actual_s: float) -> None:
        """Corrects the estimates on the mesh, if the rewrite takes so long."""
        if not self._missing_bytes:
            return
        before, found = self.mesh.error_s_per_byte, (actual_s - self.rewrite.cost_s) / self._missing_bytes
        self.mesh.error_s_per_byte = max(0.0, min(found, (before + found) / 2))

    @property
    def least_bytes(self) -> float:
        """If it had turns without a plan, it comes after all others."""
        solved = self.mesh.solved
        return math.inf if self.num_turns else solved.least_bytes + solved.most_bytes - self.spare_bytes

    def take(self, limit_s: float) -> Iterable[Candidate]:
        """Every further turn takes twice as long, because the search goes on where it ended. A search that ended before its
        time has no further turn; one whose strategies needed more than the cap has one."""
        solved, trials = self.mesh.solved, self.mesh.solved.trials
        before, cutoff_s, estimate_s = trials.best, trials.cutoff_s, self.estimate_s
        limit_s = 2**self.num_turns * limit_s
        early = Deadline.after(FIRST_SHARE * limit_s, trials.clock)
        step_problem, bound_s = self._improve(limit_s)
        self.num_turns += 1
        if trials.best is not before:
            self._correct(trials.cutoff_s)
            return []
        if max(bound_s, cutoff_s) < math.inf:
            self._correct(max(bound_s, cutoff_s, estimate_s))
        missed_bytes = trials.needed_bytes(step_problem) - trials.options.memory_bytes
        is_too_large = 0 < missed_bytes < math.inf
        self.later_s = math.inf if is_too_large else AGAIN * max(estimate_s, bound_s)
        if is_too_large and bound_s == math.inf:
            self.mesh.least_spare_bytes = max(self.mesh.least_spare_bytes, self.spare_bytes + missed_bytes)
        if (
            trials.best is None and self.num_turns == 1
        ):  # with a plan, only faster strategies are known to miss
            missed_bytes = missed_bytes if is_too_large else MISSES_BY * trials.options.memory_bytes
            solved.enough_bytes = max(solved.enough_bytes, self.spare_bytes + missed_bytes)
        has_turns_left = self.num_turns == 1 if is_too_large else early.is_over
        return [self] if bound_s < math.inf and has_turns_left else []

    @cached_property
    def problem(self) -> tuple[StepProblem, MeshProblem]:
        """The step with the rewrite, on its mesh."""
        rewrite, trials, baseline = self.rewrite, self.mesh.solved.trials, self.mesh.solved.baseline
        if not rewrite.sites and not rewrite.offloaded_sites:
            return baseline.step_problem, self.mesh.on_mesh
        step_problem = trials.recomputing(baseline.step_problem, rewrite.sites, rewrite.offloaded_sites)
        trials.gains_s[step_problem] = max(-rewrite.more_s, trials.gains_s.get(step_problem, 0.0))
        return step_problem, trials.put_on(step_problem, rewrite.shape)

    def _improve(self, limit_s: float) -> tuple[StepProblem, float]:
        """Looks for a better plan; returns the step, and a lower bound on its plans."""
        trials, rewrite, baseline = self.mesh.solved.trials, self.rewrite, self.mesh.solved.baseline
        prefix = progress_prefix(baseline.step_problem.traced)
        where, waits = f"mesh {format_mesh(rewrite.shape)}", ""
        if rewrite.offloads:
            waits = f"{len(rewrite.offloaded_sites)} residuals on the host, "
        again = f"recomputing {len(rewrite.sites)} ops on {where}"
        is_same = not rewrite.sites and not rewrite.offloads
        trials.progress(f"{prefix}{where}, under the cap" if is_same else f"{prefix}{waits}{again}")
        step_problem, on_mesh = self.problem
        if trials.cannot_fit(step_problem, on_mesh):
            return step_problem, math.inf
        if is_same:
            known = Known(bound_s=trials.proven_s(step_problem).get(rewrite.shape, -math.inf))
        else:
            known = self._known(step_problem, on_mesh)
        return step_problem, trials.improve(step_problem, on_mesh, limit_s, known=known)[0]

    def _known(self, step_problem: StepProblem, on_mesh: MeshProblem) -> Known:
        """A warm start from the strategies of the estimate, and a bound. There is no bound if recomputation is estimated to
        make the step faster, because the gain is not proven."""
        solved, uncapped = self.mesh.solved, self.rewrite.uncapped
        gain_s = solved.trials.gains_s[step_problem]
        known = Known() if gain_s else solved.certificate.known(step_problem, on_mesh.shape)
        with suppress(NoFitError):
            return replace(known, start=for_rewritten_step(uncapped.on_mesh, uncapped.labels, on_mesh))
        return known


@dataclass(eq=False)
class OfPlan:
    """The best plan's step on a mesh: another one, or its own for more time.

    Attributes:
      trials: the trials of the step.
      certificate: its lower bounds.
      plan: the plan.
      shape: the mesh.
      solved: the variant that the plan's step is made from.
      num_turns: number of turns so far.
    """

    trials: Trials
    certificate: Certificate
    plan: Found
    shape: tuple[int, ...]
    solved: SolvedVariant | None = None
    least_bytes: float = math.inf
    num_turns: int = 0

    @property
    def estimate_s(self) -> float:
        """Halfway between the plan's time and its lower bound, which is at least that of its computation."""
        computed_s = self.plan.cost_s - self.plan.communication_s
        proven_s = self.certificate.proven_s(self.plan.step_problem, self.shape)
        return (max(computed_s, proven_s) + self.plan.cost_s) / 2

    def take(self, limit_s: float) -> Iterable[Candidate]:
        """Solves the step on the mesh. If time ends before a better plan is found, it goes on in a later turn. If memory is
        short on a mesh of three axes, other rewrites of the variant may be faster there."""
        plan, trials, step_problem = self.plan, self.trials, self.plan.step_problem
        is_own, on_mesh = self.shape == plan.on_mesh.shape, trials.put_on(step_problem, self.shape)
        known = self.certificate.known(step_problem, self.shape)
        if is_own:
            known = replace(known, start=plan.labels)
        elif self.shape in finer_shapes(trials.cluster, plan.on_mesh.shape):
            known = replace(known, start=for_finer_mesh(plan.on_mesh, plan.labels, on_mesh))
        trials.progress(f"the same on mesh {format_mesh(self.shape)}")
        deadline = Deadline.after(limit_s, trials.clock)
        _, is_memory_bound = trials.improve(step_problem, on_mesh, limit_s, known)
        again = [self] if deadline.is_over and trials.best is plan else []
        self.num_turns += 1
        may_have_others = is_memory_bound and not is_own and self.shape not in trials.shapes
        if self.solved and may_have_others and self.num_turns == 1:
            return [OnMesh(self.solved, self.shape), *again]
        return again


@dataclass(frozen=True, eq=False)
class UpdatedElsewhere:
    """The best plan with its hosted state updated in the other place: on the host, or on the device.

    Attributes:
      trials: the trials of the step.
      plan: the plan.
      updated: the arguments that the host updates.
    """

    trials: Trials
    plan: Found
    updated: frozenset[int]
    least_bytes: float = math.inf

    @property
    def estimate_s(self) -> float:
        """Seconds if no copy has to be waited for."""
        return self.plan.cost_s - self.plan.device.waited_s

    def take(self, limit_s: float) -> Iterable[Candidate]:
        trials, known = self.trials, Known()
        trials.progress("updated on the host" if self.updated else "updated on the device")
        step_problem = trials.updating_there(self.plan.step_problem, self.updated)
        on_mesh = trials.put_on(step_problem, self.plan.on_mesh.shape)
        with suppress(NoFitError):
            known = Known(for_rewritten_step(self.plan.on_mesh, self.plan.labels, on_mesh))
        trials.improve(step_problem, on_mesh, limit_s, known=known)
        return []
