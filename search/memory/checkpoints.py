"""The best checkpoints of a chain, by dynamic programming: a start sequence for graphs that are chains.

A chain's values x[0], x[1], ... are each computed from the one before; later nodes read them last to first, as a backward
phase does. Let C(i, j, m) be the least cost of serving all reads of x[i+1..j], one after the other, when x[i] is in memory
and m more fits. The first action is to advance to some x[k] and to keep it until all reads after it are served:

    C(i, j, m) = min over i < k <= j of  cost(i+1..k) + C(k, j, m - size[k]) + C(i, k-1, m),

0 if no value is read, infinite if two neighbours on the way do not fit. With sizes of 1 this is the recursion of Griewank
and Walther (2000, "Revolve", section 2), with others that of Beaumont et al. (2019) for persistent checkpoints.
"""

from collections.abc import Iterator

import numpy as np

from autoshard.search.memory.value_graph import ValueGraph

MOST_SLOTS = 64
"""Number of parts of the budget; sizes are rounded up to whole parts. Source: a choice of ours."""
MOST_NODES = 100
"""Of a chain; the program's time grows with the cube (a second at a hundred, measured). Longer chains are skipped."""


def checkpointed(graph: ValueGraph, budget: int) -> tuple[int, ...] | None:
    """A sequence for a graph that is a chain read backwards; None for others, or where no checkpoints fit."""
    longest = _chain_length(graph)
    for length in (
        longest,
        longest - 1,
    ):  # the first node that reads backwards may look like the chain's last
        reads = [[u for u in us if u < length] for us in graph.operands()[length:]]
        if 2 <= length <= MOST_NODES and _are_backwards(reads):
            wanted = {length - 1, *(us[0] for us in reads if us)}
            chain = _Chain(graph, budget - _beside(graph, length), length, wanted)
            return tuple(_with_readers(chain, reads, length)) if chain.fits else None
    return None


def _are_backwards(reads: list[list[int]]) -> bool:
    wanted = [us[0] for us in reads if us]
    return all(len(us) <= 1 for us in reads) and wanted == sorted(wanted, reverse=True)


def _chain_length(graph: ValueGraph) -> int:
    """The number of leading nodes that read the node before and no other."""
    operands = graph.operands()
    return next((v for v in range(1, len(graph)) if operands[v] != [v - 1]), len(graph))


def _beside(graph: ValueGraph, length: int) -> int:
    """The most memory that the nodes after the chain take among themselves."""
    last = [max(ws, default=v) for v, ws in enumerate(graph.readers())]
    later = range(length, len(graph))
    return max((sum(graph.sizes[u] for u in range(length, v + 1) if last[u] >= v) for v in later), default=0)


def _with_readers(chain: "_Chain", reads: list[list[int]], length: int) -> Iterator[int]:
    """The chain's sequence, with each later node as soon as its operand is in memory."""
    later = 0
    for v, is_served in chain.steps():
        if not is_served:
            yield v
            continue
        while later < len(reads) and reads[later] in ([], [v]):
            yield length + later
            later += 1


class _Chain:
    """The costs C(i, j, m) and the choices behind them, for all m at once.

    Nodes count from 1; i = 0 stands before the first, where nothing is held.
    """

    def __init__(self, graph: ValueGraph, budget: int, length: int, wanted: set[int]) -> None:
        slot = max(1, -(-budget // MOST_SLOTS))
        self.length, self.num_slots, self.wanted = length, max(0, budget // slot), wanted
        self.sizes = [0, *(-(-size // slot) for size in graph.sizes[:length])]
        self.until = np.concatenate([[0.0], np.cumsum(graph.costs[:length])])
        self.cost: dict[tuple[int, int], np.ndarray] = {}
        self.choice: dict[tuple[int, int], np.ndarray] = {}
        for width in range(length + 1):
            for i in range(length + 1 - width):
                self._solve(i, i + width)

    @property
    def fits(self) -> bool:
        """True if there are checkpoints that fit."""
        return bool(np.isfinite(self.cost[0, self.length][-1]))

    def _solve(self, i: int, j: int) -> None:
        free = np.arange(self.num_slots + 1)
        is_read = not self.wanted.isdisjoint(range(i, j))
        best, choice = np.full(len(free), np.inf if is_read else 0.0), np.zeros(len(free), np.int64)
        needed = 0
        for k in range(i + 1, j + 1) if is_read else ():
            needed = max(needed, self.sizes[k] + (self.sizes[k - 1] if k > i + 1 else 0))
            cost = np.full(len(free), np.inf)
            after = self.cost[k, j][: max(0, len(free) - self.sizes[k])]
            cost[self.sizes[k] :] = (
                self.until[k] - self.until[i] + self.cost[i, k - 1][self.sizes[k] :] + after
            )
            cost[:needed] = np.inf
            choice[cost < best] = k
            best = np.minimum(best, cost)
        self.cost[i, j], self.choice[i, j] = best, choice

    def steps(self) -> Iterator[tuple[int, bool]]:
        """Nodes as they are computed, and once more, marked, when all reads after them are served."""
        waiting: list[tuple[int, int, int]] = [(0, self.length, self.num_slots)]
        while waiting:
            i, j, free = waiting.pop()
            if i == j and free < 0:
                yield i - 1, True
            elif k := int(self.choice[i, j][free]):
                yield from ((v - 1, False) for v in range(i + 1, k + 1))
                waiting += [(i, k - 1, free), (k, k, -1), (k, j, free - self.sizes[k])]
