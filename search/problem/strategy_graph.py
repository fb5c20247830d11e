"""The search problem before any mesh: who decides, and what passes between them.

Nodes are clusters, and *copies*. A value is made in one spec and may be wanted in others. Where several
consumers of one phase want it, they share one copy: a node whose label is a spec, resharded to once (the
all-gather that queries, keys and values share). A value that the forward phase made and the backward phase
reads again has a copy there too, because how it gets there is a choice: *fresh*, resharded again in the
backward phase (FSDP's second all-gather), or *kept* from the forward phase. A value that may be partial and
is read in several phases is first brought to *rest*, so that it is reduced once.

A *port* is a place where a value enters or leaves a node: its dimensions as factors of the node, from which
follows, for any mesh and label, its spec. A *wire* joins two ports and is handed over `count` times in one
step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from search.ir.factors import Kind, Rule
from search.ir.factors.rule import Dims
from search.ir.graph import Phase, Value
from search.problem.flat_program import FlatOp
from search.problem.folding import Folded
from search.problem.fusion import Kernel, Place, kernels
from search.problem.op_groups import Cluster

STUCK = -1
"""In a port's dimensions: a factor that cannot be split."""

MIN_RETAINED_BYTES = 1 << 16
"""Smaller values need no choice of retention: resharding them is all latency, keeping them costs nothing."""


class Group(StrEnum):
    """Which consumers a copy serves; REST serves all."""

    REST = "rest"
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


Maker = tuple[int, int]
"""(kind, result): the values that these make."""


@dataclass(frozen=True, slots=True)
class Port:
    """Where a value meets a node.

    Attributes:
      node: the node's number.
      dims: per dimension, the node's factors that it is made of, major to minor; empty for a copy's port.
      partial_over: factors of which the value holds partial sums.
    """

    node: int
    dims: Dims
    partial_over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wire:
    """A value's way from one port to another, `count` times in one step; `maker` is its (kind, result)."""

    source: Port
    target: Port
    value: Value
    count: int
    maker: Maker


@dataclass(frozen=True, slots=True)
class Copy:
    """A node that holds a value for one group of consumers.

    Attributes:
      node: its number.
      maker: (kind, result) of the value.
      value: its shape and dtype.
      group: whom it serves.
      source: where it comes from.
      targets: whom it serves, as ports.
      kept_from: the ports that read the value in the forward phase, whose spec a kept copy has; empty if it
        can't be kept.
      count: how many there are in one step.
    """

    node: int
    maker: Maker
    value: Value
    group: Group
    source: Port
    targets: tuple[Port, ...]
    kept_from: tuple[Port, ...]
    count: int


