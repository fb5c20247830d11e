"""Improves an assignment by changing most labels at once.

Pair moves stop if a better assignment differs in a parameter, its optimizer state, its gradient and all their copies: each
step on the way costs more. Elimination (`search.solver.elimination`) would find the minimum, but the tables around the
residual stream are too large. So if no small table is left, the node with the most neighbours keeps its present label. This
removes a dimension from each of its tables, and elimination continues. The result is the best assignment that agrees on the
few fixed nodes: a very large neighbourhood, searched exactly (Ahuja, Ergun, Orlin and Punnen's survey, 2002; in graphical
models, cutset conditioning, Pearl 1988). Each round fixes other nodes, until some rounds find nothing better. If no node has
to be fixed, the answer is the minimum.

Nodes with small tables are eliminated only once, before the rounds.
"""

from collections import Counter

from autoshard.search.solver.clock import NEVER, Deadline
from autoshard.search.solver.elimination import Elimination
from autoshard.search.solver.pbqp import Labels, Problem

EASY_ENTRIES = 3e4
"""Largest table, in entries, before any node is fixed."""
MAX_ENTRIES = 3e5
"""Largest table, in entries: 2.4 MB of doubles, computed in about a millisecond."""
MAX_ROUNDS = 10
"""A safety limit; three or four rounds are usual."""
MAX_WITHOUT_GAIN = 1
"""Successive rounds without a better assignment, though each fixes other nodes, after which the search stops."""
ROUNDING = 1e-9
"""Relative; a smaller gain does not count."""


def reoptimised(problem: Problem, start: Labels, deadline: Deadline = NEVER) -> tuple[Labels, bool]:
    """An assignment no worse than `start`, and whether it is proven to be the minimum.

    Args:
      problem: merged.
      start: the first assignment.
      deadline: after it no round begins.
    """
    easy, fixed_before = Elimination(problem, deadline.clock), Counter[int]()
    easy.run(EASY_ENTRIES)
    labels, cost_s, num_without_gain = start, problem.cost_s(start), 0
    for _ in range(MAX_ROUNDS):
        if num_without_gain == MAX_WITHOUT_GAIN or deadline.is_over:
            break
        found, fixed = _best_around(easy.copy(), labels, fixed_before)
        fixed_before.update(fixed)
        found_s = problem.cost_s(found)
        num_without_gain = 0 if found_s < cost_s - ROUNDING * abs(cost_s) else num_without_gain + 1
        if found_s < cost_s:
            labels, cost_s = found, found_s
        if not fixed:
            return labels, True
    return labels, False


def _best_around(
    elimination: Elimination, labels: Labels, fixed_before: Counter[int]
) -> tuple[Labels, list[int]]:
    """The best assignment that agrees with `labels` on the nodes that had to be fixed, and these nodes."""
    fixed: list[int] = []
    elimination.run(MAX_ENTRIES)
    while elimination.left:
        node = max(elimination.left, key=lambda n: (elimination.degree(n) / (1 + fixed_before[n]), -n))
        elimination.fix(node, labels[node])
        fixed.append(node)
        elimination.run(MAX_ENTRIES)
    return elimination.labels(), fixed
