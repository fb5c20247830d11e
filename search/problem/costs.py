"""The cost of every label and every wire on one mesh: the PBQP that the solver gets.

A node's cost is its ops' time on the devices, by the roofline, for the part that one device computes, times
how often they run, plus the reductions inside it. Light ops are fused by the compiler: what they move is what
enters and leaves their cluster. A wire's cost is the cheapest reshard between the specs at its ends.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from jax.lax import Precision

from cost_model.cluster import Device
from cost_model.compute import Product, kernel_s, product_s
from search.ir.factors import Kind
from search.ir.factors.contraction import FLOPS_PER_PRODUCT_SUM
from search.ir.factors.contraction import RULES as PRODUCTS
from search.ir.graph import Phase
from search.problem.flat_program import FlatOp
from search.problem.fusion import is_light, moved_alone
from search.problem.reshard import Handling, Resharder
from search.problem.strategies import Choices, Way, all_choices, port_specs, shards_over
from search.problem.strategy_graph import Maker, Place, Port, Sketch, Wire
from search.solver.pbqp import Edge, Problem

COMBINED_BYTES = 30 * 2**20
"""XLA:GPU joins collectives of one kind that wait for nothing else of it, up to this size. Source: XLA,
`service/collective_utils.h`, kDefaultAllReduceCombineThreshold and its like for all-gathers and reduce-scatters."""


@dataclass(frozen=True, eq=False)
class Priced:
    """A sketch on one mesh: its labels and their costs."""

    sketch: Sketch
    resharder: Resharder
    choices: tuple[Choices, ...]

    @cached_property
    def node_seconds(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Per node, [labels] seconds of computation, and of communication inside it."""
        clusters = [self._cluster_seconds(node) for node in range(len(self.sketch.clusters))]
        copies = [np.zeros(len(self.choices[c.node])) for c in self.sketch.copies]
        return tuple(clusters) + tuple((z, z) for z in copies)

    @cached_property
    def spec_index(self) -> dict[tuple[Port, int], np.ndarray]:
        """Memo of `indices`."""
        return {}

    @cached_property
    def _shards(self) -> dict[Port, np.ndarray]:
        """Memo of `shards`."""
        return {}

    def indices(self, port: Port, rank: int) -> np.ndarray:
        """[labels]: the spec at a port as an index of the reshard tables."""
        key = (port, rank)
        if key not in self.spec_index:
            specs = port_specs(port, self.choices[port.node])
            index = np.zeros(len(specs), np.int64)
            for axis in range(specs.shape[1]):
                index = index * (rank + 2) + specs[:, axis] + 2
            self.spec_index[key] = index
        return self.spec_index[key]

    def shards(self, port: Port) -> np.ndarray:
        """[labels]: into how many parts the value at a port is cut."""
        if port not in self._shards:
            specs = port_specs(port, self.choices[port.node])
            self._shards[port] = np.where(specs >= 0, np.array(self.resharder.mesh.shape), 1).prod(axis=1)
        return self._shards[port]

    def problem(self) -> Problem:
        """The PBQP."""
        costs = [compute + inside for compute, inside in self.node_seconds]
        edges = []
        for wire in self.sketch.wires:
            seconds = self.wire_seconds(wire)
            if wire.source.node == wire.target.node:
                costs[wire.source.node] = costs[wire.source.node] + np.diagonal(seconds)
            else:
                edges.append(Edge(wire.source.node, wire.target.node, seconds))
        for copy in self.sketch.copies:
            for port in copy.kept_from:
                edges.append(Edge(port.node, copy.node, self._kept_matrix(port, copy.node)))
        return Problem(tuple(costs), tuple(edges))

    def wire_seconds(self, wire: Wire) -> np.ndarray:
        """[labels of source, labels of target] seconds in one step."""
        rank = len(wire.value.shape)
        table = self.resharder.seconds(wire.value, self.handling(wire.source.node, wire.maker))
        source, target = self.indices(wire.source, rank), self.indices(wire.target, rank)
        seconds = table[np.ix_(source, target)] * wire.count
        ways = self.choices[wire.target.node].ways
        equal = source[:, None] == target[None, :]
        if wire.source.node in self._private:
            seconds = np.where(equal, 0.0, np.inf)
        if ways:
            seconds = np.where([w is Way.SAME for w in ways], np.where(equal, 0.0, np.inf), seconds)
            seconds = np.where([w is Way.KEPT for w in ways], 0.0, seconds)
        return seconds

    @cached_property
    def _private(self) -> frozenset[int]:
        """Copies with one reader: they lie as it wants them, or what it is handed would be in nobody's books."""
        return frozenset(c.node for c in self.sketch.copies if len(c.targets) == 1)

    def handling(self, source: int, maker: Maker) -> Handling:
        """What the compiler does with the collectives of these values on their way from a node. It sums what is scattered
        over several axes in one collective too."""
        is_scattered = self.sketch.folded.op(maker[0]).name.startswith("scatter")
        return Handling(self.sketch.is_sum(source) or is_scattered, self._joined_bytes(maker))

    def _joined_bytes(self, maker: Maker) -> float:
        """The size of the collectives that these values' are joined into; zero where they are left alone."""
        return self._combined_bytes if maker in self.sketch.combined else 0.0

    @cached_property
    def _combined_bytes(self) -> float:
        """How large combined collectives get: a model may have fewer gradients than would fit."""
        folded = self.sketch.folded
        gradients = [(k, r) for k, r in self.sketch.combined if folded.op(k).phase is Phase.BACKWARD]
        values = folded.program.values
        total = sum(len(folded.members[k]) * values[folded.op(k).results[r]].num_bytes for k, r in gradients)
        return float(min(COMBINED_BYTES, total))

    def _kept_matrix(self, port: Port, node: int) -> np.ndarray:
        ways = np.array([w is Way.KEPT for w in self.choices[node].ways])
        forward, copy = port_specs(port, self.choices[port.node]), self.choices[node].assignment
        equal = (forward[:, None, :] == copy[None, :, :]).all(axis=2)
        return np.where(ways[None, :] & ~equal, np.inf, 0.0)

    def _cluster_seconds(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        cluster, choices = self.sketch.clusters[node], self.choices[node]
        compute, inside = np.zeros(len(choices)), np.zeros(len(choices))
        for kind in cluster.kinds:
            op, count = self.sketch.folded.op(kind), self.sketch.folded.counts[kind]
            if op.is_boundary:
                continue
            if not is_light(self.sketch.folded, kind):
                compute += count * self.op_seconds(kind)
            inside += count * self._reduction_seconds(kind)
        for kernel in self.sketch.kernels_of[node]:
            compute += kernel.count * kernel_s(self._device, self._bytes(node, kernel.moved))
        return compute, inside

    @property
    def _device(self) -> Device:
        return self.resharder.mesh.cluster.device

    def op_seconds(self, kind: int) -> np.ndarray:
        """[labels]: one run of an op that is a kernel of its own, on one device."""
        folded, node = self.sketch.folded, self.sketch.node_of[kind]
        op = folded.op(kind)
        num_bytes = self._bytes(node, moved_alone(folded, kind))
        if not (folded.is_heavy[kind] and op.rule.flops_per_point > 0 and len(op.operands) > 1):
            return np.asarray(kernel_s(self._device, num_bytes))
        if op.name not in PRODUCTS:
            return np.asarray(kernel_s(self._device, num_bytes, self._flops(kind)))
        peak_flops_per_s = self._product_flops_per_s(op)
        return np.asarray(product_s(self._device, self._product(kind), num_bytes, peak_flops_per_s))

    def _bytes(self, node: int, moved: Sequence[tuple[Place, float]]) -> np.ndarray:
        """[labels]: bytes that one device moves."""
        total = np.zeros(len(self.choices[node]))
        for place, times in moved:
            kind, index, is_result = place
            op = self.sketch.folded.op(kind)
            value = self.sketch.folded.program.values[(op.results if is_result else op.operands)[index]]
            total += times * value.num_bytes / self.shards(self.sketch.ports[place])
        return total

    def _product(self, kind: int) -> Product:
        """[labels]: the matrix product that one device computes.

        Loops of the result are batches, rows or columns by the operands that they index; all others are summed over.
        """
        rule = self.sketch.folded.op(kind).rule
        left, right, made = (
            {f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0])
        )
        batch, rows, columns = made & left & right, made - right, made & right - left
        sizes = [prod(rule.factors[f].size for f in loops) for loops in (batch, rows, columns)]
        depth = self._points(kind) * rule.flops_per_point / (FLOPS_PER_PRODUCT_SUM * prod(sizes))
        rest = set(range(len(rule.factors))) - made
        local = [
            np.ceil(size / self._parts(kind, loops))
            for size, loops in zip((*sizes, depth), (batch, rows, columns, rest), strict=True)
        ]
        return Product(*local)

    def _flops(self, kind: int) -> np.ndarray:
        """[labels]: floating-point operations of one device."""
        rule = self.sketch.folded.op(kind).rule
        return rule.flops_per_point * self._points(kind) / self._parts(kind, set(range(len(rule.factors))))

    def _points(self, kind: int) -> float:
        return prod(float(f.size) for f in self.sketch.folded.op(kind).rule.factors)

    def _parts(self, kind: int, loops: set[int]) -> np.ndarray:
        """[labels]: into how many parts some of an op's loops are cut."""
        node = self.sketch.node_of[kind]
        factor_of = self.sketch.clusters[node].factor_of
        own = frozenset(factor_of[kind, f] for f in loops if (kind, f) in factor_of)
        return shards_over(own, self.choices[node], self.resharder.mesh.shape)

    def _product_flops_per_s(self, op: FlatOp) -> float:
        """The peak for an op's operands; a product that asks for all of float32's digits runs on ordinary cores."""
        device = self._device
        dtype = self.sketch.folded.program.values[op.operands[0]].dtype
        asked = op.op.params.get("precision") if op.op is not None else None
        wanted = asked if isinstance(asked, tuple) else (asked,)
        if dtype == np.float32 and Precision.HIGHEST in wanted:
            return device.vector_flops_per_s
        return device.peak_flops_per_s(dtype)

    def _reduction_seconds(self, kind: int) -> np.ndarray:
        """[labels]: all-reduces of an op's results that its own cluster resolves."""
        total = np.zeros(len(self.choices[self.sketch.node_of[kind]]))
        for axes, at, local_bytes, combined_bytes in self.reductions(kind):
            total[at] += self.resharder.mesh.time_s("all-reduce", axes, local_bytes, combined_bytes)
        return total

    def reductions(self, kind: int):
        """All-reduces inside an op: (mesh axes, [labels] where, bytes per device there, bytes of the collectives that
        they are joined into), for each set of axes."""
        sketch, op = self.sketch, self.sketch.folded.op(kind)
        node = sketch.node_of[kind]
        cluster, assignment = sketch.clusters[node], self.choices[node].assignment
        for r, v in enumerate(op.results):
            port = sketch.ports[kind, r, True]
            carried = {f for dim in port.dims for f in dim} | set(port.partial_over)
            reduced = sorted(
                {
                    cluster.factor_of[kind, i]
                    for i, f in enumerate(op.rule.factors)
                    if f.kind in (Kind.SUM, Kind.REDUCE) and (kind, i) in cluster.factor_of
                }
                - carried
            )
            if not reduced:
                continue
            split = np.isin(assignment, reduced)
            value, shards = sketch.folded.program.values[v], self.shards(port)
            for row in np.unique(split, axis=0):
                if row.any():
                    at = np.flatnonzero((split == row).all(axis=1))
                    axes = tuple(np.flatnonzero(row).tolist())
                    yield axes, at, value.num_bytes / shards[at], self._joined_bytes((kind, r))


def price(sketch: Sketch, resharder: Resharder) -> Priced:
    """Puts a sketch on a mesh."""
    return Priced(sketch, resharder, all_choices(sketch, resharder))
