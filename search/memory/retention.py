"""Which values to keep, drop and recompute, on any graph, so that memory stays within a budget: the cheapest sequence.

A graph's nodes are computed in a given order, each from the results of others. A *sequence* lists every node at least once,
with first computations in that order. A node may be listed more than once, wherever its operands are in memory: a dropped
value must be recomputed before it is read. While a node is computed, its operands, its own result and all values retained
for later are in memory together, and never more than the budget (the convention of Jain et al. 2020, "Checkmate", section
4). A result is dropped after the last reader of that copy. A result without readers is dropped at once, so a value that must
outlive the step needs a reader at the end.

The cheapest sequence is NP-hard to find. `solve` starts from the result of an eviction rule (`search.memory.eviction`), or
from the best checkpoints if the graph is a chain (`search.memory.checkpoints`). It continues with an integer program over
the stages between first computations (`search.memory.retention_program`), which CP-SAT solves. The program gives a bound
too, which proves the answer or limits its distance from the best. Like Checkmate and Moccasin (Bartan et al. 2023), the
program recomputes nodes in the graph's order. Tight budgets sometimes need more than one such *run* in a stage. More runs
are tried if the answer does not reach the bound over sequences in any order.

`footprints` gives the memory of any sequence, independently of its search. It checks every answer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd, inf
from time import monotonic

from autoshard.cost_model.errors import InfeasibleError, InputError
from autoshard.search.memory.checkpoints import checkpointed
from autoshard.search.memory.eviction import evicting
from autoshard.search.memory.retention_program import Outcome, RetentionProgram
from autoshard.search.memory.value_graph import ValueGraph

MOST_RUNS = 3
"""Most runs of recomputation, in ascending order, between two first computations. Source: with up to three, all of 2,088
random problems of six to ten nodes came out as by a search over all sequences (measured); with one, 99 in 100."""
RESOLUTION = 10**9
"""Costs that are no whole numbers are rounded to one part in this many of their sum."""
LEAST_BUDGET_S = 5.0
"""Least time to search for a sufficient budget, if no sequence was found. Source: a choice of ours."""


@dataclass(frozen=True, slots=True)
class RetentionPlan:
    """A sequence, with its cost and its memory.

    Attributes:
      sequence: the nodes in the order of their computation.
      cost: of all computations.
      peak: the most memory.
      bound: no sequence of as many runs in each stage costs less.
      bound_any_order: no sequence whatsoever costs less.
      num_runs: runs in each stage of the program that gave `bound`.
    """

    sequence: tuple[int, ...]
    cost: float
    peak: int
    bound: float
    bound_any_order: float
    num_runs: int

    @property
    def gap(self) -> float:
        """The cost less the bound, as a share of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @property
    def is_optimal(self) -> bool:
        """True if the bound proves the sequence cheapest: of its number of runs, or of all if `bound_any_order` does too."""
        return self.cost <= self.bound


