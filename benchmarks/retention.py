"""Solves rematerialisation on training graphs of known networks and on random ones, and says how much is proven.

Networks' graphs have a node for each layer and one for its gradient, with the layer shapes of their papers: VGG16
(Simonyan & Zisserman 2015, column D), ResNet-50 (He et al. 2016, table 1), MobileNet (Howard et al. 2017, table 1) and
U-Net (Ronneberger et al. 2015, figure 1, padded). A layer costs its multiply-adds, or its elements where it has none, its
gradient twice that; each takes four bytes an element. A gradient is computed from the gradients of the layer's readers, the
layer's operands and its result. Random layered graphs have as many nodes and edges as the smallest of Bartan et al. (2023,
"Moccasin", section 4), with costs and sizes drawn apart from each other. Budgets are shares of the peak without
recomputation.

    python -m benchmarks.retention                      # the table, some minutes
    python -m benchmarks.retention graph.json 0.9 0.8   # a graph in networkx's node-link form, as published with Moccasin

In such a file nodes have `cost_cpu` and `cost_ram`, or `out_cost` for both.
"""

import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from autoshard.cost_model.errors import InfeasibleError
from autoshard.search.memory.retention import ValueGraph, footprints, solve

TIME_LIMIT_S = 60.0
NUM_WORKERS = 2
SHARES = (0.9, 0.8)
BYTES = 4
"""An element's."""


