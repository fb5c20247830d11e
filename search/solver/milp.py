"""A PBQP with memory rows as a mixed-integer program, solved through OR-Tools' MathOpt.

Variables: x[n, i] in {0, 1}, node n takes label i; y[e, a, b] >= 0, edge e runs from label class a to label
class b. A class is a set of labels with equal rows (columns) of the edge's costs: costs depend on the few
specs that labels imply, so classes are few where labels are many. Forbidden labels and pairs get no variable.

Objective: sum of cost[n, i] x[n, i] + sum of cost[e, a, b] y[e, a, b].

Constraints (the local polytope, the tightest pairwise relaxation of the graph problem):
  `_add_choices`:  sum over i of x[n, i] = 1
  `_add_edge`:     sum over b of y[e, a, b] = sum over i in a of x[u, i], and the same for v
  `add_row`:       sum of bytes[n, i] x[n, i] <= limit - fixed

`solve_peak` asks for the smallest peak instead: no costs, one variable that every row must not exceed,
minimised. Seconds and bytes are scaled to sizes near one before the solver sees them.

OR-Tools takes a while to import, so the import waits until a program is solved.
"""

# pyright: reportMissingTypeStubs=false

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.search.solver.clock import NEVER, Deadline
from autoshard.search.solver.pbqp import Edge, Labels, MemoryConstraint, Problem

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2
    from ortools.math_opt.python import mathopt

BACKEND = "HIGHS"
"""MathOpt's name of the fastest solver to prove optimality on our instances (benchmarks/solvers.py)."""
FEASIBILITY = 1e-9
"""Share of the limit by which HiGHS may overrun a row; its default, 1e-6, would be 80 kB in 80 GB."""
ENTRY_S = 3e-5
"""Nominal seconds to build and presolve each entry of a program's matrix. Source: `benchmarks/nominal_seconds.py`."""
STEP_S = 4e-8
"""Nominal seconds of a simplex step for each entry. Source: `benchmarks/nominal_seconds.py`."""
NODE_STEPS = 50
"""Assumed simplex steps a node, to turn a limit in nominal seconds into one of nodes.
Source: `benchmarks/nominal_seconds.py`."""


@dataclass(frozen=True, slots=True)
class MilpResult:
    """The solver's result: labels are None if it found no assignment; the bound is +inf if it proved that there is none."""

    labels: Labels | None
    bound: float


def solve_milp(
    problem: Problem,
    rows: Sequence[MemoryConstraint],
    limit_bytes: float,
    *,
    relative_gap: float,
    deadline: Deadline = NEVER,
    backend: str = BACKEND,
) -> MilpResult:
    """The cheapest assignment of a merged problem under the given rows; the bound is on its cost, in seconds.

    Raises:
      RuntimeError: the solver failed other than by running out of time.
    """
    program = _Program(problem, _scale_s(problem))
    for row in rows:
        program.add_row(row, limit_bytes, max(limit_bytes, 1.0))
    return program.solve(deadline, relative_gap, backend)


def solve_peak(
    problem: Problem,
    rows: Sequence[MemoryConstraint],
    limit_bytes: float,
    *,
    relative_gap: float,
    deadline: Deadline = NEVER,
) -> MilpResult:
    """The allowed assignment with the smallest largest row; the bound is on that row, in bytes.

    Args:
      problem: merged.
      rows: the memory rows to consider.
      limit_bytes: the unit; a peak below it counts as equal to it.
    """
    free = free_of_cost(problem)
    forbidding = tuple(edge for edge in free.edges if edge.cost_s.any())
    program = _Program(Problem(free.node_cost_s, forbidding), limit_bytes)
    program.add_peak()
    for row in rows:
        program.add_row(row, 0.0, limit_bytes)
    return program.solve(deadline, relative_gap, BACKEND)


def _scale_s(problem: Problem) -> float:
    """A typical large cost: the unit in which the solver sees seconds."""
    costs = [*problem.node_cost_s, *(edge.cost_s for edge in problem.edges)]
    finite = [float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0)) for cost in costs]
    return max(finite, default=0.0) or 1.0


def free_of_cost(problem: Problem) -> Problem:
    """The problem with all finite costs zero: only its forbidden labels and pairs remain."""
    nodes = tuple(np.where(np.isfinite(cost), 0.0, np.inf) for cost in problem.node_cost_s)
    edges = (Edge(e.u, e.v, np.where(np.isfinite(e.cost_s), 0.0, np.inf)) for e in problem.edges)
    return Problem(nodes, tuple(edges))


def _limit(num_entries: int, deadline: Deadline) -> dict[str, Any]:
    """The solver's limit: seconds, or nodes if the clock counts work. The first node has no limit."""
    if deadline.left_s == np.inf:
        return {}
    if deadline.clock.counts_work:
        return {"node_limit": max(1, int(deadline.left_s / (NODE_STEPS * STEP_S * num_entries)))}
    return {"time_limit": timedelta(seconds=max(deadline.left_s, 0.01))}


