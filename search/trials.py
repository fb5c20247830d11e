"""What has been tried of one step's plans, and how more is tried.

A step is made ready once for all meshes, put on each, and solved there without a cap first, by what is left of the time: the
fastest of these plans that fits is the best so far, and whatever is tried next has to be faster. Meshes whose fastest plans
do not fit are put off: what they can do under the cap takes longer to find out, and something else may be faster then. Of
the meshes worth trying the most promising comes first, and ties go to the first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary, WeakValueDictionary

from autoshard.cost_model.cluster import Cluster
from autoshard.cost_model.units import format_mesh
from autoshard.search.found import Found
from autoshard.search.ir.graph import Site, Step
from autoshard.search.mesh_problem import (
    NO_CAP,
    RELATIVE_GAP,
    UNKNOWN,
    Known,
    MeshProblem,
    StepProblem,
    TooLargeError,
)
from autoshard.search.options import Options, Progress, candidate_shapes
from autoshard.search.problem.reshard import Resharder
from autoshard.search.recomputation import MAX_MESHES, UncappedSolution
from autoshard.search.solver.branch_and_bound import NoFitError
from autoshard.search.solver.clock import Deadline, SearchClock
from autoshard.search.stopwatch import Stopwatch
from autoshard.search.tried import Tried

UNCAPPED_SHARE = 0.1
"""Of the time left, what a mesh may take without a cap. Source: a choice of ours; most take less, and what takes longer may
be easier under the cap."""

ALIKE = 0.05
"""Meshes whose bounds differ by less promise alike. Source: a choice of ours; first bounds are not tight."""

SURE_SHARE = 0.7
"""Of the cap: strategies that hold no more in program order are taken to fit, and only the kernels of the best ones are
simulated; should those not fit, all are asked. Source: a choice of ours; kernels seldom hold 1.4 times as much, but where
arrays come from the host."""

FINER_GAP = 0.01
"""What is certified of a step that recomputes on a mesh of three axes. Source: a choice of ours; half of it takes several
times as long."""

Sites = frozenset[Site]
"""Of ops of the traced step."""

Bounds = Mapping[tuple[int, ...], float]
"""Lower bounds by mesh, in seconds."""


@dataclass(frozen=True, eq=False)
class Baseline:
    """A step that recomputes nothing, tried on all meshes.

    Attributes:
      step_problem: of the step.
      on_meshes: on each mesh.
      uncapped: the fastest strategies without a cap where the cap makes a difference, the fastest first.
      deferred: the meshes of these that were not tried under the cap, the most promising first.
      found: the plans that were each better than the one before.
      floors_s: on its plans without a cap, by mesh.
    """

    step_problem: StepProblem
    on_meshes: tuple[MeshProblem, ...]
    uncapped: tuple[UncappedSolution, ...]
    deferred: tuple[MeshProblem, ...]
    found: tuple[Found, ...]
    floors_s: Bounds


class Trials:
    """All that is tried of one step.

    Attributes:
      step: it, as it was traced.
      marks: per argument, what keeps it and the ops around it apart from others: its pin.
      cluster: where it will run.
      options: what is asked for.
      pins: of these, how arguments must rest.
      progress: called with a line for all that is tried.
      watch: what takes how long.
      best: the best plan so far.
      nearest: of what did not fit, by the kernels of a device, what holds least.
      hosted: the arguments that rest in the host's memory in what is tried next.
      shapes: the meshes to try.
      gains_s: of steps that recompute: by how much they are estimated to be faster for it.
      clock: by which all limits count.
      tried: the candidates that were tried.
      began_s: on it, when the search began.
      deadline: after it nothing is begun besides a plan that is there.
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
        self.clock, self.watch = clock, watch or Stopwatch(step.trace_s)
        self.began_s, self.deadline = clock.now_s, Deadline.after(options.limit_s, clock)
        self.shapes = candidate_shapes(cluster, options)
        self.best: Found | None = None
        self.nearest: Found | None = None
        self.hosted = frozenset[int]()
        self._resharders: dict[tuple[int, ...], Resharder] = {}
        self.gains_s = WeakKeyDictionary[StepProblem, float]()
        self._rewritten = WeakValueDictionary[tuple[StepProblem, Sites, Sites], StepProblem]()
        self.tried = Tried()
        self._proven_s = WeakKeyDictionary[StepProblem, dict[tuple[int, ...], float]]()

    @property
    def cutoff_s(self) -> float:
        """What a better plan has to stay below."""
        return self.best.cost_s if self.best else math.inf

    @property
    def least_s(self) -> float:
        """Bounds above this prove a best plan."""
        return (1 - RELATIVE_GAP) * self.cutoff_s

    def takes(self, found: Found) -> bool:
        """Whether a plan is better than the best one; if so, it is the best one."""
        is_better = found.cost_s < self.cutoff_s
        self.tried.takes(found)
        if is_better:
            self.best = found
        return is_better

    def _comes_near(self, found: Found) -> None:
        """Takes note of strategies that do not fit, if they hold less than all before them."""
        if self.nearest is None or found.peak.num_bytes < self.nearest.peak.num_bytes:
            self.nearest = found

    def baseline(self, step: Step, time_limit_s: float) -> Baseline:
        """Looks for better plans of a step that recomputes nothing, among those that are fastest without a cap."""
        step_problem = self.made_ready(step)
        on_meshes = tuple(self.put_on(step_problem, shape) for shape in self.shapes)
        before = self.best
        surely_fits_bytes = 0.0 if step_problem.has_transfers else SURE_SHARE * self.options.memory_bytes
        baseline = self._over(on_meshes, step_problem, time_limit_s, surely_fits_bytes)
        if self.best is not before and self.best and not self.best.fits:
            self.best = before
            baseline = self._over(on_meshes, step_problem, time_limit_s, 0.0)
        self.watch.lap("solve")
        return baseline

    def _over(
        self,
        on_meshes: tuple[MeshProblem, ...],
        step_problem: StepProblem,
        time_limit_s: float,
        surely_fits_bytes: float,
    ) -> Baseline:
        """The same, mesh by mesh; what holds so little is taken to fit."""
        deadline = Deadline.after(time_limit_s, self.clock)
        uncapped, floors_s = self._without_cap(on_meshes, step_problem, deadline)
        found, memory_bound, tried = list[Found](), list[UncappedSolution](), set[MeshProblem]()
        for one in uncapped:
            is_memory_bound, before = not self._is_within(one), self.best
            if not is_memory_bound and one.cost_s < self._cutoff_on(one.on_mesh):
                tried.add(one.on_mesh)
                known = Known(bound_s=floors_s[one.on_mesh.shape])
                is_memory_bound = self.improve(
                    step_problem, one.on_mesh, deadline.left_s, surely_fits_bytes, known
                )[1]
            memory_bound += [one] * is_memory_bound
            found += [self.best] if self.best and self.best is not before else []
        left = [one for one in on_meshes if one not in tried]
        deferred = tuple(sorted(left, key=lambda one: floors_s[one.shape]))
        return Baseline(step_problem, on_meshes, tuple(memory_bound), deferred, tuple(found), floors_s)

    def _without_cap(
        self, on_meshes: Sequence[MeshProblem], step_problem: StepProblem, deadline: Deadline
    ) -> tuple[list[UncappedSolution], Bounds]:
        """Good strategies on each mesh without a cap, the fastest first, and a bound for every mesh; none where they are
        slower than the best plan, than others that keep to the cap, or than the fastest on `MAX_MESHES` others."""
        uncapped: list[UncappedSolution] = []
        floors_s: dict[tuple[int, ...], float] = {}
        within_s, prefix = math.inf, progress_prefix(step_problem.traced)
        for i, on_mesh in enumerate(self._most_promising_first(on_meshes)):
            shape, fastest = on_mesh.shape, sorted(one.cost_s for one in uncapped)
            self.progress(f"{prefix}mesh {format_mesh(shape)} ({i + 1} of {len(on_meshes)})")
            cutoff_s = min(self._cutoff_on(on_mesh), within_s, *fastest[MAX_MESHES - 1 :])
            try:
                kept, share_s = on_mesh.pinned(self.pins), UNCAPPED_SHARE * deadline.left_s
                solution = on_mesh.solve(kept, NO_CAP, share_s, cutoff_s)
                uncapped.append(UncappedSolution(on_mesh, solution.labels, solution.cost_s))
                floors_s[shape] = solution.bound_s
                within_s = min(within_s, solution.cost_s) if self._is_within(uncapped[-1]) else within_s
            except NoFitError as e:
                floors_s[shape] = e.bound_s
            self._prove(step_problem, shape, floors_s[shape])
        return sorted(uncapped, key=lambda one: one.cost_s), floors_s

    def _is_within(self, uncapped: UncappedSolution) -> bool:
        """Whether strategies keep to the cap in program order."""
        return uncapped.on_mesh.memory.peak(uncapped.labels).num_bytes <= self.options.memory_bytes

    def _most_promising_first(self, on_meshes: Sequence[MeshProblem]) -> list[MeshProblem]:
        """What is found first makes short work of what promises less; of those that promise alike the simplest is first."""
        if len(on_meshes) == 1:
            return list(on_meshes)
        left = {one: one.promised_s(one.pinned(self.pins)) for one in on_meshes}
        self.watch.lap("solve")
        order: list[MeshProblem] = []
        while left:
            most = (1 + ALIKE) * min(left.values())
            order.append(next(one for one, promised_s in left.items() if promised_s <= most))
            del left[order[-1]]
        return order

    def under_cap(
        self, step_problem: StepProblem, on_meshes: Iterable[MeshProblem], deadline: Deadline
    ) -> None:
        """Looks for better plans on meshes that promise some."""
        for on_mesh in on_meshes:
            proven_s = self.proven_s(step_problem).get(on_mesh.shape, -math.inf)
            if proven_s < self.least_s and not (self.best and deadline.is_over):
                prefix, mesh = progress_prefix(step_problem.traced), format_mesh(on_mesh.shape)
                self.progress(f"{prefix}mesh {mesh}, under the cap")
                self.improve(step_problem, on_mesh, deadline.left_s, known=Known(bound_s=proven_s))

    def made_ready(self, step: Step) -> StepProblem:
        """A step that recomputes nothing, ready for all meshes."""
        step_problem = StepProblem.of(
            step, self.marks, self.cluster.device, hosted=self.hosted, clock=self.clock
        )
        self.watch.lap("graph")
        return step_problem

    def recomputing(self, baseline: StepProblem, sites: Sites, offloaded_sites: Sites) -> StepProblem:
        """The same with something recomputed, and something waiting on the host; made once while it is in use."""
        key = baseline, sites, offloaded_sites
        step_problem = self._rewritten.get(key) or StepProblem.of(
            baseline.traced,
            self.marks,
            self.cluster.device,
            sites,
            baseline.hosted,
            offloaded_sites,
            known=baseline.traced_program,
            clock=self.clock,
        )
        self._rewritten[key] = step_problem
        self.watch.lap("graph")
        return step_problem

    def put_on(self, step_problem: StepProblem, shape: tuple[int, ...]) -> MeshProblem:
        """The problem on a mesh; what is known of resharding there is shared by all that is tried."""
        on_mesh = step_problem.on(self.cluster, shape, self._resharders.get(shape))
        self._resharders[shape] = on_mesh.memory.costed.resharder
        self.watch.lap("strategies")
        return on_mesh

    def improve(
        self,
        step_problem: StepProblem,
        on_mesh: MeshProblem,
        time_limit_s: float,
        surely_fits_bytes: float = 0.0,
        known: Known = UNKNOWN,
        min_gain: float = 0.0,
    ) -> tuple[float, bool]:
        """Looks for a plan on one mesh that is better by such a share; a lower bound on all of its plans that fit, and
        whether memory counted.

        Where there is a start on a mesh of three axes, it is content with less.
        """
        limit_bytes = self.options.memory_bytes
        is_near_enough = known.start is not None and on_mesh.shape not in self.shapes
        gap = FINER_GAP if is_near_enough else RELATIVE_GAP
        kept, cutoff_s = on_mesh.pinned(self.pins), (1 - min_gain) * self._cutoff_on(on_mesh)
        try:
            solution, device = on_mesh.fitting(
                kept, limit_bytes, time_limit_s, cutoff_s, gap, surely_fits_bytes, known
            )
            self.takes(Found(step_problem, on_mesh, solution.labels, limit_bytes, device))
            bound_s, is_memory_bound = solution.bound_s, bool(solution.stats.num_rows)
        except NoFitError as e:
            bound_s, is_memory_bound = e.bound_s, e.num_rows != 0
            if isinstance(e, TooLargeError):
                self._comes_near(Found(step_problem, on_mesh, e.labels, limit_bytes, e.predicted))
        self._prove(step_problem, on_mesh.shape, bound_s)
        self.watch.lap("solve")
        return bound_s, is_memory_bound

    def _cutoff_on(self, on_mesh: MeshProblem) -> float:
        """What the solver has to stay below, which does not know that copies may be hidden."""
        return self.cutoff_s + on_mesh.least_transfer_s(on_mesh.pinned(self.pins))

    def proven_s(self, step_problem: StepProblem) -> Bounds:
        """On plans of a step that fit, by mesh."""
        return self._proven_s.get(step_problem, {})

    def _prove(self, step_problem: StepProblem, shape: tuple[int, ...], bound_s: float) -> None:
        proven_s = self._proven_s.setdefault(step_problem, {})
        proven_s[shape] = max(bound_s, proven_s.get(shape, -math.inf))
        self.tried.proves(step_problem, shape, bound_s)


def progress_prefix(step: Step) -> str:
    """What a line of progress says first."""
    return f"{step.num_microbatches} microbatches, " if step.num_microbatches > 1 else ""
