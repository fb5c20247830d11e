"""A sequence that fits a budget, found by a rule: when memory is short, evict a cheap, large value with a distant reader.

Nodes are computed in order. A node's missing operands are recomputed first, and so are the missing operands of these. If a
result does not fit, the value with the smallest score is evicted:

    cost of computing it again, with all that is missing for that  /  (its size x how far away its next reader is)

The score follows Kirisame et al. (2021, "Dynamic tensor rematerialization"). Their rule is online, knows the past alone, and
uses the time since the last read. Operands of the nodes in computation stay. The rule may get stuck where a sequence exists.
"""

from autoshard.search.memory.value_graph import ValueGraph

MOST_COMPUTATIONS = 50
"""Per node, on average; the rule gives up a budget that takes more. Source: a choice of ours."""


class _StuckError(Exception):
    """The rule has nothing left to evict, or recomputes too much."""


def evicting(graph: ValueGraph, budget: int) -> tuple[int, ...] | None:
    """A sequence that fits, if the rule finds one."""
    eviction = _Eviction(graph, budget)
    try:
        for v in range(len(graph)):
            eviction.advance(v)
    except _StuckError:
        return None
    return tuple(eviction.sequence)


class _Eviction:
    """The values in memory while a sequence is made."""

    def __init__(self, graph: ValueGraph, budget: int) -> None:
        self.graph, self.budget = graph, budget
        self.operands, self.readers = graph.operands(), graph.readers()
        self.sequence: list[int] = []
        self.present: dict[int, None] = {}
        self.pinned = [0] * len(graph)
        self.now = 0

    def advance(self, v: int) -> None:
        """Computes a node for the first time, and drops values that no later node reads."""
        self.now = v
        self._compute(v)
        for u in [u for u in self.present if self._next_reader(u) is None]:
            del self.present[u]

    def _compute(self, wanted: int) -> None:
        """Computes a node, and before it recursively its missing operands."""
        waiting = [self._pin(wanted, 1)]
        while waiting:
            v = waiting[-1]
            missing = next((u for u in self.operands[v] if u not in self.present), None)
            if missing is not None:
                waiting.append(self._pin(missing, 1))
                continue
            self._make_room(self.graph.sizes[v])
            self.sequence.append(v)
            self.present[v] = None
            self._pin(waiting.pop(), -1)

    def _pin(self, v: int, times: int) -> int:
        """Pins a node's operands in memory (`times` is 1), or releases them (-1)."""
        for u in self.operands[v]:
            self.pinned[u] += times
        return v

    def _make_room(self, size: int) -> None:
        if len(self.sequence) >= MOST_COMPUTATIONS * len(self.graph):
            raise _StuckError
        used = size + sum(self.graph.sizes[u] for u in self.present)
        while used > self.budget:
            loose = [u for u in self.present if not self.pinned[u] and self.graph.sizes[u]]
            if not loose:
                raise _StuckError
            evicted = min(loose, key=lambda u: (self._regret(u), u))
            del self.present[evicted]
            used -= self.graph.sizes[evicted]

    def _regret(self, v: int) -> float:
        reader = self._next_reader(v)
        away = (len(self.graph) if reader is None else reader) - self.now + 1
        return self._cost_again(v) / (self.graph.sizes[v] * away)

    def _next_reader(self, v: int) -> int | None:
        """The next node not yet computed that reads a node."""
        return next((w for w in self.readers[v] if w > self.now), None)

    def _cost_again(self, v: int) -> float:
        missing, stack = {v}, [v]
        while stack:
            for u in self.operands[stack.pop()]:
                if u not in self.present and u not in missing:
                    missing.add(u)
                    stack.append(u)
        return sum(self.graph.costs[u] for u in missing)
