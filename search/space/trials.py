"""The trials of one search: a step's solutions on meshes, the best plan so far, and the proven bounds.

A step is prepared once for all meshes. Each mesh has a lower bound, and the most promising ones are solved without a cap
until a solution fits. This is the best plan so far, and every later trial must beat it. All other meshes are deferred: those
that were not solved, and those whose fastest solution does not fit. To solve them under the cap takes longer, and another
step or mesh may be faster by then.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.units import format_mesh
from autoshard.search.ir.graph import Site, Step
from autoshard.search.memory.host_updates import host_updates, least_copy_s, least_update_s, updatable
from autoshard.search.mesh_problem import (
    NO_CAP,
    RELATIVE_GAP,
    ROUNDING,
    UNKNOWN,
    Known,
    MeshProblem,
    TooLargeError,
)
from autoshard.search.options import Options, Progress, candidate_shapes
from autoshard.search.problem.folding import FoldedProgram
from autoshard.search.problem.reshard import Resharder
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline, SearchClock
from autoshard.search.space.found import Bounds, Found
from autoshard.search.space.rewrites import UncappedSolution
from autoshard.search.space.tried import Tried
from autoshard.search.step_problem import StepProblem
from autoshard.search.stopwatch import Stopwatch

UNCAPPED_SHARE = 0.1
"""Share of the time left that one mesh may take without a cap. Source: a choice of ours; most meshes take less, and a
slow one may be easier under the cap."""

TURN_SHARE = 0.2
"""Share of the time left that one turn may take. Source: a choice of ours; five turns use up two thirds of the time."""

LEAST_TURN_S = 2.0
"""Seconds that one turn may take in any case. Source: a choice of ours."""

Sites = frozenset[Site]
"""Ops of the traced step."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step without extra recomputation, tried on all meshes.

    Attributes:
      step_problem: the prepared step.
      on_meshes: its problem on each mesh.
      uncapped: solutions without a cap that the cap forbids or may forbid, the fastest first.
      deferred: meshes that were not tried under the cap, the most promising first.
      found: plans, each better than the one before it.
      floors_s: lower bounds on plans without a cap, by mesh.
      estimates_s: estimated seconds of the fastest plan without a cap, by mesh.
    """

    step_problem: StepProblem
    on_meshes: tuple[MeshProblem, ...]
    uncapped: tuple[UncappedSolution, ...]
    deferred: tuple[MeshProblem, ...]
    found: tuple[Found, ...]
    floors_s: Bounds
    estimates_s: Mapping[tuple[int, ...], float]


@dataclass(eq=False)
class Shared:
    """The state that the trials of all forms of a step share; mutable.

    Attributes:
      deadline: the end of the search.
      watch: the time of each part of the search.
      best: the best plan so far.
    """

    deadline: Deadline
    watch: Stopwatch
    best: Found | None = None


class Trials:
    """All trials of one step.

    Attributes:
      step: the traced step.
      marks: per argument, its pin. Arguments with different pins are in different equivalence classes.
      cluster: the cluster that will run the step.
      options: the options of the search.
      pins: the specs in which arguments must rest.
      progress: called with a line for each trial.
      shared: the best plan so far and the time, shared with the trials of another form of the step.
      nearest: among solutions that do not fit, the one whose kernels need the least memory.
      shapes: the meshes to try.
      gains_s: estimated seconds by which recomputation makes a step faster.
      clock: the clock of all limits.
      tried: the candidates that were tried.
    """

    def __init__(
        self,
        step: Step,
        marks: Sequence[str],
        cluster: Cluster,
        options: Options,
        progress: Progress,
        clock: SearchClock,
        watch: Stopwatch | None = None,
    ) -> None:
        self.step, self.marks, self.cluster = step, marks, cluster
        self.options, self.progress, self.pins = options, progress, options.pins or {}
        self.clock = clock
        self.shared = Shared(Deadline.after(options.limit_s, clock), watch or Stopwatch(step.trace_s))
        self.shapes = candidate_shapes(cluster, options)
        self.nearest: Found | None = None
        self._resharders: dict[tuple[int, ...], Resharder] = {}
        self._on_meshes = WeakKeyDictionary[StepProblem, dict[tuple[int, ...], MeshProblem]]()
        self.gains_s = WeakKeyDictionary[StepProblem, float]()
        self._rewritten = WeakValueDictionary[tuple[StepProblem, Sites, Sites], StepProblem]()
        self.tried = Tried()
        self._needed_bytes = WeakKeyDictionary[StepProblem, float]()
        self._nearest: dict[tuple[Step, frozenset[int]], Found] = {}
        self._proven_s = WeakKeyDictionary[StepProblem, dict[tuple[int, ...], float]]()

    def of_form(self, step: Step, marks: Sequence[str]) -> "Trials":
        """The trials of the step in another form. Both look for one plan, in one time."""
        other = Trials(step, marks, self.cluster, self.options, self.progress, self.clock)
        other.shared, other._resharders = self.shared, self._resharders
        return other

    def under(self, options: Options, progress: Progress, shared: Shared | None = None) -> "Trials":
        """Trials under a lower cap, with the problems and bounds that are known. A bound under the higher cap holds under
        the lower one.

        Args:
          options: the lower cap.
          progress: called with a line for each trial.
          shared: the state of another form's trials under that cap; a new one if there are none.
        """
        lower = copy(self)
        lower.options, lower.progress = options, progress
        deadline = Deadline.after(options.limit_s, self.clock)
        lower.shared = shared or Shared(deadline, Stopwatch(self.step.trace_s))
        lower.tried, lower._nearest = Tried(), dict(self._nearest)
        lower._needed_bytes = WeakKeyDictionary(self._needed_bytes)
        lower._proven_s = WeakKeyDictionary({one: dict(bounds) for one, bounds in self._proven_s.items()})
        return lower

    @property
    def best(self) -> Found | None:
        """The best plan so far."""
        return self.shared.best

    @property
    def deadline(self) -> Deadline:
        """The end of the search."""
        return self.shared.deadline

    @property
    def watch(self) -> Stopwatch:
        """The time of each part of the search."""
        return self.shared.watch

    @property
    def cutoff_s(self) -> float:
        """Seconds that a better plan must stay below."""
        return self.best.cost_s if self.best else math.inf

    @property
    def least_s(self) -> float:
        """A mesh whose bound is above this cannot hold a better plan."""
        return (1 - RELATIVE_GAP) * self.cutoff_s

    @property
    def may_offload_residuals(self) -> bool:
        """True if the user allows that residuals are offloaded, and the host has memory for them."""
        return self.options.may_offload_residuals and self.cluster.host_bytes_per_node > 0

    def extend(self, times: float) -> None:
        """Gives the search this multiple of its time limit more, besides the time that is left, unless the user sets the
        limit."""
        if self.options.is_limited:
            return
        left_s = self.deadline.left_s + times * self.options.limit_s
        self.shared.deadline = Deadline.after(left_s, self.clock)

    def owns(self, found: Found) -> bool:
        """True if a plan was found by these trials, and not by those of another form."""
        return found.step_problem in self._proven_s

    def takes(self, found: Found) -> bool:
        """Keeps a plan if it is better than the best one; returns whether it is."""
        is_better = found.cost_s < self.cutoff_s
        self.tried.takes(found)
        self._proven_s.setdefault(found.step_problem, {})
        if is_better:
            self.shared.best = found
        return is_better

    def _comes_near(self, found: Found) -> None:
        """Keeps strategies that do not fit if they need less memory than all before them."""
        least_bytes = min(found.peak.num_bytes, self.needed_bytes(found.step_problem))
        self._needed_bytes[found.step_problem] = least_bytes
        before = self.nearest_of(found.step_problem)
        if before is None or found.peak.num_bytes < before.peak.num_bytes:
            self._nearest[found.step_problem.traced, found.step_problem.hosted] = found
        if self.nearest is None or found.peak.num_bytes < self.nearest.peak.num_bytes:
            self.nearest = found

    def cannot_fit(self, step_problem: StepProblem, on_mesh: MeshProblem) -> bool:
        """True if a lower bound on a step's memory on a mesh is above the cap. No costs are made for it."""
        least_bytes = on_mesh.memory.least_bytes(on_mesh.pinned(self.pins))
        if least_bytes <= (1 + ROUNDING) * self.options.memory_bytes:
            return False
        self._needed_bytes[step_problem] = min(least_bytes, self.needed_bytes(step_problem))
        self._prove(step_problem, on_mesh.shape, math.inf)
        return True

    def needed_bytes(self, step_problem: StepProblem) -> float:
        """The smallest peak of a step's strategies that did not fit, or the least that they can have; infinite if nothing
        is known."""
        return self._needed_bytes.get(step_problem, math.inf)

    def nearest_of(self, baseline: StepProblem) -> Found | None:
        """The strategies with the smallest peak among those of a baseline and its rewritten steps that did not fit."""
        return self._nearest.get((baseline.traced, baseline.hosted))

    def baseline(
        self, step_problem: StepProblem, on_meshes: tuple[MeshProblem, ...], time_limit_s: float
    ) -> Baseline:
        """Looks for better plans of a step without extra recomputation, among its fastest strategies without a cap."""
        promised_s = {one.shape: one.promised_s(one.pinned(self.pins)) for one in on_meshes}
        self.watch.lap("solve")
        deadline = Deadline.after(time_limit_s, self.clock)
        in_order = sorted(on_meshes, key=lambda one: promised_s[one.shape])
        uncapped, proven_s = self._without_cap(in_order, step_problem, deadline)
        floors_s = {
            shape: max(bound_s, proven_s.get(shape, bound_s)) for shape, bound_s in promised_s.items()
        }
        estimates_s = _estimates_s(uncapped, floors_s, promised_s)
        found, memory_bound, tried = list[Found](), list[UncappedSolution](), set[MeshProblem]()
        for one in uncapped:
            is_memory_bound, before = not self._is_within(one), self.best
            if not is_memory_bound and one.cost_s < self._cutoff_on(one.on_mesh):
                tried.add(one.on_mesh)
                known = Known(bound_s=floors_s[one.on_mesh.shape])
                _, is_memory_bound = self.improve(step_problem, one.on_mesh, turn_s(deadline), known)
            memory_bound += [one] * is_memory_bound
            found += [self.best] if self.best and self.best is not before else []
        left = [one for one in on_meshes if one not in tried]
        deferred = tuple(sorted(left, key=lambda one: estimates_s[one.shape]))
        self.watch.lap("solve")
        return Baseline(
            step_problem, on_meshes, tuple(memory_bound), deferred, tuple(found), floors_s, estimates_s
        )

    def _without_cap(
        self, on_meshes: Sequence[MeshProblem], step_problem: StepProblem, deadline: Deadline
    ) -> tuple[list[UncappedSolution], Bounds]:
        """Good strategies on meshes without a cap, the fastest first, and a lower bound for each of these meshes.

        Meshes are tried in the given order, until strategies keep to the cap. A mesh has no solution here if it is slower
        than the best plan or than another solution.
        """
        uncapped: list[UncappedSolution] = []
        floors_s: dict[tuple[int, ...], float] = {}
        prefix = progress_prefix(step_problem.traced)
        for i, on_mesh in enumerate(on_meshes):
            shape = on_mesh.shape
            self.progress(f"{prefix}mesh {format_mesh(shape)} ({i + 1} of {len(on_meshes)})")
            cutoff_s = min((self._cutoff_on(on_mesh), *(one.cost_s for one in uncapped)))
            try:
                kept, share_s = on_mesh.pinned(self.pins), UNCAPPED_SHARE * deadline.left_s
                solution = on_mesh.solve(kept, NO_CAP, share_s, cutoff_s)
                uncapped.append(UncappedSolution(on_mesh, solution.labels, solution.cost_s))
                floors_s[shape] = solution.bound_s
            except NoFitError as e:
                floors_s[shape] = e.bound_s
            self._prove(step_problem, shape, floors_s[shape])
            if uncapped and self._is_within(uncapped[-1]):
                break
        return sorted(uncapped, key=lambda one: one.cost_s), floors_s

    def _is_within(self, uncapped: UncappedSolution) -> bool:
        """True if strategies keep to the cap in program order."""
        return uncapped.on_mesh.memory.peak(uncapped.labels).num_bytes <= self.options.memory_bytes

    def under_cap(self, step_problem: StepProblem, on_meshes: Iterable[MeshProblem]) -> None:
        """Looks for plans under the cap on some meshes."""
        for on_mesh in on_meshes:
            self.improve(step_problem, on_mesh, self.deadline.left_s)

    def made_ready(self, step: Step, hosted: frozenset[int] = frozenset()) -> StepProblem:
        """A step without extra recomputation, with some arguments in host memory, prepared for all meshes."""
        return self._prepared(step, hosted, self._updated_there(step, hosted))

    def _prepared(
        self,
        step: Step,
        hosted: frozenset[int],
        updated: frozenset[int],
        sites: Sites = frozenset(),
        offloaded_sites: Sites = frozenset(),
        known: FoldedProgram | None = None,
    ) -> StepProblem:
        given = step, self.marks, self.cluster.device, sites, hosted, offloaded_sites
        step_problem = StepProblem.of(*given, known=known, clock=self.clock, updated=updated)
        self.watch.lap("graph")
        return step_problem

    def _updated_there(self, step: Step, hosted: frozenset[int]) -> frozenset[int]:
        """The arguments that the host updates at first: all that it can, if its memory is faster for them than the bus."""
        if not hosted or not self.cluster.host_update_bytes_per_s:
            return frozenset()
        updates, cluster = host_updates(step, hosted), self.cluster
        is_faster = least_update_s(step, updates, cluster) < least_copy_s(step, updates, cluster)
        return updatable(step, hosted) if is_faster else frozenset()

    def on_all_meshes(self, step_problem: StepProblem) -> tuple[MeshProblem, ...]:
        """A step's problem on each mesh."""
        return tuple(self.put_on(step_problem, shape) for shape in self.shapes)

    def recomputing(self, baseline: StepProblem, sites: Sites, offloaded_sites: Sites) -> StepProblem:
        """The baseline's step with sites recomputed and residuals offloaded. It is prepared once while it is in use."""
        key = baseline, sites, offloaded_sites
        given, known = (baseline.traced, baseline.hosted, baseline.updated), baseline.traced_program
        step_problem = self._rewritten.get(key) or self._prepared(*given, sites, offloaded_sites, known)
        self._rewritten[key] = step_problem
        return step_problem

    def updating_there(self, before: StepProblem, updated: frozenset[int]) -> StepProblem:
        """A prepared step whose host updates these arguments, which rest in its memory."""
        rewritten = before.sites, before.offloaded_sites, before.traced_program
        return self._prepared(before.traced, before.hosted, updated, *rewritten)

    def put_on(self, step_problem: StepProblem, shape: tuple[int, ...]) -> MeshProblem:
        """The problem on a mesh. It is made once while the step is in use, so that every solver goes on from the bounds of
        the one before it. All steps share the resharding costs of a mesh."""
        known = self._on_meshes.setdefault(step_problem, {})
        if shape not in known:
            known[shape] = step_problem.on(self.cluster, shape, self._resharders.get(shape))
            self._resharders[shape] = known[shape].memory.costed.resharder
            self.watch.lap("strategies")
        return known[shape]

    def improve(
        self,
        step_problem: StepProblem,
        on_mesh: MeshProblem,
        time_limit_s: float,
        known: Known = UNKNOWN,
    ) -> tuple[float, bool]:
        """Looks for a better plan on one mesh. Returns a lower bound on its plans that fit, and whether the step is
        memory-bound there.

        Args:
          step_problem: the prepared step.
          on_mesh: its problem on the mesh.
          time_limit_s: seconds for the solver.
          known: a warm start and a bound.
        """
        limit_bytes = self.options.memory_bytes
        kept, cutoff_s = on_mesh.pinned(self.pins), self._cutoff_on(on_mesh)
        try:
            solution, device = on_mesh.fitting(kept, limit_bytes, time_limit_s, cutoff_s, known=known)
            self.takes(Found(step_problem, on_mesh, solution.labels, limit_bytes, device))
            bound_s, is_memory_bound = solution.bound_s, bool(solution.stats.num_rows) or device.overlap < 1
        except NoFitError as e:
            bound_s, is_memory_bound = e.bound_s, e.num_rows != 0
            if isinstance(e, TooLargeError):
                self._comes_near(Found(step_problem, on_mesh, e.labels, limit_bytes, e.predicted))
        self._prove(step_problem, on_mesh.shape, bound_s)
        self.watch.lap("solve")
        return bound_s, is_memory_bound

    def _cutoff_on(self, on_mesh: MeshProblem) -> float:
        """The solver's cutoff on a mesh. It leaves room for copies to and from the host, because the solver does not
        know that computation may hide them."""
        return self.cutoff_s + on_mesh.least_transfer_s(on_mesh.pinned(self.pins))

    def proven_s(self, step_problem: StepProblem) -> Bounds:
        """Lower bounds on plans of a step that fit, by mesh."""
        return self._proven_s.get(step_problem, {})

    def _prove(self, step_problem: StepProblem, shape: tuple[int, ...], bound_s: float) -> None:
        proven_s = self._proven_s.setdefault(step_problem, {})
        proven_s[shape] = max(bound_s, proven_s.get(shape, -math.inf))
        self.tried.proves(step_problem, shape, bound_s)


def _estimates_s(
    uncapped: Sequence[UncappedSolution], floors_s: Bounds, promised_s: Bounds
) -> Mapping[tuple[int, ...], float]:
    """Estimated seconds of the fastest plan without a cap, by mesh. A mesh without a solution is taken to be as much slower
    than the one with the fastest solution as its first bound is higher.

    Args:
      uncapped: solutions on some meshes, the fastest first.
      floors_s: lower bounds on plans, by mesh.
      promised_s: first bounds, found with equal effort on all meshes.
    """
    estimates_s = dict(floors_s)
    promised_there_s = promised_s[uncapped[0].on_mesh.shape] if uncapped else 0.0
    if promised_there_s:
        times = uncapped[0].cost_s / promised_there_s
        estimates_s = {shape: max(floors_s[shape], times * s) for shape, s in promised_s.items()}
    return estimates_s | {one.on_mesh.shape: one.cost_s for one in uncapped}


def turn_s(deadline: Deadline) -> float:
    """Seconds that one turn may take."""
    return max(TURN_SHARE * deadline.left_s, LEAST_TURN_S)


def progress_prefix(step: Step) -> str:
    """The beginning of a progress line."""
    return f"{step.num_microbatches} microbatches, " if step.num_microbatches > 1 else ""
