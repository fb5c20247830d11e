"""Memory rows as prices: the Lagrangian relaxation of a PBQP with rows.

Charge every byte of a row a price instead of limiting the row: seconds a byte, a price a row. The result is a
PBQP without rows. Its bound (`search.solver.trws`), less the price of the bytes that the limit allows, bounds
every assignment that fits. The best prices maximise that bound. It is concave in the prices, and every
assignment x ever seen is a plane above it:

    bound(prices) <= cost(x) + sum over rows of price[row] * overflow(x, row)

`Relaxation.next_prices` maximises the lowest of these planes (Kelley's cutting planes, a tiny linear program)
and goes half-way from the best prices so far towards that maximum (the in-out stabilisation of Ben-Ameur and
Neto, 2007). The linear program's dual is a *fractional solution*: weights of assignments that fit on average. The search
branches on the node where its members disagree about most memory. Prices change node costs only, so the messages of one
pricing are a warm start for the next. The start is the last pricing or the best so far, whichever has the nearer prices:
messages are slow to forget prices that were far off, as the first prices always are.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from autoshard.search.solver.clock import PROCESSOR, SearchClock
from autoshard.search.solver.flat import Flat, flat_bytes, flat_cost_s
from autoshard.search.solver.pbqp import Labels, MemoryConstraint, Problem
from autoshard.search.solver.trws import Trws

if TYPE_CHECKING:
    from ortools.math_opt import model_pb2

INTERIOR = 0.5
"""Weight of the best prices so far in the next prices; the rest is the weight of the planes' best prices."""
MAX_RISE = 4.0
"""A pricing raises a price to at most this multiple of its best value, plus the price at which memory as large as the limit
costs as much as the most expensive assignment seen."""
MIN_WEIGHT = 1e-6
"""Least weight of an assignment in a fractional solution; a smaller one is the linear solver's rounding."""

TIE = 1e-3
"""Weight of a node's whole range of priced bytes beside its spread in the fractional solution: it decides if the solution's
members agree."""

PRICING_S = 1e-3
"""Nominal seconds of a linear program for prices. Source: `benchmarks/nominal_seconds.py`."""


@dataclass(slots=True, eq=False)
class CuttingPlanes:
    """Assignments seen, with their costs and overflows; shared by all branches.

    Attributes:
      rows: the priced rows, in order of arrival; the list grows.
      clock: counts the time spent on prices.
    """

    problem: Flat
    limit_bytes: float
    clock: SearchClock = PROCESSOR
    rows: list[MemoryConstraint] = field(default_factory=list[MemoryConstraint], init=False)
    seen: dict[Labels, tuple[float, list[float]]] = field(
        default_factory=dict[Labels, tuple[float, list[float]]], init=False
    )
    _bytes: list[np.ndarray] = field(default_factory=list[np.ndarray], init=False)

    @property
    def unit_bytes(self) -> float:
        """The linear program's unit of bytes."""
        return max(self.limit_bytes, 1.0)

    def add_row(self, row: MemoryConstraint) -> None:
        self.rows.append(row)
        self._bytes.append(flat_bytes(row, self.problem.places))
        for labels, (_, overflow) in self.seen.items():
            overflow.append(self._overflow(len(self.rows) - 1, self._at(labels)))

    def of(self, labels: Labels, cost_s: float | None = None) -> tuple[float, list[float]]:
        """An assignment's cost (`cost_s`, if known) and, per row, bytes over the limit (negative: room left)."""
        if labels not in self.seen:
            at = self._at(labels)
            overflow = [self._overflow(row, at) for row in range(len(self.rows))]
            self.seen[labels] = flat_cost_s(self.problem, labels) if cost_s is None else cost_s, overflow
        return self.seen[labels]

    def _at(self, labels: Labels) -> np.ndarray:
        """[nodes]: the places of labels among the labels of all nodes."""
        return self.problem.places.labels[:-1] + np.array(labels, int)

    def _overflow(self, row: int, at: np.ndarray) -> float:
        return float(self._bytes[row][at].sum()) + self.rows[row].fixed_bytes - self.limit_bytes

    def fits(self, labels: Labels) -> bool:
        """True if an assignment overflows none of the known rows."""
        return max(self.of(labels)[1], default=0.0) <= 0

    def within(self, kept: list[np.ndarray]) -> list[Labels]:
        """The assignments seen that have a finite cost and only kept labels."""
        finite = [labels for labels, (cost, _) in self.seen.items() if np.isfinite(cost)]
        table = np.array(finite, int).reshape(len(finite), len(kept))
        is_within = np.ones(len(finite), bool)
        for node, (labels, num) in enumerate(zip(kept, np.diff(self.problem.places.labels), strict=True)):
            allowed = np.zeros(num, bool)
            allowed[labels] = True
            is_within &= allowed[table[:, node]]
        return [labels for labels, is_in in zip(finite, is_within, strict=True) if is_in]