@dataclass(frozen=True, eq=False)
class Sketch:
    """The problem before any mesh.

    Attributes:
      folded: the folded program.
      clusters: the first nodes, in order.
      copies: the other nodes, in order.
      wires: what passes between nodes; a wire from a node to itself is a reshard inside a cluster.
      node_of: for each kind, its cluster.
      ports: of every operand and result.
    """

    folded: Folded
    clusters: tuple[Cluster, ...]
    copies: tuple[Copy, ...]
    wires: tuple[Wire, ...]
    node_of: tuple[int, ...]
    ports: dict[Place, Port]

    @property
    def num_nodes(self) -> int:
        """Clusters and copies."""
        return len(self.clusters) + len(self.copies)

    def is_sum(self, node: int) -> bool:
        """Whether a node is a cluster whose values may be partial."""
        return node < len(self.clusters) and self.clusters[node].is_sum

    @cached_property
    def kernels_of(self) -> tuple[tuple[Kernel, ...], ...]:
        """Per node: the kernels of its light ops."""
        found: list[list[Kernel]] = [[] for _ in range(self.num_nodes)]
        for kernel in kernels(self.folded, self.node_of):
            found[self.node_of[kernel.kinds[0]]].append(kernel)
        return tuple(tuple(k) for k in found)

    @cached_property
    def combined(self) -> frozenset[Maker]:
        """Values whose collectives wait for nothing else of their kind, so that the compiler joins small ones: the
        step's inputs, cast or not, and what is only for the update."""
        folded, readers = self.folded, self._readers
        made_by: dict[int, set[int]] = {}
        for link in folded.links:
            made_by.setdefault(link.consumer, set()).add(link.producer)
        read_by = {k: readers[k, 0] for k in range(len(folded.members)) if (k, 0) in readers}
        inputs = {k for k in range(len(folded.members)) if folded.op(k).name == "input"}
        updates = {k for k in range(len(folded.members)) if group_of(folded.op(k)) is Group.UPDATE}
        early, late = self._grown(inputs, made_by), self._grown(updates, read_by)
        return frozenset(m for m, r in readers.items() if m[0] in early or r <= late)

    def _grown(self, kinds: set[int], neighbours: dict[int, set[int]]) -> set[int]:
        """These kinds, and those that only hand on what comes from, or goes to, kinds among them."""
        waiting = {k for k in neighbours if _hands_on(self.folded.op(k))} - kinds
        while reached := {k for k in waiting if neighbours[k] <= kinds}:
            kinds = kinds | reached
            waiting -= reached
        return kinds

    @cached_property
    def _readers(self) -> dict[Maker, set[int]]:
        """The kinds that read each value."""
        readers: dict[Maker, set[int]] = {}
        for link in self.folded.links:
            readers.setdefault((link.producer, link.result), set()).add(link.consumer)
        return readers

    @cached_property
    def copy_of(self) -> dict[tuple[int, int, Group], Copy]:
        """Copies by maker and group."""
        return {(*c.maker, c.group): c for c in self.copies}


def sketch(folded: Folded, parts: tuple[Cluster, ...]) -> Sketch:
    """Connects the clusters of a folded program."""
    node_of = [0] * len(folded.members)
    for node, cluster in enumerate(parts):
        for k in cluster.kinds:
            node_of[k] = node
    ports = {p: port for node, cluster in enumerate(parts) for p, port in _ports(folded, cluster, node)}
    wiring = _Wiring(folded, parts, ports)
    wiring.connect()
    return Sketch(folded, parts, tuple(wiring.copies), tuple(wiring.wires), tuple(node_of), ports)


def group_of(op: FlatOp) -> Group:
    """The group in which an op reads: the next step's state is read by the update."""
    return Group.UPDATE if op.name == "input" else _GROUP_OF[op.phase]


def _hands_on(op: FlatOp) -> bool:
    """Whether an op passes a value on as it is, or nearly so: a cast, a reshape, a slice of a stack, a sum of rows."""
    is_plain = op.rule.is_additive and len(op.operands) == len(op.results) == 1
    return is_plain or op.name in ("stack", "slice")


_GROUP_OF = {
    Phase.FORWARD: Group.FORWARD,
    Phase.BACKWARD: Group.BACKWARD,
    Phase.UPDATE: Group.UPDATE,
}


def _ports(folded: Folded, cluster: Cluster, node: int) -> Iterator[tuple[Place, Port]]:
    """The ports of all operands and results in a cluster."""
    read_inside = {
        link.producer
        for k in cluster.kinds
        for link in folded.links_into.get(k, ())
        if link.producer in cluster.kinds
    }
    for kind in cluster.kinds:
        rule = folded.op(kind).rule
        may_be_partial = cluster.is_sum or kind not in read_inside
        summed = {
            cluster.factor_of[kind, i]
            for i, f in enumerate(rule.factors)
            if may_be_partial and f.kind is Kind.SUM and (kind, i) in cluster.factor_of
        }
        for i, dims in enumerate(rule.operands):
            yield (kind, i, False), Port(node, _named(rule, cluster, kind, dims))
        for i, dims in enumerate(rule.results):
            named = _named(rule, cluster, kind, dims)
            partial = summed - {f for dim in named for f in dim} if dims else set()
            yield (kind, i, True), Port(node, named, tuple(sorted(partial)))


