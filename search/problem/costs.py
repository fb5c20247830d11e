"""The cost of every strategy and every edge on one mesh: the PBQP that the solver gets.

A node's cost is its ops' time on the devices, by the roofline, for the part that one device computes, times their runs,
plus the reductions inside it. The compiler fuses light ops: they move only the values that enter and leave their group.
An edge's cost is the cheapest reshard between the specs at its ends.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import numpy as np
from jax.lax import Precision

from autoshard.cost_model.cluster import Device
from autoshard.cost_model.compute import Product, Seconds, kernel_s, product_s
from autoshard.cost_model.decompositions import STEPS, decomposition_s
from autoshard.cost_model.memo import memo
from autoshard.search.ir.factors.contraction import FLOPS_PER_PRODUCT_SUM
from autoshard.search.ir.factors.contraction import RULES as PRODUCTS
from autoshard.search.ir.factors.rule import Dims, Rule
from autoshard.search.ir.graph import Phase
from autoshard.search.problem.flat_program import FlatOp
from autoshard.search.problem.halos import Exchange, exchanges
from autoshard.search.problem.kernels import CopyKernel, FusedKernel, Kernels, moved_alone
from autoshard.search.problem.reshard import Handling, Resharder
from autoshard.search.problem.rings import ATTENTIONS, Attention, Messages, attention
from autoshard.search.problem.strategies import (
    CopySource,
    Strategies,
    all_strategies,
    port_shares,
    port_specs,
    shards_over,
    split_over,
    splits,
)
from autoshard.search.problem.strategy_graph import Endpoint, Maker, Port, ReshardEdge, StrategyGraph
from autoshard.search.solver.pbqp import Edge, Problem

COMBINED_BYTES = 30 * 2**20
"""XLA:GPU joins collectives of one kind that do not depend on one another, up to this size. Source: XLA,
`service/collective_utils.h`, kDefaultAllReduceCombineThreshold and the constants for all-gathers and reduce-scatters."""


@dataclass(frozen=True, eq=False)
class CostedGraph:
    """A strategy graph on one mesh: its strategies and their costs."""

    graph: StrategyGraph
    kernels: Kernels
    resharder: Resharder
    strategies: tuple[Strategies, ...]

    def only(self, kept: Sequence[np.ndarray]) -> "CostedGraph":
        """The graph with only the kept strategies of each node."""
        left = zip(self.strategies, kept, strict=True)
        return replace(self, strategies=tuple(each.only(k) for each, k in left))

    @cached_property
    def node_seconds(self) -> tuple[tuple[np.ndarray, np.ndarray], ...]:
        """Per node, [strategies] seconds of computation, and of communication inside it."""
        groups = [self._group_seconds(node) for node in range(len(self.graph.groups))]
        copies = [np.zeros(len(self.strategies[c.node])) for c in self.graph.copies]
        return tuple(groups) + tuple((z, z) for z in copies)

    def compute_s(self, chosen: Sequence[int]) -> float:
        """Seconds of computation under a full assignment."""
        each = zip(self.node_seconds, chosen, strict=True)
        return sum(float(compute[strategy]) for (compute, _), strategy in each)

    @memo
    def indices(self, port: Port, rank: int) -> np.ndarray:
        """[strategies]: the spec at a port as an index of the reshard tables."""
        return self.resharder.indices(port_specs(port, self.strategies[port.node]), rank)

    @memo
    def shares(self, port: Port) -> np.ndarray:
        """[strategies]: the share of the value at a port that one device holds, padding included."""
        strategies, extents = self.strategies[port.node], self.graph.extents(port)
        return port_shares(port, strategies, extents, self.resharder.mesh.shape)

    def problem(self, hidden_s: Sequence[np.ndarray | float]) -> Problem:
        """The PBQP.

        Args:
          hidden_s: per edge of the graph, its seconds that computation hides.
        """
        costs = [compute + inside for compute, inside in self.node_seconds]
        edges = []
        for edge, whole_s, hidden in zip(self.graph.edges, self.edges_seconds, hidden_s, strict=True):
            seconds = whole_s - hidden
            if edge.source.node == edge.target.node:
                costs[edge.source.node] = costs[edge.source.node] + np.diagonal(seconds)
            else:
                edges.append(Edge(edge.source.node, edge.target.node, seconds))
        for copy in self.graph.copies:
            for port in copy.kept_from:
                edges.append(Edge(port.node, copy.node, self._kept_matrix(port, copy.node)))
        return Problem(tuple(costs), tuple(edges))

    @cached_property
    def edges_seconds(self) -> tuple[np.ndarray, ...]:
        """Per edge of the graph: `edge_seconds`."""
        edges = self.graph.edges
        self.resharder.learn((e.value, self.handling_on(e)) for e in edges)
        return tuple(map(self.edge_seconds, edges))

    def edge_seconds(self, edge: ReshardEdge) -> np.ndarray:
        """[strategies of source, strategies of target] seconds in one step."""
        how = self.handling_on(edge)
        is_tied = edge.source.node in self._private or edge.value.is_on_host  # which knows no collectives
        key = (
            "resharded",
            *self.kinds(edge),
            edge.value.shape,
            edge.value.itemsize,
            how,
            is_tied,
            edge.count,
        )
        return self.resharder.once(key, lambda: self._resharding_seconds(edge, how, is_tied))

    def kinds(self, edge: ReshardEdge) -> tuple[tuple[Strategies, Dims, tuple[int, ...]], ...]:
        """For each end of an edge, a key that ports with equal specs under equal strategies share: their node's
        strategies, the value's factors, and the factors of which it holds partial sums."""
        ends = edge.source, edge.target
        return tuple((self.strategies[port.node], port.dims, port.partial_over) for port in ends)

    def _resharding_seconds(self, edge: ReshardEdge, how: Handling, is_tied: bool) -> np.ndarray:
        rank, copy_sources = len(edge.value.shape), self.strategies[edge.target.node].copy_sources
        source, target = self.indices(edge.source, rank), self.indices(edge.target, rank)
        tied = np.where(source[:, None] == target, 0.0, np.inf)
        seconds = self.resharder.seconds(edge.value, how)[source[:, None], target] * edge.count
        seconds = tied if is_tied else seconds
        if copy_sources:
            seconds = np.where([w is CopySource.SAME for w in copy_sources], tied, seconds)
            seconds = np.where([w is CopySource.KEPT for w in copy_sources], 0.0, seconds)
        return seconds

    @cached_property
    def _private(self) -> frozenset[int]:
        """Copies with one reader, which take the reader's spec: no row of memory counts a reshard after them."""
        return frozenset(c.node for c in self.graph.copies if len(c.targets) == 1)

    def handling_on(self, edge: ReshardEdge) -> Handling:
        """The compiler's handling of the collectives of an edge."""
        return self.handling(edge.source.node, edge.maker, self.graph.is_updating(edge.target.node))

    @memo
    def handling(self, source: int, maker: Maker, is_updating: bool) -> Handling:
        """The compiler's handling of the collectives of these values on their way from a node, to the update or to
        other phases. XLA sums a scatter's result over several axes in one collective too. It sums a loop's sum in its
        terms' type, and may move a converted value in the narrower type."""
        is_scattered = self.graph.folded.op(maker[0]).name.startswith("scatter")
        term, narrowed = self.graph.terms.get(maker), self.graph.narrowed.get((maker, is_updating))
        return Handling(
            at_once=self.graph.is_sum(source) or is_scattered,
            combined_bytes=self.joined_bytes(maker),
            term_itemsize=term.itemsize if term else 0,
            narrow_dtype=narrowed.dtype if narrowed else None,
        )

    def joined_bytes(self, maker: Maker) -> float:
        """The size of the collectives that these values' are joined into; zero where they are not joined."""
        return self._combined_bytes if maker in self.graph.combined else 0.0

    @cached_property
    def _combined_bytes(self) -> float:
        """Size of combined collectives: a model may have fewer gradients than would fit."""
        folded = self.graph.folded
        gradients = [(k, r) for k, r in self.graph.combined if folded.op(k).phase is Phase.BACKWARD]
        values = folded.program.values
        total = sum(folded.sizes[k] * values[folded.op(k).results[r]].num_bytes for k, r in gradients)
        return float(min(COMBINED_BYTES, total))

    def _kept_matrix(self, port: Port, node: int) -> np.ndarray:
        copy_sources = np.array([w is CopySource.KEPT for w in self.strategies[node].copy_sources])
        forward, copy = port_specs(port, self.strategies[port.node]), self.strategies[node].assignment
        equal = (forward[:, None, :] == copy[None, :, :]).all(axis=2)
        return np.where(copy_sources[None, :] & ~equal, np.inf, 0.0)

    def _group_seconds(self, node: int) -> tuple[np.ndarray, np.ndarray]:
        group, strategies = self.graph.groups[node], self.strategies[node]
        compute, inside = np.zeros(len(strategies)), np.zeros(len(strategies))
        for op_class in group.op_classes:
            op, count = self.graph.folded.op(op_class), self.graph.folded.counts[op_class]
            compute += self._copying_seconds(op_class)
            if op.is_boundary:
                continue
            if alone := self.runs_alone(op_class):
                compute += alone * self.op_seconds(op_class)
            if op_class in self.graph.summed:
                inside += self.graph.num_reductions[op_class] * self.reduction_seconds(op_class)
            if op.name in ATTENTIONS:
                inside += count * np.array([sent.exposed_s for sent in self.ring_messages(op_class)])
            for strategy, halos in self.exchanges(op_class).items():
                inside[strategy] += count * sum(one.seconds(self.resharder.mesh) for one in halos)
        for kernel in self._kernels_of[node]:
            compute += kernel.count * kernel_s(self.device, self.kernel_bytes(kernel))
        return compute, inside

    def runs_alone(self, op_class: int) -> int:
        """Runs of the ops of a class in one step that are kernels of their own."""
        folded = self.graph.folded
        return sum(folded.program.ops[i].count for i in folded.members[op_class] if i in self.kernels.alone)

    @cached_property
    def _kernels_of(self) -> tuple[tuple[FusedKernel, ...], ...]:
        """Per node: its fused kernels."""
        found: list[list[FusedKernel]] = [[] for _ in range(self.graph.num_nodes)]
        for kernel in self.kernels.fused:
            found[self.graph.node_of[kernel.op_classes[0]]].append(kernel)
        return tuple(map(tuple, found))

    @memo
    def kernel_bytes(self, kernel: FusedKernel) -> np.ndarray:
        """[strategies]: bytes that a fused kernel moves on one device."""
        return self._bytes(self.graph.node_of[kernel.op_classes[0]], kernel.moved)

    @property
    def device(self) -> Device:
        """The device that the plan runs on."""
        return self.resharder.mesh.cluster.device

    def moved_bytes(self, op_class: int) -> np.ndarray:
        """[strategies]: bytes that one run of an op that is a kernel of its own reads and writes, on one device."""
        return self._bytes(self.graph.node_of[op_class], moved_alone(self.graph.folded, op_class))

    @memo
    def op_seconds(self, op_class: int) -> np.ndarray:
        """[strategies]: seconds of one run of an op that is a kernel of its own, on one device."""
        folded, node = self.graph.folded, self.graph.node_of[op_class]
        op = folded.op(op_class)
        if op.is_transfer:
            copied_bytes = self._bytes(node, (((op_class, 0, True), 1.0),))
            return self.resharder.mesh.cluster.host_link.copy_s(copied_bytes)
        if op.name in ATTENTIONS:
            return self._attention_seconds(op_class)
        num_bytes = self.moved_bytes(op_class)
        if op.is_host_update:
            return self._host_update_seconds(op_class, num_bytes)
        if op.operands and folded.program.values[op.operands[0]].is_on_host:
            return self.resharder.mesh.cluster.host_link.copy_s(num_bytes)
        if op.name in STEPS:
            return np.asarray(self._decomposition_seconds(op_class, num_bytes))
        is_heavy = folded.is_heavy[op_class] and op.rule.flops_per_point > 0 and len(op.operands) > 1
        if not (is_heavy or op.name == "fft"):
            return np.asarray(kernel_s(self.device, num_bytes))
        if op.name not in PRODUCTS:
            return np.asarray(kernel_s(self.device, num_bytes, self._flops(op_class)))
        peak_flops_per_s = self.product_flops_per_s(op)
        return np.asarray(product_s(self.device, self._product(op_class), num_bytes, peak_flops_per_s))

    def _host_update_seconds(self, op_class: int, num_bytes: np.ndarray) -> np.ndarray:
        """[strategies]: seconds of one update by the host, with the copies of its results to the device: XLA:GPU copies
        none before all updates are over."""
        program, node = self.graph.folded.program, self.graph.node_of[op_class]
        results, cluster = self.graph.folded.op(op_class).results, self.resharder.mesh.cluster
        copied = [
            r
            for r, v in enumerate(results)
            if any(program.ops[u].is_transfer for u in program.uses.get(v, ()))
        ]
        copied_bytes = self._bytes(node, tuple(((op_class, r, True), 1.0) for r in copied))
        back_s = cluster.host_link.copy_s(copied_bytes) if copied else 0.0
        return num_bytes / cluster.host_update_bytes_per_s + back_s

    def _attention_seconds(self, op_class: int) -> np.ndarray:
        """[strategies]: seconds of one run of a blockwise attention."""
        peak_flops_per_s = self.product_flops_per_s(self.graph.folded.op(op_class))
        return np.array([one.compute_s(peak_flops_per_s) for one in self.attentions(op_class)])

    def attentions(self, op_class: int) -> tuple[Attention, ...]:
        """Per strategy, a blockwise attention."""
        folded, node = self.graph.folded, self.graph.node_of[op_class]
        op, values, mesh = folded.op(op_class), folded.program.values, self.resharder.mesh
        factor_of = self.graph.groups[node].factor_of
        own = {f: factor_of[k, f] for k, f in factor_of if k == op_class}
        return tuple(attention(op, values, own, row, mesh) for row in self.strategies[node].assignment)

    @memo
    def ring_messages(self, op_class: int) -> tuple[Messages, ...]:
        """Per strategy, what one run of a blockwise attention sends."""
        pairs = zip(self.attentions(op_class), self.op_seconds(op_class).tolist(), strict=True)
        return tuple(one.messages(seconds) for one, seconds in pairs)

    def rings(self, chosen: Sequence[int]) -> Iterator[tuple[int, Messages]]:
        """The messages of all blockwise attentions under a full assignment, each with its runs in one step."""
        for op_class, node in enumerate(self.graph.node_of):
            if self.graph.folded.op(op_class).name in ATTENTIONS:
                yield self.graph.folded.counts[op_class], self.ring_messages(op_class)[chosen[node]]

    def hidden_in_rings_s(self, chosen: Sequence[int]) -> float:
        """Seconds of the rings' messages that the blocks' products hide."""
        return sum(n * (sent.total_s - sent.exposed_s) for n, sent in self.rings(chosen))

    @memo
    def exchanges(self, op_class: int) -> dict[int, tuple[Exchange, ...]]:
        """By strategy, the exchanges of halos in one run of an op; strategies without any are left out."""
        has_windows = bool(self.graph.folded.op(op_class).rule.windows)
        return dict(self._found_exchanges(op_class)) if has_windows else {}

    def _found_exchanges(self, op_class: int) -> Iterator[tuple[int, tuple[Exchange, ...]]]:
        graph, node = self.graph, self.graph.node_of[op_class]
        op, factor_of = graph.folded.op(op_class), graph.groups[node].factor_of
        own = {f: factor_of[k, f] for k, f in factor_of if k == op_class}
        values = [graph.folded.program.values[v] for v in op.operands]
        shares = [self.shares(graph.ports[op_class, i, False]) for i in range(len(values))]
        assignment = self.strategies[node].assignment
        cuts_windows = splits({own[window.factor] for window in op.rule.windows}, assignment).any(axis=1)
        for strategy, row in zip(
            np.flatnonzero(cuts_windows).tolist(), assignment[cuts_windows], strict=True
        ):
            parts = [v.num_bytes * float(s[strategy]) for v, s in zip(values, shares, strict=True)]
            found = tuple(exchanges(op, [v.shape for v in values], parts, own, row, self.resharder.mesh))
            if found:
                yield strategy, found

    def halos(self, chosen: Sequence[int]) -> Iterator[tuple[int, Exchange]]:
        """The exchanges of halos under a full assignment, each with its runs in one step."""
        for op_class, node in enumerate(self.graph.node_of):
            for exchange in self.exchanges(op_class).get(chosen[node], ()):
                yield self.graph.folded.counts[op_class], exchange

    def _decomposition_seconds(self, op_class: int, num_bytes: np.ndarray) -> Seconds:
        """[strategies]: seconds of one run of an op that goes through the columns of a matrix, or of many."""
        program, op = self.graph.folded.program, self.graph.folded.op(op_class)
        value = program.values[op.operands[0]]
        batch = {f for dim in op.rule.operands[0][:-2] for f in dim}
        num_matrices = prod(value.shape[:-2]) / self._parts(op_class, batch)
        matrix = value.shape[-2], value.shape[-1]
        flops = self._flops(op_class)
        return decomposition_s(
            self.device, STEPS[op.name], matrix, num_matrices, value.dtype, num_bytes, flops
        )

    def _copying_seconds(self, op_class: int) -> np.ndarray | float:
        """[strategies]: seconds in one step of the copies for an op, or of filling with zeros."""
        if self.device.name == "CPU":
            return 0.0
        copied = self.kernels.copied.get(op_class, ())
        seconds = sum(copy.count * np.asarray(self.copy_seconds(copy)) for copy in copied)
        halos = self.exchanges(op_class)
        if not halos or self.graph.folded.op(op_class).name not in PRODUCTS:  # others join halos on the fly
            return seconds
        written = {one.endpoint[1] for one in copied}
        return seconds + self.graph.folded.counts[op_class] * self._joining_seconds(op_class, halos, written)

    def _joining_seconds(
        self, op_class: int, halos: Mapping[int, Sequence[Exchange]], written: Collection[int]
    ) -> np.ndarray:
        """[strategies]: seconds to write a device's part and its halos as one array, of operands that are not written out
        in any case."""
        found = np.zeros(len(self.strategies[self.graph.node_of[op_class]]))
        values, operands = self.graph.folded.program.values, self.graph.folded.op(op_class).operands
        for strategy, exchanged in halos.items():
            for operand in {one.operand for one in exchanged} - {*written}:
                share = self.shares(self.graph.ports[op_class, operand, False])[strategy]
                growth = prod(one.growth for one in exchanged if one.operand == operand)
                num_bytes = (1 + growth) * share * values[operands[operand]].num_bytes
                found[strategy] += float(kernel_s(self.device, num_bytes))
        return found

    def copy_seconds(self, copy: CopyKernel) -> Seconds:
        """[strategies]: seconds of one run of a kernel that only moves an array."""
        node = self.graph.node_of[copy.endpoint[0]]
        return kernel_s(self.device, self._bytes(node, ((copy.endpoint, copy.times),)))

    def _bytes(self, node: int, moved: Sequence[tuple[Endpoint, float]]) -> np.ndarray:
        """[strategies]: bytes that one device moves."""
        total = np.zeros(len(self.strategies[node]))
        for endpoint, times in moved:
            op_class, index, is_result = endpoint
            op = self.graph.folded.op(op_class)
            value = self.graph.folded.program.values[(op.results if is_result else op.operands)[index]]
            total += times * value.num_bytes * self.shares(self.graph.ports[endpoint])
        return total

    def _product(self, op_class: int) -> Product:
        """[strategies]: the matrix product that one device computes."""
        sizes = self.product_sizes(op_class)
        parts = (self._parts(op_class, loops) for loops in product_loops(self.graph.folded.op(op_class).rule))
        return Product(*(np.ceil(size / by) for size, by in zip(sizes, parts, strict=True)))

    def product_sizes(self, op_class: int) -> tuple[float, float, float, float]:
        """The matrix product that one device computes alone: batches, rows, columns, terms of each sum."""
        rule = self.graph.folded.op(op_class).rule
        sizes = [prod(rule.factors[f].size for f in loops) for loops in product_loops(rule)[:3]]
        points = prod(max(1, size) for size in sizes)  # as `num_points` counts the loops of an empty array
        batch, rows, columns = map(float, sizes)
        depth = self._points(op_class) * rule.flops_per_point / (FLOPS_PER_PRODUCT_SUM * points)
        return batch, rows, columns, depth

    def _flops(self, op_class: int) -> np.ndarray:
        """[strategies]: floating-point operations of one device."""
        rule = self.graph.folded.op(op_class).rule
        return (
            rule.flops_per_point
            * self._points(op_class)
            / self._parts(op_class, set(range(len(rule.factors))))
        )

    def _points(self, op_class: int) -> float:
        return float(self.graph.folded.op(op_class).rule.num_points)

    def _parts(self, op_class: int, loops: set[int]) -> np.ndarray:
        """[strategies]: the number of parts into which some of an op's loops are cut."""
        node = self.graph.node_of[op_class]
        factor_of = self.graph.groups[node].factor_of
        own = frozenset(factor_of[op_class, f] for f in loops if (op_class, f) in factor_of)
        return shards_over(own, self.strategies[node], self.resharder.mesh.shape)

    def product_flops_per_s(self, op: FlatOp) -> float:
        """The peak rate for an op's operands; a product that asks for all of float32's digits runs on ordinary cores."""
        device = self.device
        dtype = self.graph.folded.program.values[op.operands[0]].dtype
        asked = op.op.params.get("precision") if op.op is not None else None
        wanted = asked if isinstance(asked, tuple) else (asked,)
        if dtype == np.float32 and Precision.HIGHEST in wanted:
            return device.vector_flops_per_s
        return device.peak_flops_per_s(dtype)

    def reduction_seconds(self, op_class: int) -> np.ndarray:
        """[strategies]: seconds of the all-reduces of an op's results that its own group resolves."""
        total = np.zeros(len(self.strategies[self.graph.node_of[op_class]]))
        for axes, at, local_bytes, combined_bytes in self.reductions(op_class):
            total[at] += self.resharder.mesh.time_s("all-reduce", axes, local_bytes, combined_bytes)
        return total

    def reductions(self, op_class: int):
        """All-reduces inside an op: (mesh axes, [strategies] where, bytes per device there, bytes of the collectives that
        they are joined into), for each set of axes."""
        graph, op = self.graph, self.graph.folded.op(op_class)
        for r, factors in graph.summed.get(op_class, ()):
            value = graph.folded.program.values[op.results[r]]
            shares = self.shares(graph.ports[op_class, r, True])
            for axes, at in split_over(factors, self.strategies[graph.node_of[op_class]]):
                yield axes, at, value.num_bytes * shares[at], self.joined_bytes((op_class, r))


def product_loops(rule: Rule) -> tuple[set[int], set[int], set[int], set[int]]:
    """The loops of a matrix product. Those of the result are batches, rows or columns by the operands that they index; all
    others are summed over."""
    left, right, made = ({f for dim in dims for f in dim} for dims in (*rule.operands[:2], rule.results[0]))
    return made & left & right, made - right, made & right - left, set(range(len(rule.factors))) - made


def price(graph: StrategyGraph, kernels: Kernels, resharder: Resharder) -> CostedGraph:
    """Puts a strategy graph on a mesh."""
    return CostedGraph(graph, kernels, resharder, all_strategies(graph, resharder))