@dataclass(slots=True, eq=False)
class Relaxation:
    """The priced problem on the kept labels; mutable.

    Attributes:
      trws: the reparametrised costs, prices included.
      planes: shared with other branches.
      prices_s: the present prices, seconds a byte, one a row.
      best_prices_s: the prices of the highest bound so far.
      best_bound_s: the highest bound so far.
      best_trws: the reparametrised costs that gave the highest bound.
      fractional: (weight, assignment) of the last `next_prices`.
    """

    planes: CuttingPlanes
    trws: Trws
    prices_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    best_prices_s: np.ndarray = field(default_factory=lambda: np.zeros(0))
    best_bound_s: float = -np.inf
    fractional: tuple[tuple[float, Labels], ...] = ()
    best_trws: Trws = field(init=False)

    def __post_init__(self) -> None:
        self.best_trws = self.trws.copy()

    def branch(self, node: int, mask: np.ndarray) -> "Relaxation":
        """A copy that restricts a node to the kept labels in the mask."""
        trws = self.trws.copy()
        trws.keep([mask if index == node else np.ones(len(k), bool) for index, k in enumerate(trws.kept)])
        part = Relaxation(
            self.planes, trws, self.prices_s, self.best_prices_s, self.best_bound_s, self.fractional
        )
        part.best_trws = self.best_trws
        return part

    def branching_node(self) -> tuple[int, np.ndarray]:
        """The node on whose priced bytes the fractional solution disagrees most, and the mask of its lighter labels."""
        kept = self.trws.kept
        priced = self._priced_bytes()
        weights = np.array([weight for weight, _ in self.fractional])
        members = [self.trws.renumbered(labels) for _, labels in self.fractional]
        spread = np.zeros(len(kept))
        for node, cost in enumerate(priced):
            if np.ptp(cost):
                at = np.array([cost[min(labels[node], len(cost) - 1)] for labels in members])
                mean = np.dot(weights, at) / weights.sum() if members else 0.0
                spread[node] = np.ptp(cost) * TIE + (
                    np.sqrt(np.dot(weights, (at - mean) ** 2)) if members else 0.0
                )
        if spread.any():
            node = int(spread.argmax())
            return node, priced[node] <= (priced[node].min() + priced[node].max()) / 2
        node = int(np.argmax([len(labels) for labels in kept]))
        return node, np.arange(len(kept[node])) < len(kept[node]) // 2

    def _priced_bytes(self) -> list[np.ndarray]:
        """Per node and kept label, the price of its bytes."""
        kept = self.trws.kept
        priced = [np.zeros(len(labels)) for labels in kept]
        for price, row in zip(self.best_prices_s, self.planes.rows, strict=False):
            for node, per_label in row.bytes if price else ():
                priced[node] = priced[node] + price * per_label[kept[node]]
        return priced

    def run(self, num_sweeps: int) -> tuple[float, Labels]:
        """Sweeps at the present prices: a bound on fitting assignments, and the best priced assignment met."""
        self._meet_new_rows()
        return self.take_note([self.trws.sweep() for _ in range(num_sweeps)])

    def take_note(self, swept: Sequence[tuple[float, Labels]]) -> tuple[float, Labels]:
        """Records finished sweeps at the present prices: a bound on fitting assignments, and the best assignment met."""
        bound = max(bound for bound, _ in swept) - self.allowance_s
        self._raise_bound(bound)
        return bound, min((labels for _, labels in swept), key=self.priced_s)

    def priced(self) -> Problem:
        """The problem on the kept labels, at the present prices."""
        self._meet_new_rows()
        rest, kept = self.trws.rest(), self.trws.kept
        costs = list(rest.node_cost_s)
        for price, row in zip(self.prices_s, self.planes.rows, strict=True):
            for node, per_label in row.bytes if price else ():
                costs[node] = costs[node] + price * per_label[kept[node]]
        return Problem(tuple(costs), rest.edges)

    def close(self, priced_s: float) -> None:
        """Records the smallest cost of the priced problem, or a lower bound on it."""
        self._raise_bound(priced_s - self.allowance_s)

    def set_prices(self, prices_s: np.ndarray) -> None:
        """Changes the prices; messages start from the present or the best prices, whichever are nearer."""
        self._meet_new_rows()
        if np.abs(prices_s - self.best_prices_s).sum() < np.abs(prices_s - self.prices_s).sum():
            self._return_to_best()
        for change, row in zip(prices_s - self.prices_s, self.planes.rows, strict=True):
            if change:
                for node, per_label in row.bytes:
                    self.trws.add(node, change * per_label)
        self.prices_s = prices_s

    def label_bounds(self) -> list[np.ndarray]:
        """Per node and kept label: a lower bound on every fitting assignment that uses it."""
        allowance = self.allowance_s
        return [bound - allowance for bound in self.trws.label_bounds()]

    def next_prices(self) -> np.ndarray:
        """The prices to try next; sets the fractional solution."""
        self._meet_new_rows()
        scale, seen = self.planes.unit_bytes, self.planes.within(self.trws.kept)
        if not seen:
            return self.best_prices_s
        self.planes.clock.spend(PRICING_S)
        whole_s = (
            max(abs(self.planes.of(labels)[0]) for labels in seen) or 1.0
        )  # if all assignments seen cost nothing, any positive price works
        planes = [(cost, np.array(overflow) / scale) for cost, overflow in map(self.planes.of, seen)]
        solved = _highest_bound(planes, MAX_RISE * self.best_prices_s * scale + whole_s)
        if solved is None:
            return self.best_prices_s
        prices, weights = solved
        self.fractional = tuple(
            (float(w), labels) for w, labels in zip(weights, seen, strict=True) if w > MIN_WEIGHT
        )
        return INTERIOR * self.best_prices_s + (1 - INTERIOR) * (prices / scale)

    def _return_to_best(self) -> None:
        """Goes back to the prices and messages of the best bound, on the labels that are still kept."""
        trws = self.best_trws.copy()
        trws.keep([np.isin(before, left) for before, left in zip(trws.kept, self.trws.kept, strict=True)])
        self.trws, self.prices_s = trws, self.best_prices_s

    def _raise_bound(self, bound_s: float) -> None:
        if bound_s > self.best_bound_s:
            self.best_bound_s, self.best_prices_s, self.best_trws = bound_s, self.prices_s, self.trws.copy()

    def _meet_new_rows(self) -> None:
        missing = np.zeros(len(self.planes.rows) - len(self.prices_s))
        self.prices_s = np.append(self.prices_s, missing)
        self.best_prices_s = np.append(self.best_prices_s, missing)

    @property
    def allowance_s(self) -> float:
        """The cost, at the present prices, of the bytes that the limit allows."""
        rows = zip(self.prices_s, self.planes.rows, strict=False)
        return float(sum(price * (self.planes.limit_bytes - row.fixed_bytes) for price, row in rows if price))

    def least_priced_s(self) -> float:
        """The least priced cost, less the allowance, of the assignments seen that have only kept labels."""
        self._meet_new_rows()
        return min(map(self.priced_s, self.planes.within(self.trws.kept)), default=np.inf)

    def priced_s(self, labels: Labels) -> float:
        cost, overflow = self.planes.of(labels)
        return cost + float(np.dot(self.prices_s, overflow))