def _named(rule: Rule, cluster: Cluster, kind: int, dims: Dims) -> Dims:
    """Dimensions in terms of the cluster's factors."""
    return tuple(
        tuple(cluster.factor_of.get((kind, f), STUCK) for f in d if rule.factors[f].size > 1) for d in dims
    )


Reads = dict[tuple[int, int], int]
"""How often values of one kind are read: by value and count, as a loop's carry is read inside the loop and after it."""


class _Wiring:
    """Collects copies and wires, value by value."""

    def __init__(self, folded: Folded, parts: tuple[Cluster, ...], ports: dict[Place, Port]) -> None:
        self.folded, self.parts, self.ports = folded, parts, ports
        self.copies: list[Copy] = []
        self.wires: list[Wire] = []

    def connect(self) -> None:
        for (kind, result), reads in self._reads().items():
            self._value(kind, result, reads)

    def _reads(self) -> dict[tuple[int, int], dict[Group, dict[Port, Reads]]]:
        """For each kind's result, by group and port: how often each value of that kind is read."""
        program = self.folded.program
        reads: dict = {}
        for position, op in enumerate(program.ops):
            consumer = self.folded.kind_of[position]
            for operand, (v, count) in enumerate(zip(op.operands, op.operand_counts, strict=True)):
                if not program.values[v].shape:
                    continue
                made, r = program.maker[v]
                key = (self.folded.kind_of[made], r)
                by_value = reads.setdefault(key, {}).setdefault((group_of(op), consumer, operand), {})
                by_value[v, count] = count
        return {key: self._by_port(key, reads[key]) for key in sorted(reads)}

    def _by_port(self, key, by_consumer) -> dict[Group, dict[Port, Reads]]:
        source = self.ports[(*key, True)]
        grouped: dict[Group, dict[Port, Reads]] = {}
        for (group, consumer, operand), by_value in by_consumer.items():
            port = self.ports[consumer, operand, False]
            if port == source:
                continue
            merged = grouped.setdefault(group, {}).setdefault(port, {})
            for v, count in by_value.items():
                merged[v] = max(merged.get(v, 0), count)
        return grouped

    def _value(self, kind: int, result: int, groups: dict[Group, dict[Port, Reads]]) -> None:
        op = self.folded.op(kind)
        value = self.folded.program.values[op.results[result]]
        source = self.ports[kind, result, True]
        outside = {g: ports for g, ports in groups.items() if any(p.node != source.node for p in ports)}
        may_be_partial = bool(source.partial_over) or self.parts[source.node].is_sum
        if may_be_partial and len(outside) > 1:
            everything = {
                v: c for ports in groups.values() for by_value in ports.values() for v, c in by_value.items()
            }
            source = self._copy((kind, result), value, Group.REST, source, (), (), sum(everything.values()))
        forward = tuple(groups.get(Group.FORWARD, ()))
        for group, ports in groups.items():
            total: Reads = {}
            for by_value in ports.values():
                for v, count in by_value.items():
                    total[v] = max(total.get(v, 0), count)
            nodes = {p.node for p in ports}
            is_retained = group is Group.BACKWARD and bool(forward) and value.num_bytes >= MIN_RETAINED_BYTES
            start = source
            if len(nodes - {source.node}) > 1 or (is_retained and nodes != {source.node}):
                kept = forward if is_retained else ()
                targets = tuple(ports)
                start = self._copy((kind, result), value, group, source, targets, kept, sum(total.values()))
            for port, by_value in ports.items():
                self.wires.append(Wire(start, port, value, sum(by_value.values()), (kind, result)))

    def _copy(self, maker, value, group, source, targets, kept_from, count) -> Port:
        node = len(self.parts) + len(self.copies)
        self.copies.append(Copy(node, maker, value, group, source, targets, kept_from, count))
        self.wires.append(Wire(source, Port(node, ()), value, count, maker))
        return Port(node, ())
