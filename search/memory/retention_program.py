"""The cheapest sequence under a budget as an integer program over stages, with memory rows added when they are violated.

*Stage* t lies between the first computation of node t - 1 and that of node t, and ends with the latter. (With several runs,
each stage is several, of which the last computes t.) Variables, for stage t and a node v that was computed before:

    R[t, v]  v is recomputed in stage t
    S[t, v]  v is in memory when stage t begins

Objective: sum of cost[v] R[t, v]. Constraints (Jain et al. 2020, section 4; `_add_stage`):

    S[t, v] <= S[t-1, v] + R[t-1, v]             a value in memory was there before, or was recomputed
    R[t, v] <= S[t, u] + R[t, u]    for u -> v   operands are in memory; for v = t too, where R is 1
    S[t, v] + R[t, v] <= 1                       a value dropped and recomputed in one stage counts as the latter
    R[t, v], S[t, v] <= S[t+1, v] + sum of R[t, w] over readers w: every value in memory has a use

Memory while v is computed in stage t, for each event (t, v), v = t included (`add_row`):

    sum over u < v of size[u] A[t, v, u]  +  size[v] R[t, v]  +  sum over u > v of size[u] S[t, u]  <=  budget

where A[t, v, u] = S[t+1, u] or R[t, w] for any reader w >= v of u: in a run nodes are computed in ascending order, and u is
in memory until its last reader, or for the next stage. Where R[t, v] = 0 the row follows from the next event's.

In the rows of the events (t, t), every A is an S or a constant. These rows hold for any order of computation inside a stage:
with them alone the program is a relaxation over all sequences. Other rows are added when a solution violates them. Under
budgets of 80% or 90% of the peak, training graphs need none or a few of the n^2 / 2 rows. So the linear relaxation, which
gives the bound, stays small. Moccasin (Bartan et al. 2023) needs only O(n) integers, the ends of the intervals in which
copies are retained; the booleans are here for the sake of that relaxation.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoshard.search.memory.value_graph import ValueGraph

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

SEED = 0
"""The solver's seed, so that one program always gives one answer."""
LEAST_SOLVE_S = 0.1
"""Least time of a solve, even if time is up, so that the solver can at least look at its hint."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one solve.

    Attributes:
      events: the best solution: stages and the nodes that they compute, in order; None if there is none, or none was found
        in
        time.
      bound: no solution of the program's rows costs less; infinite if there is none.
      is_finished: whether the solver finished.
    """

    events: tuple[tuple[int, int], ...] | None
    bound: float
    is_finished: bool

    @property
    def sequence(self) -> tuple[int, ...] | None:
        """The nodes of the events."""
        return None if self.events is None else tuple(v for _, v in self.events)


@dataclass(frozen=True, slots=True)
class Stage:
    """Nodes below `end` may be recomputed; then node `end` is computed, if this is the last of its stages."""

    end: int
    is_last: bool


