"""A step made ready for the search, and the solution of one mesh.

A `StepProblem` is all that does not depend on the mesh: the flat program, its op classes and groups, the strategy graph and
the live ranges. `on` puts it on a mesh: a `MeshProblem`, whose `fitting` finds the cheapest strategies that fit there.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic
from typing import Any

import numpy as np

from cost_model.cluster import Cluster, Device
from cost_model.collectives import MeshModel
from cost_model.errors import InputError
from cost_model.meshes import mesh_shapes
from search.device.prediction import Prediction, predict
from search.ir.graph import Step
from search.ir.spec import AXIS_NAMES, from_partition_spec
from search.plan.decisions import DecisionCodec, allowed_by_pins
from search.problem.costs import price
from search.problem.fingerprint import fingerprint
from search.problem.flat_program import flatten
from search.problem.folding import fold, separate
from search.problem.fusion import Fusion, expensive_itemsize
from search.problem.kernels import Kernels, kernels
from search.problem.live_ranges import LiveRange, LiveRanges
from search.problem.memory_rows import Memory
from search.problem.op_groups import op_groups
from search.problem.reshard import Resharder
from search.problem.strategy_graph import StrategyGraph, strategy_graph
from search.solver import branch_and_bound
from search.solver.pbqp import Problem

DEFAULT_TIME_LIMIT_S = 15.0
"""Seconds for all meshes together; what is not proven by then is stated as the plan's gap."""

RELATIVE_GAP = 5e-3
"""Plans within this of the optimum are taken for optimal: the cost model is not finer."""

MAX_TIGHTENINGS = 10
"""How often the solver is told that its plan does not fit. Source: a choice of ours; once is enough as a rule."""

MAX_ROWS_ALONE = 5
"""How often by a row, without a lower limit. Source: a choice of ours."""

BLIND = 1.1
"""From which share of the limit on the rows are taken to miss something. Source: a choice of ours."""

MARGIN = 2e-3
"""By how much more than needed it is lowered. Source: a choice of ours, as peaks come in steps."""

