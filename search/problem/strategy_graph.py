"""The search problem before any mesh: the nodes that choose strategies, and the values that pass between them.

Nodes are groups, and *copies*. A value is made in one spec and may be needed in others. Where several consumers of one
phase need it, they share one copy: a node whose strategy is a spec, resharded to once (the all-gather that queries,
keys and values share). A value that the forward phase made and the backward phase also reads has a copy there too,
because it has two sources: *fresh*, resharded once more in the backward phase (FSDP's second all-gather), or *kept*
from the forward phase. A value that may be partial and is read in several phases is first brought to *rest*, so that it
is reduced once.

A *port* is a place where a value enters or leaves a node: its dimensions as factors of the node, from which its spec
follows, for any mesh and strategy. An *edge* joins two ports; a value passes over it `count` times in one step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

from autoshard.search.ir.factors import Kind, Rule
from autoshard.search.ir.factors.rule import Dims
from autoshard.search.ir.graph import Value
from autoshard.search.problem.flat_program import FlatOp, ReadPhase, read_phase
from autoshard.search.problem.folding import Dependency, FoldedProgram
from autoshard.search.problem.kernels import Endpoint
from autoshard.search.problem.op_groups import MIN_DECIDED_BYTES, OpGroup

CONVERSION = "convert_element_type"

STUCK = -1
"""In a port's dimensions: a factor that cannot be split."""


Maker = tuple[int, int]
"""(class, result): the values that these make."""


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
class ReshardEdge:
    """A value's way from one port to another, `count` times in one step; `maker` is its (class, result)."""

    source: Port
    target: Port
    value: Value
    count: int
    maker: Maker


@dataclass(frozen=True, slots=True)
class Copy:
    """A node that holds a value for the consumers of one phase.

    Attributes:
      node: its number.
      maker: (class, result) of the value.
      value: its shape and dtype.
      phase: the phase of its consumers.
      source: the port that the value comes from.
      targets: the ports of its consumers.
      kept_from: the ports that read the value in the forward phase, whose spec a kept copy has; empty if it can't be
        kept.
      count: number of such copies in one step.
    """

    node: int
    maker: Maker
    value: Value
    phase: ReadPhase
    source: Port
    targets: tuple[Port, ...]
    kept_from: tuple[Port, ...]
    count: int


