"""The order in which message passing visits nodes.

Messages run along the order and back. In one sweep, a node's message reaches every node at the end of a path of ever later
nodes. In the order of a problem's construction, a copy of a value comes after all its readers, so every path through the
copy breaks there. Cuthill and McKee's order (1969), made to keep a sparse matrix's entries near its diagonal, visits nodes
by their distance from the first: most edges lead forward. On training steps it halves the number of sweeps.
"""

from collections.abc import Sequence


def cuthill_mckee(num_nodes: int, pairs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """All nodes, breadth first from one of least degree, neighbours of least degree first; components one by one."""
    around: list[set[int]] = [set() for _ in range(num_nodes)]
    for u, v in pairs:
        around[u].add(v)
        around[v].add(u)
    by_degree = sorted(range(num_nodes), key=lambda node: (len(around[node]), node))
    rank = {node: at for at, node in enumerate(by_degree)}
    order: dict[int, None] = {}
    for first in by_degree:
        queue = [] if first in order else [first]
        order.update(dict.fromkeys(queue))
        for node in queue:
            reached = sorted(around[node] - order.keys(), key=rank.__getitem__)
            order.update(dict.fromkeys(reached))
            queue += reached
    return tuple(order)