def solve(
    graph: ValueGraph, budget: int, *, time_limit_s: float = 60.0, num_workers: int = 1
) -> RetentionPlan:
    """The cheapest sequence whose memory never exceeds a budget.

    Args:
      graph: the nodes to compute.
      budget: the most memory, in the unit of the graph's sizes.
      time_limit_s: after it, the best so far is returned, with its bound.
      num_workers: threads; with one, the same graph gives the same answer unless time runs out.

    Raises:
      InfeasibleError: no sequence fits, or none was found in time; the message says how much memory is needed at least.

    Example:
      >>> chain = ValueGraph([1, 1, 1, 0], [1, 1, 1, 0], [(0, 1), (1, 2), (0, 3), (2, 3)])
      >>> solve(chain, 2).sequence
      (0, 1, 2, 0, 3)
    """
    end_s, whole = monotonic() + time_limit_s, _in_whole_units(graph)
    unit = gcd(*graph.sizes) or 1
    found = _search(whole, budget // unit, end_s, num_workers)
    if found.sequence is None:
        raise InfeasibleError(_infeasible(whole, budget, unit, end_s, num_workers))
    cost, whole_cost = sum(graph.costs[v] for v in found.sequence), _cost(whole, found.sequence)
    per_unit = sum(graph.costs) / (sum(whole.costs) or 1)
    bound, bound_any_order = (
        cost if known >= whole_cost else known * per_unit for known in (found.bound, found.bound_any_order)
    )
    peak = max(footprints(graph, found.sequence), default=0)
    assert peak <= budget, f"a sequence that takes {peak} was found for a budget of {budget}"
    return RetentionPlan(found.sequence, cost, peak, bound, bound_any_order, found.num_runs)


def footprints(graph: ValueGraph, sequence: Sequence[int]) -> list[int]:
    """The memory at each computation of a sequence: its operands, its result, and the values retained for later.

    Raises:
      InputError: nodes are first computed in another order than the graph's, or not at all.
    """
    operands, last_read = graph.operands(), list(range(len(sequence)))
    made_at: dict[int, int] = {}
    for at, v in enumerate(sequence):
        if v not in made_at and (v != len(made_at) or v >= len(graph)):
            raise InputError(
                f"position {at} of the sequence computes node {v} where node {len(made_at)} of {len(graph)} comes next: "
                "list first computations in the graph's order"
            )
        for u in operands[v]:
            last_read[made_at[u]] = at
        made_at[v] = at
    if len(made_at) < len(graph):
        raise InputError(f"the sequence never computes node {len(made_at)} of {len(graph)}: list every node")
    change = [0] * (len(sequence) + 1)
    for at, v in enumerate(sequence):
        change[at] += graph.sizes[v]
        change[last_read[at] + 1] -= graph.sizes[v]
    return list(accumulate(change[:-1]))


@dataclass(frozen=True, slots=True)
class _Found:
    """The best sequence so far, if any, and the proven bounds on all others."""

    sequence: tuple[int, ...] | None
    bound: float
    bound_any_order: float
    num_runs: int


def _in_whole_units(graph: ValueGraph) -> ValueGraph:
    """The graph with whole costs and sizes, as small as they may be."""
    costs, size_unit = graph.costs, gcd(*graph.sizes) or 1
    if all(cost == int(cost) for cost in costs):
        unit = gcd(*map(int, costs)) or 1
        whole = [int(cost) // unit for cost in costs]
    else:
        whole = [round(cost / sum(costs) * RESOLUTION) for cost in costs]
    return ValueGraph(whole, [size // size_unit for size in graph.sizes], graph.edges)


def _search(graph: ValueGraph, budget: int, end_s: float, num_workers: int) -> _Found:
    plain, least = tuple(range(len(graph))), sum(graph.costs)
    if max(footprints(graph, plain), default=0) <= budget:
        return _Found(plain, least, least, 1)
    if graph.least_budget() > budget:
        return _Found(None, inf, inf, 1)
    starts = [s for s in (evicting(graph, budget), checkpointed(graph, budget)) if s is not None]
    fitting = [s for s in starts if max(footprints(graph, s)) <= budget]
    best = _Found(min(fitting, key=lambda s: _cost(graph, s), default=None), least, least, 0)
    for num_runs in range(1, MOST_RUNS + 1):
        before, best = best, _with_runs(graph, budget, best, num_runs, end_s, num_workers)
        is_known = _cost(graph, best.sequence) <= best.bound_any_order
        has_settled = best.sequence is not None and best.sequence == before.sequence and num_runs > 1
        if is_known or has_settled or best.num_runs < num_runs or monotonic() > end_s:
            break
    return best


def _with_runs(
    graph: ValueGraph, budget: int, best: _Found, num_runs: int, end_s: float, num_workers: int
) -> _Found:
    """The best sequence with that many runs in each stage, if it is better than the best so far."""
    program = RetentionProgram(graph, budget, num_runs)
    rounds = list(_rounds(program, graph, budget, best.sequence, end_s, num_workers))
    last, bound = rounds[-1], max(sum(graph.costs), *(outcome.bound for outcome in rounds))
    bound_any_order = max(best.bound_any_order, rounds[0].bound)
    if last.is_finished or not best.num_runs:
        best = replace(best, bound=bound, num_runs=num_runs)
    is_better = _cost(graph, last.sequence) < _cost(graph, best.sequence)
    if is_better and last.sequence is not None and max(footprints(graph, last.sequence)) <= budget:
        best = _Found(last.sequence, bound, bound_any_order, num_runs)
    return replace(best, bound_any_order=bound_any_order)


def _rounds(
    program: RetentionProgram,
    graph: ValueGraph,
    budget: int | None,
    hint: tuple[int, ...] | None,
    end_s: float,
    num_workers: int,
) -> Iterator[Outcome]:
    """Solves until no row is violated, no solution is found or time is up; each round adds the rows that the last one
    violated."""
    is_new = True
    while is_new:
        outcome = program.solve(hint, end_s - monotonic(), num_workers)
        yield outcome
        if outcome.events is None or outcome.sequence is None or monotonic() > end_s:
            return
        hint, limit = outcome.sequence, outcome.bound if budget is None else budget
        taken = zip(outcome.events, footprints(graph, hint), strict=True)
        is_new = any([program.add_row(event) for event, size in taken if size > limit])


def _cost(graph: ValueGraph, sequence: Sequence[int] | None) -> float:
    return inf if sequence is None else sum(graph.costs[v] for v in sequence)


def _infeasible(graph: ValueGraph, budget: int, unit: int, end_s: float, num_workers: int) -> str:
    """The error message, with a sufficient budget found by the same program with the peak as its objective."""
    plain = tuple(range(len(graph)))
    end_s = max(end_s, monotonic() + LEAST_BUDGET_S)
    rounds = list(_rounds(RetentionProgram(graph, None), graph, None, plain, end_s, num_workers))
    needed = max(rounds[0].bound, graph.least_budget())
    enough = min(
        max(footprints(graph, sequence), default=0)
        for sequence in (plain, *(o.sequence for o in rounds if o.sequence is not None))
    )
    return (
        f"no sequence was found that computes {len(graph)} nodes in a memory of {budget}: every sequence "
        f"needs {round(needed) * unit} or more, and {enough * unit} is enough for one; raise the budget, or "
        "cut large nodes into smaller ones"
    )
