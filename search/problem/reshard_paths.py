"""The specs of values under a full assignment of strategies, and the chains of collectives between them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from autoshard.cost_model.memo import memo
from autoshard.search.ir.graph import Value
from autoshard.search.ir.sharding import OperandReshard, ReshardPath, ReshardStep, SharedPaths
from autoshard.search.ir.spec import Spec, shard_size
from autoshard.search.problem.costs import CostedGraph
from autoshard.search.problem.flat_program import FlatProgram, ReadPhase, read_phase
from autoshard.search.problem.reshard import REDUCTIONS
from autoshard.search.problem.strategies import CopySource, port_specs
from autoshard.search.problem.strategy_graph import Port

STAYS = OperandReshard(())


class ReshardPaths:
    """The specs and reshards of values that the strategies imply.

    Lookups repeat for the layers of a model, so results are remembered: the spec of every port, and the path of each
    dependency between two classes.
    """

    def __init__(self, costed: CostedGraph, chosen: Sequence[int]) -> None:
        self.costed, self.chosen, self.graph = costed, chosen, costed.graph
        self.folded = costed.graph.folded
        self.program: FlatProgram = self.folded.program
        self.maker = self.program.maker
        self._to_rest: dict[tuple[int, int], ReshardPath] = {}
        self._to_readers: dict[int, OperandReshard] = {}

    @memo
    def spec(self, port: Port) -> Spec:
        """The spec of the value at a port."""
        row = port_specs(port, self.costed.strategies[port.node])[self.chosen[port.node]]
        return tuple(int(d) for d in row)

    def made(self, v: int) -> Spec:
        """The spec in which a value is made."""
        i, r = self.maker[v]
        return self.spec(self.graph.ports[self.folded.class_of[i], r, True])

    def resting(self, v: int) -> Spec:
        """The spec to which a value is brought as soon as it is made."""
        i, r = self.maker[v]
        rest = self.graph.copy_of.get((self.folded.class_of[i], r, ReadPhase.REST))
        return self.spec(Port(rest.node, ())) if rest else self.made(v)

    def chain(self, v: int, here: Spec, there: Spec, is_updating: bool = False) -> ReshardPath:
        """The steps of a value's reshard from one spec to another, for the update or for other phases."""
        if here == there:
            return ()
        made_at, r = self.maker[v]
        op_class = self.folded.class_of[made_at]
        how = self.costed.handling(self.graph.node_of[op_class], (op_class, r), is_updating)
        return self.costed.resharder.chain(self.program.values[v], here, there, how)

    def to_rest(self, v: int) -> ReshardPath:
        """The steps from the spec in which a value is made to its resting spec."""
        i, r = self.maker[v]
        alike = self.folded.class_of[i], r
        if alike not in self._to_rest:
            has_shape = bool(self.program.values[v].shape)
            self._to_rest[alike] = self.chain(v, self.made(v), self.resting(v)) if has_shape else ()
        return self._to_rest[alike]

    def to_reader(self, i: int, operand: int) -> OperandReshard:
        """The reshard by which an op gets an operand."""
        alike = self.folded.dependency_of[i][operand]
        if alike not in self._to_readers:
            self._to_readers[alike] = self._to_reader(i, operand)
        return self._to_readers[alike]

    def first_read(self, v: int) -> tuple[int, int] | None:
        """The first op that reads a value, and as which operand; None where only the boundaries of loops and branches
        read it."""
        for i in self.program.uses.get(v, ()):
            if not self.program.ops[i].is_boundary:
                return i, self.program.ops[i].operands.index(v)
        return None

    def _to_reader(self, i: int, operand: int) -> OperandReshard:
        op = self.program.ops[i]
        v, phase = op.operands[operand], read_phase(op)
        if not self.program.values[v].shape:
            return STAYS
        made_at, r = self.maker[v]
        op_class = self.folded.class_of[made_at]
        port = self.graph.ports[self.folded.class_of[i], operand, False]
        if port == self.graph.ports[op_class, r, True]:
            return STAYS  # as it is made, wherever it is brought for others
        copy = self.graph.copy_of.get((op_class, r, phase))
        here, need = self.resting(v), self.spec(port)
        source = CopySource.SAME if copy is None else self.copy_source(copy.node)
        held = here if copy is None or source is CopySource.SAME else self.spec(Port(copy.node, ()))
        via = self._read_forward_as(op_class, r, here) if source is CopySource.KEPT else here
        chain = partial(self.chain, is_updating=phase is ReadPhase.UPDATE)
        shared, last = (*chain(v, here, via), *chain(v, via, held)), chain(v, held, need)
        may_be_kept = copy is not None and bool(copy.kept_from)
        is_fresh = may_be_kept and (bool(last) if not shared else source is CopySource.FRESH)
        return OperandReshard((*shared, *last), phase.value if is_fresh else "")

    def _read_forward_as(self, op_class: int, r: int, resting: Spec) -> Spec:
        """The spec in which the forward phase's readers get a value; a kept copy comes from there."""
        copy = self.graph.copy_of.get((op_class, r, ReadPhase.FORWARD))
        if copy is None or self.copy_source(copy.node) is CopySource.SAME:
            return resting
        return self.spec(Port(copy.node, ()))

    def steps(self) -> Iterator[tuple[int, ReshardStep, int]]:
        """All steps of the values' reshards: the value, the step, and its number of runs in one training step.

        A loop's carry is read inside the loop and after it; each of the two takes its steps separately.
        """
        read = {
            (v, n) for op in self.program.ops for v, n in zip(op.operands, op.operand_counts, strict=True)
        }
        taken = [(v, step, count) for v, count in sorted(read) for step in self.to_rest(v)]
        shared = SharedPaths[None]()
        for i, op in enumerate(self.program.ops):
            for operand, key in enumerate(zip(op.operands, op.operand_counts, strict=True)):
                reshard = self.to_reader(i, operand)
                shared.arrive(
                    key, reshard, lambda: None, lambda _, step, key=key: taken.append((key[0], step, key[1]))
                )
        return iter(taken)

    def moved(self, v: int, step: ReshardStep) -> Value:
        """The value that a collective moves: a loop's sum has the type of its terms where it is reduced, and a narrowed
        value the narrower type."""
        i, r = self.maker[v]
        own, maker = self.program.values[v], (self.folded.class_of[i], r)
        if step.is_narrowed:
            return replace(own, dtype=step.narrow_dtype)
        return self.graph.terms.get(maker, own) if step.kind in REDUCTIONS else own

    def copy_source(self, node: int) -> CopySource:
        """The source of a copy under its strategy."""
        return self.costed.strategies[node].copy_sources[self.chosen[node]]

    def local_bytes(self, v: int, spec: Spec) -> float:
        """Bytes of a value on one device; a partial value is whole on every device."""
        value = self.program.values[v]
        return value.itemsize * shard_size(spec, value.shape, self.costed.resharder.mesh.shape)
