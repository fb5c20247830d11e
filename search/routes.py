"""How values lie and travel under a full assignment of labels: specs, and the chains of collectives between them."""

from collections.abc import Sequence

from autoshard.spec import Spec, num_shards
from search.choices import Way, port_specs
from search.pricing import Priced
from search.program import Program
from search.reshard import Step
from search.sketch import Group, Port, group_of


class Routes:
    """The labels' meaning, value by value; remembers every port's spec."""

    def __init__(self, priced: Priced, labels: Sequence[int]) -> None:
        self.priced, self.labels, self.sketch = priced, labels, priced.sketch
        self.folded = priced.sketch.folded
        self.program: Program = self.folded.program
        self.maker = {v: (i, r) for i, op in enumerate(self.program.ops) for r, v in enumerate(op.results)}
        self._specs: dict[Port, Spec] = {}

    def spec(self, port: Port) -> Spec:
        """Of the value at a port."""
        if port not in self._specs:
            row = port_specs(port, self.priced.choices[port.node])[self.labels[port.node]]
            self._specs[port] = tuple(int(d) for d in row)
        return self._specs[port]

    def made(self, v: int) -> Spec:
        """In which a value is made."""
        i, r = self.maker[v]
        return self.spec(self.sketch.ports[self.folded.kind_of[i], r, True])

    def resting(self, v: int) -> Spec:
        """To which it is brought at once."""
        i, r = self.maker[v]
        rest = self.sketch.copy_of.get((self.folded.kind_of[i], r, Group.REST))
        return self.spec(Port(rest.node, ())) if rest else self.made(v)

    def chain(self, v: int, here: Spec, there: Spec) -> tuple[Step, ...]:
        """The steps of its way from one spec to another."""
        if here == there:
            return ()
        made_at, r = self.maker[v]
        kind = self.folded.kind_of[made_at]
        how = self.priced.handling(self.sketch.node_of[kind], (kind, r))
        return self.priced.resharder.chain(self.program.values[v], here, there, how)

    def to_rest(self, v: int) -> tuple[Step, ...]:
        """From where it is made."""
        return self.chain(v, self.made(v), self.resting(v)) if self.program.values[v].shape else ()

    def to_reader(self, i: int, operand: int) -> tuple[tuple[Step, ...], str]:
        """The steps by which an op gets an operand, and the phase that shares them ("" for all)."""
        op = self.program.ops[i]
        v, group = op.operands[operand], group_of(op)
        made_at, r = self.maker[v]
        kind = self.folded.kind_of[made_at]
        port = self.sketch.ports[self.folded.kind_of[i], operand, False]
        here = self.resting(v)
        if not self.program.values[v].shape or (
            port == self.sketch.ports[kind, r, True] and here == self.made(v)
        ):
            return (), ""
        copy = self.sketch.copy_of.get((kind, r, group))
        held, lap = here, ""
        if copy is not None and (way := self.way(copy.node)) is not Way.SAME:
            held = self.spec(Port(copy.node, ()))
            lap = group.value if copy.kept_from and way is Way.FRESH else ""
        return (*self.chain(v, here, held), *self.chain(v, held, self.spec(port))), lap

    def way(self, node: int) -> Way:
        """How a copy comes by its spec."""
        return self.priced.choices[node].ways[self.labels[node]]

    def local_bytes(self, v: int, spec: Spec) -> float:
        """What one device holds of a value; a partial one is whole everywhere."""
        return self.program.values[v].num_bytes / num_shards(spec, self.priced.resharder.mesh.shape)
