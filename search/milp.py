"""A PBQP with memory rows as a mixed-integer program, solved through OR-Tools' MathOpt.

Variables: x[n, i] in {0, 1}, node n takes label i; y[e, a, b] >= 0, edge e runs from label class a to label class b. A
class is a set of labels with equal rows (columns) of the edge's costs: costs depend on the few specs that labels imply,
so classes are few where labels are many. Forbidden labels and pairs get no variable.

Objective: sum of cost[n, i] x[n, i] + sum of cost[e, a, b] y[e, a, b].

Constraints (the local polytope, the tightest pairwise relaxation of the graph problem):
  `_add_choices`:   sum over i of x[n, i] = 1
  `_add_edge`:      sum over b of y[e, a, b] = sum over i in a of x[u, i], and the same for v
  `_add_row`:       sum of bytes[n, i] x[n, i] <= limit - fixed

Seconds and bytes are scaled to sizes near one before the solver sees them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from search.pbqp import Edge, Labels, Problem, Row

BACKEND = mathopt.SolverType.HIGHS
"""The fastest to prove optimality on our instances (benchmarks/solvers.py)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the solver found: labels None where it has none; bound_s +inf where it proved that there are none."""

    labels: Labels | None
    bound_s: float


@dataclass(slots=True)
class _Model:
    """A MILP under construction, in coordinate form."""

    cost: list[float] = field(default_factory=list)
    num_integers: int = 0
    row_ids: list[np.ndarray] = field(default_factory=list)
    column_ids: list[np.ndarray] = field(default_factory=list)
    coefficients: list[np.ndarray] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add_variables(self, cost: np.ndarray) -> np.ndarray:
        first = len(self.cost)
        self.cost.extend(cost.tolist())
        return np.arange(first, len(self.cost))

    def add_constraint(self, columns: np.ndarray, coefficients: np.ndarray, lower: float, upper: float) -> None:
        self.row_ids.append(np.full(len(columns), len(self.lower)))
        self.column_ids.append(columns)
        self.coefficients.append(coefficients)
        self.lower.append(lower)
        self.upper.append(upper)


def solve_milp(
    problem: Problem,
    rows: Sequence[Row],
    limit_bytes: float,
    *,
    time_limit_s: float,
    relative_gap: float,
    backend: mathopt.SolverType = BACKEND,
) -> Answer:
    """Solves a merged problem under the given rows.

    Raises:
      RuntimeError: the solver failed other than by running out of time.
    """
    scale_s = _scale_s(problem)
    model, labels_of, variables_of = _build(problem, rows, limit_bytes, scale_s)
    if any(len(labels) == 0 for labels in labels_of):
        return Answer(None, np.inf)
    params = mathopt.SolveParameters(
        time_limit=timedelta(seconds=max(time_limit_s, 0.01)), relative_gap_tolerance=relative_gap
    )
    result = mathopt.solve(mathopt.Model.from_model_proto(_proto(model)), backend, params=params)
    return _answer(result, labels_of, variables_of, scale_s)


def _scale_s(problem: Problem) -> float:
    """A typical large cost: the unit in which the solver sees seconds."""
    costs = [*problem.node_cost_s, *(edge.cost_s for edge in problem.edges)]
    finite = [float(np.abs(cost[np.isfinite(cost)]).max(initial=0.0)) for cost in costs]
    return max(finite, default=0.0) or 1.0


def _build(problem: Problem, rows: Sequence[Row], limit_bytes: float, scale_s: float):
    model = _Model()
    labels_of, variables_of = [], []
    for cost in problem.node_cost_s:
        labels_of.append(np.flatnonzero(np.isfinite(cost)))
        variables_of.append(model.add_variables(cost[labels_of[-1]] / scale_s))
    model.num_integers = len(model.cost)
    _add_choices(model, variables_of)
    for edge in problem.edges:
        _add_edge(model, edge, labels_of, variables_of, scale_s)
    for row in rows:
        _add_row(model, row, limit_bytes, labels_of, variables_of)
    return model, labels_of, variables_of


def _add_choices(model: _Model, variables_of: list[np.ndarray]) -> None:
    for variables in variables_of:
        model.add_constraint(variables, np.ones(len(variables)), 1.0, 1.0)


def _add_edge(model: _Model, edge: Edge, labels_of, variables_of, scale_s: float) -> None:
    cost = edge.cost_s[np.ix_(labels_of[edge.u], labels_of[edge.v])]
    if cost.size == 0:
        return
    cost, u_class = np.unique(cost, axis=0, return_inverse=True)
    cost, v_class = np.unique(cost, axis=1, return_inverse=True)
    is_allowed = np.isfinite(cost)
    pair = np.full(cost.shape, -1)
    pair[is_allowed] = model.add_variables(cost[is_allowed] / scale_s)
    for pairs, classes, variables in ((pair, u_class, variables_of[edge.u]), (pair.T, v_class, variables_of[edge.v])):
        for index, flows in enumerate(pairs):
            flow, label = flows[flows >= 0], variables[classes == index]
            signs = np.concatenate([np.ones(len(flow)), -np.ones(len(label))])
            model.add_constraint(np.concatenate([flow, label]), signs, 0.0, 0.0)


def _add_row(model: _Model, row: Row, limit_bytes: float, labels_of, variables_of) -> None:
    scale = max(abs(limit_bytes), 1.0)
    terms = [(variables_of[node], per_label[labels_of[node]] / scale) for node, per_label in row.bytes]
    columns = np.concatenate([variables for variables, _ in terms] or [np.zeros(0, int)])
    coefficients = np.concatenate([share for _, share in terms] or [np.zeros(0)])
    model.add_constraint(columns, coefficients, -np.inf, (limit_bytes - row.fixed_bytes) / scale)


def _proto(model: _Model) -> model_pb2.ModelProto:
    num_variables, num_constraints = len(model.cost), len(model.lower)
    proto = model_pb2.ModelProto()
    proto.variables.ids.extend(range(num_variables))
    proto.variables.lower_bounds.extend([0.0] * num_variables)
    proto.variables.upper_bounds.extend([1.0] * num_variables)
    proto.variables.integers.extend(index < model.num_integers for index in range(num_variables))
    nonzero = [(index, cost) for index, cost in enumerate(model.cost) if cost]
    proto.objective.linear_coefficients.ids.extend(index for index, _ in nonzero)
    proto.objective.linear_coefficients.values.extend(cost for _, cost in nonzero)
    proto.linear_constraints.ids.extend(range(num_constraints))
    proto.linear_constraints.lower_bounds.extend(model.lower)
    proto.linear_constraints.upper_bounds.extend(model.upper)
    rows, columns = np.concatenate(model.row_ids), np.concatenate(model.column_ids)
    coefficients = np.concatenate(model.coefficients)
    order = np.lexsort((columns, rows))
    order = order[coefficients[order] != 0]
    proto.linear_constraint_matrix.row_ids.extend(rows[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(columns[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(coefficients[order].tolist())
    return proto


def _answer(result: mathopt.SolveResult, labels_of, variables_of, scale_s: float) -> Answer:
    reason = result.termination.reason
    if reason in (mathopt.TerminationReason.INFEASIBLE, mathopt.TerminationReason.INFEASIBLE_OR_UNBOUNDED):
        return Answer(None, np.inf)
    if reason in (mathopt.TerminationReason.NUMERICAL_ERROR, mathopt.TerminationReason.OTHER_ERROR):
        raise RuntimeError(f"the MILP solver stopped with {reason.name}: {result.termination.detail}")
    bound_s = result.termination.objective_bounds.dual_bound * scale_s
    if not result.has_primal_feasible_solution():
        return Answer(None, bound_s)
    values = result.variable_values()
    by_id = np.array([values[variable] for variable in sorted(values, key=lambda variable: variable.id)])
    picked = (int(labels[by_id[variables].argmax()]) for labels, variables in zip(labels_of, variables_of, strict=True))
    return Answer(tuple(picked), bound_s)
