"""Small problems drawn at random, and what brute force says of them: every assignment, as an array over all labels."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from autoshard.search.solver.pbqp import Edge, MemoryConstraint, Problem

UNITS_S = st.sampled_from([1e-6, 1.0, 10.0])
ROUNDING = 1e-9


def costs(draw, shape, unit_s, forbidden=True):
    """Few distinct values, zeros and forbidden entries among them: ties and infeasibility are common."""
    values = [st.just(0.0), st.integers(1, 5).map(float), st.floats(0.1, 5.0), st.just(np.inf)]
    size = int(np.prod(shape))
    drawn = draw(st.lists(st.one_of(values[: 4 if forbidden else 3]), min_size=size, max_size=size))
    return np.array(drawn).reshape(shape) * unit_s


def edge_costs(draw, shape, unit_s, forbidden=True):
    """Of which rows and columns often repeat, as strategies do that agree on one value's spec."""
    classes = [draw(st.lists(st.integers(0, num - 1), min_size=num, max_size=num)) for num in shape]
    drawn = costs(draw, shape, unit_s, forbidden)
    return drawn[np.ix_(*classes)] if draw(st.booleans()) else drawn


@st.composite
def problems(draw, forbidden=True):
    """Up to seven nodes; edges in either direction, several between one pair, some nodes without any."""
    unit_s = draw(UNITS_S)
    num_labels = draw(st.lists(st.integers(2, 4), min_size=3, max_size=7))
    pairs = st.tuples(*[st.integers(0, len(num_labels) - 1)] * 2).filter(lambda pair: pair[0] != pair[1])
    edges = [
        Edge(u, v, edge_costs(draw, (num_labels[u], num_labels[v]), unit_s, forbidden))
        for u, v in draw(st.lists(pairs, max_size=9))
    ]
    return Problem(tuple(costs(draw, (num,), unit_s, forbidden) for num in num_labels), tuple(edges))


@st.composite
def chains(draw, forbidden=True, max_nodes=6):
    """Nodes one after the other, on which message passing is exact."""
    unit_s = draw(UNITS_S)
    num_labels = draw(st.lists(st.integers(1, 4), min_size=2, max_size=max_nodes))
    nodes = tuple(costs(draw, (num,), unit_s, forbidden) for num in num_labels)
    edges = tuple(
        Edge(u, u + 1, edge_costs(draw, (num_labels[u], num_labels[u + 1]), unit_s, forbidden))
        for u in range(len(num_labels) - 1)
    )
    return Problem(nodes, edges)


@st.composite
def rows_of(draw, problem, max_rows=4):
    rows = []
    for index in range(draw(st.integers(1, max_rows))):
        nodes = draw(st.sets(st.integers(0, len(problem.num_labels) - 1)))
        sizes = [
            (node, 1e9 * np.array(draw(st.lists(st.integers(0, 9), min_size=num, max_size=num)), float))
            for node in sorted(nodes)
            for num in [problem.num_labels[node]]
        ]
        rows.append(MemoryConstraint(f"point {index}", tuple(sizes), 1e9 * draw(st.integers(0, 3))))
    return tuple(rows)


@st.composite
def rows_with_pairs(draw, problem):
    """Rows of what nodes hold, and values that are as much as they are larger at one node than at another."""
    rows = []
    for row in draw(rows_of(problem)):
        pairs = dict[tuple[int, int], np.ndarray]()
        for u, v in draw(st.sets(st.tuples(*[st.integers(0, len(problem.num_labels) - 1)] * 2), max_size=3)):
            if u != v:
                own, source = (
                    [draw(st.integers(0, 9)) for _ in range(problem.num_labels[n])] for n in (u, v)
                )
                pairs[u, v] = 1e9 * np.maximum(np.subtract.outer(own, source), 0.0)
        rows.append(replace(row, pairs=tuple((u, v, num_bytes) for (u, v), num_bytes in pairs.items())))
    return tuple(rows)


@st.composite
def limited_problems(draw, forbidden=True):
    """A problem, its rows and their limit."""
    problem = draw(problems(forbidden))
    return problem, draw(rows_of(problem)), 1e9 * draw(st.integers(1, 25))


@st.composite
def assignments(draw, problem):
    return tuple(draw(st.integers(0, num - 1)) for num in problem.num_labels)


def layered(num_layers, width, num_labels, seed):
    """Layers of nodes, each joined to all of the layer before: wide enough that no stage can be skipped."""
    rng = np.random.default_rng(seed)
    nodes = [rng.integers(0, 20, num_labels) / 10 for _ in range(num_layers * width)]
    pairs = [
        (layer * width + i, (layer + 1) * width + j)
        for layer in range(num_layers - 1)
        for i in range(width)
        for j in range(width)
    ]
    edges = tuple(Edge(u, v, rng.integers(0, 20, (num_labels, num_labels)) / 10) for u, v in pairs)
    sizes = tuple((node, rng.integers(0, 10, num_labels) * 1e9) for node in range(len(nodes)))
    return Problem(tuple(nodes), edges), (MemoryConstraint("all", sizes, 0.0),)


def along(values, nodes, num_nodes):
    """Values over some nodes' labels, as an array over all nodes'."""
    order = np.argsort(nodes)
    shape = np.ones(num_nodes, int)
    shape[list(nodes)] = values.shape
    return values.transpose(order).reshape(shape)


def every_cost_s(problem):
    """The cost of every assignment, [labels of node 0, labels of node 1, ...]."""
    num = len(problem.num_labels)
    total = np.zeros(problem.num_labels)
    for node, cost in enumerate(problem.node_cost_s):
        total = total + along(cost, (node,), num)
    for edge in problem.edges:
        total = total + along(edge.cost_s, (edge.u, edge.v), num)
    return total


def every_row_bytes(problem, row):
    """What every assignment puts into a row."""
    total = np.full(problem.num_labels, row.fixed_bytes)
    for node, per_label in row.bytes:
        total = total + along(per_label, (node,), len(problem.num_labels))
    for u, v, num_bytes in row.pairs:
        total = total + along(num_bytes, (u, v), len(problem.num_labels))
    return total


def every_peak_bytes(problem, rows):
    """The largest row of every assignment."""
    totals = [every_row_bytes(problem, row) for row in rows]
    return np.max([np.full(problem.num_labels, -np.inf), *totals], axis=0)


def every_fitting_cost_s(problem, rows, limit_bytes):
    """The cost of every assignment, infinite where a row exceeds the limit."""
    return np.where(every_peak_bytes(problem, rows) <= limit_bytes, every_cost_s(problem), np.inf)


def optimum_s(problem, rows=(), limit_bytes=np.inf):
    return every_fitting_cost_s(problem, rows, limit_bytes).min()


def cheapest_with(table, node):
    """Per label of a node, the smallest entry with that label fixed."""
    return np.moveaxis(table, node, 0).reshape(table.shape[node], -1).min(1)


def at_most(bound, value):
    """Whether a bound holds, rounding aside."""
    return bound <= value + ROUNDING * abs(value) + 1e-15 if np.isfinite(value) else True


def turned(problem):
    """The same, with every edge seen from its other end, in the opposite order."""
    return replace(problem, edges=tuple(edge.transposed() for edge in reversed(problem.edges)))