class RetentionProgram:
    """A program under construction; rows are added between solves.

    Args:
      graph: its costs are whole numbers.
      budget: the most memory; None to minimise memory instead of the cost.
      num_runs: runs of recomputation, in ascending order, between two first computations.
    """

    def __init__(self, graph: ValueGraph, budget: int | None, num_runs: int = 1) -> None:
        from ortools.sat.python import cp_model  # it takes a while to import

        self._graph, self._operands, self._readers = graph, graph.operands(), graph.readers()
        self._last_use = graph.last_uses()
        self._model = cp_model.CpModel()
        self.stages = tuple(
            Stage(end, run == num_runs - 1) for end in range(len(graph)) for run in range(num_runs)
        )
        self._kept: list[dict[int, cp_model.IntVar]] = []
        self._again: list[dict[int, cp_model.IntVar]] = []
        for stage in self.stages:
            useful = [v for v in range(stage.end) if self._last_use[v] >= stage.end]
            pairs = {v: (self._model.new_bool_var(""), self._model.new_bool_var("")) for v in useful}
            self._kept.append({v: kept for v, (kept, _) in pairs.items()})
            self._again.append({v: again for v, (_, again) in pairs.items()})
        self._kept.append({})
        self._alive: dict[tuple[int, int, int], cp_model.LiteralT | None] = {}
        self._rows: set[tuple[int, int]] = set()
        for j in range(len(self.stages)):
            self._add_stage(j)
        self._limit = self._add_objective(budget)
        for j, stage in enumerate(self.stages):
            if stage.is_last:
                self.add_row((j, stage.end))

    def add_row(self, event: tuple[int, int]) -> bool:
        """Limits the memory at an event, a stage's computation of a node; returns whether the row is new."""
        if event in self._rows:
            return False
        self._rows.add(event)
        j, v = event
        sizes, end = self._graph.sizes, self.stages[j].end
        there = [(sizes[u], self._alive_at(j, v, u)) for u in range(v)]
        there.append((sizes[v], 1 if v == end else self._again[j].get(v)))
        there += [(sizes[u], self._kept[j].get(u)) for u in range(v + 1, end)]
        self._model.add(
            sum(size * literal for size, literal in there if size and literal is not None) <= self._limit
        )
        return True

    def solve(self, hint: Sequence[int] | None, time_limit_s: float, num_workers: int) -> Outcome:
        """The cheapest solution under the rows so far.

        Args:
          hint: a sequence to start from.
          time_limit_s: after it, the best so far is returned.
          num_workers: with one, the same program gives the same answer if it finishes.
        """
        from ortools.sat.python import cp_model

        self._model.clear_hints()
        if hint is not None:
            self._add_hint(hint)
        solver = cp_model.CpSolver()
        solver.parameters.random_seed = SEED
        solver.parameters.linearization_level = 2
        solver.parameters.num_workers = num_workers
        if num_workers > 1:
            solver.parameters.subsolvers.extend(["max_lp"])
        solver.parameters.max_time_in_seconds = max(time_limit_s, LEAST_SOLVE_S)
        status = solver.solve(self._model)
        if status == cp_model.INFEASIBLE:
            return Outcome(None, math.inf, True)
        if status == cp_model.UNKNOWN:
            return Outcome(None, solver.best_objective_bound, False)
        assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), solver.status_name(status)
        return Outcome(tuple(self._events(solver)), solver.best_objective_bound, status == cp_model.OPTIMAL)

    def _placed(self, sequence: Sequence[int]) -> list[tuple[int, int]]:
        """A sequence's nodes with a stage for each; the last run of a stage also takes nodes that are not in ascending
        order."""
        j, last, found = 0, -1, list[tuple[int, int]]()
        for v in sequence:
            stage = self.stages[j]
            if v == stage.end:
                while not self.stages[j].is_last:
                    j += 1
            elif v <= last and not stage.is_last:
                j += 1
            found.append((j, v))
            last = v
            if v == self.stages[j].end:
                j, last = j + 1, -1
        return found

    def _add_stage(self, j: int) -> None:
        again, kept, end = self._again[j], self._kept[j], self.stages[j].end
        for v in again:
            self._model.add_implication(kept[v], again[v].negated())
            used = self._uses(j, v)
            if used is not None:
                self._model.add_bool_or(again[v].negated(), *used)
                self._model.add_bool_or(kept[v].negated(), *used)
            if j and v in self._kept[j - 1]:
                self._model.add_bool_or(kept[v].negated(), self._kept[j - 1][v], self._again[j - 1][v])
            for u in self._operands[v]:
                self._model.add_bool_or(again[v].negated(), kept[u], again[u])
        if self.stages[j].is_last:
            for u in self._operands[end]:
                self._model.add_bool_or(kept[u], again[u])

    def _uses(self, j: int, v: int) -> "list[cp_model.IntVar] | None":
        """The possible uses of a node in a stage, as literals; None if the node must be in memory."""
        end = self.stages[j].end
        if self.stages[j].is_last and end in self._readers[v]:
            return None
        readers = [self._again[j][w] for w in self._readers[v] if w in self._again[j]]
        return [*readers, *([self._kept[j + 1][v]] if v in self._kept[j + 1] else [])]

    def _alive_at(self, j: int, at: int, u: int) -> "cp_model.LiteralT | None":
        """The literal that an earlier node is in memory while node `at` is computed; True if it always is, None if it never
        is."""
        stage = self.stages[j]
        if stage.is_last and stage.end in self._readers[u]:
            return True
        reader = next((w for w in self._readers[u] if w >= at and w in self._again[j]), None)
        if reader is None:
            return self._kept[j + 1].get(u)
        if (j, reader, u) not in self._alive:
            later = self._alive_at(j, reader + 1, u)
            alive = self._model.new_bool_var("")
            self._model.add_implication(self._again[j][reader], alive)
            if later is not None:
                self._model.add_implication(later, alive)
            self._alive[j, reader, u] = alive
        return self._alive[j, reader, u]

    def _add_objective(self, budget: int | None) -> "int | cp_model.IntVar":
        """The limit of all rows: the budget, or a variable that is minimised."""
        costs, sizes = self._graph.costs, self._graph.sizes
        if budget is None:
            peak = self._model.new_int_var(self._graph.least_budget(), sum(sizes), "peak")
            self._model.minimize(peak)
            return peak
        extra = sum(int(costs[v]) * literal for again in self._again for v, literal in again.items())
        self._model.minimize(sum(map(int, costs)) + extra)
        return budget

    def _add_hint(self, sequence: Sequence[int]) -> None:
        events = self._placed(sequence)
        again = {*events}
        kept = set(_kept(events, self._operands))
        for j in range(len(self.stages)):
            for v in self._again[j]:
                self._model.add_hint(self._again[j][v], (j, v) in again)
                self._model.add_hint(self._kept[j][v], (j, v) in kept)

    def _events(self, solver: "cp_model.CpSolver") -> Iterator[tuple[int, int]]:
        for j, stage in enumerate(self.stages):
            yield from ((j, v) for v, literal in self._again[j].items() if solver.boolean_value(literal))
            if stage.is_last:
                yield j, stage.end


def _kept(events: Sequence[tuple[int, int]], operands: Sequence[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """The nodes in memory when stages begin, by stage and node."""
    made_in: dict[int, int] = {}
    for j, v in events:
        for u in operands[v]:
            yield from ((k, u) for k in range(made_in[u] + 1, j + 1))
            made_in[u] = max(made_in[u], j)
        made_in[v] = j
