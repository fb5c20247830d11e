"""Blockwise ops in the place of attentions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from autoshard.search.ir.attention.layout import Layout
from autoshard.search.ir.attention.op import BACKWARD, FORWARD, AttentionOp
from autoshard.search.ir.graph import Graph, Op, Site, Step, Value, verify, walk, without_dead_ops
from autoshard.search.ir.sinking import sunk
from autoshard.search.memory.attention.cudnn import from_cudnn
from autoshard.search.memory.attention.layouts import layout_of
from autoshard.search.memory.attention.names import UnrecognisedError
from autoshard.search.memory.attention.reader import Reader
from autoshard.search.memory.attention.region import Region
from autoshard.search.memory.recompute import recomputed


class _Writer:
    """A graph with its attentions replaced."""

    def __init__(self, graph: Graph) -> None:
        self.values = list(graph.values)
        self.graph = graph

    def new(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def replaced(self, regions: Sequence[Region]) -> Graph:
        """The graph with blockwise ops for these regions."""
        instead: dict[int, list[Op]] = {}
        dropped = set[int]()
        for region in regions:
            layout = layout_of(region)
            ats = [at for at, _ in region.gradients.values()]
            at = region.output[0] if region.output else min(ats)
            forward = self._forward(region, layout, at)
            instead.setdefault(at, []).append(forward)
            dropped |= {region.output[0]} if region.output else set()
            if ats:
                instead.setdefault(min(ats), []).append(self._backward(region, layout, forward))
                dropped |= set(ats)
        ops: list[Op] = []
        for i, op in enumerate(self.graph.ops):
            ops += instead.get(i, ())
            if i not in dropped:
                ops.append(op)
        graph = self.graph
        return without_dead_ops(
            Graph(tuple(self.values), graph.inputs, graph.constants, tuple(ops), graph.outputs)
        )

    def _forward(self, region: Region, layout: Layout, at: int) -> Op:
        assert region.value is not None, "a region has values"
        op, values = self.graph.ops[at], self.graph.values
        sizes = layout.sizes(*(values[v].shape for v in (region.query, region.key, region.value)))
        kind = np.promote_types(values[region.query].dtype, np.float32)
        statistic = Value(layout.shape(layout.statistics, sizes), kind)
        made = op.result_values[0]
        if region.output is None:
            made = Value(layout.shape(layout.output, sizes), values[region.value].dtype)
        params = {"layout": layout, "scores": region.scores, "dtypes": (made.dtype, kind)}
        inputs = (region.query, region.key, region.value, *(v for v, _ in region.operands))
        return replace(
            op,
            primitive=AttentionOp(FORWARD),
            params=params,
            inputs=inputs,
            outputs=(*(op.outputs if region.output else (self.new(made),)), self.new(statistic)),
            result_values=(made, statistic),
        )

    def _backward(self, region: Region, layout: Layout, forward: Op) -> Op:
        ops, values = self.graph.ops, self.graph.values
        assert region.seen is not None, "a region with gradients"
        assert region.value is not None, "a region with gradients"
        found = {kind: ops[at] for kind, (at, _) in region.gradients.items()}
        arrays = {"query": region.query, "key": region.key, "value": region.value}
        results = tuple(found[k].result_values[0] if k in found else values[v] for k, v in arrays.items())
        inputs = (*arrays.values(), *forward.outputs, region.seen, *(v for v, _ in region.operands))
        made = zip(arrays, results, strict=True)
        return replace(
            min(found.values(), key=lambda op: op.outputs),
            primitive=AttentionOp(BACKWARD),
            params={"layout": layout, "scores": region.scores, "dtypes": tuple(v.dtype for v in results)},
            inputs=inputs,
            outputs=tuple(found[k].outputs[0] if k in found else self.new(v) for k, v in made),
            result_values=results,
        )


def blockwise(step: Step) -> Step | None:
    """The step with every attention that is recognised as blockwise ops; None if there is none.

    If a loop keeps its probabilities for the backward loop, this loop recomputes them first: then each of both loops holds a
    whole attention.
    """
    sunken = replace(step, graph=sunk(step.graph, is_whole=True))
    sites = frozenset(_kept_for_backward_loops(sunken.graph))
    graph, num = _rewritten((recomputed(sunken, sites) if sites else sunken).graph)
    if not num:
        return None
    verify(graph)
    return replace(step, graph=graph, spelled_out=step)


def _kept_for_backward_loops(graph: Graph) -> Iterator[Site]:
    """The ops of attentions in loops whose scores leave the loop."""
    for path, body in walk(graph):
        regions = Reader(body).regions() if path else ()
        for region in regions:
            if not region.gradients and not region.inside_values(body).isdisjoint(body.made):
                yield from ((*path, i) for i in sorted(region.inside))


def _rewritten(graph: Graph) -> tuple[Graph, int]:
    """A graph with its attentions, and those of its loops, replaced; and their number."""
    ops, total = list[Op](), 0
    for op in graph.ops:
        bodies, found = dict[str, tuple[Graph, ...]](), 0
        for key, inner in op.bodies.items():
            pairs = [_rewritten(body) for body in inner]
            bodies[key], found = tuple(body for body, _ in pairs), found + sum(n for _, n in pairs)
        op = replace(op, bodies=bodies) if found else op
        fused = from_cudnn(graph, op)
        ops.append(fused or op)
        total += found + (fused is not None)
    graph = replace(graph, ops=tuple(ops)) if total else graph
    regions = [region for region in Reader(graph).regions() if _has_layout(region)]
    graph, regions = _replaced(graph, regions)
    return graph, total + len(regions)


def _has_layout(region: Region) -> bool:
    try:
        layout_of(region)
    except UnrecognisedError:
        return False
    return True


def _replaced(graph: Graph, regions: Sequence[Region]) -> tuple[Graph, Sequence[Region]]:
    """The graph with those of the regions replaced whose scores nothing else reads, and these."""
    while regions:
        new = _Writer(graph).replaced(regions)
        left = {v for op in new.ops for v in op.outputs}
        alone = [r for r in regions if left.isdisjoint(graph.ops[r.exponential].outputs)]
        if len(alone) == len(regions):
            return new, regions
        regions = alone
    return graph, ()
