"""A graph of values for the choice of recomputation: the cost, the size and the operands of each."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost_model.errors import InputError


@dataclass(frozen=True, slots=True)
class ValueGraph:
    """Nodes 0 to n - 1 in the order in which they are first computed.

    Attributes:
      costs: cost of computing each node once, in seconds or any unit; not negative.
      sizes: size of each result, in bytes or any unit; whole numbers, not negative.
      edges: (u, v) where v is computed from u's result; u comes before v.
    """

    costs: Sequence[float]
    sizes: Sequence[int]
    edges: Sequence[tuple[int, int]]

    def __post_init__(self) -> None:
        if len(self.costs) != len(self.sizes):
            raise InputError(
                f"a graph of values needs a cost and a size for each node, not {len(self.costs)} costs "
                f"and {len(self.sizes)} sizes"
            )
        for node, (cost, size) in enumerate(zip(self.costs, self.sizes, strict=True)):
            if not (math.isfinite(cost) and cost >= 0 and size >= 0 and size == int(size)):
                raise InputError(
                    f"node {node} costs {cost} and takes {size}: costs must be finite and sizes whole "
                    "numbers, neither negative"
                )
        for u, v in self.edges:
            if not 0 <= u < v < len(self.costs):
                raise InputError(
                    f"edge ({u}, {v}) of a graph of {len(self.costs)} nodes: number the nodes from 0 in "
                    "the order in which they are computed, so that edges go from lower to higher"
                )

    def __len__(self) -> int:
        return len(self.costs)

    def operands(self) -> list[list[int]]:
        """By node: the nodes that it is computed from."""
        found: list[list[int]] = [[] for _ in self.costs]
        for u, v in sorted(set(self.edges)):
            found[v].append(u)
        return found

    def readers(self) -> list[list[int]]:
        """By node: the nodes that are computed from it."""
        found: list[list[int]] = [[] for _ in self.costs]
        for u, v in sorted(set(self.edges)):
            found[u].append(v)
        return found

    def last_uses(self) -> list[int]:
        """By node: the last node that is computed from it, directly or through others; the node itself if there is none."""
        readers, last = self.readers(), list(range(len(self)))
        for v in reversed(range(len(self))):
            last[v] = max([v, *(last[w] for w in readers[v])])
        return last

    def least_budget(self) -> int:
        """Memory of the largest node together with its operands: no sequence takes less."""
        operands = self.operands()
        return max(
            (self.sizes[v] + sum(self.sizes[u] for u in us) for v, us in enumerate(operands)), default=0
        )