def _highest_bound(
    planes: Sequence[tuple[float, np.ndarray]], max_prices: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """The prices that maximise the lowest plane, `cost + prices @ overflow`, and each plane's weight (the dual solution);
    None if the linear solver fails."""
    from ortools.math_opt.python import mathopt  # it takes a while to import

    model = mathopt.Model.from_model_proto(_program(planes, max_prices))
    result = mathopt.solve(model, mathopt.SolverType.GLOP)
    if result.termination.reason != mathopt.TerminationReason.OPTIMAL:
        return None
    _, *prices = sorted(model.variables(), key=lambda variable: variable.id)
    held = sorted(model.linear_constraints(), key=lambda constraint: constraint.id)
    return np.array(result.variable_values(prices)), np.abs(result.dual_values(held))


def _program(planes: Sequence[tuple[float, np.ndarray]], max_prices: np.ndarray) -> "model_pb2.ModelProto":
    """Maximise the bound, variable 0, such that `bound - prices @ overflow <= cost` in each plane. Arrays make the program
    in a fifth of the time that Python's expressions take."""
    from ortools.math_opt import model_pb2

    program, num_prices = model_pb2.ModelProto(), len(max_prices)
    variables, constraints, matrix = (
        program.variables,
        program.linear_constraints,
        program.linear_constraint_matrix,
    )
    variables.ids.extend(range(1 + num_prices))
    variables.lower_bounds.extend([-np.inf] + num_prices * [0.0])
    variables.upper_bounds.extend([np.inf, *max_prices.tolist()])
    variables.integers.extend((1 + num_prices) * [False])
    program.objective.maximize = True
    program.objective.linear_coefficients.ids.append(0)
    program.objective.linear_coefficients.values.append(1.0)
    constraints.ids.extend(range(len(planes)))
    constraints.lower_bounds.extend(len(planes) * [-np.inf])
    constraints.upper_bounds.extend(cost for cost, _ in planes)
    coefficients = np.array([[1.0, *-overflow] for _, overflow in planes])
    rows, columns = np.nonzero(coefficients)
    matrix.row_ids.extend(rows.tolist())
    matrix.column_ids.extend(columns.tolist())
    matrix.coefficients.extend(coefficients[rows, columns].tolist())
    return program
