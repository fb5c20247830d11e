"""Meshes of three axes, if they may pay: splits of the best mesh of two axes, or the most promising of all.

Splits of an axis of the best mesh are tried if communication takes much of the step. If one axis over all devices costs
much more than two, the best mesh of two axes says little about meshes of three: for instance if the batch has fewer
examples than there are devices. Then all meshes of three axes are estimated by a cheap lower bound, and the most
promising ones are tried as well.

The baseline is solved there without a cap, with a warm start from a coarser mesh. Meshes whose gap is still wide get a
second turn. A faster solution that fits is the best plan. One that does not fit is a start for steps that recompute,
and its mesh is tried under the cap at the end. The best plan's rewritten step is tried with a warm start, too. If no
baseline fits on two axes, only this last trial is made: three axes would need much the same recomputation, and it is
found sooner on two. If recomputation makes a step faster on one mesh of three axes, the other meshes that were tried
get that step as well. A mesh without a proof keeps no bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from autoshard.cost_model.meshes import finer_shapes
from autoshard.cost_model.units import format_mesh
from autoshard.search.found import Found
from autoshard.search.memory.residuals import has_loops
from autoshard.search.mesh_problem import RELATIVE_GAP, UNKNOWN, Known, MeshProblem, StepProblem
from autoshard.search.options import named_axes
from autoshard.search.recomputation import UncappedSolution, without_cap
from autoshard.search.solver.clock import Deadline
from autoshard.search.trials import FINER_GAP, Baseline, Bounds, Trials
from autoshard.search.warm_starts import for_finer_mesh

COMMUNICATES = 0.025
"""Smallest share of communication in a step for which meshes of three axes are tried. Source: a choice of ours; three
axes save a part of it, and half a percent is certified."""

COMMUNICATES_MUCH = 0.1
"""If the share of communication is below this, meshes of three axes get proportionally less time. Source: a choice of
ours."""

ONE_AXIS_COSTS = 1.3
"""If one axis over all devices costs more than this multiple of the best mesh, all meshes of three axes are estimated.
Source: a choice of ours; on 512 H100s the ratio is 1.0 to 1.2 for nine of twelve models with a multiple of 512
examples, and 1.5 to 35 for six others, three of which are 6 to 17% faster on another mesh than on the first two splits
of the best one."""

MIN_GAIN = 1e-3
"""Share by which a mesh of three axes must be faster than the best plan. Source: a choice of ours; two axes are
simpler."""

HELD_TO_CAP = 0.02
"""The baseline is solved under the cap on a mesh of three axes only if its bound is below the best plan by this share.
Source: a choice of ours; that takes as long as all other trials, and hardly ever finds a better plan."""

MAX_FINER = 2
"""Number of splits of the best mesh that are tried, and number of other promising meshes. Source: a choice of ours; of
up to four splits, the first two gave the whole gain in twelve models on four clusters."""

WIDE_OPEN = 0.1
"""A mesh gets as much time again if its bound is below the best plan by this share. Source: a choice of ours; with 256
images on 1,000 H100s a convolutional autoencoder becomes 38% faster."""

FINER_SHARE = 2.5
"""Largest multiple of the work so far that meshes of three axes may take. Source: a choice of ours; with 1.5, a ResNet
over Ethernet gains 2.6% instead of 3.7%; most take far less."""

LEAST_FINER_S = 4.0
"""Seconds that they may take in any case. Source: a choice of ours; scanned layers are searched in less than two, and
three axes, which save 1% and more, take three."""


class FinerMeshes:
    """The meshes of three axes of one search.

    Attributes:
      trials: the trials of the step.
      floors_s: lower bounds on all plans without a cap, by mesh.
      memory_bound: meshes on which the baseline would be fastest without a cap and does not fit.
    """

    def __init__(self, trials: Trials) -> None:
        self.trials = trials
        self.floors_s: dict[tuple[int, ...], float] = {}
        self.memory_bound: list[MeshProblem] = []

    def uncapped(self, baseline: Baseline, uncapped: Sequence[UncappedSolution]) -> list[UncappedSolution]:
        """The best uncapped solutions, the fastest first, with those on meshes of three axes that do not fit.

        Args:
          baseline: the baseline, tried on all other meshes.
          uncapped: its best solutions there that do not fit.
        """
        trials = self.trials
        fastest, before = next(iter(uncapped), None), trials.best
        if before and not uncapped and before.step_problem is baseline.step_problem:
            fastest = UncappedSolution(before.on_mesh, before.labels, before.cost_s)
        if fastest is None:
            return []
        one_axis = (trials.cluster.num_devices,)
        is_unknown = (
            self._is_open and baseline.floors_s.get(one_axis, math.inf) > ONE_AXIS_COSTS * fastest.cost_s
        )
        if before is None and not is_unknown and trials.options.remat != "never":
            return [*uncapped]  # plans that fit recompute, and are tried there in `finish`
        coarser, found = (fastest, *baseline.uncapped, *baseline.found), [*uncapped]
        promising = self._most_promising(baseline, coarser) if is_unknown else self._splits(baseline, coarser)
        deadline = self._deadline(1.0 if is_unknown else fastest.communication_share)
        for i, (on_mesh, known) in enumerate(promising):
            trials.progress(f"mesh {format_mesh(on_mesh.shape)}")
            share = deadline.share(1 / (len(promising) - i))
            found += self._too_large_on(on_mesh, baseline.step_problem, (fastest, *found), share, known)
        for on_mesh, known in promising:  # a second turn while time is left
            best_s = min(trials.cutoff_s, *(one.cost_s for one in (fastest, *found)))
            is_wide_open = self.floors_s[on_mesh.shape] < (1 - WIDE_OPEN) * best_s
            again = self._deadline(1.0) if is_wide_open else deadline
            if self.floors_s[on_mesh.shape] < (1 - RELATIVE_GAP) * best_s and not again.is_over:
                found += self._too_large_on(on_mesh, baseline.step_problem, (fastest, *found), again, known)
        return sorted(found, key=lambda one: one.cost_s)

    def _too_large_on(
        self,
        on_mesh: MeshProblem,
        step_problem: StepProblem,
        found: Sequence[UncappedSolution],
        deadline: Deadline,
        known: Known,
    ) -> list[UncappedSolution]:
        """Looks for a better solution without a cap on one mesh; returns it if it does not fit."""
        trials = self.trials
        cutoff_s = (1 - MIN_GAIN) * min(trials.cutoff_s, *(one.cost_s for one in found))
        better, bounds_s = without_cap([on_mesh], trials.pins, cutoff_s, deadline, known)
        for shape, bound_s in bounds_s.items():
            self.floors_s[shape] = max(bound_s, self.floors_s.get(shape, -math.inf))
        too_large = [one for one in better if not self._fits(step_problem, one)]
        self.memory_bound += [one.on_mesh for one in too_large if one.on_mesh not in self.memory_bound]
        trials.watch.lap("solve")
        return too_large

    def _fits(self, step_problem: StepProblem, uncapped: UncappedSolution) -> bool:
        """True if uncapped strategies fit. They may become the best plan."""
        limit_bytes = self.trials.options.memory_bytes
        if uncapped.on_mesh.memory.peak(uncapped.labels).num_bytes > limit_bytes:
            return False
        found = Found(step_problem, uncapped.on_mesh, uncapped.labels, limit_bytes)
        if found.fits:
            self.trials.takes(found)
        return found.fits

    def finish(
        self, best: Found, baseline: StepProblem, floors_s: Bounds
    ) -> tuple[Found, tuple[tuple[int, ...], ...]]:
        """The best plan in the end, and the meshes of three axes with a proof.

        Args:
          best: the best plan so far.
          baseline: the step without extra recomputation.
          floors_s: lower bounds on all plans, by mesh of two axes.
        """
        trials, deadline = self.trials, self._deadline(best.communication_share)
        for on_mesh in self.memory_bound:
            known = self.known(baseline, on_mesh.shape, baseline, floors_s)
            if (1 - HELD_TO_CAP) * trials.cutoff_s > known.bound_s and not deadline.is_over:
                trials.improve(baseline, on_mesh, deadline.left_s, known=known)
        if best.step_problem is not baseline or not self.floors_s:
            known = self.known(best.step_problem, best.on_mesh.shape, baseline, floors_s)
            self._improve_where_it_is(best, known, deadline)
            for shape in self._shapes_after_all(best):
                known = self.known(best.step_problem, shape, baseline, floors_s)
                is_promising = known.bound_s < trials.least_s and self._may_gain(
                    shape, best, baseline, floors_s
                )
                if is_promising and not deadline.is_over:
                    trials.progress(f"mesh {format_mesh(shape)}")
                    on_mesh = trials.put_on(best.step_problem, shape)
                    if best.on_mesh.shape in trials.shapes:
                        known = replace(known, start=for_finer_mesh(best.on_mesh, best.labels, on_mesh))
                    bound_s, _ = trials.improve(
                        best.step_problem, on_mesh, deadline.left_s, known=known, min_gain=MIN_GAIN
                    )
                    self.floors_s[shape] = bound_s
        return trials.best or best, tuple(
            s for s, bound_s in self.floors_s.items() if bound_s >= trials.least_s
        )

    def _improve_where_it_is(self, best: Found, known: Known, deadline: Deadline) -> None:
        """Looks for a better plan on the best plan's own mesh of three axes, which had little time so far."""
        trials, shape = self.trials, best.on_mesh.shape
        bound_s = max(known.bound_s, trials.proven_s(best.step_problem).get(shape, -math.inf))
        if shape not in trials.shapes and bound_s < (1 - FINER_GAP) * best.cost_s and not deadline.is_over:
            known = Known(best.labels, is_enough=True, bound_s=bound_s)
            trials.improve(best.step_problem, best.on_mesh, deadline.left_s, known=known)

    def _shapes_after_all(self, best: Found) -> tuple[tuple[int, ...], ...]:
        """Other meshes of three axes for the best plan's step: the splits of its mesh. If it has three axes itself, the
        meshes that the baseline was tried on, the most promising first."""
        if best.on_mesh.shape in self.trials.shapes:
            return self._split_shapes(best.on_mesh, best.communication_share)
        asked = sorted(self.floors_s, key=self.floors_s.__getitem__)
        return tuple(shape for shape in asked if shape != best.on_mesh.shape)

    def _may_gain(self, shape: tuple[int, ...], best: Found, baseline: StepProblem, floors_s: Bounds) -> bool:
        """True if the best plan's step may be faster on another mesh of three axes.

        A step that only recomputes hardly gains where the uncapped baseline does not. The exception is a step on three
        axes that is faster thanks to recomputation.
        """
        gains = best.on_mesh.shape not in self.trials.shapes and self.trials.gains_s.get(best.step_problem)
        if best.step_problem.traced is not baseline.traced or gains:
            return True
        known_s = {**floors_s, **self.floors_s}
        return known_s.get(shape, -math.inf) < (1 - RELATIVE_GAP) * known_s.get(best.on_mesh.shape, math.inf)

    def known(
        self,
        step_problem: StepProblem,
        shape: tuple[int, ...],
        baseline: StepProblem,
        floors_s: Mapping[tuple[int, ...], float],
    ) -> Known:
        """A lower bound on a step's plans on a mesh: the baseline's bound less the estimated gain of recomputation. A
        step with loops has none, because recomputation may make it much faster."""
        known_s = {} if has_loops(baseline.step) else {**floors_s, **self.floors_s}
        return Known(bound_s=known_s.get(shape, -math.inf) - self.trials.gains_s.get(step_problem, 0.0))

    def _deadline(self, communicated: float) -> Deadline:
        """The time for meshes of three axes: a multiple of the work so far, within the limit of the search. It shrinks
        with the share of communication."""
        trials = self.trials
        within = trials.latest if trials.options.time_limit_s is None else trials.deadline
        left_s = within.left_s
        spent_s = trials.clock.now_s - trials.began_s
        share = min(1.0, communicated / COMMUNICATES_MUCH)
        return Deadline.after(min(max(share * FINER_SHARE * spent_s, LEAST_FINER_S), left_s), trials.clock)

    def _splits(
        self, baseline: Baseline, coarser: Sequence[UncappedSolution | Found]
    ) -> list[tuple[MeshProblem, Known]]:
        """Meshes that split the mesh of the first solution or one beside it, each with a warm start."""
        others = [one.shape for one in baseline.on_meshes]
        shapes = self._split_shapes(coarser[0].on_mesh, coarser[0].communication_share, others)
        return [self._begun(baseline, shape, coarser) for shape in shapes]

    def _most_promising(
        self, baseline: Baseline, coarser: Sequence[UncappedSolution | Found]
    ) -> list[tuple[MeshProblem, Known]]:
        """The splits of the fastest mesh, and the most promising other meshes of three axes, the most promising first.
        Meshes are estimated while time is left."""
        trials, promised_s = self.trials, dict[tuple[MeshProblem, Known], float]()
        deadline = self._deadline(1.0)
        fastest = coarser[0].on_mesh.shape
        for shape in finer_shapes(trials.cluster, fastest, *(one.shape for one in baseline.on_meshes)):
            if deadline.is_over:
                break
            on_mesh, known = self._begun(baseline, shape, coarser)
            promised_s[on_mesh, known] = on_mesh.promised_s(on_mesh.pinned(trials.pins), known)
        trials.watch.lap("solve")
        in_order = sorted(promised_s, key=promised_s.__getitem__)
        splits = finer_shapes(trials.cluster, fastest)[:MAX_FINER]
        others = [one for one in in_order if one[0].shape not in splits][:MAX_FINER]
        return [one for one in in_order if one[0].shape in splits or one in others]

    def _begun(
        self, baseline: Baseline, shape: tuple[int, ...], coarser: Sequence[UncappedSolution | Found]
    ) -> tuple[MeshProblem, Known]:
        """The baseline on a mesh of three axes, with a warm start from the first solution on a mesh that it splits."""
        on_mesh = self.trials.put_on(baseline.step_problem, shape)
        for one in coarser:
            if shape in finer_shapes(self.trials.cluster, one.on_mesh.shape):
                return on_mesh, Known(for_finer_mesh(one.on_mesh, one.labels, on_mesh), is_enough=False)
        return on_mesh, UNKNOWN

    @property
    def _is_open(self) -> bool:
        """True if the user asks for neither a mesh nor an axis."""
        return self.trials.options.mesh is None and not named_axes(self.trials.pins)

    def _split_shapes(
        self, on_mesh: MeshProblem, communicated: float, others: Sequence[tuple[int, ...]] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """The splits of a mesh that are worth trying with so much communication. If they are few, splits of the other
        meshes follow."""
        if not self._is_open or not communicated > COMMUNICATES or len(on_mesh.shape) != 2:
            return ()
        shapes = (finer_shapes(self.trials.cluster, shape) for shape in (on_mesh.shape, *others))
        return tuple(dict.fromkeys(chain.from_iterable(shapes)))[:MAX_FINER]
