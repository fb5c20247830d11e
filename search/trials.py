"""What has been tried of one step's plans, and how more is tried.

A step is made ready once for all meshes, put on each, and solved there by what is left of the time; the fastest plan that
fits is the best so far, and whatever is tried next has to be faster. Of the meshes worth trying the most promising comes
first, and ties go to the first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cost_model.cluster import Cluster
from cost_model.units import format_mesh
from search.found import Found
from search.ir.graph import Site, Step
from search.mesh_problem import RELATIVE_GAP, UNKNOWN, Known, MeshProblem, StepProblem
from search.options import Options, Progress, candidate_shapes
from search.problem.reshard import Resharder
from search.solver.branch_and_bound import NoFitError
from search.solver.clock import Deadline, SearchClock
from search.stopwatch import Stopwatch

MESH_SHARE = 0.75
"""Of the time left, what a mesh may take while there are others. Source: a choice of ours; those that promise most come
first, and the others need little."""

ALIKE = 0.05
"""Meshes whose bounds differ by less promise alike. Source: a choice of ours; first bounds are not tight."""

ROOMY = 0.7
"""Of the cap: strategies that hold no more in program order are taken to fit, and only the kernels of the best ones are
simulated; should those not fit, all are asked. Source: a choice of ours; kernels seldom hold 1.4 times as much, but where
arrays come from the host."""

FINER_GAP = 0.02
"""Of the bound that is known of a mesh of three axes: a step that recomputes and comes so near is good enough. Source: a
choice of ours; there a proof takes several times as long as all else, and what is recomputed costs as much."""

Bounds = Mapping[tuple[int, ...], float]
"""Lower bounds by mesh, in seconds."""


@dataclass(frozen=True, eq=False)
class Plain:
    """A step that recomputes nothing, tried on all meshes.

    Attributes:
      step_problem: of the step.
      on_meshes: on each mesh.
      cramped: those where memory made a difference.
      found: the plans that were each better than the one before.
      bounds_s: on its plans that fit, by mesh.
    """

    step_problem: StepProblem
    on_meshes: tuple[MeshProblem, ...]
    cramped: tuple[MeshProblem, ...]
    found: tuple[Found, ...]
    bounds_s: Bounds


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
      hosted: the arguments that rest in the host's memory in what is tried next.
      shapes: the meshes to try.
      clock: by which all limits count.
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
        self.hosted = frozenset[int]()
        self._resharders: dict[tuple[int, ...], Resharder] = {}

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
        if is_better:
            self.best = found
        return is_better

    def plain(self, step: Step, time_limit_s: float) -> Plain:
        """Looks for better plans of a step that recomputes nothing."""
        step_problem = self.made_ready(step)
        on_meshes = tuple(self.put_on(step_problem, shape) for shape in self.shapes)
        before = self.best
        roomy_bytes = 0.0 if step_problem.has_transfers else ROOMY * self.options.memory_bytes
        plain = self._over(on_meshes, step_problem, time_limit_s, roomy_bytes)
        if self.best is not before and self.best and not self.best.fits:
            self.best = before
            plain = self._over(on_meshes, step_problem, time_limit_s, 0.0)
        self.watch.lap("solve")
        return plain

    def _over(
        self,
        on_meshes: tuple[MeshProblem, ...],
        step_problem: StepProblem,
        time_limit_s: float,
        roomy_bytes: float,
    ) -> Plain:
        """The same, mesh by mesh; what holds so little is taken to fit."""
        ordered, deadline = self._most_promising_first(on_meshes), Deadline.after(time_limit_s, self.clock)
        cramped: list[MeshProblem] = []
        found: list[Found] = []
        bounds_s: dict[tuple[int, ...], float] = {}
        said = said_of(step_problem.traced)
        for i, on_mesh in enumerate(ordered):
            shape, is_last = on_mesh.shape, i == len(on_meshes) - 1
            self.progress(f"{said}mesh {format_mesh(shape)} ({i + 1} of {len(on_meshes)})")
            before, share = self.best, 1.0 if is_last else MESH_SHARE
            left_s = share * deadline.left_s
            bounds_s[shape], is_cramped = self.improve(step_problem, on_mesh, left_s, roomy_bytes)
            cramped += [on_mesh] * is_cramped
            if self.best is not None and self.best is not before:
                found.append(self.best)
        return Plain(step_problem, on_meshes, tuple(cramped), tuple(found), bounds_s)

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

    def made_ready(self, step: Step) -> StepProblem:
        """A step that recomputes nothing, ready for all meshes."""
        step_problem = StepProblem.of(
            step, self.marks, self.cluster.device, hosted=self.hosted, clock=self.clock
        )
        self.watch.lap("graph")
        return step_problem

    def recomputing(
        self, plain: StepProblem, sites: frozenset[Site], waiting: frozenset[Site]
    ) -> StepProblem:
        """The same with something recomputed, and something waiting on the host."""
        step_problem = StepProblem.of(
            plain.traced,
            self.marks,
            self.cluster.device,
            sites,
            self.hosted,
            waiting,
            known=plain.plain,
            clock=self.clock,
        )
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
        roomy_bytes: float = 0.0,
        known: Known = UNKNOWN,
    ) -> tuple[float, bool]:
        """Looks for a better plan on one mesh; a lower bound on all of its plans that fit, and whether memory counted.

        Where there is a start on a mesh of three axes, it is content with less.
        """
        limit_bytes = self.options.memory_bytes
        is_near_enough = known.start is not None and on_mesh.shape not in self.shapes
        gap = FINER_GAP if is_near_enough else RELATIVE_GAP
        kept = on_mesh.pinned(self.pins)
        transfer_s = on_mesh.least_transfer_s(kept)  # of which the solver does not know that it may be hidden
        cutoff_s = self.cutoff_s + transfer_s
        try:
            solution, device = on_mesh.fitting(
                kept, limit_bytes, time_limit_s, cutoff_s, gap, roomy_bytes, known
            )
            self.takes(Found(step_problem, on_mesh, solution.labels, limit_bytes, device))
            return solution.bound_s, bool(solution.stats.num_rows)
        except NoFitError as e:
            return e.bound_s, e.num_rows != 0
        finally:
            self.watch.lap("solve")


def said_of(step: Step) -> str:
    """What a line of progress says first."""
    return f"{step.num_microbatches} microbatches, " if step.num_microbatches > 1 else ""
