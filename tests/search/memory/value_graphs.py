"""Small graphs of values, and what a search over all sequences finds for them."""

import heapq
import random

from autoshard.search.memory.value_graph import ValueGraph


def layered(seed: int, num_nodes: int) -> ValueGraph:
    """Each node reads one or two of the four before it."""
    drawn = random.Random(seed)
    edges = {
        (drawn.randrange(max(0, v - 4), v), v)
        for v in range(1, num_nodes)
        for _ in range(drawn.randint(1, 2))
    }
    return _sized(drawn, num_nodes, edges)


def forward_backward(seed: int, num_layers: int) -> ValueGraph:
    """A chain with skips, and its gradients: each reads a layer's operands and the gradients of its readers."""
    drawn = random.Random(seed)
    forward = {(v - 1, v) for v in range(1, num_layers)}
    forward |= {(drawn.randrange(v - 1), v) for v in range(2, num_layers) if drawn.random() < 0.4}
    last = 2 * num_layers - 1
    backward = {edge for u, v in forward for edge in ((last - v, last - u), (u, last - v))}
    return _sized(drawn, 2 * num_layers, forward | backward | {(num_layers - 1, num_layers)})


def _sized(drawn: random.Random, num_nodes: int, edges: set[tuple[int, int]]) -> ValueGraph:
    costs = [drawn.randint(1, 5) for _ in range(num_nodes)]
    return ValueGraph(costs, [drawn.randint(1, 6) for _ in range(num_nodes)], sorted(edges))


def revolve_chain(num_steps: int) -> ValueGraph:
    """Reversal as Griewank and Walther (2000) count it: a state is advanced by steps that cost 1, gradients cost nothing.

    Their advance overwrites the state that it starts from unless that is a checkpoint; ours has operand and result in memory
    together. So a step is two nodes, one into a buffer (cost 1, size 1) and one out of it (cost 0, size 1). Out of the
    buffer, the next state and the buffer are there beside all checkpoints, the state just left included if it is one: with
    a budget of c + 2 there are at most c. The initial state is free to get again, as it is the program's input: in REVOLVE
    it takes one of s slots for good, so that c = s - 1 and the budget s + 1. The step that is reversed is not advanced: its
    gradient reads the state before it.
    """
    costs, edges, states = [0], list[tuple[int, int]](), [0]
    for _ in range(num_steps - 1):
        buffer = len(costs)
        edges += [(states[-1], buffer), (buffer, buffer + 1)]
        states.append(buffer + 1)
        costs += [1, 0]
    num_forward = len(costs)
    for n, state in enumerate(reversed(states)):
        edges += [(state, num_forward + n)] + ([(num_forward + n - 1, num_forward + n)] if n else [])
    sizes = [1] * num_forward + [0] * num_steps
    return ValueGraph(costs + [0] * num_steps, sizes, edges)


def cheapest(graph: ValueGraph, budget: int) -> float | None:
    """Dijkstra's algorithm over what was computed and what is in memory; None where no sequence fits."""
    num = len(graph)
    needs = [0] * num
    for u, v in graph.edges:
        needs[v] |= 1 << u
    best: dict[tuple[int, int], float] = {(0, 0): 0.0}
    queue = [(0.0, 0, 0)]
    while queue:
        cost, known, memory = heapq.heappop(queue)
        if cost > best[known, memory]:
            continue
        if known == num:
            return cost
        moves = [(cost, known, memory & ~(1 << v)) for v in range(num) if memory >> v & 1]
        for v in range(known + 1):
            after = memory | 1 << v
            taken = sum(graph.sizes[u] for u in range(num) if after >> u & 1)
            if not memory >> v & 1 and not needs[v] & ~memory and taken <= budget:
                moves.append((cost + graph.costs[v], max(known, v + 1), after))
        for move in moves:
            if move[0] < best.get(move[1:], float("inf")):
                best[move[1:]] = move[0]
                heapq.heappush(queue, move)
    return None