MIN_TIME_S = 0.5
"""Seconds that the solver gets in any case."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Options:
    """What a search is asked for.

    Attributes:
      memory_bytes: the cap per device.
      mesh: sizes of the mesh axes, outermost first; None to search it.
      pins: the `PartitionSpec` in which an argument must rest, by its pytree path.
      time_limit_s: seconds for the solver.
    """

    memory_bytes: int
    mesh: tuple[int, ...] | None = None
    pins: Mapping[str, Any] | None = None
    time_limit_s: float = DEFAULT_TIME_LIMIT_S

    def __post_init__(self) -> None:
        if self.memory_bytes <= 0 or not self.time_limit_s > 0:
            raise InputError(
                f"the memory cap and the time limit must be positive, got {self.memory_bytes} bytes and "
                f"{self.time_limit_s} s"
            )


@dataclass(frozen=True, eq=False)
class StepProblem:
    """All that does not depend on the mesh."""

    graph: StrategyGraph
    kernels: Kernels
    live_ranges: LiveRanges
    items: tuple[LiveRange, ...]
    fingerprint: str

    @classmethod
    def of(
        cls, step: Step, marks: Sequence[str], device: Device, decided: Sequence[Any] = ()
    ) -> "StepProblem":
        """Makes a step ready for a device.

        Args:
          step: the traced step.
          marks: per argument, what keeps it and the ops around it apart from others: its pin.
          device: what it will run on.
          decided: per argument, what is decided of it: those that differ are taken apart, no op is.
        """
        program = flatten(step)
        folded = fold(program, marks)
        folded = separate(folded, decided) if decided else folded
        groups = op_groups(folded)
        fusion, graph = Fusion(folded, expensive_itemsize(device)), strategy_graph(folded, groups)
        live_ranges = LiveRanges(graph, fusion)
        return cls(graph, kernels(fusion, groups), live_ranges, live_ranges.items(), fingerprint(program))

    @property
    def step(self) -> Step:
        """The traced step."""
        return self.graph.folded.program.step

    def on(self, cluster: Cluster, shape: tuple[int, ...]) -> "MeshProblem":
        """The problem on one mesh."""
        costed = price(self.graph, self.kernels, Resharder(MeshModel(cluster, shape)))
        return MeshProblem(
            Memory(costed, self.items), self.live_ranges, costed.problem(), DecisionCodec(costed)
        )


@dataclass(frozen=True, eq=False)
class MeshProblem:
    """The problem on one mesh: its memory, its costs, its words."""

    memory: Memory
    live_ranges: LiveRanges
    problem: Problem
    codec: DecisionCodec

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.memory.costed.resharder.mesh.shape

    def pinned(self, pins: Mapping[str, Any]) -> tuple[np.ndarray, ...]:
        """Per node: the strategies that the pins leave."""
        kept = [np.arange(n) for n in self.problem.num_labels]
        specs = {name: from_partition_spec(spec, self.codec.axis_names) for name, spec in pins.items()}
        for node, chosen in allowed_by_pins(self.codec, specs).items():
            kept[node] = chosen
        return tuple(kept)

    def fitting(
        self, kept: Sequence[np.ndarray], limit_bytes: int, time_limit_s: float, cutoff_s: float = np.inf
    ) -> tuple[branch_and_bound.Solution, Prediction]:
        """The cheapest of the kept strategies that fit, as the kernels of a device tell.

        The solver's rows are linear in the strategies; what kernels hold is not. Where they hold a little more than the
        limit, the solver gets a lower one; where much more, its rows are blind to something, and it gets one that sees it.

        Raises:
          NoFitError: nothing fits and costs less than the cutoff.
        """
        end_s, solver_limit_bytes, rows = monotonic() + time_limit_s, float(limit_bytes), []
        for n in range(MAX_TIGHTENINGS):
            left_s = max(end_s - monotonic(), MIN_TIME_S)
            solution = self.solve(kept, int(solver_limit_bytes), left_s, cutoff_s, rows)
            found = self.predicted(solution.labels, limit_bytes)
            if found.least.num_bytes <= limit_bytes:
                return solution, found
            over = found.least.num_bytes / limit_bytes
            if over > BLIND and n < MAX_ROWS_ALONE:
                rows.append(self.memory.row_of(found.least, solution.labels))
            else:
                highest_bytes = self.memory.peak(solution.labels).num_bytes
                solver_limit_bytes = min(solver_limit_bytes, highest_bytes) / over * (1 - MARGIN)
        raise branch_and_bound.NoFitError(f"nothing was found that fits {limit_bytes} bytes", is_proven=False)

    def predicted(self, chosen: Sequence[int], limit_bytes: float) -> Prediction:
        """A step on one device under full strategies."""
        return predict(self.memory.costed, self.live_ranges, chosen, limit_bytes)

    def solve(
        self,
        kept: Sequence[np.ndarray],
        limit_bytes: int,
        time_limit_s: float,
        cutoff_s: float = np.inf,
        rows: Sequence[branch_and_bound.MemoryConstraint] = (),
    ) -> branch_and_bound.Solution:
        """The cheapest of the kept strategies that fit, in the original numbering.

        Raises:
          NoFitError: nothing fits and costs less than the cutoff.
        """
        solution = branch_and_bound.solve(
            self._restricted(kept),
            limit_bytes=float(limit_bytes),
            rows=[_kept_of(row, kept) for row in rows],
            violated=self._violated(kept, limit_bytes),
            time_limit_s=time_limit_s,
            relative_gap=RELATIVE_GAP,
            cutoff_s=cutoff_s,
        )
        return replace(solution, labels=_original(kept, solution.labels))

    def smallest_peak(
        self, kept: Sequence[np.ndarray], limit_bytes: int, time_limit_s: float, cutoff_bytes: float = np.inf
    ) -> tuple[int, ...]:
        """The kept strategies whose peak is smallest, costs aside.

        Raises:
          NoFitError: the kept strategies contradict one another, or no peak below the cutoff was found.
        """
        seen: dict[tuple[int, ...], float] = {}
        rows = []
        for _ in range(MAX_ROWS_ALONE):
            found = branch_and_bound.minimise_peak(
                self._restricted(kept),
                limit_bytes=float(limit_bytes),
                rows=[_kept_of(row, kept) for row in rows],
                violated=self._violated(kept, limit_bytes),
                time_limit_s=time_limit_s / MAX_ROWS_ALONE,
            )
            chosen = _original(kept, found.labels)
            if chosen in seen or found.peak_bytes >= cutoff_bytes:
                break
            least = self.predicted(chosen, 0.0).least
            seen[chosen] = least.num_bytes
            rows.append(self.memory.row_of(least, chosen))
        if not seen:
            raise branch_and_bound.NoFitError(
                f"no peak below {cutoff_bytes} bytes was found", is_proven=False
            )
        return min(seen, key=lambda chosen: (seen[chosen], chosen))

    def _restricted(self, kept: Sequence[np.ndarray]) -> Problem:
        nodes = tuple(cost[k] for cost, k in zip(self.problem.node_cost_s, kept, strict=True))
        edges = tuple(
            branch_and_bound.Edge(e.u, e.v, e.cost_s[np.ix_(kept[e.u], kept[e.v])])
            for e in self.problem.edges
        )
        return Problem(nodes, edges)

    def _violated(self, kept: Sequence[np.ndarray], limit_bytes: int):
        def violated(chosen: Sequence[int]) -> tuple[branch_and_bound.MemoryConstraint, ...]:
            rows = self.memory.rows_over(_original(kept, chosen), limit_bytes)
            return tuple(_kept_of(row, kept) for row in rows)

        return violated


def _kept_of(
    row: branch_and_bound.MemoryConstraint, kept: Sequence[np.ndarray]
) -> branch_and_bound.MemoryConstraint:
    return branch_and_bound.MemoryConstraint(
        row.name, tuple((n, b[kept[n]]) for n, b in row.bytes), row.fixed_bytes
    )


def _original(kept: Sequence[np.ndarray], chosen: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(k[label]) for k, label in zip(kept, chosen, strict=True))


def candidate_shapes(cluster: Cluster, options: Options) -> tuple[tuple[int, ...], ...]:
    """The meshes to try.

    Raises:
      InputError: the mesh that is asked for does not suit the cluster, or no mesh has the axes that the pins
        name.
    """
    if options.mesh is None:
        shapes = mesh_shapes(cluster, max_axes=2)
        named = {a for spec in (options.pins or {}).values() for a in _axes_of(spec)}
        shapes = tuple(s for s in shapes if named <= set(AXIS_NAMES[len(s)]))
        if not shapes:
            raise InputError(
                f"no mesh has all the axes that the pins name: {sorted(named)}; axes are {AXIS_NAMES}"
            )
        return shapes
    if len(options.mesh) not in AXIS_NAMES or min(options.mesh) < 1:
        raise InputError(f"wanted a mesh of 1 to 3 axes of positive size, got {options.mesh}")
    if int(np.prod(options.mesh)) != cluster.num_devices:
        raise InputError(
            f"the mesh {options.mesh} has {int(np.prod(options.mesh))} devices, the cluster {cluster.name} has "
            f"{cluster.num_devices}"
        )
    return (tuple(options.mesh),)


def _axes_of(spec: Any) -> set[str]:
    return {
        a for entry in spec if entry is not None for a in (entry if isinstance(entry, tuple) else (entry,))
    }