@dataclass(slots=True)
class Layers:
    """A network's forward phase under construction; a layer is its index."""

    batch: int
    costs: list[int] = field(default_factory=list)
    shapes: list[tuple[int, int]] = field(default_factory=list)
    operands: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, side: int, channels: int, operands: Sequence[int], products_per_element: int = 1) -> int:
        """A layer with square images as its result."""
        self.shapes.append((side, channels))
        self.costs.append(self.batch * side * side * channels * products_per_element)
        self.operands.append(tuple(operands))
        return len(self.costs) - 1

    def conv(self, x: int, channels: int, kernel: int = 3, stride: int = 1) -> int:
        side, inputs = self.shapes[x]
        return self.add(side // stride, channels, [x], kernel * kernel * inputs)

    def depthwise(self, x: int, stride: int) -> int:
        side, channels = self.shapes[x]
        return self.add(side // stride, channels, [x], 9)

    def pool(self, x: int, by: int = 2) -> int:
        side, channels = self.shapes[x]
        return self.add(side // by, channels, [x], by * by)

    def dense(self, x: int, channels: int) -> int:
        side, inputs = self.shapes[x]
        return self.add(1, channels, [x], side * side * inputs)

    def pointwise(self, *xs: int) -> int:
        """A normalisation, an activation or a sum."""
        return self.add(*self.shapes[xs[0]], xs)

    def training_graph(self) -> ValueGraph:
        """The layers, and the gradients of all but the input, last to first."""
        num = len(self.costs)
        sizes = [BYTES * self.batch * side * side * channels for side, channels in self.shapes]
        gradient = {v: 2 * num - 1 - v for v in range(1, num)}
        readers: list[list[int]] = [[] for _ in range(num)]
        edges = [(u, v) for v, us in enumerate(self.operands) for u in us]
        for u, v in edges:
            readers[u].append(v)
        for v, g in gradient.items():
            edges += [(u, g) for u in (*self.operands[v], v)]
            edges += [(gradient[w], g) for w in readers[v]]
        backward = range(num - 1, 0, -1)
        return ValueGraph(
            [*self.costs, *(2 * self.costs[v] for v in backward)],
            [*sizes, *(sizes[v] for v in backward)],
            edges,
        )


def vgg16(batch: int = 256) -> ValueGraph:
    net = Layers(batch)
    x = net.add(224, 3, [])
    for channels, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            x = net.conv(x, channels)
        x = net.pool(x)
    for channels in (4096, 4096, 1000):
        x = net.dense(x, channels)
    return net.training_graph()


def mobilenet(batch: int = 512) -> ValueGraph:
    net = Layers(batch)
    x = net.pointwise(net.conv(net.add(224, 3, []), 32, stride=2))
    widths = (
        (64, 1),
        (128, 2),
        (128, 1),
        (256, 2),
        (256, 1),
        (512, 2),
        *[(512, 1)] * 5,
        (1024, 2),
        (1024, 1),
    )
    for channels, stride in widths:
        x = net.pointwise(net.depthwise(x, stride))
        x = net.pointwise(net.conv(x, channels, kernel=1))
    net.dense(net.pool(x, 7), 1000)
    return net.training_graph()


def resnet50(batch: int = 256) -> ValueGraph:
    net = Layers(batch)
    x = net.pool(net.conv(net.add(224, 3, []), 64, kernel=7, stride=2))
    for stage, (channels, depth) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(depth):
            stride = 2 if stage and not block else 1
            y = net.conv(net.conv(net.conv(x, channels, 1), channels, 3, stride), 4 * channels, 1)
            x = net.pointwise(y, x if block else net.conv(x, 4 * channels, 1, stride))
    net.dense(net.pool(x, 7), 1000)
    return net.training_graph()


def unet(batch: int = 32) -> ValueGraph:
    net = Layers(batch)
    x, skips = net.add(416, 3, []), list[int]()
    for channels in (64, 128, 256, 512):
        skips.append(net.conv(net.conv(x, channels), channels))
        x = net.pool(skips[-1])
    x = net.conv(net.conv(x, 1024), 1024)
    for channels, skip in zip((512, 256, 128, 64), reversed(skips), strict=True):
        side = net.shapes[skip][0]
        up = net.add(side, channels, [x], 4 * net.shapes[x][1])
        joined = net.add(side, 2 * channels, [up, skip])
        x = net.conv(net.conv(joined, channels), channels)
    net.conv(x, 2, kernel=1)
    return net.training_graph()


def random_layered(num_nodes: int = 100, num_edges: int = 236, seed: int = 0) -> ValueGraph:
    """Layers of up to ten nodes; each node reads one of the layer before, other edges skip up to three layers."""
    drawn, layers, edges = random.Random(seed), [[0]], set[tuple[int, int]]()
    while (start := layers[-1][-1] + 1) < num_nodes:
        layers.append(list(range(start, min(num_nodes, start + drawn.randint(1, 10)))))
        edges |= {(drawn.choice(layers[-2]), v) for v in layers[-1]}
    while len(edges) < num_edges:
        at = drawn.randrange(1, len(layers))
        edges.add((drawn.choice(layers[max(0, at - drawn.randint(1, 3))]), drawn.choice(layers[at])))
    costs = [drawn.randint(1, 100) for _ in range(num_nodes)]
    return ValueGraph(costs, [drawn.randint(1, 100) for _ in range(num_nodes)], sorted(edges))


def published(path: Path) -> ValueGraph:
    """A graph in networkx's node-link form, its nodes in a topological order, smallest number first."""
    graph = json.loads(path.read_text(encoding="utf-8"))
    index = {node.get("id", node["name"]): n for n, node in enumerate(graph["nodes"])}
    ends = [(e.get("source", e.get("0")), e.get("target", e.get("1"))) for e in graph["links"]]
    edges, missing = [(index[u], index[v]) for u, v in ends], [0] * len(index)
    for _, v in edges:
        missing[v] += 1
    order, ready = dict[int, int](), [v for v, count in enumerate(missing) if not count]
    while ready:
        u = min(ready)
        ready.remove(u)
        order[u] = len(order)
        for _, v in (edge for edge in edges if edge[0] == u):
            missing[v] -= 1
            ready += [v] if not missing[v] else []
    nodes = [graph["nodes"][v] for v in order]
    return ValueGraph(
        [node.get("cost_cpu", node.get("out_cost")) for node in nodes],
        [node.get("cost_ram", node.get("out_cost")) for node in nodes],
        [(order[u], order[v]) for u, v in edges],
    )


def rows(name: str, graph: ValueGraph, shares: Sequence[float]) -> Iterator[str]:
    """The table's rows of one graph: its cost and the bounds as increases over that without recomputation."""
    peak, once = max(footprints(graph, range(len(graph)))), sum(graph.costs)
    for share in shares:
        start_s, head = perf_counter(), f"| {name} | {len(graph)} | {len(set(graph.edges))} | {share:.0%} |"
        try:
            plan = solve(graph, int(share * peak), time_limit_s=TIME_LIMIT_S, num_workers=NUM_WORKERS)
        except InfeasibleError:
            yield f"{head} none found | | | {perf_counter() - start_s:.1f} | |"
            continue
        cost, bound, any_order = (
            f"{value / once - 1:.3%}" for value in (plan.cost, plan.bound, plan.bound_any_order)
        )
        proven = "yes" if plan.is_optimal else "no"
        yield f"{head} {cost} | {bound} | {any_order} | {perf_counter() - start_s:.1f} | {proven} |"


def main() -> None:
    print("| graph | nodes | edges | budget | cost | bound | bound in any order | seconds | proven |")
    print("|---|---|---|---|---|---|---|---|---|")
    if len(sys.argv) > 1:
        path = Path(sys.argv[1])
        graphs, shares = {path.stem: published(path)}, [*map(float, sys.argv[2:])] or SHARES
    else:
        networks = {"VGG16": vgg16(), "U-Net": unet(), "ResNet-50": resnet50(), "MobileNet": mobilenet()}
        drawn = {f"random layered {seed}": random_layered(seed=seed) for seed in range(3)}
        graphs, shares = networks | drawn, SHARES
    for name, graph in graphs.items():
        for row in rows(name, graph, shares):
            print(row, flush=True)


if __name__ == "__main__":
    main()