@dataclass(frozen=True, eq=False)
class StrategyGraph:
    """The problem before any mesh.

    Attributes:
      folded: the folded program.
      groups: the first nodes, in order.
      copies: the other nodes, in order.
      edges: the values' ways between nodes; an edge from a node to itself is a reshard inside a group.
      node_of: for each class, its group.
      ports: of every operand and result.
    """

    folded: FoldedProgram
    groups: tuple[OpGroup, ...]
    copies: tuple[Copy, ...]
    edges: tuple[ReshardEdge, ...]
    node_of: tuple[int, ...]
    ports: dict[Endpoint, Port]

    @property
    def num_nodes(self) -> int:
        """Groups and copies."""
        return len(self.groups) + len(self.copies)

    def copy_at(self, node: int) -> Copy | None:
        """The copy that a node is, if it is one."""
        return self.copies[node - len(self.groups)] if node >= len(self.groups) else None

    def extents(self, port: Port) -> tuple[int, ...]:
        """The extents of the dimensions of the value at a port, as far as they can be split."""
        if port.node >= len(self.groups):
            return self.copies[port.node - len(self.groups)].value.shape
        sizes = self.groups[port.node].sizes
        return tuple(prod(sizes[f] for f in dim if f != STUCK) for dim in port.dims)

    def is_sum(self, node: int) -> bool:
        """Whether a node is a group whose values may be partial."""
        return node < len(self.groups) and self.groups[node].is_sum

    @cached_property
    def ports_of(self) -> tuple[tuple[Port, ...], ...]:
        """The ports of each group."""
        found: list[dict[Port, None]] = [{} for _ in self.groups]
        for port in self.ports.values():
            found[port.node][port] = None
        return tuple(map(tuple, found))

    @cached_property
    def summed(self) -> dict[int, tuple[tuple[int, tuple[int, ...]], ...]]:
        """By class: the results that its own group reduces, and over which of its factors; classes without any are left
        out."""
        found = {k: tuple(self._summed(k)) for k in range(len(self.folded.members))}
        return {k: results for k, results in found.items() if results}

    def _summed(self, op_class: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        rule, factor_of = self.folded.op(op_class).rule, self.groups[self.node_of[op_class]].factor_of
        factors = {
            factor_of[op_class, i]
            for i, f in enumerate(rule.factors)
            if f.kind in (Kind.SUM, Kind.REDUCE) and (op_class, i) in factor_of
        }
        for r in range(len(rule.results) if factors else 0):
            port = self.ports[op_class, r, True]
            carried = {f for dim in port.dims for f in dim} | set(port.partial_over)
            if factors - carried:
                yield r, tuple(sorted(factors - carried))

    @cached_property
    def num_reductions(self) -> tuple[int, ...]:
        """By class: how often its group reduces its results in one step. A number that a loop only adds up, as a loss in
        microbatches, is reduced once behind the loop (XLA, `while_loop_all_reduce_code_motion.cc`)."""
        found = list(self.folded.counts)
        for accumulator in (k for k in self._partial_accumulators if not self._value((k, 0)).shape):
            for term in self._terms_of(accumulator):
                found[term.producer] = self.folded.counts[accumulator]
        return tuple(found)

    @property
    def _partial_accumulators(self) -> list[int]:
        """The sums of loops that are reduced behind the loop."""
        classes = range(len(self.folded.members))
        return [k for k in classes if self.folded.op(k).is_accumulator and self.is_sum(self.node_of[k])]

    def _terms_of(self, accumulator: int) -> list[Dependency]:
        """The values that a loop's sum adds up, as they come into its group."""
        node = self.node_of[accumulator]
        into = (d for c in self.groups[node].op_classes for d in self.folded.dependencies_into[c])
        return [d for d in into if self.node_of[d.producer] != node]

    @cached_property
    def terms(self) -> dict[Maker, Value]:
        """By class and result of a loop's sum of converted terms: a term before its conversion, if the sum may be
        partial."""
        found = dict[Maker, Value]()
        for k in self._partial_accumulators:
            source = self._terms_of(k)[0]
            term = self._value((source.producer, source.result))
            if term.dtype != self._value((k, 0)).dtype:
                found[k, 0] = term
        return found

    @cached_property
    def narrowed(self) -> dict[tuple[Maker, bool], Value]:
        """By maker of a value that may be moved in a narrower type, and whether it moves to the update: the value in that
        type. Either an op converts it from that type; or one op there reads it, which converts it to that type for one
        reader, and it has no copies.

        The compiler does this too (XLA, `collective_quantizer.cc`): it exchanges a collective and the conversion behind
        it if each of the two has one reader. A collective has other readers than its operand: a parameter that the
        forward phase gathers and converts moves in the narrower type, though the update reads it as it rests."""
        found, copied = dict[tuple[Maker, bool], Value](), {copy.maker for copy in self.copies}
        for maker, readers in self._readers.items():
            updating = {k for k in readers if self._is_updating(k)}
            for there in filter(None, (updating, readers - updating)):
                to = None if maker in copied else self._converted_to(maker, there)
                others = (self.widened.get(maker), to, self._value(maker))
                narrowest = min((one for one in others if one), key=lambda one: one.itemsize)
                if narrowest.itemsize < self._value(maker).itemsize:
                    found[maker, there is updating] = narrowest
        return found

    def is_updating(self, node: int) -> bool:
        """Whether a node holds values for the update."""
        copy = self.copy_at(node)
        if copy is not None:
            return copy.phase is ReadPhase.UPDATE
        return self._is_updating(self.groups[node].op_classes[0])

    def _is_updating(self, op_class: int) -> bool:
        return read_phase(self.folded.op(op_class)) is ReadPhase.UPDATE

    @cached_property
    def widened(self) -> dict[Maker, Value]:
        """By maker of a value that is converted from a narrower type: the value in that type."""
        found = dict[Maker, Value]()
        values, classes = self.folded.program.values, range(len(self.folded.members))
        conversions = ((k, self.folded.op(k)) for k in classes if self.folded.op(k).name == CONVERSION)
        for k, op in ((k, op) for k, op in conversions if op.operands):
            before, after = values[op.operands[0]], values[op.results[0]]
            if before.itemsize < after.itemsize:
                found[k, 0] = before
        return found

    def _value(self, maker: Maker) -> Value:
        return self.folded.program.values[self.folded.op(maker[0]).results[maker[1]]]

    def _converted_to(self, maker: Maker, readers: set[int]) -> Value | None:
        """The result of the conversion that is the only one of these classes to read a value, if one op reads the result."""
        (reader, *others), uses = readers, self.folded.program.uses
        op, made = self.folded.op(reader), self.folded.op(maker[0]).results[maker[1]]
        num_reads = [self.folded.class_of[i] for i in uses.get(made, ())].count(reader)
        is_alone = (
            not others and num_reads == 1 and op.name == CONVERSION and len(uses.get(op.results[0], ())) == 1
        )
        return self._value((reader, 0)) if is_alone else None

    @cached_property
    def combined(self) -> frozenset[Maker]:
        """Values whose collectives depend on no others of their kind, so that the compiler joins small ones: the step's
        inputs, cast or not, and values that only the update reads."""
        inputs = {k for k in range(len(self.folded.members)) if self.folded.op(k).name == "input"}
        early, late = self.handing_on(inputs), self.late
        return frozenset(m for m, r in self._readers.items() if m[0] in early or r <= late)

    def handing_on(self, inputs: set[int]) -> set[int]:
        """Inputs of the step, and the classes that only pass their values on."""
        made_by: dict[int, set[int]] = {}
        for dependency in self.folded.dependencies:
            made_by.setdefault(dependency.consumer, set()).add(dependency.producer)
        return self._grown(inputs, made_by)

    @cached_property
    def late(self) -> set[int]:
        """The classes of the update, and those that only pass values on to it."""
        folded, readers = self.folded, self._readers
        read_by = {k: readers[k, 0] for k in range(len(folded.members)) if (k, 0) in readers}
        updates = {k for k in range(len(folded.members)) if self._is_updating(k)}
        return self._grown(updates, read_by)

    def _grown(self, op_classes: set[int], neighbours: dict[int, set[int]]) -> set[int]:
        """These classes, and those that only pass on values from them, or to them."""
        waiting = {k for k in neighbours if _hands_on(self.folded.op(k))} - op_classes
        while reached := {k for k in waiting if neighbours[k] <= op_classes}:
            op_classes = op_classes | reached
            waiting -= reached
        return op_classes

    @cached_property
    def _readers(self) -> dict[Maker, set[int]]:
        """The classes that read each value; a loop's addition to its own sum is not listed."""
        readers: dict[Maker, set[int]] = {}
        for dependency in self.folded.dependencies:
            node = self.node_of[dependency.producer]
            if self.is_sum(node) and node == self.node_of[dependency.consumer]:
                continue
            readers.setdefault((dependency.producer, dependency.result), set()).add(dependency.consumer)
        return readers

    @cached_property
    def copy_of(self) -> dict[tuple[int, int, ReadPhase], Copy]:
        """Copies by maker and phase."""
        return {(*c.maker, c.phase): c for c in self.copies}


def strategy_graph(folded: FoldedProgram, parts: tuple[OpGroup, ...]) -> StrategyGraph:
    """Connects the groups of a folded program."""
    node_of = [0] * len(folded.members)
    for node, group in enumerate(parts):
        for k in group.op_classes:
            node_of[k] = node
    ports = {p: port for node, group in enumerate(parts) for p, port in _ports(folded, group, node)}
    wiring = _EdgeCollector(folded, parts, ports)
    wiring.connect()
    return StrategyGraph(folded, parts, tuple(wiring.copies), tuple(wiring.edges), tuple(node_of), ports)


def _hands_on(op: FlatOp) -> bool:
    """Whether an op passes a value on as it is, or nearly so: a cast, a reshape, a slice of a stack, a sum of rows."""
    is_plain = op.rule.is_additive and len(op.operands) == len(op.results) == 1
    return is_plain or op.name in ("stack", "slice")


def _ports(folded: FoldedProgram, group: OpGroup, node: int) -> Iterator[tuple[Endpoint, Port]]:
    """The ports of all operands and results in a group."""
    read_inside = {
        dependency.producer
        for k in group.op_classes
        for dependency in folded.dependencies_into.get(k, ())
        if dependency.producer in group.op_classes
    }
    for op_class in group.op_classes:
        rule = folded.op(op_class).rule
        may_be_partial = (group.is_sum or op_class not in read_inside) and not rule.is_on_shards
        summed = {
            group.factor_of[op_class, i]
            for i, f in enumerate(rule.factors)
            if may_be_partial and f.kind is Kind.SUM and (op_class, i) in group.factor_of
        }
        for i, dims in enumerate(rule.operands):
            yield (op_class, i, False), Port(node, _named(rule, group, op_class, dims))
        for i, dims in enumerate(rule.results):
            named = _named(rule, group, op_class, dims)
            partial = summed - {f for dim in named for f in dim} if dims else set()
            yield (op_class, i, True), Port(node, named, tuple(sorted(partial)))


def _named(rule: Rule, group: OpGroup, op_class: int, dims: Dims) -> Dims:
    """Dimensions in terms of the group's factors."""
    return tuple(
        tuple(group.factor_of.get((op_class, f), STUCK) for f in d if rule.factors[f].size > 1) for d in dims
    )


Reads = dict[tuple[int, int], int]
"""Reads of the values of one class: by value and count, as a loop's carry is read inside the loop and after it."""


class _EdgeCollector:
    """Collects copies and edges, value by value."""

    def __init__(
        self, folded: FoldedProgram, parts: tuple[OpGroup, ...], ports: dict[Endpoint, Port]
    ) -> None:
        self.folded, self.parts, self.ports = folded, parts, ports
        self.copies: list[Copy] = []
        self.edges: list[ReshardEdge] = []

    def connect(self) -> None:
        for (op_class, result), reads in self._reads().items():
            self._value(op_class, result, reads)

    def _reads(self) -> dict[tuple[int, int], dict[ReadPhase, dict[Port, Reads]]]:
        """For each class's result, by phase and port: how often each value of that class is read.

        Arguments that were separated have equal ports, even if none of their own values is read there. So they have the
        copies, and these the strategies, that they had together.
        """
        program, whole_of, dependencies = self.folded.program, self.folded.whole_of, self.folded.dependencies
        handed: dict[int, Reads] = {}
        for op, dependency_of in zip(program.ops, self.folded.dependency_of, strict=True):
            for n, v, count in zip(dependency_of, op.operands, op.operand_counts, strict=True):
                if program.values[v].shape:
                    handed.setdefault(n, {})[v, count] = count
        reads: dict = {}
        readers: dict = {}
        for n, by_value in handed.items():
            d = dependencies[n]
            reader = read_phase(self.folded.op(d.consumer)), d.consumer, d.operand
            readers.setdefault((whole_of[d.producer], d.result), {})[reader] = None
            reads.setdefault((d.producer, d.result), {})[reader] = by_value
        return {
            (k, r): self._by_port((k, r), {at: reads[k, r].get(at, {}) for at in readers[whole_of[k], r]})
            for k, r in sorted(reads)
        }

    def _by_port(self, key, by_consumer) -> dict[ReadPhase, dict[Port, Reads]]:
        source = self.ports[(*key, True)]
        grouped: dict[ReadPhase, dict[Port, Reads]] = {}
        for (phase, consumer, operand), by_value in by_consumer.items():
            port = self.ports[consumer, operand, False]
            if port == source:
                continue
            merged = grouped.setdefault(phase, {}).setdefault(port, {})
            for v, count in by_value.items():
                merged[v] = max(merged.get(v, 0), count)
        return grouped

    def _value(self, op_class: int, result: int, phases: dict[ReadPhase, dict[Port, Reads]]) -> None:
        op = self.folded.op(op_class)
        value = self.folded.program.values[op.results[result]]
        source = self.ports[op_class, result, True]
        outside = {g: ports for g, ports in phases.items() if any(p.node != source.node for p in ports)}
        may_be_partial = bool(source.partial_over) or self.parts[source.node].is_sum
        if may_be_partial and len(outside) > 1:
            everything = {
                v: c for ports in phases.values() for by_value in ports.values() for v, c in by_value.items()
            }
            source = self._copy(
                (op_class, result), value, ReadPhase.REST, source, (), (), sum(everything.values())
            )
        forward = tuple(phases.get(ReadPhase.FORWARD, ()))
        for phase, ports in phases.items():
            total: Reads = {}
            for by_value in ports.values():
                for v, count in by_value.items():
                    total[v] = max(total.get(v, 0), count)
            nodes, own = {self._whole(p.node) for p in ports}, self._whole(source.node)
            is_retained = (
                phase is ReadPhase.BACKWARD and bool(forward) and value.num_bytes >= MIN_DECIDED_BYTES
            )
            start = source
            if not value.is_on_host and (len(nodes - {own}) > 1 or (is_retained and nodes != {own})):
                kept = forward if is_retained else ()
                targets = tuple(ports)
                start = self._copy(
                    (op_class, result), value, phase, source, targets, kept, sum(total.values())
                )
            for port, by_value in ports.items():
                if by_value:
                    self.edges.append(
                        ReshardEdge(start, port, value, sum(by_value.values()), (op_class, result))
                    )

    def _whole(self, node: int) -> int:
        """A number that a group shares with those that it was separated from; copies have none."""
        return self.folded.whole_of[self.parts[node].op_classes[0]] if node < len(self.parts) else -1

    def _copy(self, maker, value, phase, source, targets, kept_from, count) -> Port:
        node = len(self.parts) + len(self.copies)
        self.copies.append(Copy(node, maker, value, phase, source, targets, kept_from, count))
        self.edges.append(ReshardEdge(source, Port(node, ()), value, count, maker))
        return Port(node, ())