class _Program:
    """A mixed-integer program under construction, in coordinate form."""

    def __init__(self, problem: Problem, unit: float) -> None:
        self.unit = unit
        self.cost: list[float] = []
        self.entries: list[tuple[np.ndarray, np.ndarray]] = []
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.peak: np.ndarray | None = None
        self.labels = [np.flatnonzero(np.isfinite(cost)) for cost in problem.node_cost_s]
        self.choices = [
            self._add_variables(cost[labels] / unit)
            for cost, labels in zip(problem.node_cost_s, self.labels, strict=True)
        ]
        self.num_integers = len(self.cost)
        self._add_choices()
        for edge in problem.edges:
            self._add_edge(edge)

    def add_row(self, row: MemoryConstraint, limit_bytes: float, unit_bytes: float) -> None:
        terms = [
            (self.choices[node], per_label[self.labels[node]] / unit_bytes) for node, per_label in row.bytes
        ]
        if self.peak is not None:
            terms.append((self.peak, np.array([-1.0])))
        columns = np.concatenate([variables for variables, _ in terms] or [np.zeros(0, int)])
        coefficients = np.concatenate([share for _, share in terms] or [np.zeros(0)])
        self._add_constraint(columns, coefficients, -np.inf, (limit_bytes - row.fixed_bytes) / unit_bytes)

    def add_peak(self) -> None:
        """Adds the peak: a variable, at least one unit (the limit), that no later row may exceed."""
        self.peak = self._add_variables(np.ones(1))

    def solve(self, deadline: Deadline, relative_gap: float, backend: str) -> MilpResult:
        if not all(len(labels) for labels in self.labels):
            return MilpResult(None, np.inf)
        from ortools.math_opt.python import mathopt

        num_entries = sum(len(columns) for columns, _ in self.entries)
        params = mathopt.SolveParameters(relative_gap_tolerance=relative_gap, **_limit(num_entries, deadline))
        if backend == "HIGHS":
            params.highs.double_options["mip_feasibility_tolerance"] = FEASIBILITY
            params.highs.double_options["primal_feasibility_tolerance"] = FEASIBILITY
        model = mathopt.Model.from_model_proto(self._proto())
        result = mathopt.solve(model, mathopt.SolverType[backend], params=params)
        deadline.clock.spend(num_entries * (ENTRY_S + STEP_S * result.solve_stats.simplex_iterations))
        return self._answer(result)

    def _add_variables(self, cost: np.ndarray) -> np.ndarray:
        first = len(self.cost)
        self.cost.extend(cost.tolist())
        return np.arange(first, len(self.cost))

    def _add_constraint(
        self, columns: np.ndarray, coefficients: np.ndarray, lower: float, upper: float
    ) -> None:
        self.entries.append((columns, coefficients))
        self.lower.append(lower)
        self.upper.append(upper)

    def _add_choices(self) -> None:
        for variables in self.choices:
            self._add_constraint(variables, np.ones(len(variables)), 1.0, 1.0)

    def _add_edge(self, edge: Edge) -> None:
        cost = edge.cost_s[np.ix_(self.labels[edge.u], self.labels[edge.v])]
        if cost.size == 0:
            return
        cost, u_class = np.unique(cost, axis=0, return_inverse=True)
        cost, v_class = np.unique(cost, axis=1, return_inverse=True)
        is_allowed = np.isfinite(cost)
        flow = np.full(cost.shape, -1)
        flow[is_allowed] = self._add_variables(cost[is_allowed] / self.unit)
        self._add_flow(flow, u_class, self.choices[edge.u])
        self._add_flow(flow.T, v_class, self.choices[edge.v])

    def _add_flow(self, flow: np.ndarray, classes: np.ndarray, choices: np.ndarray) -> None:
        """For each class of labels, the sum of its edge variables equals the sum of its labels' variables."""
        for index, out in enumerate(flow):
            leaving, chosen = out[out >= 0], choices[classes == index]
            signs = np.concatenate([np.ones(len(leaving)), -np.ones(len(chosen))])
            self._add_constraint(np.concatenate([leaving, chosen]), signs, 0.0, 0.0)

    def _proto(self) -> "model_pb2.ModelProto":
        from ortools.math_opt import model_pb2

        proto, num = model_pb2.ModelProto(), len(self.cost)
        peak = None if self.peak is None else int(self.peak[0])
        proto.variables.ids.extend(range(num))
        proto.variables.lower_bounds.extend(1.0 if index == peak else 0.0 for index in range(num))
        proto.variables.upper_bounds.extend(np.inf if index == peak else 1.0 for index in range(num))
        proto.variables.integers.extend(index < self.num_integers for index in range(num))
        proto.objective.linear_coefficients.ids.extend(range(num))
        proto.objective.linear_coefficients.values.extend(self.cost)
        proto.linear_constraints.ids.extend(range(len(self.lower)))
        proto.linear_constraints.lower_bounds.extend(self.lower)
        proto.linear_constraints.upper_bounds.extend(self.upper)
        for row, (columns, coefficients) in enumerate(self.entries):
            order = np.argsort(columns)
            order = order[coefficients[order] != 0]
            proto.linear_constraint_matrix.row_ids.extend([row] * len(order))
            proto.linear_constraint_matrix.column_ids.extend(columns[order].tolist())
            proto.linear_constraint_matrix.coefficients.extend(coefficients[order].tolist())
        return proto

    def _answer(self, result: "mathopt.SolveResult") -> MilpResult:
        reason = result.termination.reason.name
        if reason in ("INFEASIBLE", "INFEASIBLE_OR_UNBOUNDED"):
            return MilpResult(None, np.inf)
        if reason in ("NUMERICAL_ERROR", "OTHER_ERROR"):
            raise RuntimeError(f"the MILP solver stopped with {reason}: {result.termination.detail}")
        bound = result.termination.objective_bounds.dual_bound * self.unit
        if not result.has_primal_feasible_solution():
            return MilpResult(None, bound)
        values = result.variable_values()
        by_id = np.array([values[variable] for variable in sorted(values, key=lambda variable: variable.id)])
        picked = (
            labels[by_id[choices].argmax()] for labels, choices in zip(self.labels, self.choices, strict=True)
        )
        return MilpResult(tuple(map(int, picked)), bound)
