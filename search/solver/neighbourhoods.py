"""Improves an assignment by changing most labels at once.

Pair moves end where a better assignment differs in a parameter, its optimizer state, its gradient and all their copies: each
step on the way costs more. Elimination (`search.solver.elimination`) finds the best of all assignments, but for the tables
around the residual stream, which are too large. So where no table is small enough any more, the node with the most
neighbours keeps the label that it has, which cuts a dimension from every table that it was in, and elimination goes on. What
comes out is the best of all assignments that agree on the few nodes that were fixed: a very large neighbourhood, searched
exactly (Ahuja, Ergun, Orlin and Punnen's survey, 2002; of graphical models, cutset conditioning, Pearl 1988). The next round
fixes other nodes, until some rounds find nothing better. Where none has to be fixed, the answer is the minimum.

The nodes that eliminate easily do so once, whatever is fixed then.
"""

from collections import Counter

from autoshard.search.solver.clock import NEVER, Deadline
from autoshard.search.solver.elimination import Elimination
from autoshard.search.solver.pbqp import Labels, Problem

EASY_ENTRIES = 3e4
"""Of a table before anything is fixed."""
MAX_ENTRIES = 3e5
"""Of a table: 2.4 MB of doubles, made in about a millisecond."""
MAX_ROUNDS = 10
"""A guard; three or four are usual."""
MAX_FUTILE = 1
"""Rounds in a row that find nothing better, though each fixes other nodes."""
ROUNDING = 1e-9
"""Relative; a smaller gain is none."""


def reoptimised(problem: Problem, start: Labels, deadline: Deadline = NEVER) -> tuple[Labels, bool]:
    """An assignment of a merged problem that is no worse than `start`, and whether none is better.

    Args:
      problem: merged.
      start: where to begin.
      deadline: after it no round begins.
    """
    easy, fixed_before = Elimination(problem, deadline.clock), Counter[int]()
    easy.run(EASY_ENTRIES)
    labels, cost_s, num_futile = start, problem.cost_s(start), 0
    for _ in range(MAX_ROUNDS):
        if num_futile == MAX_FUTILE or deadline.is_over:
            break
        found, fixed = _best_around(easy.copy(), labels, fixed_before)
        fixed_before.update(fixed)
        found_s = problem.cost_s(found)
        num_futile = 0 if found_s < cost_s - ROUNDING * abs(cost_s) else num_futile + 1
        if found_s < cost_s:
            labels, cost_s = found, found_s
        if not fixed:
            return labels, True
    return labels, False


def _best_around(
    elimination: Elimination, labels: Labels, fixed_before: Counter[int]
) -> tuple[Labels, list[int]]:
    """The best assignment that agrees with another where nodes had to be fixed, and those nodes."""
    fixed: list[int] = []
    elimination.run(MAX_ENTRIES)
    while elimination.left:
        node = max(elimination.left, key=lambda n: (elimination.degree(n) / (1 + fixed_before[n]), -n))
        elimination.fix(node, labels[node])
        fixed.append(node)
        elimination.run(MAX_ENTRIES)
    return elimination.labels(), fixed
